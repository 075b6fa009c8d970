"""The forge through the real command line: a set from unlabelled images, its use in training, resume, and bad input."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

CHECKOUT = Path(__file__).resolve().parents[2]
CLIPART = CHECKOUT / "datasets" / "Clipart10"
SMALL = ("levels=3", "least=0.9", "images=40", "held_out=16", "widths=1", "narrowest=0.8", "resolutions=160", "drops=1", "policy_epochs=2",
         "profile_seconds=2")

pytest.importorskip("torchvision")
pytest.importorskip("timm")
if sys.version_info < (3, 10):
    pytest.skip("the forge needs Python 3.10", allow_module_level=True)


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    return dict(os.environ, PIEBRIDGE_CACHE=str(tmp_path_factory.mktemp("profile")), OMP_NUM_THREADS="1", PYTHONPATH=str(CHECKOUT))


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Six images of each class of the embedded set, in one folder and without labels."""
    folder = tmp_path_factory.mktemp("photos") / "no labels"
    folder.mkdir()
    for name in sorted(each.name for each in CLIPART.iterdir() if each.is_dir()):
        for path in sorted((CLIPART / name).iterdir())[:6]:
            shutil.copy(str(path), str(folder / f"{name}_{path.name}"))
    return folder


def forge(environment, *words, **options):
    return subprocess.run([sys.executable, "-m", "piebridge", "forge", *map(str, words)], env=environment, cwd=str(CHECKOUT),
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=300, **options)


def train(environment, *words):
    return subprocess.run([sys.executable, "-m", "piebridge", "train", "efficientnet_lite0/Clipart10/ours", *words], env=environment,
                          cwd=str(CHECKOUT), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=200)


