"""Building the clip-art sets from a small package made here, unpacking what may be hostile, and the set in the checkout."""

import functools
import hashlib
import io
import json
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from PIL import Image

from piebridge.core.archives import open_deb, unpack_tar
from piebridge.core.data_archive import fetch_data
from piebridge.core.data_catalogue import prepare
from piebridge.core.errors import UserError
from piebridge.core.images import load_image
from piebridge.core.openclipart import build_openclipart
from piebridge.core.openclipart_package import CLASS_FOLDERS

CHECKOUT = Path(__file__).parents[2]
ROOT = "./usr/share/openclipart/png/"


def drawing(number, size=(40, 20)):
    """A PNG of a disc on a clear ground, its colour by number."""
    image = Image.new("RGBA", size, (0, 0, 0, 0))
    image.paste((number * 37 % 256, number * 91 % 256, number * 17 % 256, 255), (5, 5, size[0] - 5, size[1] - 5))
    output = io.BytesIO()
    image.save(output, "PNG")
    return output.getvalue()


def bomb():
    content = bytearray(drawing(1))
    content[16:24] = (30000).to_bytes(4, "big") * 2
    return bytes(content)


def add(tar, name, content=b"", kind=tarfile.REGTYPE, link=""):
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.size = kind, link, len(content)
    tar.addfile(member, io.BytesIO(content))


