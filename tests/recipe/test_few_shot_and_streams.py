"""Few shots, pseudo-labels, streams and a power sensor through the real loop, on real images; stopped and gone on to the same weights."""

import csv
import functools
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import piebridge
from piebridge import training
from piebridge.core import loop
from piebridge.core.errors import Cancelled, UserError
from piebridge.core.network_file import save_network
from piebridge.core.networks import load_network
from piebridge.core.power import Meter
from piebridge.core.safetensors_file import read_safetensors

CHECKOUT = Path(__file__).resolve().parents[2]
RUN = "efficientnet_lite0/Clipart10/ours"
CLASSES = ("arrows", "flags", "fruit")
PLAIN = {"backend.name": "eager", "proxies.levels": [], "router.kind": "none", "optimizer.label_smoothing": 0.0, "device": "cpu"}
STREAM = {"stream.samples": 20, "loader.augment": "crop_flip", "epochs": 2}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """3 classes with 16 images each, and a network that looks at them in 64 px."""
    folder = tmp_path_factory.mktemp("data")
    for name in CLASSES:
        (folder / "images" / name).mkdir(parents=True)
        for image in sorted((CHECKOUT / "datasets" / "Clipart10" / name).iterdir())[:16]:
            shutil.copy(str(image), str(folder / "images" / name))
    network = load_network("efficientnet_lite0")
    network.description["input_size"] = [3, 64, 64]
    save_network(network, folder / "small.safetensors")
    return folder


@pytest.fixture
def train(data, monkeypatch, tmp_path):
    """A function that trains there with settings."""
    monkeypatch.setenv("PIEBRIDGE_CACHE", str(tmp_path / "profile"))

    def run(output, settings, **options):
        overrides = dict(PLAIN, data=str(data / "images"), network=str(data / "small.safetensors"), output=str(tmp_path / output))
        return piebridge.train(RUN, **dict(overrides, **settings), **options)
    return run


def tensors(result):
    found, _ = read_safetensors(result.folder / "trainable.safetensors")
    return {name: tensor.numpy() for name, tensor in found.items()}


def assert_same_weights(one, other):
    first, second = tensors(one), tensors(other)
    assert sorted(first) == sorted(second) and all(np.array_equal(first[name], second[name]) for name in first)


def stopped_and_gone_on(train, settings, count):
    """A run that is interrupted after `count` batches, and then goes on to its end."""
    inner, done = loop._train_batch, []

    def train_batch(*arguments):
        inner(*arguments)
        done.append(1)
        if len(done) == count:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "_train_batch", train_batch)
        with pytest.raises(Cancelled):
            train("again", settings)
    return train("again", settings)


def test_few_shots_alone_use_nothing_else(train):
    result = train("few", {"splits.shots": 3, "epochs": 2})
    assert result.labels == {"labelled": 9, "unlabelled": 24}
    rows = (result.folder / "splits.csv").read_text().splitlines()
    assert sum(row.startswith("train,") for row in rows) == 9


def test_pseudo_labels_join_in_and_a_stopped_run_ends_with_the_same_weights(train):
    settings = {"splits.shots": 3, "pseudo.kind": "confidence", "pseudo.threshold": 0.5, "pseudo.warmup_epochs": 2, "epochs": 4,
                "optimizer.lr": 0.01}
    whole = train("whole", settings)
    labels = whole.labels
    assert (labels["labelled"], labels["unlabelled"]) == (9, 24) and [entry["epoch"] for entry in labels["rounds"]] == [3, 4]
    assert 0 < labels["pseudo_labelled"] <= 24 and 0 <= labels["pseudo_accuracy"] <= 1
    # 3 batches in each of the first two epochs; the stop comes in the middle of the third
    again = stopped_and_gone_on(train, settings, 8)
    assert again.labels == labels
    assert_same_weights(whole, again)


def test_a_stream_of_views_is_never_kept_and_goes_on_where_it_stopped(train):
    whole = train("whole", STREAM)
    assert whole.plan["levels_used"] == {"original": 20} and whole.plan["gate"] == "loss"
    assert "cache" not in whole.results["phases"] or whole.results["phases"]["cache"] < 0.01
    again = stopped_and_gone_on(train, STREAM, 7)
    assert_same_weights(whole, again)


def test_a_streams_last_epochs_close_on_the_original(train):
    result = train("closed", dict(STREAM, **{"proxies.levels": ["48px"], "router.kind": "level:1", "router.closing": 1}))
    assert result.plan["levels_used"] == {"original": 0, "48px": 20}
    with open(str(result.folder / "metrics.csv")) as stream:
        assert [float(row["mean_level"]) for row in csv.DictReader(stream)] == [1, 0]


def test_an_iterable_of_the_users_own(train, data):
    paths = [(path, path.parent.name) for name in CLASSES for path in sorted((data / "images" / name).iterdir())[:8]]
    images = [(Image.open(str(path)), CLASSES.index(name)) if position % 2 else (path, name) for position, (path, name) in enumerate(paths)]
    result = train("own", {"stream.samples": 12, "epochs": 2}, images=iter(images))
    assert result.status == "success" and result.results["test_accuracy"] is not None
    with pytest.raises(UserError, match="images: the stream ended after 24 samples"):
        train("short", {"stream.samples": 12, "epochs": 3}, images=iter(paths))
    with pytest.raises(UserError, match=r"unfinished run of another configuration \(images given -> the data set's\)"):
        train("short", {"stream.samples": 12, "epochs": 3})
    with pytest.raises(UserError, match="how many of them make an epoch"):
        train("none", {}, images=iter(paths))


def test_a_stream_of_unchanging_views_is_refused(train):
    with pytest.raises(UserError, match="with loader.augment=none a data set shows the same views again"):
        train("same", {"stream.samples": 20})


def test_a_sensor_gives_the_joules_of_each_phase(train, tmp_path, monkeypatch):
    """A board that draws 4 W whatever it does: 4 J for each second, over a stop too."""
    sensor = tmp_path / "sys/bus/i2c/drivers/ina3221x/0-0041/iio:device1"
    sensor.mkdir(parents=True)
    (sensor / "rail_name_0").write_text("VDD_IN\n")
    (sensor / "in_power0_input").write_text("4000\n")
    monkeypatch.setattr(training, "Meter", functools.partial(Meter, root=tmp_path))
    whole = train("whole", {"epochs": 2})
    assert whole.power_sensor == ["VDD_IN"] and whole.heat is None
    results = whole.results
    assert results["energy_j"] == pytest.approx(4 * results["train_seconds"], rel=0.02)
    assert results["energy_phases"]["evaluation"] == pytest.approx(4 * results["evaluation_seconds"], rel=0.1)
    assert sum(results["energy_phases"].values()) == pytest.approx(4 * results["wall_seconds"], rel=0.02)
    for name, seconds in results["phases"].items():
        assert results["energy_phases"].get(name, 0) == pytest.approx(4 * seconds, abs=0.1 * 4 * results["wall_seconds"])
    again = stopped_and_gone_on(train, {"epochs": 2}, 10).results
    assert again["energy_j"] == pytest.approx(4 * again["train_seconds"], rel=0.2)


def test_without_a_sensor_the_record_says_so(train, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "Meter", functools.partial(Meter, root=tmp_path / "nothing"))
    result = train("few", {"splits.shots": 2, "epochs": 1})
    assert (result.power_sensor, result.heat) == (None, None)
    assert (result.results["energy_j"], result.results["energy_phases"], result.results["peak_device_mib"]) == (None, None, None)
    assert result.power_mode is None or isinstance(result.power_mode, str)