@pytest.fixture(scope="module")
def forged(environment, photos, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sets") / "lite0"
    done = forge(environment, "efficientnet_lite0", "--images", photos, "--out", folder, *SMALL)
    assert done.returncode == 0, done.stderr
    assert str(folder) in done.stdout
    return folder


def test_a_set_is_whole_and_says_what_it_is(environment, forged):
    manifest = json.loads((forged / "manifest.json").read_text())
    assert manifest["facts"]["images"] == {"fitted": 40, "held_out": 16}
    assert 1 <= len(manifest["proxies"]) <= 3 and len(manifest["latency"]) == 1
    for entry in manifest["proxies"]:
        at_tap = entry["facts"]["alignment"]["after"][manifest["facts"]["tap"]]
        assert 0.8 < at_tap["cosine"] < 1 and 0 < at_tap["relative_error"] < 1
    shown = forge(environment, "--show", forged)
    assert shown.returncode == 0 and all(entry["name"] in shown.stdout for entry in manifest["proxies"])
    assert not forged.with_name("lite0.work").exists()


def test_an_original_is_trained_through_each_router(environment, forged, tmp_path):
    data = tmp_path / "data"
    for name in ("arrows", "flags", "fruit"):
        (data / name).mkdir(parents=True)
        for path in sorted((CLIPART / name).iterdir())[:16]:
            shutil.copy(str(path), str(data / name))
    accuracies = {}
    routers = [(kind, "device") for kind in ("residual", "policy", "random", "level:1", "none")] + [("residual", "set")]
    for router, predictor in routers:
        output = tmp_path / f"{predictor} {router.replace(':', '')}"
        done = train(environment, f"data={data}", f"output={output}", "epochs=2", f"proxies.set={forged}", f"router.kind={router}",
                     f"router.predictor={predictor}", "router.delta=0.5", "proxies.use=all")
        assert done.returncode == 0, done.stderr
        record = json.loads((output / "run.json").read_text())
        accuracies[router, predictor] = record["results"]["test_accuracy"]
        used = record["plan"]["levels_used"]
        assert sum(used.values()) == 33
        if router == "level:1":
            assert used == {"original": 0, json.loads((forged / "manifest.json").read_text())["proxies"][0]["name"]: 33}
        if router == "none":
            assert used == {"original": 33}
        if predictor == "set":
            assert used["original"] < 33  # half of such images may leave more than the tolerance
            assert "router.kind=residual" in record["plan"]["proxies"]["reason"]  # taken as they are, with nothing calibrated
    assert min(accuracies.values()) > 0.5


def test_the_commands_of_the_readme(environment, tmp_path):
    for name in ("arrows", "flags", "fruit", "mammals"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for path in sorted((CLIPART / name).iterdir())[:14]:
            shutil.copy(str(path), str(tmp_path / "photos" / name))

    def run(verb, *words):
        done = subprocess.run([sys.executable, "-m", "piebridge", verb, *words], env=environment, cwd=str(tmp_path), stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("forge", "efficientnet_lite0", "--images", "photos", "--out", "proxynetworks/lite0", *SMALL)
    profile = run("forge", "--profile", "proxynetworks/lite0", "profile_seconds=1", "batch_sizes=1")
    assert "The original on every backend" in profile and "eager" in profile
    trained = run("train", "efficientnet_lite0/Clipart10/ours", "data=photos", "output=res/photos_lite0", "proxies.set=proxynetworks/lite0")
    assert "test accuracy" in trained


def test_a_damaged_set_is_called_a_set(environment, forged, tmp_path):
    folder = tmp_path / "set"
    shutil.copytree(str(forged), str(folder))
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text[:len(text) // 2])
    refused(forge(environment, "--show", folder), "manifest.json: no JSON")
    manifest = json.loads(text)
    manifest["proxies"][0]["macs"] = "many"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    refused(forge(environment, "--show", folder), "manifest.json: proxy 0: macs='many' must be a whole number above 0")
    (folder / "manifest.json").unlink()
    refused(forge(environment, "--show", folder), "manifest.json: no such file; give the folder of a proxy set")


def test_another_networks_set_is_refused(environment, forged, tmp_path):
    done = train(environment, f"output={tmp_path / 'run'}", "network=" + str(_other_network(tmp_path)), f"proxies.set={forged}")
    assert done.returncode == 2 and "was made of efficientnet_lite0 with other weights" in done.stderr, done.stderr


def _other_network(folder):
    from piebridge.core.network_file import save_network
    from piebridge.core.networks import load_network

    save_network(load_network("efficientnet_lite0", is_pretrained=False), folder / "other.safetensors")
    return folder / "other.safetensors"


def test_a_killed_forge_goes_on_and_leaves_no_half_set(environment, photos, tmp_path):
    out = tmp_path / "set"
    words = [sys.executable, "-m", "piebridge", "forge", "efficientnet_lite0", "--images", str(photos), "--out", str(out), *SMALL]
    process = subprocess.Popen(words, env=environment, cwd=str(CHECKOUT), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    trials = tmp_path / "set.work" / "trials.json"
    for _ in range(1200):
        if trials.is_file() and len(json.loads(trials.read_text())) >= 2:
            break
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not out.exists() and (tmp_path / "set.work" / "width_01.safetensors").is_file()
    measured = json.loads(trials.read_text())
    done = forge(environment, "efficientnet_lite0", "--images", photos, "--out", out, *SMALL)
    assert done.returncode == 0, done.stderr
    assert (out / "manifest.json").is_file() and len(measured) >= 2
    assert not list(tmp_path.glob(".*")) and not (tmp_path / "set.work").exists()


def refused(done, *texts):
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    for text in texts:
        assert text in lines[-1], done.stderr


def test_bad_input_is_one_line_and_leaves_nothing(environment, photos, tmp_path):
    few, plain = tmp_path / "few", tmp_path / "plain"
    for folder in (few, plain):
        folder.mkdir()
    for path in sorted(photos.iterdir())[:5]:
        shutil.copy(str(path), str(few))
    for number in range(40):
        Image.new("RGB", (64, 64), (number * 6, 0, 0)).save(str(plain / f"{number}.png"))
    out = tmp_path / "set"
    lite = "efficientnet_lite0"
    refused(forge(environment, lite, "--images", few, "--out", out), "5 images that can be read; the forge needs at least 32")
    refused(forge(environment, lite, "--images", plain, "--out", out), "is of one colour")
    refused(forge(environment, lite, "--images", tmp_path / "nowhere", "--out", out), "nowhere: no such file or folder")
    refused(forge(environment, lite, "--images", photos), "give --out DIR")
    refused(forge(environment, lite, "--images", photos, "--out", out, "levls=3"), "levls: unknown key (did you mean 'levels'?)")
    refused(forge(environment, lite, "--images", photos, "--out", photos), "a folder with other things in it")
    refused(forge(environment, "efficientnet_lite9", "--images", photos, "--out", out), "unknown network 'efficientnet_lite9'")
    impossible = ("images=40", "held_out=16", "widths=0", "resolutions=208", "precisions=float", "drops=0", "least=0.05")
    refused(forge(environment, lite, "--images", photos, "--out", out, *impossible), "no level takes at most 5 % of the original's")
    assert not out.exists() and not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_broken_weights_are_refused(environment, photos, tmp_path):
    import torch

    from piebridge.core.network_file import save_network
    from piebridge.core.networks import load_network

    network = load_network("efficientnet_lite0")
    with torch.no_grad():
        next(network.parameters()).fill_(float("nan"))
    save_network(network, tmp_path / "broken.safetensors")
    refused(forge(environment, tmp_path / "broken.safetensors", "--images", photos, "--out", tmp_path / "set"), "not finite")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.safetensors"]
