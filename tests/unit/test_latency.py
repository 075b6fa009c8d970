"""Turns and their sums with a clock that the test moves; the gradient against plain torch; tables of small real networks."""

import copy
import itertools
import json
import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from piebridge.core import backends
from piebridge.core.capture import capture
from piebridge.core.device import describe_device
from piebridge.core.errors import UserError
from piebridge.forge import latency
from piebridge.forge.backward import DIFFERENTIABLE, forward_and_backward
from piebridge.forge.latency import LEAST_REPEATS, MOST_REPEATS, WARM_UPS, Level, measure, original_level, summary, take_turns

FLOAT = [name for name, backend in backends.BACKENDS.items() if not backend.rounding and not backends.missing_packages(name)]
HAS_INT8 = not backends.missing_packages(backends.INT8)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.Conv2d(16, 8, 1)

    def forward(self, x):
        return x + self.second(torch.relu(self.norm(self.first(x))))


class Tower(nn.Module):
    """Its second part begins with what overwrites its input."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.blocks = nn.Sequential(*[Block() for _ in range(3)])
        self.last = nn.Sequential(nn.ReLU6(inplace=True), nn.Conv2d(8, 16, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(16, 5)

    def rest(self, x):
        return torch.flatten(self.pool(self.last(x)), 1)

    def forward(self, x):
        return self.classifier(self.rest(self.blocks(self.stem(x))))


@pytest.fixture(scope="module")
def tower():
    torch.manual_seed(0)
    tower = Tower().train()
    with torch.no_grad():
        for _ in range(10):
            tower(torch.randn(8, 3, 16, 16) + 0.3)
    return tower.eval()


@pytest.fixture(scope="module")
def network(tower):
    return capture(tower, "tower", [3, 16, 16], [0.5] * 3, [0.5] * 3)


class Clock:
    """Time passes when a call says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def call(self, *durations):
        """A function that takes these seconds, call after call, the last ones over and over."""
        left = itertools.chain(durations, itertools.repeat(durations[-1]))

        def run():
            self.now += next(left)
        return run


def test_warm_ups_do_not_count_and_levels_take_turns():
    clock, order = Clock(), []

    def noted(name, run):
        def call():
            order.append(name)
            run()
        return call

    calls = {"a": noted("a", clock.call(9.0, 0.1, 0.2, 0.3)), "b": noted("b", clock.call(7.0, 1.0))}
    times, refused = take_turns(calls, seconds=0.001, clock=clock)
    assert refused == {} and LEAST_REPEATS == 3 and WARM_UPS == 1
    assert times["a"] == pytest.approx([0.1, 0.2, 0.3])
    assert times["b"] == pytest.approx([1.0] * 3)
    assert order == ["a", "b"] * 4


@pytest.mark.parametrize("seconds, repeats", [(0.0, LEAST_REPEATS), (3.5, LEAST_REPEATS), (10.5, 10), (1e6, MOST_REPEATS)])
def test_repeats_fill_the_time_and_no_more(seconds, repeats):
    clock = Clock()
    times, _ = take_turns({"a": clock.call(50.0, 0.75), "b": clock.call(50.0, 0.25)}, seconds, clock)
    assert len(times["a"]) == len(times["b"]) == repeats


def test_a_slow_spell_hits_all_levels_alike():
    """One's share of the other is what it is on a quiet device, though a third of the rounds take ten times as long."""
    clock = Clock()
    slowness = [1] + [1, 10, 1] * 20
    times, _ = take_turns({"original": clock.call(*[0.4 * each for each in slowness]),
                           "half": clock.call(*[0.2 * each for each in slowness])}, 30.0, clock)
    original, half = (summary(times[name], 1) for name in ("original", "half"))
    assert half["median"] / original["median"] == pytest.approx(0.5)
    assert half["median"] == pytest.approx(200)


