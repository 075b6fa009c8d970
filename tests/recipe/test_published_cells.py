"""The 36 configurations of the published experiments, as they are shipped, on stand-ins for what is not here.

Data: a few real images in the published list layout (`NAME_MNN/train.txt`, `test.txt`, images in `train/`, `test/`), found by the
data set's name. Networks: the architectures at their input size, with random weights. All 36 runs take narrow ones (`network=FILE`);
one run each takes the full-sized network from where its name makes it be looked for. One epoch instead of twelve, so accuracies
mean nothing here.
"""

import json
import shutil
from pathlib import Path

import pytest

from piebridge.cli import main
from piebridge.core.network_file import save_network
from piebridge.core.networks import ARCHITECTURES, IMAGENET

pytestmark = pytest.mark.usefixtures("one_thread", "logger_as_before")
ROOT = Path(__file__).resolve().parent.parent.parent
PUBLISHED = ROOT / "res" / "expected" / "jetson_tx2" / "paper.csv"
CLASSES = {"Caltech101": ("flags", "fruit", "music"), "Caltech256": ("arrows", "fruit"), "DogsVsCats": ("desserts", "mammals"),
           "DTD": ("flags", "arrows")}
NETWORKS = {"resnet": ("resnet50", "head"), "mobilenet": ("mobilenet_v3_large", "last_k"), "vit": ("vit_b_16", "adapter")}
RUNS = [f"{network}/{data}/{method}" for network in NETWORKS for data in CLASSES for method in ("ours", "PET", "FTAll")]


def stand_in(root, data, train, test):
    """`root`/`data`_MNN with so many images of each class, of the embedded set's, in the list layout with numbers as labels."""
    for part, first, count in (("train", 0, train), ("test", train, test)):
        folder = root / f"{data}_MNN" / part
        folder.mkdir(parents=True)
        lines = []
        for label, source in enumerate(CLASSES[data]):
            for image in sorted((ROOT / "datasets" / "Clipart10" / source).glob("*.jpg"))[first:first + count]:
                shutil.copy(str(image), str(folder / f"{label}_{image.name}"))
                lines.append(f"{label}_{image.name} {label}\n")
        (root / f"{data}_MNN" / f"{part}.txt").write_text("".join(lines))


def narrow(name):
    """The architecture with the kinds and the number of blocks that matter here, but few channels."""
    from torchvision import models

    if name == "resnet50":
        return models.ResNet(models.resnet.Bottleneck, [1, 2, 1, 1], width_per_group=16)
    if name == "mobilenet_v3_large":
        return models.mobilenet_v3_large(width_mult=0.25)
    return models.VisionTransformer(image_size=224, patch_size=16, num_layers=12, num_heads=2, hidden_dim=32, mlp_dim=64)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with datasets/, narrow network files, and no configurations of its own."""
    import torch

    from piebridge.core.capture import capture

    folder = tmp_path_factory.mktemp("cells")
    for data in CLASSES:
        stand_in(folder / "datasets", data, train=7, test=2)
    torch.manual_seed(0)
    for name, _ in NETWORKS.values():
        network = capture(narrow(name).eval(), name, [3, 224, 224], *IMAGENET)
        save_network(network, folder / f"{name}.safetensors")
    return folder


@pytest.fixture(autouse=True)
def here(place, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setenv("PIEBRIDGE_CACHE", str(place / "profile"))
    monkeypatch.delenv("PIEBRIDGE_DATASETS", raising=False)


def train(run, output, *words):
    """The record of a finished run of one epoch."""
    assert main(["-q", "train", run, "epochs=1", f"output={output}"] + list(words)) == 0
    return json.loads((Path(output) / "run.json").read_text())


@pytest.mark.parametrize("run", RUNS)
def test_each_configuration_trains_an_epoch(place, run, capsys):
    network, data, method = run.split("/")
    name, pet = NETWORKS[network]
    # on so few images no proxy pays; in one cell per network all are made, so that each network is known to allow them or to say why not
    proxies = ["proxies.use=all"] if (data, method) == ("DTD", "ours") else []
    record = train(run, place / "runs" / run, f"network={place / name}.safetensors", *proxies)
    assert (record["status"], record["network"], record["dataset"], record["method"]) == ("success", name, data, method)
    assert record["pet"] == ("all" if method == "FTAll" else pet)
    loader = record["config"]["loader"]
    assert (loader["batch_size"], loader["augment"]) == (4, "crop_flip")
    assert 0 <= record["results"]["test_accuracy"] <= 1 and record["results"]["train_seconds"] > 0
    if proxies:
        assert record["plan"]["proxies"]["reason"]
    capsys.readouterr()
    assert main(["compare", str(place / "runs" / run), str(PUBLISHED)]) == 0
    assert capsys.readouterr().out.count(": epochs 1, not 12") == 1, "the published row is found, and knows that this run is another"


@pytest.mark.parametrize("network", NETWORKS)
def test_the_full_sized_network_is_found_by_its_name(place, network, tmp_path, monkeypatch):
    """Weights are looked for in proxynetworks/NAME.pth of the current folder first; nothing is fetched."""
    import torch

    name, pet = NETWORKS[network]
    monkeypatch.chdir(tmp_path)
    stand_in(tmp_path / "datasets", "DTD", train=3, test=1)
    (tmp_path / "proxynetworks").mkdir()
    torch.manual_seed(0)
    torch.save(ARCHITECTURES[name].build().state_dict(), str(tmp_path / "proxynetworks" / f"{name}.pth"))
    record = train(f"{network}/DTD/PET", tmp_path / "run")
    assert (record["status"], record["network"], record["pet"], record["dataset"]) == ("success", name, pet, "DTD")
    shutil.rmtree(str(tmp_path))  # hundreds of MB
