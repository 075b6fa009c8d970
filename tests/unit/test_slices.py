"""Slices of tensors against numpy's own indexing, and the cuts of pruned networks against the networks."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from piebridge.core.capture import capture
from piebridge.core.errors import UserError
from piebridge.core.slices import cut, reordered, scatter
from piebridge.forge import in_nested_order, nested_order, prune, structure_of, tensor_cuts
from piebridge.forge.nested_levels import Level


@st.composite
def tensors_and_slices(draw):
    """(float64 tensor, slices of some of its axes, in any order)."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    axes = draw(st.lists(st.integers(0, len(shape) - 1), unique=True))
    slices = [(axis, draw(st.lists(st.integers(0, shape[axis] - 1), min_size=1, unique=True))) for axis in axes]
    return torch.arange(float(np.prod(shape)), dtype=torch.float64).reshape(shape), slices


def numpy_index(shape, slices):
    lists = dict(slices)
    return np.ix_(*[lists.get(axis, range(size)) for axis, size in enumerate(shape)])


@settings(max_examples=150, deadline=None)
@given(tensors_and_slices())
def test_cut_and_scatter_are_numpys_indexing(example):
    tensor, slices = example
    index = numpy_index(tensor.shape, slices)
    part = cut(tensor, slices)
    assert np.array_equal(part.numpy(), tensor.numpy()[index])
    wanted = tensor.numpy().copy()
    wanted[index] = -part.numpy()
    before = tensor.clone()
    assert np.array_equal(scatter(-part, slices, tensor).numpy(), wanted)
    assert torch.equal(tensor, before)


@settings(max_examples=150, deadline=None)
@given(tensors_and_slices(), st.randoms())
def test_slices_of_a_reordered_tensor(example, random):
    tensor, slices = example
    order = [(axis, random.sample(range(size), size)) for axis, size in enumerate(tensor.shape) if random.random() < 0.7]
    moved = cut(tensor, order)
    assert torch.equal(cut(moved, reordered(slices, order)), cut(tensor, slices))
    assert torch.equal(scatter(moved, order, torch.full_like(tensor, -1)), tensor)  # undone


def test_a_prefix_is_a_view_and_nothing_else_is():
    tensor = torch.randn(6, 5)
    view = cut(tensor, [(1, [0, 1, 2]), (0, [0, 1])])
    view.zero_()
    assert float(tensor[:2, :3].abs().max()) == 0 and view.data_ptr() == tensor.data_ptr()
    for positions in ([1, 0], [0, 2], [1]):
        copy = cut(tensor, [(1, positions)])
        copy.fill_(7)
        assert not bool((tensor == 7).any())


def test_gradients_pass_through_both():
    slices = [(0, [3, 1]), (2, [0, 2])]
    whole = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)
    part = torch.randn(2, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda tensor: cut(tensor, slices), (whole,))
    assert torch.autograd.gradcheck(lambda one, other: scatter(one, slices, other), (part, whole))


def test_a_part_of_the_wrong_shape():
    with pytest.raises((ValueError, RuntimeError, IndexError)):
        scatter(torch.zeros(2, 3), [(0, [0, 1, 2])], torch.zeros(4, 3))
    with pytest.raises(ValueError, match=r"a part of shape \[1\] where its place has \[2\]"):
        scatter(torch.zeros(1), [(0, [0, 1])], torch.zeros(2))


class Heads(nn.Module):
    """Joint query, key and value, as timm has them, and a squeeze beside it: axes that are products, and axes that are not."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x):
        query, key, value = self.qkv(x).reshape(x.shape[0], -1, 3, 4, 4).permute(2, 0, 3, 1, 4).unbind(0)
        weights = torch.softmax(query @ key.transpose(-2, -1) * 0.5, -1)
        x = x + self.proj((weights @ value).transpose(1, 2).reshape(x.shape[0], -1, 16))
        return x + self.down(torch.relu(self.up(x)))


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 4, 4)
        self.first, self.second = Heads(), Heads()
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        x = self.stem(x).flatten(2).transpose(1, 2)
        return self.head(self.second(self.first(x)).mean(1))


@pytest.fixture(scope="module")
def tokens():
    torch.manual_seed(0)
    network = capture(Tokens().eval(), "tokens", [3, 8, 8], [0.5] * 3, [0.5] * 3)
    return network, structure_of(network)


def test_cuts_are_what_pruning_keeps(tokens):
    network, structure = tokens
    kept = {"first.qkv": [2, 0], "first.up": [5, 1, 2, 23], "second.up": range(24)}
    cuts = tensor_cuts(structure, kept)
    pruned = prune(network, kept, structure).state_dict()
    for key, tensor in network.state_dict().items():
        assert torch.equal(cut(tensor, cuts.get(key, [])), pruned[key])
    rows = [part * 16 + head * 4 + place for part in range(3) for head in (2, 0) for place in range(4)]
    assert cuts["first.qkv.weight"] == [(0, rows)]
    assert cuts["first.proj.weight"] == [(1, [8, 9, 10, 11, 0, 1, 2, 3])]
    assert cuts["first.up.weight"] == [(0, [5, 1, 2, 23])] and cuts["first.down.weight"] == [(1, [5, 1, 2, 23])]
    assert cuts["first.up.weight"][0][1] is cuts["first.down.weight"][0][1] is cuts["first.up.bias"][0][1]
    assert not any(key.startswith("second") for key in cuts)  # a group that is whole cuts nothing
    with pytest.raises(UserError, match="network tokens: group 'first.up': keep at least one of its 24"):
        tensor_cuts(structure, {"first.up": []})


def test_pruning_leaves_the_original_its_own_memory(tokens):
    network, structure = tokens
    before = network.fingerprint()
    pruned = prune(network, {"first.up": range(8)}, structure)  # a prefix, which cut gives as a view
    with torch.no_grad():
        pruned.get_submodule("first.up").weight.zero_()
    assert network.fingerprint() == before


def levels_of(*kept):
    return [Level(number, each, 0) for number, each in enumerate(kept)]


def test_nested_order_puts_first_what_most_levels_keep(tokens):
    network, structure = tokens
    levels = levels_of({}, {"first.up": (1, 3, 4, 7), "first.qkv": (0, 2, 3)}, {"first.up": (3, 7), "first.qkv": (0, 2, 3)})
    order = nested_order(structure, levels)
    assert order == {"first.up": (3, 7, 1, 4, 0, 2, 5, 6) + tuple(range(8, 24)), "first.qkv": (0, 2, 3, 1)}
    first, second, third = in_nested_order(structure, levels)
    assert first == levels[0]
    assert second.kept == {"first.up": (3, 7, 1, 4), "first.qkv": (0, 2, 3)} and third.kept["first.up"] == (3, 7)
    moved = prune(network, order, structure)  # nothing is cut, channels move
    images = torch.randn(3, 3, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(moved(images), network(images))
        small = prune(moved, {"first.up": range(2), "first.qkv": range(3)})
        torch.testing.assert_close(small(images), prune(network, levels[2].kept, structure)(images))
    assert moved.fingerprint() != network.fingerprint()


def test_what_is_not_nested_has_no_order(tokens):
    with pytest.raises(UserError, match="level 1 lacks indices of group 'first.up' that a cheaper level keeps; levels must be nested"):
        nested_order(tokens[1], levels_of({}, {"first.up": (0, 1, 2)}, {"first.up": (0, 5)}))