@pytest.mark.parametrize("failing_call", [1, 2, 4])
def test_who_fails_is_out_with_the_reason_and_the_others_go_on(failing_call):
    clock, calls_made = Clock(), Counter()

    def broken():
        calls_made["broken"] += 1
        if calls_made["broken"] == failing_call:
            raise RuntimeError("no kernel for this\nand a long trace")

    times, refused = take_turns({"broken": broken, "sound": clock.call(1.0)}, 1.0, clock)
    assert refused == {"broken": "no kernel for this"}
    assert list(times) == ["sound"] and len(times["sound"]) == LEAST_REPEATS
    assert calls_made["broken"] == failing_call


def test_a_summary_is_per_image_in_milliseconds():
    seconds = np.random.RandomState(0).gamma(4.0, 0.01, 23)
    found = summary(seconds.tolist(), 4)
    first, median, third = np.percentile(1000 * seconds / 4, [25, 50, 75])
    assert found == {"median": pytest.approx(median, abs=1e-5), "iqr": pytest.approx(third - first, abs=2e-5), "repeats": 23}


@pytest.mark.parametrize("backend", [name for name in DIFFERENTIABLE if name != "bf16"])
@pytest.mark.parametrize("block", [0, 2])
def test_the_gradient_ends_at_the_tap(tower, backend, block):
    """In float64 against plain autograd. After the last block comes a module that overwrites its input."""
    double = copy.deepcopy(tower).double()
    network = capture(tower, "tower", [3, 16, 16], [0.5] * 3, [0.5] * 3).double()
    before = network.fingerprint()
    images = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        leaf = double.blocks[:block + 1](double.stem(images))
    leaf.requires_grad_(True)
    expected, = torch.autograd.grad(double.rest(double.blocks[block + 1:](leaf.clone())).sum(), leaf)
    tap = network.description["blocks"][block]["output"]
    run = forward_and_backward(network, backend, tap, images)
    for _ in range(2):
        torch.testing.assert_close(run(), expected, rtol=1e-9, atol=1e-12)
    assert network.fingerprint() == before
    assert all(parameter.requires_grad and parameter.grad is None for parameter in network.parameters())


def test_the_gradient_in_bfloat16_is_about_the_same(network):
    images = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    tap = network.description["blocks"][0]["output"]
    exact, rounded = (forward_and_backward(network, backend, tap, images)().float() for backend in ("folded", "bf16"))
    assert 0 < (exact - rounded).norm() / exact.norm() < 0.3  # a value near 0 may fall on the other side of a ReLU


@pytest.fixture(scope="module")
def levels(network):
    dropped = network.without_blocks([network.description["blocks"][0]["name"]])
    return [original_level(network), Level("8px", network, 8, "float"), Level("16px-drop1", dropped, 16, "float"),
            Level("16px-int8", network, 16, "int8"), Level("16px-bf16", network, 16, "bf16")]


@pytest.fixture(scope="module")
def table(levels):
    return measure(levels, seconds=0.01, batch_sizes=(1, 2), backends=["eager", "folded", "bf16", "openvino", "openvino_int8"])


def test_a_table_has_every_level_on_each_backend_of_its_precision(table):
    assert json.loads(json.dumps(table)) == table
    assert table["device"] == describe_device(torch.device("cpu")) and table["versions"]["torch"] == torch.__version__.split("+")[0]
    here = [name for name in ("eager", "folded", "openvino") if name in FLOAT]
    expected = {name: here for name in ("original", "8px", "16px-drop1")}
    differentiable = [name for name in here if name in DIFFERENTIABLE]  # int8 has no backward: it runs in float
    expected.update({"16px-bf16": ["bf16"], "16px-int8": (["openvino_int8"] if HAS_INT8 else []) + differentiable})
    assert {level: list(measured) for level, measured in table["levels"].items()} == expected
    for level, measured in table["levels"].items():
        for backend, directions in measured.items():
            expected = ["forward_ms"] if level != "16px-int8" or backend == "openvino_int8" else []
            assert list(directions) == expected + (["backward_ms"] if backend in DIFFERENTIABLE else [])
            for cells in directions.values():
                assert list(cells) == ["1", "2"]
                assert all(cell["repeats"] >= LEAST_REPEATS and 0 < cell["median"] < math.inf and cell["iqr"] >= 0
                           for cell in cells.values())
    reasons = [each["reason"] for each in table["refused"]]
    assert reasons == ([] if HAS_INT8 else ["precision int8 needs openvino_int8, which is not here"])


