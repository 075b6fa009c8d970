"""Build the clip-art sets from Debian's `openclipart-png`: public-domain drawings, sorted into folders by their authors.

The package repeats pictures (as links, and as equal files in several folders), and holds some of up to 623 megapixels. Here a
picture appears once, in one class, and the huge ones are left out and counted. The choice depends on the files' contents alone.
"""

import contextlib
import hashlib
import io
import logging
import os
import re
import shutil
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from PIL import Image

from piebridge.core.errors import UserError
from piebridge.core.files import expand_user, sha256_of_file, write_json, write_text
from piebridge.core.images import BadImage, load_image, silence_pillow
from piebridge.core.openclipart_package import CLASS_FOLDERS, download_package, unpack_package
from piebridge.core.progress_bar import progress_bar

LOG = logging.getLogger(__name__)

# Ten of the classes with 60 distinct drawings or more; map symbols are left out, as many of them are arrows or road signs.
EMBEDDED_CLASSES = ("arrows", "clothing", "desserts", "flags", "fruit", "mammals", "music", "patterns", "roadsigns", "sports")

Recipe = namedtuple("Recipe", "classes per_class side quality")  # side in pixels, JPEG quality
RECIPES = {
    "Openclipart": Recipe(tuple(CLASS_FOLDERS), 120, 256, 90),
    "Clipart10": Recipe(EMBEDDED_CLASSES, 60, 160, 85),
}

# A 32 megapixel drawing takes about 250 MiB while it is decoded and laid onto white, and two are decoded at a time.
_MAX_MEGAPIXELS = 32
_THREADS = 2

Picture = namedtuple("Picture", "path relative sha256")


def build_openclipart(destination, source=None, name="Openclipart"):
    """Build the set `name` (a key of RECIPES) as the folder `destination`; returns a line that says what there is.

    The folder appears whole, under its name, when everything is done. An interrupted build leaves a `.NAME.building` beside it,
    which the next one takes up (a finished download is not repeated).

    Args:
        source: the package's .deb, or a folder that holds it unpacked; None downloads it with apt-get.

    Raises:
        UserError: no package to be had, a damaged one, or another folder in the way.
    """
    destination = Path(os.path.abspath(str(destination)))
    if (destination / "manifest.json").is_file():
        return f"{name} is there already: {destination}"
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise UserError(f"{destination}: is there already, and was not built by this command; move it, or give output=FOLDER")
    with _building_folder(destination) as building:
        origin = expand_user(source) if source is not None else download_package(building / "download")
        root, package = unpack_package(origin, building / "unpacked")
        manifest = _build(root, RECIPES[name], building / "set")
        manifest = dict({"format": "piebridge-dataset", "version": 1, "name": name, "package": package}, **manifest)
        write_json(building / "set" / "manifest.json", manifest)
        write_text(building / "set" / "README.md", _readme(manifest))
        if destination.exists():
            destination.rmdir()  # empty, as was checked
        os.replace(str(building / "set"), str(destination))
    left_out = ", ".join(f"{count} {reason}" for reason, count in manifest["left_out"].items())
    return f"{name}: {len(manifest['images'])} images in {len(manifest['classes'])} classes ({left_out}): {destination}"


