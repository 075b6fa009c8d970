"""Layouts, splits, names and verification of data sets, on real files in temporary folders."""

import collections
import hashlib
import logging
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from piebridge.core.data_catalogue import CATALOGUE, ENVIRONMENT_KEY, describe, prepare
from piebridge.core.dataset import open_dataset, verify_images
from piebridge.core.errors import UserError

CLIPART = Path(__file__).parents[2] / "datasets" / "Clipart10"
SPLITS = SimpleNamespace(val_fraction=0.1, test_fraction=0.2, seed=0)
JPEG = sorted(CLIPART.glob("fruit/*.jpg"))[0].read_bytes()


def put(path, content=JPEG):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def fill(folder, counts, suffix=".jpg"):
    """Folders of class name: number of images."""
    for name, count in counts.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            put(folder / name / ("%03d%s" % (number, suffix)))
    return folder


def names(samples):
    return [os.path.basename(os.path.dirname(sample.path)) + "/" + os.path.basename(sample.path) for sample in samples]


def counts(dataset, part):
    found = collections.Counter(sample.label for sample in dataset.parts[part])
    return {dataset.classes[label]: found[label] for label in sorted(found)}


def test_embedded_set():
    dataset = open_dataset("Clipart10", SPLITS)
    assert dataset.name == "Clipart10" and dataset.classes == sorted(path.name for path in CLIPART.iterdir() if path.is_dir())
    for part, count in (("train", 42), ("val", 6), ("test", 12)):
        assert set(counts(dataset, part).values()) == {count}
    assert verify_images(dataset, 0).bad_files == []
    table = dataset.as_table()
    assert len(table) == 600 and len({row["path"] for row in table}) == 600
    assert table[0] == {"split": "train", "path": "arrows/" + os.path.basename(dataset.train[0].path), "label": 0,
                        "class_name": "arrows"}
    assert dataset.as_csv().splitlines()[0] == "split,path,label,class_name" and len(dataset.as_csv().splitlines()) == 601
    assert dataset.split == {"layout": "split", "seed": 0, "val_fraction": 0.1, "test_fraction": 0.2}


def test_split_is_by_path_and_seed_alone(tmp_path):
    one = fill(tmp_path / "one", {"a": 30, "b": 11, "c": 3})
    other = tmp_path / "elsewhere" / "other"
    for path in sorted(one.rglob("*.jpg"), reverse=True):  # another order of creation, in another place
        put(other / path.relative_to(one))
    first, second = open_dataset(one, SPLITS), open_dataset(other, SPLITS)
    assert first.as_table() == second.as_table() and first.fingerprint == second.fingerprint
    assert counts(first, "train") == {"a": 21, "b": 8, "c": 1}
    assert counts(first, "val") == {"a": 3, "b": 1, "c": 1}
    assert counts(first, "test") == {"a": 6, "b": 2, "c": 1}
    ranked = sorted(range(11), key=lambda number: hashlib.sha256(b"0/b/%03d.jpg" % number).hexdigest())
    assert sorted(names(s for s in first.test if s.label == 1)) == sorted("b/%03d.jpg" % number for number in ranked[:2])
    reseeded = open_dataset(one, SimpleNamespace(val_fraction=0.1, test_fraction=0.2, seed=1))
    assert reseeded.as_table() != first.as_table() and reseeded.fingerprint != first.fingerprint


def test_fingerprint_sees_sizes_labels_and_names(tmp_path):
    folder = fill(tmp_path / "set", {"a": 5, "b": 5})
    fingerprint = open_dataset(folder, SPLITS).fingerprint
    put(folder / "a" / "000.jpg", JPEG + b"\0")
    changed = open_dataset(folder, SPLITS).fingerprint
    (folder / "a").rename(folder / "c")
    assert len({fingerprint, changed, open_dataset(folder, SPLITS).fingerprint}) == 3


@pytest.mark.parametrize("val, test", [(0.5, 0.5), (-0.1, 0.2)])
def test_shares_must_leave_something(tmp_path, val, test):
    folder = fill(tmp_path / "set", {"a": 5, "b": 5})
    with pytest.raises(UserError, match="splits.test_fraction=%s and splits.val_fraction=%s: shares" % (test, val)):
        open_dataset(folder, SimpleNamespace(val_fraction=val, test_fraction=test, seed=0))


@pytest.mark.parametrize("val_name", ["val", "valid", "validation"])
def test_given_parts_are_kept(tmp_path, val_name):
    for part, count in (("train", 4), (val_name, 2), ("test", 3)):
        fill(tmp_path / part, {"cat": count, "dog": count})
    dataset = open_dataset(str(tmp_path), SPLITS)
    assert [len(dataset.parts[part]) for part in ("train", "val", "test")] == [8, 4, 6]
    assert dataset.split["layout"] == "given" and dataset.split["seed"] is None


