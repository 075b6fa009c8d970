"""The paper's algorithm, the artifact's and the ablations, each as a whole run on a small network, a small proxy set and real images."""

import contextlib
import gc
import json
import shutil
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from forge_examples import Tower, images, network_of, noisy
from pet_examples import Glance

from piebridge import training
from piebridge.core import backends, loop
from piebridge.core import proxy_set as proxy_set_module
from piebridge.core.bridge_map import fit_bridge_map
from piebridge.core.capture import capture
from piebridge.core.errors import Cancelled, RunFailed, UserError
from piebridge.core.interrupt import Interrupt
from piebridge.core.level_loader import THREAD_NAME
from piebridge.core.network import GraphNetwork, expected_shapes
from piebridge.core.proxy_set import Proxy, write_proxy_set
from piebridge.core.routing import Routing
from piebridge.core.safetensors_file import read_safetensors
from piebridge.training import train

pytestmark = pytest.mark.usefixtures("one_thread")

CLIPART = Path(__file__).resolve().parents[2] / "datasets" / "Clipart10"
OURS = "efficientnet_lite0/Openclipart/ours"
LEVELS = 4


@pytest.fixture(scope="module")
def proxy_set(tmp_path_factory):
    """An original and three proxies, the first with a bridge map, the last at a lower resolution; a policy that uses them all."""
    original = network_of(Tower()).float()
    blurred, worse = noisy(original, 0.2, 5), noisy(original, 0.4, 6)
    seen = images(40, seed=2).float()
    bridge, _ = fit_bridge_map(blurred.features(seen).detach().numpy(), original.features(seen).detach().numpy())
    proxies = [Proxy("blurred", blurred, 16, bridge=bridge.of_rank(4)), Proxy("worse", worse, 16),
               Proxy("12px", original.without_blocks([]), 12)]
    description = capture(Glance(LEVELS), "glance", [3, 16, 16], [0.5] * 3, [0.5] * 3).description
    generator = torch.Generator().manual_seed(4)
    policy = GraphNetwork(description, {key: 30 * torch.randn(shape, generator=generator) * (len(shape) > 1)
                                        for key, shape in expected_shapes(description).items()})
    folder = tmp_path_factory.mktemp("sets") / "tower"
    write_proxy_set(folder, original, proxies, policy=policy)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for name in ("arrows", "flags", "fruit"):
        (folder / name).mkdir()
        for path in sorted((CLIPART / name).iterdir())[:15]:
            shutil.copy(str(path), str(folder / name))
    return folder


class Spy:
    """What the loop trained on: (epoch, samples, their levels, the trainable part's level, share that ran backward)."""

    def __init__(self, monkeypatch):
        self.batches, self._train_batch, self.after = [], loop._train_batch, lambda: None
        monkeypatch.setattr(loop, "_train_batch", self._spy)

    def _spy(self, parts, progress, indices, inputs, level, share_done):
        before = progress.selected
        self._train_batch(parts, progress, indices, inputs, level, share_done)
        self.batches.append((progress.epoch, indices, parts.router.levels[indices].tolist(), level,
                             (progress.selected - before) / len(indices)))
        self.after()

    def of(self, epoch):
        return [batch for batch in self.batches if batch[0] == epoch]


@pytest.fixture
def spy(monkeypatch, tmp_path):
    monkeypatch.setenv("PIEBRIDGE_CACHE", str(tmp_path / "profile"))
    return Spy(monkeypatch)


def run(data, proxy_set, output, name=OURS, **settings):
    overrides = {"data": str(data), "network": str(proxy_set / "original.safetensors"), "proxies.set": str(proxy_set),
                 "output": str(output), "epochs": 3, "loader.workers": 0, "backend.name": "folded", "device": "cpu"}
    overrides.update({key.replace("__", "."): value for key, value in settings.items()})
    return train(name, **overrides)


def weights_of(result):
    return {name: tensor.numpy() for name, tensor in read_safetensors(result.folder / "trainable.safetensors")[0].items()}


def are_equal(one, other):
    return set(one) == set(other) and all(np.array_equal(one[name], other[name]) for name in one)


# strategy=paper ----------------------------------------------------------------------------------------------------------

