"""A scheme in words."""

import pytest
from scheme_examples import IMAGES, Tower, resolved

from piebridge.engine.layers import layers_of
from piebridge.engine.scheme import Scheme
from piebridge.engine.show import render_scheme, trained_layers

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_table_says_what_is_trained_and_kept():
    module = Tower()
    scheme = Scheme.read("name: half\nweights:\n  blocks.1.expand: 1/2\n  head: 1\nbias: head\nnorm: blocks.2.norm_expand\n")
    layers, parts = layers_of(module, IMAGES), scheme.resolve(module, IMAGES)
    rows = trained_layers(layers, parts, dict(module.named_parameters()))
    assert [(row.layer.path, row.words, row.numbers, row.of, row.kept_bytes) for row in rows] == [
        ("blocks.1.expand", "weight (4 of 8 input channels)", 64, 128, 2 * 4 * 8 * 8 * 4),
        ("blocks.2.norm_expand", "weight, bias", 32, 32, 2 * 16 * 8 * 8 * 4),
        ("head", "weight, bias", 45, 45, 2 * 8 * 4)]
    lines = render_scheme(module, scheme, IMAGES).splitlines()
    total = sum(parameter.numel() for parameter in module.parameters())
    assert lines[0] == f"Tower, scheme half: trains 141 of {total} numbers ({100 * 141 / total:.3g} %), in 3 of 21 layers; channels: first"
    assert lines[1] == "backward: down to blocks.1.expand, through 7 of 11 convolutions and linear layers; nothing below it"
    assert lines[2].startswith("kept for the gradients of weights: 0.010 MiB of inputs at batch 2")
    assert lines[4].split() == ["layer", "kind", "block", "output", "trained", "numbers", "share", "kept"] and len(lines) == 8
    assert lines[5].split() == ["blocks.1.expand", "1x1", "blocks.1", "2x16x8x8", "weight", "(4", "of", "8", "input", "channels)", "64",
                                "50", "%", "0.002", "MiB"]


def test_biases_keep_nothing():
    module = Tower()
    rows = trained_layers(layers_of(module, IMAGES), resolved("bias: all", module), dict(module.named_parameters()))
    assert rows and all(row.kept_bytes == 0 and row.words == "bias" for row in rows)
