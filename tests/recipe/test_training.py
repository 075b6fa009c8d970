"""The main job through the real command line, on real images: every method, resume, seeds, bad input."""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from piebridge.core.safetensors_file import read_safetensors

CHECKOUT = Path(__file__).resolve().parents[2]
RUN_FILES = {"log.txt", "metrics.csv", "run.json", "splits.csv", "trainable.safetensors", "tuned.safetensors", "checkpoint"}
METHODS = ("ours", "PET", "PET_fast", "PET_cache", "PET_fast_cache", "FTAll", "PruneTrain", "ElasticTrainer")
WHOLE = ("FTAll", "PruneTrain", "ElasticTrainer")  # these train the whole network


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """4 classes with 20 images each, from the embedded set."""
    folder = tmp_path_factory.mktemp("data") / "small set"
    for name in ("arrows", "flags", "fruit", "mammals"):
        source = CHECKOUT / "datasets" / "Clipart10" / name
        assert source.is_dir(), f"the embedded set lacks {name}"
        (folder / name).mkdir(parents=True)
        for image in sorted(source.iterdir())[:20]:
            shutil.copy(str(image), str(folder / name))
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A device profile of its own, and one thread, so that tests may share a machine."""
    return dict(os.environ, PIEBRIDGE_CACHE=str(tmp_path_factory.mktemp("profile")), OMP_NUM_THREADS="1", PYTHONPATH=str(CHECKOUT))


def command(run, *overrides):
    return [sys.executable, "-m", "piebridge", "train", run] + list(overrides)


def train(environment, method, images, output, *overrides, **options):
    arguments = command(f"efficientnet_lite0/Clipart10/{method}", f"data={images}", f"output={output}", "epochs=3", *overrides)
    return subprocess.run(arguments, env=environment, cwd=str(CHECKOUT), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          universal_newlines=True, timeout=300, **options)


def test_the_python_example_of_the_readme(environment, images, tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", (CHECKOUT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    shutil.copytree(str(images), str(tmp_path / "photos"))
    shutil.copytree(str(images / "flags"), str(tmp_path / "new_photos"))
    example += "print(result.status, result.results['test_accuracy'], result.load_network().head.out_features)\n"
    done = subprocess.run([sys.executable, "-c", example], env=environment, cwd=str(tmp_path), stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, universal_newlines=True, timeout=300)
    assert done.returncode == 0, done.stderr
    first, *predictions, last = done.stdout.splitlines()
    assert first.startswith("success ") and first.endswith("from_python")
    assert len(predictions) == 20 and {line.split()[1] for line in predictions} <= {"arrows", "flags", "fruit", "mammals"}
    status, accuracy, classes = last.split()
    assert (status, classes) == ("success", "4") and 0.5 < float(accuracy) <= 1


def record_of(folder):
    return json.loads((folder / "run.json").read_text())


def metrics_without_times(folder):
    with open(str(folder / "metrics.csv")) as stream:
        return [{key: value for key, value in row.items() if not key.endswith("_seconds")} for row in csv.DictReader(stream)]


def tensors_of(folder):
    tensors, _ = read_safetensors(folder / "trainable.safetensors")
    return {name: tensor.numpy() for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def finished(environment, images, tmp_path_factory):
    """A finished run of each method: {method: folder}; trained when it is first asked for."""
    class Finished(dict):
        def __missing__(self, method):
            folder = tmp_path_factory.mktemp("runs") / method
            done = train(environment, method, images, folder)
            assert done.returncode == 0, done.stderr
            self[method] = folder
            return folder

    return Finished()


@pytest.mark.parametrize("method", METHODS)
def test_a_run_leaves_what_the_contract_says(finished, method):
    folder = finished[method]
    assert {path.name for path in folder.iterdir()} == RUN_FILES
    record = record_of(folder)
    assert record["status"] == "success" and record["method"] == method
    assert record["dataset"] == "small set" and record["network"] == "efficientnet_lite0" and record["seed"] == 0
    results = record["results"]
    assert (0.5 if method not in WHOLE else 0.26) <= results["test_accuracy"] <= 1 and 0 <= results["val_accuracy"] <= 1
    assert results["wall_seconds"] > results["train_seconds"] > 0
    assert sum(results["phases"].values()) == pytest.approx(results["train_seconds"], abs=0.01)
    assert results["peak_mib"] > 100 and (results["energy_j"] is None or results["energy_j"] > 0)
    assert results["trainable_parameters"] == (1280 * 4 + 4 if method not in WHOLE else 3376132)
    assert results["trainable_share"] == pytest.approx(results["trainable_parameters"] / 3376132)
    lines = (folder / "log.txt").read_text().splitlines()
    assert len(lines) == 3
    for line in lines:
        accuracy, seconds = (float(value) for value in line.split(" "))
        assert 0 <= accuracy <= 1 and seconds > 0


def test_the_tuned_original_differs_in_the_trainable_part_only(finished):
    from piebridge.core.networks import load_network

    original = load_network("efficientnet_lite0").state_dict()
    tuned = load_network(str(finished["ours"] / "tuned.safetensors")).state_dict()
    head = tensors_of(finished["ours"])
    for name, tensor in tuned.items():
        if name.startswith("classifier."):
            assert np.array_equal(tensor.numpy(), head[name])
        else:
            assert np.array_equal(tensor.numpy(), original[name].numpy()), name


def test_a_cache_changes_no_weight(finished):
    """PET_cache sees the same features in the same batches as PET, computed once."""
    plain, cached = tensors_of(finished["PET"]), tensors_of(finished["PET_cache"])
    for name in plain:
        np.testing.assert_allclose(plain[name], cached[name], atol=1e-4)


def test_a_warm_shared_cache_gives_the_same_weights_and_says_so(environment, images, tmp_path):
    for name, reused, computed in (("cold", 0, 56), ("warm", 56, 0)):
        done = train(environment, "PET_cache", images, tmp_path / name, "cache.shared=true", f"cache.folder={tmp_path / 'rows'}")
        assert done.returncode == 0, done.stderr
        plan = record_of(tmp_path / name)["plan"]["cache"]
        assert (plan["is_shared"], plan["rows_reused"], plan["rows_computed"]) == (True, reused, computed)
    cold, warm = tensors_of(tmp_path / "cold"), tensors_of(tmp_path / "warm")
    assert cold and all(np.array_equal(cold[name], warm[name]) for name in cold)


@pytest.mark.parametrize("kind, rows, settings", [
    ("pixels", 56, ("cache.kind=pixels", "router.kind=none", "gate.kind=none")),
    ("features", 112, ("loader.augment=crop_flip", "cache.views=2", "cache.dtype=int8", "cache.augment=noise"))])
def test_other_caches_train_too(environment, images, tmp_path, kind, rows, settings):
    done = train(environment, "ours", images, tmp_path / "run", *settings)
    assert done.returncode == 0, done.stderr
    record = record_of(tmp_path / "run")
    assert record["plan"]["cache"]["kind"] == kind and record["plan"]["cache"]["rows_computed"] >= rows
    assert record["results"]["test_accuracy"] > 0.5


def test_ours_says_what_it_chose(finished):
    plan = record_of(finished["ours"])["plan"]
    assert plan["backend"]["backend"] and plan["backend"]["reason"]
    assert plan["proxies"]["reason"] and sum(plan["levels_used"].values()) == 56


def test_every_level_can_serve(environment, images, tmp_path):
    done = train(environment, "ours", images, tmp_path / "all", "proxies.use=all", "proxies.calibration_images=16",
                 "router.tolerance=0.4", "proxies.levels=['192px','224px-drop1','160px']")
    assert done.returncode == 0, done.stderr
    used = record_of(tmp_path / "all")["plan"]["levels_used"]
    assert list(used) == ["original", "224px-drop1", "192px", "160px"] and sum(used.values()) == 56
    assert sum(used[name] > 0 for name in used) >= 2


def test_fresh_augmentation_goes_through_routed_proxies(environment, images, tmp_path):
    done = train(environment, "ours", images, tmp_path / "fresh", "loader.augment=crop_flip", "proxies.use=all",
                 "proxies.levels=['160px']", "proxies.calibration_images=16", "router.kind=random", "router.tolerance=0.6")
    assert done.returncode == 0, done.stderr
    rows = metrics_without_times(tmp_path / "fresh")
    levels = [float(row["mean_level"]) for row in rows]
    assert 0 < levels[0] < levels[-1] <= 1  # skipped samples move up to the only proxy
    assert 0 < float(rows[-1]["selected_share"]) < 1


THROUGH_LEVELS = ("pet.kind=adapter", "step=eager", "router.kind=random", "loader.augment=crop_flip", "epochs=2", "pet.blocks=last:4",
                  "proxies.calibration_images=16", "proxies.levels=['160px','224px-drop2','192px-int8']", "checkpoint.seconds=0.0")


def test_adapters_are_trained_through_levels_and_resume(environment, images, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = train(environment, "ours", images, whole, *THROUGH_LEVELS)
    assert done.returncode == 0, done.stderr
    record = record_of(whole)
    assert list(record["plan"]["levels_used"]) == ["original", "224px-drop2", "160px"] and min(record["plan"]["levels_used"].values()) > 5
    assert "192px-int8 left out" in record["plan"]["proxies"]["reason"] and 0 < record["results"]["trainable_share"] < 0.01
    assert "adapter trains" in done.stderr
    started = time.time()
    arguments = command("efficientnet_lite0/Clipart10/ours", f"data={images}", f"output={killed}", *THROUGH_LEVELS)
    process = subprocess.Popen(arguments, env=environment, cwd=str(CHECKOUT), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    kill_when_written(process, killed / "checkpoint" / "state.safetensors", started)
    done = train(environment, "ours", images, killed, *THROUGH_LEVELS)
    assert done.returncode == 0 and "going on from epoch" in done.stderr, done.stderr
    assert metrics_without_times(killed) == metrics_without_times(whole)
    for name, tensor in tensors_of(whole).items():
        assert np.array_equal(tensors_of(killed)[name], tensor), name


def test_the_head_may_be_trained_first_and_a_killed_run_repeats_it(environment, images, tmp_path):
    """What it starts with is what a run that trains nothing but the head does, loss by loss."""
    given = ["pet.kind=adapter", "step=eager", "router.kind=none", "proxies.levels=[]", "gate.kind=none", "pet.head_first=3",
             "pet.head_last=4"]
    whole, killed, alone = (tmp_path / name for name in ("whole", "killed", "alone"))
    done = train(environment, "ours", images, whole, *given)
    assert done.returncode == 0 and "the head alone first, 3 epochs" in done.stderr, done.stderr
    first = done.stderr
    plan = record_of(whole)["plan"]
    assert plan["head_first"]["levels_used"] and plan["head_last"]["levels_used"] and "the head alone last, 4 epochs" in first
    started = time.time()
    arguments = command("efficientnet_lite0/Clipart10/ours", f"data={images}", f"output={killed}", "epochs=3", *given)
    for name in ("checkpoint/decisions.json", "checkpoint/state.safetensors"):
        process = subprocess.Popen(arguments, env=environment, cwd=str(CHECKOUT), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        kill_when_written(process, killed / name, started)
    done = train(environment, "ours", images, killed, *given)
    assert done.returncode == 0 and "going on from epoch" in done.stderr, done.stderr
    assert "the head alone first" not in done.stderr
    assert metrics_without_times(killed) == metrics_without_times(whole)
    for name, tensor in tensors_of(whole).items():
        assert np.array_equal(tensors_of(killed)[name], tensor), name
    losses = re.findall(r"validation accuracy n/a, train loss (\S+),", first)[:3]
    assert losses == re.findall(r"train loss (\S+),", train(environment, "ours", images, alone).stderr) and len(losses) == 3


@pytest.mark.parametrize("kind", ["last_k", "norm"])
def test_a_cache_in_the_middle_of_the_network_changes_no_weight(environment, images, tmp_path, kind):
    """norm starts at the first convolution, whose map is kept too where it is asked for."""
    for name in ("none", "features"):
        done = train(environment, "ours", images, tmp_path / name, f"pet.kind={kind}", "step=eager", "epochs=1", f"cache.kind={name}",
                     "gate.kind=none", "backend.name=eager", "router.kind=none", "loader.batch_size=8", "optimizer.kind=sgd")
        assert done.returncode == 0, done.stderr
    plain, cached = tensors_of(tmp_path / "none"), tensors_of(tmp_path / "features")
    assert len(plain) > 2
    for name, tensor in plain.items():
        np.testing.assert_allclose(cached[name], tensor, atol=1e-4)


@pytest.mark.parametrize("overrides, words", [
    (["loader.augment=flip"], "router.kind=residual: goes by what a level leaves at the head's tap, and pet.kind=adapter trains what lies "
                              "before it; use router.kind=random, policy, level:N or none"),
    (["loader.augment=flip", "router.kind=level:9"], "router.kind=level:9: there are 2 levels to train through"),
    (["pet.kind=head", "router.kind=level:9"], "router.kind=level:9: there are 2 proxies on offer (192px, 160px)"),
    (["loader.augment=flip", "router.kind=policy"], "router.kind=policy asks the policy of a proxy set; give proxies.set"),
    (["pet.kind=all", "method=FTAll", "cache.kind=features"], "contradicts"),
    (["pet.blocks=last:99"], "pet.blocks=last:99: network efficientnet_lite0 has 16 blocks; give 16 or fewer"),
    (["pet.blocks=0"], "pet.blocks: '0' is not all, last:N, or a list of names")])
def test_what_cannot_be_trained_through_levels(environment, images, tmp_path, overrides, words):
    given = ["pet.kind=adapter", "step=eager", "proxies.levels=['160px','192px']"] + overrides
    refused(train(environment, "ours", images, tmp_path / "out", *given), words)


@pytest.mark.parametrize("overrides, words", [
    (["router.closing=1"], "router.closing=1: moves samples to other networks from epoch to epoch, and their features are kept"),
    (["router.lowers=true"], "router.lowers=True: moves samples to other networks from epoch to epoch"),
    (["router.kind=importance"], "router.kind=importance: moves samples to other networks from epoch to epoch"),
    (["loader.augment=flip", "cache.augment=noise"], "cache.augment=noise: changes cached features, and none are kept here"),
    (["pet.kind=last_k", "pet.last_k=1", "step=eager", "cache.kind=features", "router.kind=level:1"], "router.kind=level:1: what lies "
     "before the trained part is computed once and cached, which leaves a proxy nothing to save; use router.kind=none")])
def test_settings_that_a_cache_leaves_without_effect(environment, images, tmp_path, overrides, words):
    refused(train(environment, "ours", images, tmp_path / "out", "backend.name=eager", *overrides), words)


def test_one_seed_gives_one_run(environment, finished, images, tmp_path):
    done = train(environment, "ours", images, tmp_path / "again")
    assert done.returncode == 0, done.stderr
    assert metrics_without_times(tmp_path / "again") == metrics_without_times(finished["ours"])
    for name, tensor in tensors_of(tmp_path / "again").items():
        assert np.array_equal(tensor, tensors_of(finished["ours"])[name])


def test_another_seed_gives_another_run(environment, finished, images, tmp_path):
    assert train(environment, "ours", images, tmp_path / "other", "seed=1").returncode == 0
    assert metrics_without_times(tmp_path / "other") != metrics_without_times(finished["ours"])


def kill_when_written(process, path, started):
    """SIGKILL as soon as `path` has been written since `started`; fails when the process ends by itself before that."""
    deadline = time.time() + 120
    while time.time() < deadline:
        if path.exists() and path.stat().st_mtime > started:
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
            return
        assert process.poll() is None, f"the run ended before {path.name} was written"
        time.sleep(0.002)
    raise AssertionError(f"{path.name} was never written")


@pytest.mark.parametrize("method", ["PET", "ours"])
def test_killed_three_times_and_resumed_gives_the_same_weights(environment, finished, images, tmp_path, method):
    """Killed while preparing, after the first checkpoint and after the first epoch; each time the same command goes on."""
    folder = tmp_path / "killed"
    slow = ["epochs=3", "checkpoint.seconds=0.0"]
    arguments = command(f"efficientnet_lite0/Clipart10/{method}", f"data={images}", f"output={folder}", *slow)
    for name in ("checkpoint/decisions.json", "checkpoint/state.safetensors", "metrics.csv"):
        started = time.time()
        process = subprocess.Popen(arguments, env=environment, cwd=str(CHECKOUT), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        kill_when_written(process, folder / name, started)
        assert record_of(folder)["status"] == "running"
    done = train(environment, method, images, folder, *slow)
    assert done.returncode == 0, done.stderr
    assert "going on from epoch" in done.stderr
    assert metrics_without_times(folder) == metrics_without_times(finished[method])
    for name, tensor in tensors_of(folder).items():
        assert np.array_equal(tensor, tensors_of(finished[method])[name])
    assert not list(folder.glob("**/*.part")), "the next session removes what a killed one left half-written"


def test_ctrl_c_saves_and_exits_130(environment, finished, images, tmp_path):
    folder = tmp_path / "stopped"
    arguments = command("efficientnet_lite0/Clipart10/PET", f"data={images}", f"output={folder}", "epochs=3")
    process = subprocess.Popen(arguments, env=environment, cwd=str(CHECKOUT), stderr=subprocess.PIPE, universal_newlines=True)
    deadline = time.time() + 60
    while not (folder / "run.json").exists() and time.time() < deadline:
        time.sleep(0.05)
    time.sleep(1.5)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr and "the same command goes on" in stderr
    assert record_of(folder)["status"] == "cancelled"
    done = train(environment, "PET", images, folder)
    assert done.returncode == 0, done.stderr
    for name, tensor in tensors_of(folder).items():
        assert np.array_equal(tensor, tensors_of(finished["PET"])[name])


def refused(done, *words):
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("piebridge: ")]
    assert errors and all(word in done.stderr for word in words), done.stderr


def test_a_finished_run_is_not_overwritten(environment, finished, images):
    before = (finished["ours"] / "run.json").read_bytes()
    refused(train(environment, "ours", images, finished["ours"]), "holds a finished run", "overwrite=true")
    assert (finished["ours"] / "run.json").read_bytes() == before


def test_an_unfinished_run_of_another_configuration_is_kept(environment, images, tmp_path, finished):
    folder = tmp_path / "unfinished"
    shutil.copytree(str(finished["PET"]), str(folder))
    record = dict(record_of(folder), status="cancelled")
    (folder / "run.json").write_text(json.dumps(record))
    refused(train(environment, "PET", images, folder, "optimizer.lr=0.5"), "optimizer.lr 0.001 -> 0.5", "resume=none")


def test_wrong_key_and_missing_folder(environment, tmp_path):
    refused(train(environment, "ours", tmp_path / "nowhere", tmp_path / "out"), "nowhere", "no such folder")
    refused(train(environment, "ours", tmp_path, tmp_path / "out", "learning_rate=3"), "learning_rate: unknown key")
    assert not (tmp_path / "out").exists()


def test_bad_images_are_named_and_skipped(environment, images, tmp_path):
    from PIL import Image

    folder = tmp_path / "odd images"
    shutil.copytree(str(images), str(folder))
    good = sorted((folder / "mammals").iterdir())[0]
    (folder / "mammals" / "truncated.jpg").write_bytes(good.read_bytes()[:700])
    (folder / "mammals" / "text.jpg").write_text("not an image")
    picture = Image.open(str(good))
    picture.convert("L").save(str(folder / "flags" / "grey.png"))
    picture.convert("P").save(str(folder / "flags" / "palette.png"))
    picture.convert("CMYK").save(str(folder / "flags" / "cmyk.jpg"))
    done = train(environment, "PET_cache", folder, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "truncated.jpg" in done.stderr and "text.jpg" in done.stderr
    assert not any(name in done.stderr for name in ("grey.png", "palette.png", "cmyk.jpg"))
    assert len(record_of(tmp_path / "out")["bad_files"]) == 2
    refused(train(environment, "PET_cache", folder, tmp_path / "strict", "loader.max_bad_files=1"), "max_bad_files")


def test_an_empty_class_is_named(environment, images, tmp_path):
    folder = tmp_path / "data"
    shutil.copytree(str(images), str(folder))
    (folder / "zebras").mkdir()
    refused(train(environment, "ours", folder, tmp_path / "out"), "zebras")


def test_diverging_training_stops_with_the_files_names(environment, images, tmp_path):
    done = train(environment, "PET_cache", images, tmp_path / "out", "optimizer.kind=sgd", "optimizer.lr=1e6", "optimizer.weight_decay=1e6",
                 "optimizer.label_smoothing=0.0")
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "not a finite number" in done.stderr and ".jpg" in done.stderr
    assert record_of(tmp_path / "out")["status"] == "failed"
