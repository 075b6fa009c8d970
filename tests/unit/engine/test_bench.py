"""The figures of `piebridge engine bench`, on a small network and a clock that the test winds."""

import json

import pytest
import torch
from backend_examples import small

from piebridge.core.errors import UserError
from piebridge.engine import bench as bench_module
from piebridge.engine.bench import bench, network_of
from piebridge.engine.step_graph import Part
from piebridge.engine.update_rules import SGD

SCHEME = {"5.weight": Part(), "9.weight": Part(), "9.bias": Part()}


class Clock:
    """Each look at it takes a tenth of a second longer than the one before."""

    def __init__(self):
        self.now, self.step = 0.0, 0.0

    def __call__(self):
        self.step += 0.1
        self.now += self.step
        return self.now


@pytest.fixture(scope="module")
def figures():
    return bench(small(), SCHEME, 4, 32, SGD(0.9), turns=2, clock=Clock(), candidates=("interpreter_channels_last",))


def test_every_figure_is_there_and_json(figures):
    json.dumps(figures)
    for name in ("eager_full_ms", "eager_full_channels_last_ms", "eager_full_bf16_ms", "eager_scheme_ms", "step_ms", "compile_seconds",
                 "pytorch_full_extra_mib", "masked_full_extra_mib", "sparse_extra_mib", "planned_peak_mib", "measured_peak_mib"):
        assert isinstance(figures[name], float), name
    assert figures["choice"]["parts"] and figures["batch_size"] == 4 and figures["threads"] == torch.get_num_threads()


def test_steps_are_timed_in_turns(figures):
    """Each run takes 0.2 s longer than the one before it: two looks a run, one where it only warms up."""
    names = ["eager_full_ms", "eager_full_channels_last_ms", "eager_full_bf16_ms", "eager_scheme_ms", "step_ms", "full_step_ms"]
    assert [figures[name] - figures[names[0]] for name in names] == pytest.approx([0, 200, 400, 600, 800, 1000], abs=1)
    assert figures["eager_full_ms"] == pytest.approx(1000 * (0.1 * (6 + 2) + 0.1 * (18 + 2)) / 2, abs=1)


def test_the_bytes_of_a_small_step(figures):
    """By hand: a full step keeps at least the stem's output (16 px, 8 channels), twice: before and after batch norm."""
    kept = 2 * 4 * 8 * 16 * 16 * 4 / 2 ** 20
    assert figures["pytorch_full_extra_mib"] > kept
    assert figures["sparse_extra_mib"] < figures["pytorch_full_extra_mib"]
    states = sum(small().get_parameter(key).numel() for key in SCHEME) * 4 / 2 ** 20
    assert figures["sparse_extra_mib"] == pytest.approx(figures["measured_peak_mib"] + states, abs=0.011)


def test_networks_of_torchvision_have_random_weights():
    module = network_of("squeezenet1_1")
    assert not module.training and not hasattr(module, "description")
    with pytest.raises(UserError, match="unknown network 'no_such_network'"):
        network_of("no_such_network")


def test_weights_that_cannot_be_had_are_random(monkeypatch, caplog):
    def load(name, is_pretrained=True):
        if is_pretrained:
            raise UserError("network resnet50: no weights here")
        return "random"
    monkeypatch.setattr(bench_module, "load_network", load)
    with caplog.at_level("WARNING"):
        assert network_of("resnet50") == "random"
    assert "random weights: network resnet50: no weights here" in caplog.text
