"""Peak resident memory does not grow with the number of images. By hand: `pytest tests/slow/test_memory.py --log-cli-level=INFO` shows
the figures."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from piebridge.core.network_file import save_network
from piebridge.core.networks import load_network

LOG = logging.getLogger(__name__)
CHECKOUT = Path(__file__).resolve().parents[2]
FEW, MANY = 1000, 20000
CLASSES, SIDE = 10, 64
# of a run's whole memory: what allocators and the number of images decoded ahead leave to chance from run to run
TOLERANCE = 0.03


def generate(folder, count):
    """`count` small pictures to train on and a few to validate and test on, in ten classes; noise of a class's own colour."""
    random = np.random.RandomState(0)
    for part, number in (("train", count), ("val", 100), ("test", 100)):
        for label in range(CLASSES):
            (folder / part / f"class_{label}").mkdir(parents=True)
        for index in range(number):
            label = index % CLASSES
            pixels = random.randint(0, 128, (SIDE, SIDE, 3)) + 12 * label
            Image.fromarray(pixels.astype(np.uint8)).save(str(folder / part / f"class_{label}" / f"{index:05d}.jpg"), quality=50)


def peak_mib(tmp_path, network, count, *overrides):
    """Of a run of `ours` in a process of its own, on `count` generated images."""
    data, output = tmp_path / f"images_{count}", tmp_path / f"run_{count}"
    generate(data, count)
    environment = dict(os.environ, PIEBRIDGE_CACHE=str(tmp_path / "profile"), PYTHONPATH=str(CHECKOUT))
    subprocess.run([sys.executable, "-m", "piebridge", "train", "efficientnet_lite0/Clipart10/ours", f"data={data}", f"network={network}",
                    f"output={output}", "epochs=2", *overrides], env=environment, cwd=str(tmp_path), check=True)
    results = json.loads((output / "run.json").read_text())["results"]
    LOG.info("%d images: peak %.0f MiB, %.1f s, %s", count, results["peak_mib"], results["train_seconds"], results["phases"])
    return results["peak_mib"]


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    """EfficientNet-Lite0 with 64 px images: the features are as wide as ever, and come twelve times as fast."""
    network = load_network("efficientnet_lite0")
    network.description["input_size"] = [3, SIDE, SIDE]
    path = tmp_path_factory.mktemp("network") / "small.safetensors"
    save_network(network, path)
    return path


def test_the_peak_is_flat_with_a_feature_cache(tmp_path, network):
    few, many = (peak_mib(tmp_path, network, count, "proxies.levels=[]", "router.kind=none") for count in (FEW, MANY))
    assert many < (1 + TOLERANCE) * few


def test_the_peak_is_flat_with_fresh_views(tmp_path, network):
    few, many = (peak_mib(tmp_path, network, count, "loader.augment=crop_flip", "proxies.levels=[]", "router.kind=none")
                 for count in (FEW, MANY))
    assert many < (1 + TOLERANCE) * few
