"""Classifying images with a run's tuned network, here an ImageNet network under another head and in a run folder of its own."""

import copy
import csv
import io

import pytest
import skimage.data
import torch
from PIL import Image
from torchvision.transforms import functional

from piebridge.cli import main
from piebridge.core.errors import UserError
from piebridge.core.network_file import save_network
from piebridge.core.networks import load_network
from piebridge.core.prediction import predict
from piebridge.core.run_folder import RunFolder

# places of a few ImageNet classes; the tuned head is the original's rows for them
CLASSES = {"tabby": 281, "tiger cat": 282, "Egyptian cat": 285, "espresso": 967, "coffee mug": 504}


@pytest.fixture(scope="module")
def original():
    return load_network("efficientnet_lite0").eval()


@pytest.fixture(scope="module")
def run(original, tmp_path_factory):
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    network = copy.deepcopy(original)
    rows = list(CLASSES.values())
    weight, bias = original.head.weight[rows].detach().clone(), original.head.bias[rows].detach().clone()
    network.replace_head(list(CLASSES))
    with torch.no_grad():
        network.head.weight.copy_(weight)
        network.head.bias.copy_(bias)
    save_network(network, folder.tuned_file)
    folder.write_record({"status": "success"})
    return folder.path


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    (folder / "more").mkdir()
    Image.fromarray(skimage.data.chelsea()).save(folder / "cat, asleep.png")
    Image.fromarray(skimage.data.coffee()).save(folder / "more" / "coffee.JPG", quality=95)
    (folder / "notes.txt").write_text("not an image, and not named like one")
    return folder


def test_a_cat_is_a_cat_and_coffee_is_espresso(run, photos, original):
    cat, coffee = predict(run, photos)
    assert cat.path == str(photos / "cat, asleep.png") and cat.class_name in ("tabby", "tiger cat", "Egyptian cat")
    assert coffee.path == str(photos / "more" / "coffee.JPG") and coffee.class_name in ("espresso", "coffee mug")
    # torchvision's transforms and the original network give the same probability over these classes
    size = int(224 / 0.875)
    image = functional.resize(Image.fromarray(skimage.data.chelsea()), size, functional.InterpolationMode.BICUBIC)
    pixels = functional.to_tensor(functional.center_crop(image, 224)) * 2 - 1
    with torch.no_grad():
        expected = original(pixels[None])[0, list(CLASSES.values())].softmax(0).max()
    assert cat.probability == pytest.approx(float(expected), abs=0.02)


def test_top_rows_come_most_probable_first(run, photos):
    rows = list(predict(run, [photos / "cat, asleep.png"], top=99))
    assert {row.class_name for row in rows} == set(CLASSES)
    assert sum(row.probability for row in rows) == pytest.approx(1.0)
    assert [row.probability for row in rows] == sorted((row.probability for row in rows), reverse=True)


def test_the_verb_writes_csv_and_names_what_it_left_out(run, photos, tmp_path, capsys):
    broken = tmp_path / "broken.jpg"
    broken.write_text("not a photo")
    assert main(["predict", str(run), str(broken), str(photos), "--top", "2"]) == 0
    output = capsys.readouterr()
    rows = list(csv.reader(io.StringIO(output.out)))
    assert rows[0] == ["path", "class", "probability"]
    assert [row[0] for row in rows[1:]] == [str(photos / "cat, asleep.png")] * 2 + [str(photos / "more" / "coffee.JPG")] * 2
    assert f"warning: {broken}: cannot be read as an image" in output.err
    assert "1 of 3 images could not be read and are left out" in output.err


@pytest.mark.parametrize("name, text, message", [
    ("missing.jpg", None, "missing.jpg: no such file or folder"),
    ("empty", "", "empty: no image files in this folder"),
    ("broken.png", "nonsense", "none of the 1 images could be read"),
])
def test_nothing_to_classify_is_an_error(run, tmp_path, name, text, message):
    path = tmp_path / name
    if text == "":
        path.mkdir()
    elif text:
        path.write_text(text)
    with pytest.raises(UserError, match=message):
        list(predict(run, [path]))
