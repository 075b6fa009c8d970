"""Times by layer, added up for a scheme."""

import pytest
import torch
from search_examples import Narrow, image_batches
from torch import nn

from piebridge.engine.layer import TRUNK
from piebridge.engine.layer_times import LayerTimes, layer_times_of, measure_layer_times
from piebridge.engine.layers import layers_of
from piebridge.engine.losses import cross_entropy
from piebridge.engine.step_graph import Part


def test_a_step_takes_its_forward_the_way_down_and_each_trained_weight():
    layers = layers_of(Narrow(), image_batches()[0][0])
    paths = [layer.path for layer in layers if layer.kind in TRUNK]
    times = LayerTimes(100.0, {path: 10.0 for path in paths}, {path: 1.0 for path in paths})
    assert times.milliseconds(layers, {}) == 100
    assert times.milliseconds(layers, {"head.weight": Part(), "head.bias": Part()}) == 101
    assert times.milliseconds(layers, {"last.weight": Part(), "head.bias": Part()}) == 111
    assert times.milliseconds(layers, {"blocks.2.7.bias": Part()}) == 120
    half = Part(1, torch.arange(4))
    assert times.milliseconds(layers, {"blocks.2.0.weight": half, "head.weight": Part()}) == pytest.approx(100 + 40 + 1.5)


def test_every_layer_is_measured_and_the_module_left_as_it_was():
    module, batch = Narrow().train(), image_batches()[0]
    module.last.weight.requires_grad_(False)
    layers = layers_of(module, batch[0])
    times = measure_layer_times(module, layers, batch, cross_entropy, repeats=1)
    paths = {layer.path for layer in layers if layer.kind in TRUNK}
    assert set(times.propagate) == set(times.own) == paths
    assert all(each > 0 for each in [times.forward, *times.propagate.values(), *times.own.values()])
    assert module.training and not module.last.weight.requires_grad and module.head.weight.grad is None


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Linear(8, 4)

    def forward(self, x):
        return self.out(self.attention(x, x, x, need_weights=False)[0].mean(1))


def test_layers_that_do_not_run_by_themselves_count_by_their_work():
    module, x = Attending(), torch.randn(2, 5, 8)
    layers = layers_of(module, x)
    times = measure_layer_times(module, layers, (x, torch.tensor([0, 3])), cross_entropy, repeats=1)
    joint = next(layer for layer in layers if layer.path == "attention.in_proj")
    out = next(layer for layer in layers if layer.path == "out")
    assert times.own["attention.in_proj"] > times.own["attention.out_proj"] > 0
    assert joint.macs > out.macs


def test_times_are_measured_once(tmp_path, monkeypatch):
    monkeypatch.setenv("PIEBRIDGE_CACHE", str(tmp_path))
    module, batch = Narrow(), image_batches()[0]
    layers = layers_of(module, batch[0])
    assert layer_times_of(module, layers, batch, cross_entropy) == layer_times_of(module, layers, batch, cross_entropy)