def test_train_and_test_only(tmp_path):
    fill(tmp_path / "train", {"cat": 20, "dog": 10})
    fill(tmp_path / "test", {"cat": 3, "dog": 3})
    dataset = open_dataset(tmp_path, SPLITS)
    assert counts(dataset, "train") == {"cat": 18, "dog": 9} and counts(dataset, "val") == {"cat": 2, "dog": 1}
    assert len(dataset.test) == 6
    assert dataset.split == {"layout": "split", "seed": 0, "val_fraction": 0.1, "test_fraction": None}


def test_train_only_is_split_in_three(tmp_path, caplog):
    fill(tmp_path / "train", {"cat": 10, "dog": 10})
    (tmp_path / "extra").mkdir()
    dataset = open_dataset(tmp_path, SPLITS)
    assert [len(dataset.parts[part]) for part in ("train", "val", "test")] == [14, 2, 4]
    assert "only train/ is read, not extra" in caplog.text


def test_train_and_val_only_reports_no_test(tmp_path, caplog):
    fill(tmp_path / "train", {"cat": 4, "dog": 4})
    fill(tmp_path / "val", {"cat": 2})
    dataset = open_dataset(tmp_path, SPLITS)
    assert dataset.test == [] and "no test accuracy will be reported" in caplog.text
    assert "1 of 2 classes have no image in val: dog" in caplog.text


def test_a_class_may_be_called_train(tmp_path):
    fill(tmp_path, {"bus": 5, "train": 5})
    assert open_dataset(tmp_path, SPLITS).classes == ["bus", "train"]


def test_empty_class_is_named(tmp_path):
    fill(tmp_path / "flat", {"cat": 5, "dog": 5, "owl": 0})
    with pytest.raises(UserError, match="flat/owl: class 'owl' has no readable image to train on; add images"):
        open_dataset(tmp_path / "flat", SPLITS)
    fill(tmp_path / "parts" / "train", {"cat": 0, "dog": 5, "owl": 0})
    fill(tmp_path / "parts" / "val", {"cat": 5})
    with pytest.raises(UserError, match=r"parts/train/cat: class 'cat' \(and 1 more\) has no readable image"):
        open_dataset(tmp_path / "parts", SPLITS)


def test_class_that_training_lacks(tmp_path):
    fill(tmp_path / "train", {"cat": 5, "dog": 5})
    fill(tmp_path / "test", {"cat": 5, "emu": 5})
    with pytest.raises(UserError, match="test/emu: a class that train/ does not have"):
        open_dataset(tmp_path, SPLITS)


def test_folders_that_hold_no_classes(tmp_path):
    put(tmp_path / "loose" / "a.jpg")
    (tmp_path / "void").mkdir()
    with pytest.raises(UserError, match="loose: images lie directly in it; one folder of images per class"):
        open_dataset(tmp_path / "loose", SPLITS)
    with pytest.raises(UserError, match="void: it holds no folders"):
        open_dataset(tmp_path / "void", SPLITS)
    with pytest.raises(UserError, match="one: holds 1 class; a classifier needs two"):
        open_dataset(fill(tmp_path / "one", {"cat": 5}), SPLITS)


def test_odd_names_links_and_other_files(tmp_path, caplog):
    folder = fill(tmp_path / "my photos", {"caf\u00e9 au lait": 4, "\u732b": 4})
    put(folder / "\u732b" / "deep er" / "x y.PNG")
    for ignored in (".hidden.jpg", "notes.txt", "new.HEIC", "old.heic", "Thumbs.db", "__MACOSX/._1.jpg", ".git/a.jpg"):
        put(folder / "\u732b" / ignored)
    put(folder / ".cache" / "a.jpg")
    os.symlink(str(folder / "\u732b"), str(folder / "\u732b" / "deep er" / "loop"))
    os.symlink("self.jpg", str(folder / "caf\u00e9 au lait" / "self.jpg"))
    os.mkfifo(str(folder / "\u732b" / "pipe.jpg"))
    dataset = open_dataset(folder, SPLITS)
    assert dataset.classes == ["caf\u00e9 au lait", "\u732b"]
    assert "4 files are not taken for images, by their extension: 2 .heic, 1 .jpg, 1 .txt" in caplog.text  # the pipe is one
    found = [row["path"] for row in dataset.as_table() if row["label"] == 1]
    assert sorted(found) == ["\u732b/%03d.jpg" % number for number in range(4)] + ["\u732b/deep er/x y.PNG"]
    (path, reason), = verify_images(dataset).bad_files
    assert path.endswith("/self.jpg") and "symbolic links" in reason