def test_every_installed_backend_is_measured_by_default(network):
    table = measure([original_level(network)], seconds=0.01, batch_sizes=(1,))
    assert list(table["levels"]["original"]) == FLOAT and not table["refused"]


def test_a_level_of_another_precision_is_refused_by_name(network):
    table = measure([original_level(network), Level("16px-int4", network, 16, "int4")], seconds=0.01, batch_sizes=(1,), backends=["eager"])
    assert table["levels"]["16px-int4"] == {}
    assert table["refused"] == [{"level": "16px-int4", "backend": None, "direction": None, "batch_size": None,
                                 "reason": "precision int4 needs a backend that computes so, which is not here"}]


def test_what_fails_on_a_backend_is_refused_with_the_reason_and_the_profile_goes_on(network, levels, monkeypatch):
    def build(given, input_size, batch_size):
        if input_size == 8:
            raise backends.Unsupported("8 pixels are too few for this kernel")
        return SimpleNamespace(__call__=None) if batch_size == 2 else backends.build_segment("eager", given, input_size, batch_size)

    monkeypatch.setitem(backends.BACKENDS, "folded", backends.BACKENDS["folded"]._replace(build=build))
    table = measure(levels[:2], seconds=0.01, batch_sizes=(1, 2), backends=["eager", "folded"])
    assert [tuple(each.values()) for each in table["refused"]] == [
        ("8px", "folded", "forward_ms", 1, "8 pixels are too few for this kernel"),
        ("8px", "folded", "forward_ms", 2, "8 pixels are too few for this kernel"),
        ("original", "folded", "forward_ms", 2, "'types.SimpleNamespace' object is not callable")]
    assert list(table["levels"]["8px"]["folded"]) == ["backward_ms"]
    assert list(table["levels"]["original"]["folded"]["forward_ms"]) == ["1"]
    assert list(table["levels"]["original"]["eager"]["forward_ms"]) == list(table["levels"]["8px"]["eager"]["forward_ms"]) == ["1", "2"]


def test_backward_ends_where_a_dropped_first_block_was(network, levels):
    taps = latency._first_taps(levels)
    block = network.description["blocks"][0]
    assert taps == {"original": block["output"], "8px": block["output"], "16px-drop1": block["input"], "16px-int8": block["output"],
                    "16px-bf16": block["output"]}


@pytest.mark.parametrize("change, message", [
    ({"levels": []}, "latency: there are no levels to measure; give the original and its proxies"),
    ({"levels": "twice"}, "latency: two levels are called 'original'; a table needs a name for each"),
    ({"batch_sizes": (1, 0)}, "latency: batch_sizes=(1, 0): give whole numbers of at least 1, for example 1,4,32"),
    ({"batch_sizes": ()}, "latency: batch_sizes=(): give whole numbers"),
    ({"seconds": 0}, "latency: seconds=0: give a number above 0"),
    ({"seconds": float("nan")}, "latency: seconds=nan: give a number above 0"),
    ({"backends": ["openvin"]}, "latency: unknown backend 'openvin' (did you mean 'openvino'?); known: eager, "),
])
def test_what_cannot_be_measured(network, change, message):
    arguments = {"levels": [original_level(network)], "seconds": 1.0, "batch_sizes": (1,), **change}
    if arguments["levels"] == "twice":
        arguments["levels"] = [original_level(network)] * 2
    with pytest.raises(UserError) as caught:
        measure(**arguments)
    assert message in str(caught.value)
