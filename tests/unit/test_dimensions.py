"""Axes as products of dimensions: unified, split, regrouped; and that they fit every value of the known networks."""

import pytest
import torch

from piebridge.core.descriptions import read_description
from piebridge.core.dimension_rules import analyse
from piebridge.core.dimensions import broadcast, fix, fresh, leaves, regroup, size_of, unify
from piebridge.core.network import GraphNetwork, expected_shapes
from piebridge.core.networks import ARCHITECTURES


def sizes(axis):
    return [leaf.size for leaf in leaves(axis)]


def test_equal_axes_become_one_dimension():
    one, other, third = fresh(8), fresh(8), fresh(8)
    unify(one, other)
    unify(third, other)
    assert leaves(one) == leaves(other) == leaves(third)
    fix(third)
    assert leaves(one)[0].is_fixed


def test_the_coarser_side_is_split():
    coarse, fine = fresh(24), fresh(2) + fresh(12)
    unify(coarse, fine)
    assert sizes(coarse) == [2, 12] and leaves(coarse) == leaves(fine)
    unify(coarse, fresh(8) + fresh(3))
    assert sizes(fine) == [2, 4, 3]


def test_factors_that_do_not_fit_are_fixed():
    one, other = fresh(6) + fresh(2), fresh(4) + fresh(3)
    unify(one, other)
    assert all(leaf.is_fixed for leaf in leaves(one + other))
    apart = fresh(6) + fresh(6)
    assert [size_of(axis) for axis in regroup([apart], (4, 9))] == [4, 9]
    assert all(leaf.is_fixed for leaf in leaves(apart))


def test_a_fixed_dimension_stays_fixed_when_split_or_merged():
    fixed, free = fresh(12, is_fixed=True), fresh(12)
    unify(free, fixed)
    heads, width = regroup([free], (3, 4))
    assert (sizes(heads), sizes(width)) == ([3], [4])
    assert leaves(heads + width) == leaves(fixed) and all(leaf.is_fixed for leaf in leaves(free))


def test_heads_there_and_back():
    qkv = fresh(3 * 4 * 5)
    part, heads, width = regroup([qkv], (3, 4, 5))
    (joined,) = regroup([heads, width], (20,))
    assert leaves(joined) == leaves(heads + width) == leaves(qkv)[1:]
    assert sizes(part) == [3]


def test_broadcast_ties_what_is_not_stretched():
    channels, other, height = fresh(8), fresh(8), fresh(5)
    axes = broadcast([[], channels, height], [other, []])
    assert axes == [[], channels, height] and leaves(channels) == leaves(other)


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_axes_fit_every_value_and_every_tensor(name):
    description = read_description(name)
    expected = expected_shapes(description)
    network = GraphNetwork(description, {key: torch.empty(shape, device="meta") for key, shape in expected.items()}).eval()
    shapes = {"x": (1, 3, 224, 224)}
    network.observe(torch.empty(shapes["x"], device="meta"), lambda name, value: shapes.update({name: tuple(value.shape)}))
    analysis = analyse(description, shapes)
    assert {name: tuple(map(size_of, axes)) for name, axes in analysis.values.items()} == shapes
    for (key, number), axis in analysis.tensors.items():
        assert size_of(axis) == expected[key][number]