def package(path, compression="xz", extra=()):
    """A Debian package with three drawings in each class's folder, and what is in the real one: links, copies, a bomb."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:" + compression) as tar:
        for position, folder in enumerate(CLASS_FOLDERS.values()):
            for number in range(3):
                add(tar, "%s%s/d%d.png" % (ROOT, folder, number), drawing(3 * position + number, (40 + position, 20 + number)))
        add(tar, ROOT + "animals/mammals/again.png", drawing(0, (40, 20)))  # a copy within the class
        add(tar, ROOT + "recreation/party/cake.png", kind=tarfile.SYMTYPE, link="../../food/desserts/d1.png")
        add(tar, ROOT + "food/fruit/shared.png", drawing(200))  # a copy in two classes: the first of the table gets it
        add(tar, ROOT + "animals/birds/shared.png", drawing(200))
        add(tar, ROOT + "animals/bugs/huge.png", bomb())
        add(tar, ROOT + "animals/bugs/out.png", kind=tarfile.SYMTYPE, link="../../../../../../../../etc/hostname")
        add(tar, ROOT + "plants/flowers/deep/caf\u00e9 x.png", drawing(210))
        add(tar, ROOT + "unsorted/other.png", drawing(220))
        for arguments in extra:
            add(tar, *arguments)
    control = io.BytesIO()
    with tarfile.open(fileobj=control, mode="w:gz") as tar:
        add(tar, "./control", b"Package: openclipart-png\nVersion: 1:0.18-test\nArchitecture: all\nMaintainer: a\n"
            b"Description: drawings\n")
    with open(str(path), "wb") as deb:
        deb.write(b"!<arch>\n")
        for name, content in (("debian-binary", b"2.0\n"), ("control.tar.gz", control.getvalue()),
                              ("data.tar" + ("." + compression if compression else ""), data.getvalue())):
            deb.write(("%-16s%-12d%-6d%-6d%-8s%-10d`\n" % (name, 0, 0, 0, "100644", len(content))).encode())
            deb.write(content + b"\n" * (len(content) % 2))
    return path


def tree(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_build(tmp_path):
    deb = package(tmp_path / "x.deb")
    line = build_openclipart(tmp_path / "datasets" / "Openclipart", deb)
    folder = tmp_path / "datasets" / "Openclipart"
    assert line == "Openclipart: 86 images in 28 classes (3 copies of another image, 1 too large or unreadable, " \
                   "0 beyond the limit per class): %s" % folder
    assert {path.name for path in folder.iterdir()} == set(CLASS_FOLDERS) | {"manifest.json", "README.md"}
    assert sorted(path.name for path in (folder / "birds").iterdir()) == ["d0.jpg", "d1.jpg", "d2.jpg", "shared.jpg"]
    assert len(list((folder / "fruit").iterdir())) == len(list((folder / "party").iterdir())) == 3
    assert (folder / "flowers" / "caf_x.jpg").is_file()
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["package"]["deb_version"] == "1:0.18-test" and manifest["classes"]["birds"] == 4
    assert manifest["package"]["sha256"] == hashlib.sha256(deb.read_bytes()).hexdigest()
    for image in manifest["images"]:
        assert hashlib.sha256((folder / image["path"]).read_bytes()).hexdigest() == image["sha256"]
    assert {image["source"] for image in manifest["images"] if image["path"].startswith("flowers/caf")} == {
        "plants/flowers/deep/caf\u00e9 x.png"}
    readme = (folder / "README.md").read_text(encoding="utf-8")
    assert "public domain" in readme and "1:0.18-test" in readme and "| birds | 4 |" in readme
    image = load_image(folder / "birds" / "shared.jpg")
    assert image.size == (256, 256)
    assert min(image.getpixel((2, 2))) > 250 and min(image.getpixel((128, 10))) > 250  # ground and padding are white
    colour = (200 * 37 % 256, 200 * 91 % 256, 200 * 17 % 256)
    assert max(abs(a - b) for a, b in zip(image.getpixel((128, 128)), colour)) < 6
    assert [path.name for path in (tmp_path / "datasets").iterdir()] == ["Openclipart"]  # nothing is left beside it

    before = tree(folder)
    assert build_openclipart(folder, deb) == "Openclipart is there already: %s" % folder
    assert tree(folder) == before


def test_build_is_reproducible_from_a_folder_too(tmp_path):
    deb = package(tmp_path / "x.deb", "gz")
    with open_deb(deb) as tar:
        unpack_tar(tar, tmp_path / "unpacked", lambda path: path, deb)
    build_openclipart(tmp_path / "one", deb)
    build_openclipart(tmp_path / "two", tmp_path / "unpacked")
    assert {name: content for name, content in tree(tmp_path / "one").items() if name.endswith(".jpg")} == {
        name: content for name, content in tree(tmp_path / "two").items() if name.endswith(".jpg")}


def test_embedded_recipe(tmp_path):
    line = prepare("Clipart10", source=str(package(tmp_path / "x.deb")), output=str(tmp_path / "small"))
    assert line.startswith("Clipart10: 30 images in 10 classes")
    assert load_image(tmp_path / "small" / "arrows" / "d0.jpg").size == (160, 160)


def test_at_most_the_asked_number_per_class(tmp_path):
    many = [(ROOT + "shapes/arrows/more%d.png" % number, drawing(number, (60, 60 + number))) for number in range(70)]
    build_openclipart(tmp_path / "set", package(tmp_path / "x.deb", extra=many), "Clipart10")
    assert len(list((tmp_path / "set" / "arrows").iterdir())) == 60
    assert json.loads((tmp_path / "set" / "manifest.json").read_text())["left_out"]["beyond the limit per class"] == 13


@pytest.mark.parametrize("part", [0.01, 0.2, 0.6, 0.9, 0.99])
def test_cut_package_leaves_nothing(tmp_path, part):
    deb = package(tmp_path / "x.deb")
    deb.write_bytes(deb.read_bytes()[:int(deb.stat().st_size * part)])
    with pytest.raises(UserError, match="x.deb: (damaged or cut short|not a whole Debian package)"):
        build_openclipart(tmp_path / "out" / "set", deb)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="needs dpkg-deb, which unpacks what Python cannot")
def test_package_compressed_in_another_way(tmp_path):
    package(tmp_path / "x.deb", "gz")
    for step in (["dpkg-deb", "-R", "x.deb", "tree"], ["dpkg-deb", "-Zzstd", "-b", "tree", "zstd.deb"]):
        subprocess.check_call(step, cwd=str(tmp_path), stdout=subprocess.DEVNULL)
    with open_deb(tmp_path / "zstd.deb") as tar:
        assert unpack_tar(tar, tmp_path / "to", lambda path: path, "x.deb") == 91  # 90 files and the link to one
    (tmp_path / "cut.deb").write_bytes((tmp_path / "zstd.deb").read_bytes()[:-3000])
    with pytest.raises(UserError, match="cut.deb: damaged or cut short"), open_deb(tmp_path / "cut.deb") as tar:
        unpack_tar(tar, tmp_path / "again", lambda path: path, "x.deb")


def test_wrong_sources(tmp_path):
    (tmp_path / "text.deb").write_text("hello")
    (tmp_path / "folder").mkdir()
    for source, message in (("text.deb", "not a Debian package"), ("folder", "does not hold the drawings of openclipart-png"),
                            ("none.deb", "no such file or folder; give the .deb of openclipart-png")):
        with pytest.raises(UserError, match=message):
            build_openclipart(tmp_path / "set", tmp_path / source)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "photo.jpg").write_bytes(b"precious")
    with pytest.raises(UserError, match="mine: is there already, and was not built by this command; move it"):
        build_openclipart(tmp_path / "mine", package(tmp_path / "x.deb"))
    assert (tmp_path / "mine" / "photo.jpg").read_bytes() == b"precious"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_interrupted_build(tmp_path, how):
    many = [(ROOT + "shapes/arrows/more%d.png" % number, drawing(number, (700, 700 + number))) for number in range(30)]
    deb = package(tmp_path / "x.deb", extra=many)
    code = "import sys; from piebridge.core.openclipart import build_openclipart; build_openclipart(sys.argv[1], sys.argv[2])"
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # what is started in the background may be deaf to it
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "set"), str(deb)], cwd=str(CHECKOUT),
                               stderr=subprocess.DEVNULL, preexec_fn=heard)
    building = tmp_path / ".set.building"
    deadline = time.time() + 30
    while not list(building.glob("set/arrows")) and time.time() < deadline:
        time.sleep(0.005)
    process.send_signal(how)
    assert process.wait(30) != 0
    assert building.exists() == (how == signal.SIGKILL) and not (tmp_path / "set").exists()
    assert build_openclipart(tmp_path / "set", deb).startswith("Openclipart: 116 images in 28 classes")
    assert not building.exists()


def test_two_builds_at_once(tmp_path):
    import fcntl

    (tmp_path / ".set.building").mkdir()
    with open(str(tmp_path / ".set.building" / "lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="set: is being built by another process; wait for it"):
            build_openclipart(tmp_path / "set", package(tmp_path / "x.deb"))


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "/evil", "a\\..\\evil"])
def test_members_that_point_outside(tmp_path, name):
    with tarfile.open(str(tmp_path / "x.tar"), "w") as tar:
        add(tar, "good", b"1")
        add(tar, name, b"2")
    with tarfile.open(str(tmp_path / "x.tar")) as tar, pytest.raises(UserError, match="x.tar: refused, as its member '.*evil'"):
        unpack_tar(tar, tmp_path / "to" / "here", lambda path: path, tmp_path / "x.tar")
    assert not list(tmp_path.rglob("*evil*"))


def test_links_devices_and_sizes(tmp_path):
    with tarfile.open(str(tmp_path / "x.tar"), "w") as tar:
        add(tar, "link", kind=tarfile.SYMTYPE, link="..")
        add(tar, "link/through", b"kept below a folder of that name")
        add(tar, "absolute", kind=tarfile.SYMTYPE, link="/etc/hostname")
        add(tar, "hard", kind=tarfile.LNKTYPE, link="../../etc/hostname")
        add(tar, "fine", kind=tarfile.SYMTYPE, link="link/through")
        add(tar, "device", kind=tarfile.CHRTYPE)
        add(tar, "pipe", kind=tarfile.FIFOTYPE)
    with tarfile.open(str(tmp_path / "x.tar")) as tar:
        assert unpack_tar(tar, tmp_path / "to", lambda path: path, "x.tar") == 2
    assert sorted(tree(tmp_path / "to")) == ["fine", "link/through"] and not (tmp_path / "through").exists()
    with tarfile.open(str(tmp_path / "x.tar")) as tar, pytest.raises(UserError, match="unpacks to more than 0 MiB"):
        unpack_tar(tar, tmp_path / "again", lambda path: path, "x.tar", max_bytes=10)


def published(path, prefix="datasets/"):
    with tarfile.open(str(path), "w:gz") as tar:
        for name in ("Caltech101_MNN", "Dogsvscats_MNN"):
            add(tar, prefix + name + "/train.txt", b"a.png 0\nb.png 1\n")
            add(tar, prefix + name + "/test.txt", b"c.png 0\n")
            for image in ("train/a.png", "train/b.png", "test/c.png"):
                add(tar, "%s%s/%s" % (prefix, name, image), drawing(1))
    return path


@pytest.mark.parametrize("prefix", ["datasets/", "./datasets/", ""])
def test_published_archive(tmp_path, prefix):
    archive = published(tmp_path / "datasets.tar.gz", prefix)
    line = fetch_data("DogsVsCats", tmp_path / "sets" / "DogsVsCats", archive)
    assert line == "DogsVsCats: 5 files: %s" % (tmp_path / "sets" / "DogsVsCats")
    assert sorted(tree(tmp_path / "sets" / "DogsVsCats")) == ["test.txt", "test/c.png", "train.txt", "train/a.png", "train/b.png"]
    assert [path.name for path in (tmp_path / "sets").iterdir()] == ["DogsVsCats"]
    with pytest.raises(UserError, match="DogsVsCats: is there already; move it, or give output=FOLDER"):
        fetch_data("DogsVsCats", tmp_path / "sets" / "DogsVsCats", archive)
    with pytest.raises(UserError, match="holds no set DTD in the published layout"):
        fetch_data("DTD", tmp_path / "sets" / "DTD", archive)


def test_archives_that_are_none(tmp_path):
    (tmp_path / "page.tar.gz").write_text("<html>quota exceeded</html>")
    with pytest.raises(UserError, match="page.tar.gz: not a tar archive, or cut short"):
        fetch_data("DTD", tmp_path / "DTD", tmp_path / "page.tar.gz")
    whole = published(tmp_path / "cut.tar.gz").read_bytes()
    for length in (40, len(whole) // 2, len(whole) - 200):
        (tmp_path / "cut.tar.gz").write_bytes(whole[:length])
        with pytest.raises(UserError, match="cut.tar.gz: (damaged or|not a tar archive, or) cut short"):
            fetch_data("DogsVsCats", tmp_path / "DogsVsCats", tmp_path / "cut.tar.gz")
    with pytest.raises(UserError, match="source=.*none: no such file; give the published datasets.tar.gz"):
        fetch_data("DTD", tmp_path / "DTD", tmp_path / "none")
    assert not (tmp_path / "DTD").exists() and not (tmp_path / "DogsVsCats").exists()


def test_offline(tmp_path, monkeypatch):
    for key in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(key, "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.delenv("no_proxy", raising=False)
    with pytest.raises(UserError) as caught:
        fetch_data("DTD", tmp_path / "DTD", None)
    assert "DTD: the download" in str(caught.value) and "15iwkPHR1RutYDz4Yq4DGByYV78o51Z7e" in str(caught.value)
    assert str(caught.value).endswith("piebridge data DTD source=datasets.tar.gz") and "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_the_set_in_the_checkout():
    folder = CHECKOUT / "datasets" / "Clipart10"
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    files = {path.relative_to(folder).as_posix(): path for path in folder.glob("*/*.jpg")}
    assert len(files) == 600 and set(manifest["classes"].values()) == {60} and len(manifest["classes"]) == 10
    assert {image["path"]: image["sha256"] for image in manifest["images"]} == {
        name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
    assert len({image["sha256"] for image in manifest["images"]}) == 600
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= 3 * 2 ** 20
    assert {load_image(path).size for path in files.values()} == {(160, 160)}
    assert "public domain" in (folder / "README.md").read_text(encoding="utf-8")