def test_names_that_are_not_unicode(tmp_path):
    folder = fill(tmp_path / "set", {"a": 3, "b": 3})
    put(Path(os.fsdecode(os.fsencode(str(folder)) + b"/a/\xff.jpg")), b"text")
    dataset = verify_images(open_dataset(folder, SPLITS))
    assert dataset.bad_files[0][0].endswith("/a/\\xff.jpg")
    dataset.as_csv().encode("utf-8")


def lists(folder, train, test):
    for part, lines in (("train", train), ("test", test)):
        (folder / part).mkdir(parents=True, exist_ok=True)
        (folder / (part + ".txt")).write_text("\n".join(lines) + "\n", encoding="utf-8")
        for line in lines:
            put(folder / part / line.rsplit(None, 1)[0])
    return folder


def test_published_lists(tmp_path):
    train = ["img%d.jpg %d" % (number, number % 11) for number in range(110)]
    folder = lists(tmp_path / "Caltech101_MNN", train, ["img%d.jpg %d" % (number, number) for number in range(11)])
    dataset = open_dataset(folder, SPLITS)
    assert dataset.classes == [str(label) for label in range(11)]  # 10 after 9
    assert [len(dataset.parts[part]) for part in ("train", "val", "test")] == [99, 11, 11]
    assert dataset.test[10] == (str(folder / "test" / "img10.jpg"), 10)
    assert set(counts(dataset, "val").values()) == {1}
    (folder / "classes.txt").write_text("\n".join("class %d" % label for label in range(11)))
    assert open_dataset(folder, SPLITS).classes[10] == "class 10"
    (folder / "classes.txt").write_text("only\ntwo\n")
    with pytest.raises(UserError, match="names 2 classes, and train.txt has 11 labels"):
        open_dataset(folder, SPLITS)


def test_lists_with_names_and_folders(tmp_path):
    folder = lists(tmp_path, ["sub/an image %d.jpg %s" % (n, "dog" if n % 2 else "cat") for n in range(20)], ["x.jpg cat"])
    dataset = open_dataset(folder, SPLITS)
    assert dataset.classes == ["cat", "dog"] and verify_images(dataset).bad_files == []
    (folder / "train.txt").write_text("".join("train/sub/an image %d.jpg %d\n" % (n, n % 2) for n in range(20)))
    (folder / "test.txt").write_text("x.jpg 0\n")
    assert verify_images(open_dataset(folder, SPLITS)).bad_files == []


@pytest.mark.parametrize("train, test, message", [
    (["a.jpg 0", "lonely"], ["a.jpg 0"], "train.txt line 2: 'lonely' is not `name label`"),
    (["a.jpg 0", "b.jpg 1"], ["a.jpg 0", "c.jpg 7"], "test.txt line 2: label 7 has no image in train.txt"),
    (["a.jpg 0", "../../x.jpg 1"], ["a.jpg 0"], "train.txt line 2: '../../x.jpg' is outside of .*train"),
    (["a.jpg 0", "/etc/x.jpg 1"], ["a.jpg 0"], "train.txt line 2: '/etc/x.jpg' is outside of .*train"),
    (["a.jpg 0", "b.jpg 1", "a.jpg 1"], ["a.jpg 0"], "train.txt line 3: 'a.jpg' has label 1 here and 0 above"),
    ([], ["a.jpg 0"], "train.txt: lists no image"),
])
def test_wrong_lists(tmp_path, train, test, message):
    (tmp_path / "train.txt").write_text("\n".join(train))
    (tmp_path / "test.txt").write_text("\n".join(test))
    with pytest.raises(UserError, match=message):
        open_dataset(tmp_path, SPLITS)