def test_batches_have_one_level_come_in_order_and_leave_nothing_out(data, proxy_set, tmp_path, spy):
    result = run(data, proxy_set, tmp_path / "run", strategy="paper")
    assert result.status == "success" and list(result.plan["levels_used"]) == ["original", "blurred", "worse", "12px"]
    assert sum(count > 0 for count in result.plan["levels_used"].values()) > 2
    everyone = sum(result.plan["levels_used"].values())
    known = {}
    for epoch in range(3):
        batches = spy.of(epoch)
        assert sorted(index for _, indices, *_ in batches for index in indices) == list(range(everyone))
        assert all(len(set(levels)) == 1 for _, _, levels, _, _ in batches)
        order = [levels[0] for _, _, levels, _, _ in batches]
        assert order == sorted(order)
        now = {index: level for _, indices, levels, _, _ in batches for index, level in zip(indices, levels)}
        assert all(0 <= now[index] - known.get(index, now[index]) <= 1 for index in now)  # one up, or where it was
        known = now
    assert 0 < sum(share for *_, share in spy.of(2)) < len(spy.of(2))


@pytest.mark.parametrize("backend", ["folded", "openvino"])
def test_two_segments_at_most_and_the_same_weights(data, proxy_set, tmp_path, spy, monkeypatch, backend):
    if backend == "openvino":
        pytest.importorskip("openvino")
    build, references, most = backends.build_segment, [], [0]

    def counted(*arguments):
        segment = build(*arguments)
        references.append(weakref.ref(segment))
        count()
        return segment

    def count():
        most[0] = max(most[0], *[sum(reference() is not None for reference in each) for each in (references, networks)])

    read, networks = proxy_set_module.read_proxy_file, []

    def noted(*arguments):
        proxy = read(*arguments)
        networks.append(weakref.ref(proxy.network))
        return proxy

    monkeypatch.setattr(backends, "build_segment", counted)
    monkeypatch.setattr(proxy_set_module, "read_proxy_file", noted)
    spy.after = count
    buffered = run(data, proxy_set, tmp_path / "buffered", strategy="paper", backend__name=backend)
    assert most[0] == 2 and len(references) > 8 and len(networks) > 8
    built = len(references)
    audited = run(data, proxy_set, tmp_path / "audited", strategy="paper", backend__name=backend, router__audit=0.5,
                  router__audit_floor=-1.0)
    assert most[0] == 2 and len(references) > 2 * built  # the original comes back for each audit
    assert are_equal(weights_of(buffered), weights_of(audited))
    gc.collect()  # what is left of the run itself
    references.clear()
    networks.clear()
    resident = run(data, proxy_set, tmp_path / "resident", method="ours", router__kind="policy", gate__kind="loss", cache__kind="none",
                   proxies__bridge="set", backend__name=backend)
    assert most[0] == 4
    assert are_equal(weights_of(buffered), weights_of(resident))


def test_an_error_of_the_loading_thread_is_the_runs_error(data, proxy_set, tmp_path, spy, monkeypatch):
    pytest.importorskip("openvino")
    build = backends.build_segment

    def broken(name, *arguments):
        if spy.batches:
            raise OSError(28, "No space left on device", "model.bin")
        return build(name, *arguments)

    monkeypatch.setattr(backends, "build_segment", broken)
    with pytest.raises(RunFailed, match="model.bin: No space left on device"):
        run(data, proxy_set, tmp_path / "run", strategy="paper", backend__name="openvino")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed" and not threads_left()


def threads_left():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(THREAD_NAME)]


@pytest.mark.parametrize("settings", [{"strategy": "paper"}, {"as_released": True, "gate.factor": 1.0},
                                      {"as_released": True, "gate.factor": 1.0, "pet.kind": "adapter"}])
def test_interrupted_twice_and_resumed_gives_the_same_weights(data, proxy_set, tmp_path, spy, monkeypatch, settings):
    whole = run(data, proxy_set, tmp_path / "whole", **settings)
    spy.batches.clear()
    interrupts = []

    @contextlib.contextmanager
    def interruptible():
        interrupts.append(Interrupt())
        yield interrupts[-1]

    def stop():
        if len(spy.batches) in (3, 14):
            interrupts[-1].signal_name = "SIGTERM"

    monkeypatch.setattr(training, "interruptible", interruptible)
    spy.after = stop
    for _ in range(2):
        with pytest.raises(Cancelled, match="interrupted by SIGTERM"):
            run(data, proxy_set, tmp_path / "pieces", **settings)
        assert not threads_left()
    pieces = run(data, proxy_set, tmp_path / "pieces", **settings)
    assert are_equal(weights_of(whole), weights_of(pieces))
    assert whole.results["test_accuracy"] == pieces.results["test_accuracy"]