@contextlib.contextmanager
def _building_folder(destination):
    """A folder of ours beside `destination`, held by one process; removed after a success, kept with its download otherwise."""
    import fcntl

    building = destination.parent / f".{destination.name}.building"
    building.mkdir(parents=True, exist_ok=True)
    with open(str(building / "lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{destination}: is being built by another process; wait for it") from None
        for part in ("unpacked", "set"):
            shutil.rmtree(str(building / part), ignore_errors=True)
        try:
            yield building
        except BaseException:
            has_download = (building / "download").is_dir() and any((building / "download").iterdir())
            for part in ("unpacked", "set") if has_download else ("",):
                shutil.rmtree(str(building / part), ignore_errors=True)
            raise
        shutil.rmtree(str(building), ignore_errors=True)


def _build(root, recipe, folder):
    """Render the chosen drawings into `folder`; returns the manifest's part about them."""
    silence_pillow()
    left_out = {"copies of another image": 0, "too large or unreadable": 0, "beyond the limit per class": 0}
    choice = _distinct_pictures(root, left_out)
    rendered, images = set(), []
    with ThreadPoolExecutor(_THREADS) as executor, \
            progress_bar(total=sum(min(len(choice[name]), recipe.per_class) for name in recipe.classes), desc="drawing images",
                         unit="image") as progress:
        for name in sorted(recipe.classes):
            (folder / name).mkdir(parents=True)
            waiting, count = list(choice[name]), 0
            while waiting and count < recipe.per_class:
                batch, waiting = waiting[:recipe.per_class - count], waiting[recipe.per_class - count:]
                for picture, jpeg in zip(batch, executor.map(lambda each: _render(each, recipe), batch)):
                    digest = hashlib.sha256(jpeg).hexdigest() if jpeg else None
                    if jpeg is None or digest in rendered:
                        left_out["too large or unreadable" if jpeg is None else "copies of another image"] += 1
                        continue
                    rendered.add(digest)
                    images.append({"path": _write(folder / name, picture, jpeg), "sha256": digest, "source": picture.relative})
                    count += 1
                    progress.update()
            left_out["beyond the limit per class"] += len(waiting)
    images.sort(key=lambda image: image["path"])
    counts = {name: sum(image["path"].startswith(name + "/") for image in images) for name in sorted(recipe.classes)}
    return {"settings": {"side": recipe.side, "quality": recipe.quality, "per_class": recipe.per_class,
                         "max_megapixels": _MAX_MEGAPIXELS},
            "classes": counts, "left_out": left_out, "images": images}


def _distinct_pictures(root, left_out):
    """{class: [Picture]} with each content once, in the order of its hash.

    A picture that several folders hold belongs to the class whose folder has the file itself and not a link to it, and if that
    does not decide, to the class named first in CLASS_FOLDERS.
    """
    best = {}  # content hash -> ((is a link, position of the class, relative path), class, Picture)
    inside = os.path.realpath(str(root)) + os.sep
    for position, (name, below) in enumerate(CLASS_FOLDERS.items()):
        for path in sorted((root / below).rglob("*.png")):
            if not path.is_file() or not os.path.realpath(str(path)).startswith(inside):
                continue
            picture = Picture(path, path.relative_to(root).as_posix(), sha256_of_file(path))
            candidate = ((path.is_symlink(), position, picture.relative), name, picture)
            left_out["copies of another image"] += picture.sha256 in best
            if picture.sha256 not in best or candidate[0] < best[picture.sha256][0]:
                best[picture.sha256] = candidate
    choice = {name: [] for name in CLASS_FOLDERS}
    for digest in sorted(best):
        choice[best[digest][1]].append(best[digest][2])
    return choice


def _render(picture, recipe):
    """JPEG bytes of a drawing on white, centred in a square; None when it cannot be read."""
    try:
        image = load_image(picture.path, _MAX_MEGAPIXELS)
    except BadImage as error:
        LOG.info("left out: %s (%s)", picture.relative, error.reason)
        return None
    scale = recipe.side / max(image.size)
    size = tuple(max(1, int(round(side * scale))) for side in image.size)
    square = Image.new("RGB", (recipe.side, recipe.side), (255, 255, 255))
    square.paste(image.resize(size, Image.LANCZOS), ((recipe.side - size[0]) // 2, (recipe.side - size[1]) // 2))
    output = io.BytesIO()
    square.save(output, "JPEG", quality=recipe.quality, optimize=True)
    return output.getvalue()


def _write(folder, picture, jpeg):
    """Write under a name that every system takes; returns the path below the set."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "_", Path(picture.relative).stem).strip("._") or "image"
    path = folder / (stem + ".jpg")
    if path.exists():
        path = folder / f"{stem}_{picture.sha256[:8]}.jpg"
    path.write_bytes(jpeg)
    return f"{folder.name}/{path.name}"


def _readme(manifest):
    settings, package = manifest["settings"], manifest["package"]
    rows = "\n".join(f"| {name} | {count} |" for name, count in manifest["classes"].items())
    left_out = "\n".join(f"* {count} {reason}" for reason, count in manifest["left_out"].items())
    return f"""# {manifest['name']}

{len(manifest['images'])} drawings in {len(manifest['classes'])} classes, {settings['side']} x {settings['side']} px JPEG.

**Origin**: the Open Clip Art Library, as packaged in Debian's `{package['name']}`, version {package['deb_version'] or 'unknown'}.
The classes are folders of that package, at most {settings['per_class']} drawings each, chosen by the hash of their content;
transparency is laid onto white, and the drawing is centred in a white square.

**Licence**: public domain. The authors dedicated their drawings to the public domain (Creative Commons Public Domain Dedication;
see `/usr/share/doc/{package['name']}/copyright` of the package). No permission is needed for any use.

Built by `piebridge data {manifest['name']}`. `manifest.json` lists each image with its hash and the drawing it was made from.

| class | images |
|---|---|
{rows}

Left out of the package's folders:

{left_out}
"""