def spoiled(folder):
    """A set with four unreadable files of different kinds."""
    fill(folder, {"a": 20, "b": 20})
    put(folder / "a" / "text.jpg", b"not an image\n")
    put(folder / "a" / "zero.jpg", b"")
    put(folder / "b" / "cut.jpg", JPEG[:len(JPEG) // 2])
    os.symlink("nowhere.jpg", str(folder / "b" / "dangling.jpg"))
    return folder


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_files_are_reported_and_skipped(tmp_path, caplog, workers):
    dataset = open_dataset(spoiled(tmp_path), SPLITS)
    checked = verify_images(dataset, max_bad_files=4, workers=workers)
    assert {os.path.basename(path): reason.split(":")[0] for path, reason in checked.bad_files} == {
        "text.jpg": "not an image, or of a kind that is not read here", "zero.jpg": "the file is empty",
        "cut.jpg": "the file is cut short", "dangling.jpg": "no such file"}
    for path, _ in checked.bad_files:
        assert path in caplog.text
    assert len(checked.as_table()) == 40 and checked.fingerprint != dataset.fingerprint
    assert "4 of 44 images are skipped" in caplog.text


def test_too_many_bad_files(tmp_path):
    dataset = open_dataset(spoiled(tmp_path), SPLITS)
    message = r"4 of 44 images cannot be read, more than loader.max_bad_files=3; the first is .*\.jpg \("
    with pytest.raises(UserError, match=message):
        verify_images(dataset, max_bad_files=3)


def test_a_class_of_bad_files_only(tmp_path):
    fill(tmp_path, {"a": 5, "b": 5})
    put(tmp_path / "c" / "text.jpg", b"text")
    with pytest.raises(UserError, match="/c: class 'c' has no readable image to train on"):
        verify_images(open_dataset(tmp_path, SPLITS))


def test_large_images_count_as_bad(tmp_path):
    fill(tmp_path, {"a": 5, "b": 5})
    Image.new("RGB", (400, 300)).save(str(tmp_path / "a" / "large.png"))
    checked = verify_images(open_dataset(tmp_path, SPLITS), max_megapixels=0.1)
    assert [os.path.basename(path) for path, _ in checked.bad_files] == ["large.png"]


def test_without():
    dataset = open_dataset("Clipart10", SPLITS)
    smaller = dataset.without([dataset.train[0], dataset.test[3]])
    assert [len(smaller.parts[part]) for part in ("train", "val", "test")] == [419, 60, 119]


def test_names_are_looked_up(tmp_path, monkeypatch):
    monkeypatch.chdir(str(tmp_path))
    monkeypatch.setenv(ENVIRONMENT_KEY, str(tmp_path / "store"))
    fill(tmp_path / "store" / "Dogsvscats_MNN", {"cat": 5, "dog": 5})
    fill(tmp_path / "datasets" / "mine", {"cat": 5, "dog": 5})
    fill(tmp_path / "here", {"cat": 5, "dog": 5})
    for name, folder in (("DogsVsCats", "store/Dogsvscats_MNN"), ("dogsvscats", "store/Dogsvscats_MNN"),
                         ("mine", "datasets/mine"), ("here", "here"), ("./here", "here"), (str(tmp_path / "here"), "here")):
        assert open_dataset(name, SPLITS).folder == str(tmp_path / folder)
    assert open_dataset("dogsvscats", SPLITS).name == "DogsVsCats" and open_dataset("./here", SPLITS).name == "here"
    assert open_dataset("clipart10", SPLITS).folder == str(CLIPART)  # the checkout's own


def test_unknown_names(tmp_path, monkeypatch):
    monkeypatch.chdir(str(tmp_path))
    monkeypatch.delenv(ENVIRONMENT_KEY, raising=False)
    message = (r"data=Openclpart: no such data set or folder \(did you mean 'Openclipart'\?\); known sets: Clipart10, "
               r"Openclipart, Caltech101, Caltech256, DogsVsCats, DTD; looked in .*datasets")
    with pytest.raises(UserError, match=message):
        open_dataset("Openclpart", SPLITS)
    with pytest.raises(UserError, match="data=photos/cats: no such folder"):
        open_dataset("photos/cats", SPLITS)
    put(tmp_path / "a.jpg")
    with pytest.raises(UserError, match="data=./a.jpg: is a file; give the folder of images"):
        open_dataset("./a.jpg", SPLITS)
    if not (CLIPART.parent / "DTD").exists():
        with pytest.raises(UserError, match="data=DTD: this set is not here yet .*; get it with: piebridge data DTD"):
            open_dataset("DTD", SPLITS)


def test_catalogue():
    text = "\n".join(describe())
    assert all(name in text for name in CATALOGUE) and "here: %s" % CLIPART in text
    assert prepare("clipart10") == "Clipart10 is there already: %s" % CLIPART
    with pytest.raises(UserError, match=r"Caltech100: no such data set \(did you mean 'Caltech101'\?\); known: Clipart10"):
        prepare("Caltech100")


def test_logged_once(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    open_dataset(fill(tmp_path / "set", {"a": 10, "b": 10}), SPLITS)
    assert "set: 2 classes, 14 images to train on, 2 to validate, 4 to test" in caplog.text
    shutil.rmtree(str(tmp_path / "set"))
