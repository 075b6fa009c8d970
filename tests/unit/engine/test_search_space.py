"""What a search chooses from, and that its choices are the schemes that it writes."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from search_examples import Biasless, Narrow, image_batches

from piebridge.core.errors import UserError
from piebridge.engine.knapsack import Choice
from piebridge.engine.scheme import Scheme
from piebridge.engine.search_space import SearchSpace, option_bytes, problem_of, with_option

IMAGES = image_batches(1)[0][0]


def same(left, right):
    return list(left) == list(right) and all(
        left[key].dim == right[key].dim and (left[key].is_whole or torch.equal(left[key].index, right[key].index)) for key in left)


def test_depths_go_by_blocks_and_outside_of_them_by_layers():
    space = SearchSpace(Narrow(), IMAGES)
    assert [depth.selector for depth in space.depths] == ["", "last 2 layers", "last 1 blocks", "last 2 blocks", "last 3 blocks",
                                                          "last 12 layers"]
    assert [depth.first for depth in space.depths] == [11, 10, 7, 4, 1, 0]
    assert [layer.path for layer in space.items][:2] == ["stem.0", "blocks.0.0"]
    assert "head" not in [layer.path for layer in space.items]
    assert list(space.depths[0].parts) == ["head.weight", "head.bias"]
    assert list(space.depths[2].parts) == ["blocks.2.1.bias", "blocks.2.4.bias", "blocks.2.7.bias", "head.weight", "head.bias"]


def test_a_depth_without_biases_of_its_own_is_probed_with_a_little_weight():
    space = SearchSpace(Narrow(), IMAGES)
    assert "last.weight" in space.depths[1].probe and "last.weight" not in space.depths[1].parts
    assert space.depths[2].probe.keys() == space.depths[2].parts.keys()


def test_shares_that_come_to_the_same_channels_are_one_option():
    space = SearchSpace(Narrow(), IMAGES)
    ratios = {layer.path: [option.ratio for option in options] for layer, options in zip(space.items, space.options)}
    assert ratios["stem.0"] == [Fraction(1, 8), Fraction(1, 2), Fraction(1)]  # 1, 2 and 3 of 3 channels
    assert ratios["blocks.1.6"] == [Fraction(1, 8), Fraction(1, 4), Fraction(1, 2), Fraction(1)]
    (pointwise, options), = [(layer, options) for layer, options in zip(space.items, space.options) if layer.path == "blocks.1.6"]
    assert [option.share for option in options] == [1 / 8, 1 / 4, 1 / 2, 1]
    assert option_bytes(pointwise, options[1], 0) == 4 * 4 * 8 * 8 * 4  # 4 samples, 4 channels, 8 x 8 pixels, 4 bytes
    assert option_bytes(pointwise, options[1], 2) == 4 * 4 * 8 * 8 * 4 + 2 * 4 * 8 * 4


@pytest.mark.parametrize("channels", ["first", "magnitude", "fisher"])
@pytest.mark.parametrize("make", [Narrow, Biasless])
def test_the_written_scheme_trains_what_was_chosen(make, channels):
    module = make()
    example = IMAGES if make is Narrow else torch.randn(4, 16)
    scores = {key: torch.rand(parameter.shape) for key, parameter in module.named_parameters()}
    space = SearchSpace(module, example, channels=channels, scores=scores)
    draw = np.random.default_rng(0)
    for depth, known in enumerate(space.depths):
        options = [int(draw.integers(len(each) + 1)) if item >= known.first else 0 for item, each in enumerate(space.options)]
        choice = Choice(depth, tuple(options))
        if not space.parts(choice):
            continue
        text = space.scheme(choice, "found", "for a test").text()
        assert same(Scheme.read(text).resolve(module, example), space.parts(choice)), text


def test_the_least_trains_something():
    space = SearchSpace(Narrow(), IMAGES)
    assert list(space.parts(space.least())) == ["head.weight", "head.bias"]
    space = SearchSpace(Biasless(), torch.randn(4, 16))
    assert list(space.parts(space.least())) == ["blocks.2.0.weight"]


def test_nothing_to_choose_from_is_named():
    with pytest.raises(UserError, match="Linear has no convolution or linear layer to choose from besides"):
        SearchSpace(torch.nn.Linear(3, 4), torch.randn(2, 3))


def test_a_problem_has_no_option_that_a_layer_lacks():
    space = SearchSpace(Narrow(), IMAGES)
    values = [[option.share for option in options] for options in space.options]
    costs = [[[option.bytes] for option in options] for options in space.options]
    problem = problem_of(space, [0.0] * 6, values, [[10.0]] * 4, costs)
    assert problem.values.shape == (11, 5) and problem.values[0, 4] == -np.inf and problem.first.tolist() == [11, 10, 7, 4]
    assert with_option(Choice(1, (0, 0, 0)), 1, 2) == Choice(1, (0, 2, 0))
