"""The forge from Python: a module of one's own, and what cannot be forged."""

import dataclasses
import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from forge_examples import Tower, copy_of, network_of
from torch import nn

from piebridge.core.capture import capture
from piebridge.core.costs import network_costs
from piebridge.core.errors import UserError
from piebridge.core.network_file import load_network_file
from piebridge.core.proxy_set import load_proxy_set
from piebridge.core.slices import cut
from piebridge.forge import forge, structure_of, tensor_cuts
from piebridge.forge.bench import Bench, Trial
from piebridge.forge.build import Build
from piebridge.forge.images import ForgeImages
from piebridge.forge.pruned_widths import PrunedWidths
from piebridge.forge.trials import Trials
from piebridge.forge.work_folder import KEY_FILE, empty, locked
from piebridge.forge_settings import ForgeSettings, forge_settings

CLIPART = Path(__file__).resolve().parents[2] / "datasets" / "Clipart10"
models = pytest.importorskip("torchvision.models")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    for name in ("arrows", "flags", "fruit", "mammals"):
        for path in sorted((CLIPART / name).iterdir())[:10]:
            shutil.copy(str(path), str(folder / f"{name} {path.name}"))
    return folder


class Undecided(nn.Module):
    """Its course depends on its values, so no trace of it is the whole of it."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        x = x.mean((2, 3))
        return self.head(x if x.sum() > 0 else -x)


def test_a_module_of_ones_own(photos, tmp_path, monkeypatch):
    monkeypatch.setenv("PIEBRIDGE_CACHE", str(tmp_path / "profile"))
    torch.manual_seed(0)
    module = models.mobilenet_v3_small(weights=None, num_classes=4).eval()
    settings = forge_settings({"levels": 2, "least": 0.95, "images": 24, "held_out": 12, "widths": 1, "narrowest": 0.8,
                               "resolutions": "96,64", "precisions": "float", "drops": 0, "policy": False})
    proxy_set = load_proxy_set(forge(module, photos, tmp_path / "set", settings))
    images = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(proxy_set.original(images), module(images), rtol=1e-4, atol=1e-5)
    assert 1 <= len(proxy_set.proxies) <= 2 and proxy_set.policy is None
    for proxy in proxy_set.proxies:
        after = proxy.facts["alignment"]["after"]
        assert all(0 <= each["relative_error"] < 2 and -1 <= each["cosine"] <= 1.0001 for each in after.values())


@pytest.fixture(scope="module")
def small():
    torch.manual_seed(0)
    module = models.mobilenet_v3_small(weights=None, num_classes=4)
    return capture(module, "small", [3, 96, 96], [0.5] * 3, [0.5] * 3).eval()


def small_settings(**values):
    return ForgeSettings(**dict({"levels": 2, "least": 0.95, "images": 24, "held_out": 12, "widths": 0, "resolutions": ("64", "48"),
                                 "precisions": ("float",), "drops": 0, "policy": False}, **values))


def test_what_was_tried_is_not_tried_again(small, photos, tmp_path, monkeypatch):
    """A target that cannot be met leaves no set; the same forge with another one goes on from what was measured.

    Milliseconds are the images' sizes, whatever else the machine does.
    """
    monkeypatch.setenv("PIEBRIDGE_CACHE", str(tmp_path / "profile"))
    computed, out = Bench._features, tmp_path / "set"
    monkeypatch.setattr(Bench, "_features", lambda bench, segment, size: computed(bench, segment, size)[:2] + ((size / 96, 0.01, 9),))
    with pytest.raises(UserError, match="proxies: no level takes at most 1 % of the original's .* ms; the fastest takes .* %: ask for "
                                        "that or more, or allow lower resolutions, smaller widths or int8"):
        forge(small, photos, out, small_settings(least=0.01))
    assert not out.exists() and not list(tmp_path.glob(".*"))
    measured = json.loads((tmp_path / "set.work" / "trials.json").read_text())
    assert sorted(measured) == ["48px", "64px", "original"]
    monkeypatch.setattr(Bench, "try_out", None)
    proxy_set = load_proxy_set(forge(small, photos, out, small_settings()))
    assert {proxy.name for proxy in proxy_set.proxies} <= {"64px", "48px"} and not (tmp_path / "set.work").exists()
    for proxy in proxy_set.proxies:
        at_tap = proxy.facts["alignment"]["after"][small.description["tap"]]
        assert at_tap["relative_error"] == measured[proxy.name][3]  # the same map, fitted on the features that were kept


def test_one_process_at_a_time_works_in_a_folder(tmp_path):
    folder = tmp_path / "set.work"
    with locked(folder):
        with pytest.raises(UserError, match="set.work: another process is forging this set; wait for it, or choose another --out"):
            with locked(folder):
                pass
    with locked(folder):  # nothing is left of the lock
        folder.rmdir()  # as the process that had it does at its end
    assert not folder.exists()


def test_a_work_folder_that_was_killed_at_any_time_is_taken_up(tmp_path, monkeypatch):
    folder = tmp_path / "set.work"
    folder.mkdir()
    (folder / ".key.json.0123abcd.part").write_text("{")
    with locked(folder):
        assert not list(folder.iterdir())
        (folder / KEY_FILE).write_text('{"forge": "x"}')
        (folder / "policy").mkdir()
        (folder / "zebra").write_text("")
        monkeypatch.setattr(shutil, "rmtree", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            empty(folder)
        monkeypatch.undo()
    with locked(folder):  # half-empty, and still known for what it is
        empty(folder)
    assert not list(folder.iterdir())


def test_a_work_folder_of_something_else_is_not_touched(tmp_path):
    folder = tmp_path / "set.work"
    folder.mkdir()
    (folder / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="set.work: the forge keeps its work there, and it is something else; move it away"):
        with locked(folder):
            pass
    assert (folder / "mine.txt").read_text() == "mine"
    with pytest.raises(UserError, match=r"mine.txt/set.work: the forge keeps its work there, and cannot \(Not a directory\)"):
        with locked(folder / "mine.txt" / "set.work"):
            pass


def test_resolutions_out_of_range_are_refused_before_any_work(small, photos, tmp_path):
    for size in (4, small.description["input_size"][-1] + 8):
        with pytest.raises(UserError, match=f"proxies: resolutions: {size} is not possible; give whole pixels from 8 to the original's"):
            forge(small, photos, tmp_path / "set", small_settings(resolutions=(str(size),)))
    assert not list(tmp_path.iterdir())


def test_a_network_that_is_too_small_for_a_policy_is_refused_before_any_work(photos, tmp_path):
    with pytest.raises(UserError, match="network tower: too small for a policy, .*; forge it with policy=false, and route it by residual"):
        forge(network_of(Tower()), photos, tmp_path / "set", small_settings(policy=True, resolutions=("8",)))
    assert not list(tmp_path.iterdir())


def test_only_what_can_be_chosen_is_kept(tmp_path):
    """Beside a level that is faster and nearer to the original, the features of another are of no use."""
    random = np.random.RandomState(0)
    fitted, held_out = random.randn(20, 6).astype(np.float32), random.randn(9, 6).astype(np.float32)
    bench = Bench.__new__(Bench)  # without measuring
    bench.original = Trial(10.0, 0.1, 20, (0.0, 1.0), (0.0, 1.0), None, fitted, held_out, held_out)
    trials = Trials(tmp_path, bench)

    def add(name, milliseconds, noise):
        features = [each + noise * random.randn(*each.shape).astype(np.float32) for each in (fitted, held_out)]
        trials.add(name, bench.judge((milliseconds, 0.1, 20), *features))

    def kept():
        return sorted(path.name for path in tmp_path.glob("*.features.safetensors"))

    add("worse", 6.0, 0.5)
    trials.add("refused", "does not run")
    assert kept() == ["worse.features.safetensors"]
    add("better", 4.0, 0.1)
    add("slower and nearer", 8.0, 0.01)
    assert kept() == ["better.features.safetensors", "slower and nearer.features.safetensors"]
    bench.original = dataclasses.replace(bench.original, milliseconds=5.0)  # measured anew, on a busy machine
    again = Trials(tmp_path, bench)
    assert bench.original.milliseconds == 10.0 and "refused" in again and "other" not in again
    assert [point.name for point in again.front()] == ["original", "slower and nearer", "better"]
    loaded, first = again.load("better"), trials.load("better")
    assert (loaded.milliseconds, loaded.after) == (4.0, first.after) and np.array_equal(loaded.bridged, first.bridged)


def test_images_that_are_held_are_those_that_are_decoded_each_time(small, photos, monkeypatch):
    source = ForgeImages(photos, small.description, small_settings(images=30, held_out=10))
    assert len(source.fitted) == 30 and len(source.held_out) == 10 and not set(source.fitted) & set(source.held_out)
    fewest = ForgeImages(photos, small.description, small_settings(images=16, held_out=8))
    assert len(fewest.fitted) == 16 and len(fewest.held_out) == 8
    decoded = {size: torch.cat(list(source.batches([5, 1, 20], size))) for size in (64, 48)}
    monkeypatch.setattr(source, "_loader", Mock(side_effect=source._loader))
    for size in (64, 64, 48):
        source.hold(size)
        assert torch.equal(torch.cat(list(source.batches([5, 1, 20], size))), decoded[size]) and decoded[size].shape == (3, 3, size, size)
    assert source._loader.call_count == 2
    monkeypatch.setattr("piebridge.forge.images.MOST_BYTES", 40 * 3 * 64 * 64 * 4 - 1)
    source.hold(64)  # too large: still decoded each time
    assert torch.equal(torch.cat(list(source.batches([5, 1, 20], 64))), decoded[64]) and source._loader.call_count == 3


def pruned_widths(network, photos, work, settings, on_step=lambda: None):
    work.mkdir(exist_ok=True)
    return PrunedWidths(network, structure_of(network), ForgeImages(photos, network.description, settings), settings, work, on_step)


@pytest.mark.parametrize("align, is_refitted", [("none", False), ("statistics", False), ("closed", True)])
def test_alignment_does_what_it_is_asked_for(small, photos, tmp_path, align, is_refitted):
    pruned = pruned_widths(small, photos, tmp_path, small_settings(widths=1, narrowest=0.6, align=align))
    (kept,), (proxy,) = pruned.kept.values(), pruned.networks.values()
    cuts = tensor_cuts(pruned.structure, kept)
    is_equal = {key: torch.equal(cut(tensor, cuts.get(key, [])), proxy.state_dict()[key]) for key, tensor in small.state_dict().items()}
    assert all(same for key, same in is_equal.items() if key.endswith("weight")) != is_refitted
    assert all(same for key, same in is_equal.items() if key.endswith("running_mean")) == (align == "none")


def test_an_interrupted_alignment_goes_on_with_the_same_channels_and_weights(photos, tmp_path, monkeypatch):
    """In the midst of block-wise regression, with the scores and the start that it had: here the network as it is cut."""
    tower, work = copy_of(network_of(Tower())).float(), tmp_path / "work"
    settings = small_settings(widths=1, narrowest=0.7, align="blocks")
    monkeypatch.setattr("piebridge.forge.pruned_widths.reconstruct", lambda *given: [])
    undisturbed = pruned_widths(tower, photos, tmp_path / "other", settings)

    def stop():
        if (work / "width_01" / "state.safetensors").exists():
            raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        pruned_widths(tower, photos, work, settings, stop)
    assert not (work / "width_01.safetensors").exists()
    for name in ("taylor_scores", "reconstruct"):
        monkeypatch.setattr("piebridge.forge.pruned_widths." + name, None)
    resumed = pruned_widths(tower, photos, work, settings)
    monkeypatch.setattr("piebridge.forge.pruned_widths.regress_blocks", None)
    again = pruned_widths(tower, photos, work, settings)
    for each in (resumed, again):
        assert (each.kept, each.order) == (undisturbed.kept, undisturbed.order)
        assert [network.fingerprint() for network in each.networks.values()] == [
            network.fingerprint() for network in undisturbed.networks.values()]
    network, = resumed.networks.values()
    assert load_network_file(work / "width_01" / "start.safetensors").fingerprint() != network.fingerprint()  # some block was changed


def test_a_transformer_and_the_order_of_its_channels(photos, tmp_path, monkeypatch):
    """It runs at its own size alone: what is left is pruning, by heads and hidden units. Milliseconds are MACs."""
    monkeypatch.setenv("PIEBRIDGE_CACHE", str(tmp_path / "profile"))
    torch.manual_seed(0)
    network = capture(models.VisionTransformer(64, 16, num_layers=3, num_heads=6, hidden_dim=96, mlp_dim=192, num_classes=5), "vit",
                      [3, 64, 64], [0.5] * 3, [0.5] * 3).eval()
    whole, computed, tried = network_costs(network)["macs"], Bench._features, Bench.try_out
    monkeypatch.setattr(Bench, "_features", lambda bench, segment, size: computed(bench, segment, size)[:2] + ((1.0, 0.0, 9),))

    def try_out(bench, proxy, *others):
        trial = tried(bench, proxy, *others)
        return trial if isinstance(trial, str) else dataclasses.replace(trial, milliseconds=network_costs(proxy)["macs"] / whole)
    monkeypatch.setattr(Bench, "try_out", try_out)
    settings = small_settings(widths=2, narrowest=0.6, least=0.7, resolutions=("48",))
    proxy_set = load_proxy_set(forge(network, photos, tmp_path / "set", settings))
    images, taps = torch.randn(2, 3, 64, 64), [block["output"] for block in network.description["blocks"]]
    sizes = {name: group.size for name, group in structure_of(network).groups.items()}
    with torch.no_grad():
        assert torch.equal(proxy_set.original(images), network(images))
        wanted = network.values(images, taps)
        for proxy in proxy_set.proxies:
            assert proxy.resolution == 64 and any(len(proxy.kept[name]) < size for name, size in sizes.items())
            found = proxy.network.values(images, taps)
            assert {tap: value.shape for tap, value in found.items()} == {tap: value.shape for tap, value in wanted.items()}
            measured = proxy.facts["alignment"]
            assert measured["after"][taps[-1]]["relative_error"] < measured["before"][taps[-1]]["relative_error"]
    assert proxy_set.proxies and (proxy_set.folder / "order.safetensors").is_file()


def test_channels_are_not_ordered_for_levels_that_are_not_pruned(small, photos, tmp_path, monkeypatch):
    monkeypatch.setenv("PIEBRIDGE_CACHE", str(tmp_path / "profile"))
    computed, tried = Bench._features, Bench.try_out
    monkeypatch.setattr(Bench, "_features", lambda bench, segment, size: computed(bench, segment, size)[:2] + ((size / 96, 0.01, 9),))
    monkeypatch.setattr(Bench, "try_out", lambda bench, network, *others: tried(bench, network, *others) if network is small else "refused")
    proxy_set = load_proxy_set(forge(small, photos, tmp_path / "set", small_settings(widths=1, narrowest=0.8, align="none")))
    assert proxy_set.proxies and not proxy_set.order and not (tmp_path / "set" / "order.safetensors").exists()


def test_a_width_that_cannot_be_met_is_refused(small, photos, tmp_path, monkeypatch):
    monkeypatch.setenv("PIEBRIDGE_CACHE", str(tmp_path / "profile"))
    with pytest.raises(UserError, match="network small: narrowest=0.05 cannot be met by pruning inside its blocks, which leaves at least "
                                        "0.* of its MACs; ask for that or more"):
        forge(small, photos, tmp_path / "set", small_settings(widths=2, narrowest=0.05))
    assert not (tmp_path / "set").exists() and not list(tmp_path.glob(".*"))


def test_what_the_network_does_not_allow_is_refused_before_any_work(small, photos, tmp_path):
    wide = capture(models.mobilenet_v3_small(weights=None, num_classes=4), "wide", [3, 64, 96], [0.5] * 3, [0.5] * 3)
    tiny = capture(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                                 nn.Linear(8, 5)), "tiny", [3, 32, 32], [0.5] * 3, [0.5] * 3)
    for network, settings, message in [
            (wide, small_settings(), "network wide: its input of 64 x 96 pixels is not square, as those of proxies are"),
            (small, small_settings(resolutions=("128",)), "proxies: resolutions: 128 is not possible; give whole pixels from 8 to the "),
            (tiny, small_settings(resolutions=("24",), policy=True), "network tiny: too small for a policy, .*forge it with policy=false")]:
        with pytest.raises(UserError, match=message):
            forge(network, photos, tmp_path / "set", settings)
    assert not list(tmp_path.iterdir())


def test_a_network_without_anything_to_prune_says_so(photos, tmp_path):
    plain = capture(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)), "plain",
                    [3, 32, 32], [0.5] * 3, [0.5] * 3)
    with pytest.raises(UserError, match="network plain: nothing inside its blocks can be cut; forge it with widths=0"):
        pruned_widths(plain, photos, tmp_path, small_settings(widths=1))


@pytest.mark.parametrize("given", ["~/sets/new", "sets/../sets/new"])
def test_the_set_and_its_work_lie_where_the_name_says(small, photos, tmp_path, monkeypatch, given):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    build = Build(small, photos, given, small_settings(), None)
    assert (build.out, build.work) == (tmp_path / "sets" / "new", tmp_path / "sets" / "new.work")


@pytest.mark.parametrize("make, text", [(Undecided, "Undecided"), (lambda: nn.Linear(3, 2), "Linear")])
def test_what_cannot_be_captured_is_refused(make, text, photos, tmp_path):
    with pytest.raises(UserError, match=text):
        forge(make(), photos, tmp_path / "set", ForgeSettings())
    assert not (tmp_path / "set").exists() and not (tmp_path / "set.work").exists()


def test_every_wrong_setting_is_told_at_once():
    with pytest.raises(UserError) as error:
        forge_settings(["levels=0", "precisions=int4,float", "aling=closed", "resolutions=192,x"])
    assert len(str(error.value).splitlines()) == 4
    assert "aling: unknown key (did you mean 'align'?); `piebridge forge --help` lists them" in str(error.value)
    assert forge_settings(["resolutions=192,160", "policy=false"]).resolutions == ("192", "160")


@pytest.mark.parametrize("word, expected", [
    ("resolutions=\u00b2", "resolutions: '\u00b2' is not a number from 1 to 4096"), ("resolutions=" + "9" * 5000, "is not a number from 1"),
    ("precisions=", "precisions: is empty; give at least one of float, bf16, int8"),
    ("batch_sizes=[]", "batch_sizes: is empty; give at least one number from 1 to 4096")])
def test_settings_that_are_hardly_numbers(word, expected):
    with pytest.raises(UserError) as error:
        forge_settings([word])
    assert expected in str(error.value) and len(str(error.value).splitlines()) == 1