def test_adapters_are_trained_through_every_level(data, proxy_set, tmp_path, spy):
    result = run(data, proxy_set, tmp_path / "run", strategy="paper", step="eager", pet__kind="adapter")
    assert result.status == "success" and {level for _, _, _, level, _ in spy.batches} >= {0, 1, 2}


# as_released=true --------------------------------------------------------------------------------------------------------

def test_the_artifacts_baseline_differs_in_its_gate_only(data, proxy_set, tmp_path, spy):
    ours = run(data, proxy_set, tmp_path / "ours", as_released=True, gate__factor=1.0)
    routed = list(spy.batches)
    spy.batches.clear()
    baseline = run(data, proxy_set, tmp_path / "baseline", as_released=True, method="PET")
    assert ours.plan["levels_used"] == baseline.plan["levels_used"]
    first = [batch[1:4] for batch in routed if batch[0] == 0]
    assert first == [batch[1:4] for batch in spy.of(0)]
    everyone = sum(ours.plan["levels_used"].values())
    for batches in (routed, spy.batches):
        assert all(len(indices) == 4 for _, indices, *_ in batches) and len(batches) == 3 * (everyone // 4)
        assert {share for *_, share in batches} == ({0.0, 1.0} if batches is routed else {1.0})
    assert any(len(set(levels)) > 1 for _, _, levels, *_ in routed)
    assert {tuple(levels) for _, _, levels, *_ in spy.of(0)} != set()
    levels = {index: level for _, indices, found, *_ in spy.of(0) for index, level in zip(indices, found)}
    assert all(levels.get(index, level) == level for _, indices, found, *_ in spy.of(2) for index, level in zip(indices, found))


def test_the_artifacts_figures(data, proxy_set, tmp_path, spy, monkeypatch):
    """The best accuracy on test images, counted its way, at the last time; the router's time counts for nothing."""
    stacks, look = [], Routing._looked_at

    def looked_at(self, *arguments):
        stacks.append(list(self.work.clock._stack))
        return look(self, *arguments)

    monkeypatch.setattr(Routing, "_looked_at", looked_at)
    result = run(data, proxy_set, tmp_path / "run", as_released=True, optimizer__lr=0.01)
    assert "evaluation" in stacks[0]
    lines = [line.split() for line in (tmp_path / "run" / "log.txt").read_text().splitlines()]
    accuracies = [float(accuracy) for accuracy, _ in lines]
    assert result.results["test_accuracy"] == pytest.approx(max(accuracies), abs=1e-4)
    rows = (tmp_path / "run" / "splits.csv").read_text().splitlines()
    test, val = [sum(f"{name}" in row.split(",") for row in rows) for name in ("test", "val")]
    assert (test, val) == (9, 0)
    assert all(round(accuracy * test, 3) == pytest.approx(round(accuracy * test), abs=1e-2) for accuracy in accuracies)
    assert max(accuracies) <= 8 / 9 + 1e-4  # one of nine images is never looked at


def test_full_fine_tuning_as_released(data, proxy_set, tmp_path, spy):
    result = run(data, proxy_set, tmp_path / "run", as_released=True, method="FTAll", proxies__set=None, epochs=1)
    assert result.status == "success" and all(len(indices) == 4 for _, indices, *_ in spy.batches)


# The ablations' rows ------------------------------------------------------------------------------------------------------

def ablation(name):
    return f"efficientnet_lite0/Openclipart/{name}"


def test_skipping_trains_nothing_through_a_proxy(data, proxy_set, tmp_path, spy):
    result = run(data, proxy_set, tmp_path / "run", ablation("skip_instead_of_proxy"), router__kind="policy", loader__augment="none")
    used = result.plan["levels_used"]
    assert 0 < used["original"] < sum(used.values())
    assert {level for _, _, levels, *_ in spy.batches for level in levels} == {0}
    assert sum(len(indices) for _, indices, *_ in spy.of(0)) == used["original"]


def test_who_was_skipped_once_is_not_asked_again(data, proxy_set, tmp_path, spy):
    run(data, proxy_set, tmp_path / "run", ablation("skip_instead_of_proxy"), router__kind="importance")
    asked = [{index for _, indices, *_ in spy.of(epoch) for index in indices} for epoch in range(3)]
    assert asked[0] > asked[1] > asked[2]


def test_a_run_with_nothing_left_to_train_ends_all_the_same(data, proxy_set, tmp_path, spy):
    result = run(data, proxy_set, tmp_path / "run", ablation("skip_instead_of_proxy"), router__kind="level:2", gate__kind="none")
    assert result.status == "success" and spy.batches == []


def test_without_a_policy_all_start_at_the_original(data, proxy_set, tmp_path, spy):
    result = run(data, proxy_set, tmp_path / "run", ablation("no_policy"))
    assert result.plan["levels_used"]["original"] == sum(result.plan["levels_used"].values())
    assert {level for _, _, levels, *_ in spy.of(0) for level in levels} == {0}
    assert {level for _, _, levels, *_ in spy.of(2) for level in levels} >= {0, 1}


def test_without_a_gate_all_run_backward_where_the_router_put_them(data, proxy_set, tmp_path, spy):
    run(data, proxy_set, tmp_path / "run", ablation("no_gate"), router__kind="policy")
    assert {share for *_, share in spy.batches} == {1.0}
    levels = [{index: level for _, indices, found, *_ in spy.of(epoch) for index, level in zip(indices, found)} for epoch in (0, 2)]
    assert levels[0] == levels[1] and len(set(levels[0].values())) > 2


def test_without_alignment_routing_is_alike_and_no_map_is_served(data, proxy_set, tmp_path, spy, monkeypatch):
    served, source = [], loop.Parts.__init__

    def remembered(self, **parts):
        served.append([level.bridge for level in parts["source"].levels])
        source(self, **parts)

    monkeypatch.setattr(loop.Parts, "__init__", remembered)
    used = [run(data, proxy_set, tmp_path / name, ablation(name), router__kind="policy", epochs=1).plan["levels_used"]
            for name in ("with_augmentation", "no_alignment")]
    with_maps, without = served
    assert with_maps[0] is None and None not in with_maps[1:] and without == [None] * LEVELS
    assert used[0] == used[1]


def test_one_static_proxy_serves_all(data, proxy_set, tmp_path, spy):
    result = run(data, proxy_set, tmp_path / "run", ablation("static_proxy"), router__kind="level:3")
    assert result.plan["levels_used"] == {"original": 0, "12px": sum(result.plan["levels_used"].values())}


def test_a_proxy_that_is_not_there_is_not_replaced_by_another(data, proxy_set, tmp_path, spy):
    with pytest.raises(UserError, match=r"router.kind=level:9: there are 3 proxies on offer \(.*12px\); name one of them, 1 being"):
        run(data, proxy_set, tmp_path / "run", ablation("static_proxy"), router__kind="level:9")


def test_samples_can_be_drawn_by_lot(data, proxy_set, tmp_path, spy):
    result = run(data, proxy_set, tmp_path / "run", ablation("random_routing"), router__tolerance=0.8, proxies__use="all", epochs=1)
    used = result.plan["levels_used"]
    assert list(result.plan["proxies"]["levels"]) and 0 < used["original"] < sum(used.values())


def test_under_the_papers_strategy_the_lot_deals_out_the_policys_levels(data, proxy_set, tmp_path, spy):
    policy = run(data, proxy_set, tmp_path / "policy", strategy="paper", epochs=1)
    routed = {index: level for _, indices, levels, *_ in spy.batches for index, level in zip(indices, levels)}
    spy.batches.clear()
    dealt = run(data, proxy_set, tmp_path / "dealt", ablation("random_routing"), strategy="paper", loader__augment="none", epochs=1)
    assert policy.plan["levels_used"] == dealt.plan["levels_used"]
    assert {index: level for _, indices, levels, *_ in spy.batches for index, level in zip(indices, levels)} != routed


def test_without_a_cache_each_epoch_goes_through_the_networks(data, proxy_set, tmp_path, spy):
    cached = run(data, proxy_set, tmp_path / "cached", proxies__set=None, proxies__levels=())
    plain = run(data, proxy_set, tmp_path / "plain", ablation("no_cache"), proxies__set=None, proxies__levels=(), gate__kind="none")
    assert cached.plan["measured_frozen_seconds"] > 0 and plain.plan["measured_frozen_seconds"] > 0
    for name, tensor in weights_of(plain).items():
        np.testing.assert_allclose(tensor, weights_of(cached)[name], atol=1e-4)
