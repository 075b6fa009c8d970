"""Get Debian's `openclipart-png` and unpack its drawings."""

import logging
import shutil
import subprocess

from piebridge.core.archives import deb_version, open_deb, unpack_tar
from piebridge.core.errors import UserError
from piebridge.core.files import sha256_of_file
from piebridge.core.progress_bar import progress_bar

LOG = logging.getLogger(__name__)

PACKAGE = "openclipart-png"
# class name: folder below share/openclipart/png
CLASS_FOLDERS = {
    "mammals": "animals/mammals", "birds": "animals/birds", "bugs": "animals/bugs", "flags": "signs_and_symbols/flags",
    "fruit": "food/fruit", "desserts": "food/desserts", "beverages": "food/beverages", "vehicles": "transportation/vehicles",
    "roadsigns": "transportation/roadsigns", "boating": "transportation/boating", "arrows": "shapes/arrows",
    "clothing": "people/clothing", "stickmen": "people/stickmen", "smilies": "people/smilies", "sports": "recreation/sports",
    "music": "recreation/music", "party": "recreation/party", "holiday": "recreation/holiday", "homes": "buildings/homes",
    "hardware": "computer/hardware", "map_symbols": "signs_and_symbols/map_symbols", "led": "signs_and_symbols/led",
    "gradients": "special/gradients", "patterns": "special/patterns", "weapons": "tools/weapons", "flowers": "plants/flowers",
    "weather": "signs_and_symbols/weather", "meats_eggs": "food/meats_and_eggs",
}

_PICTURES_ROOT = ("share", "openclipart", "png")


def download_package(folder):
    """The package by `apt-get download`, which checks its signature and hash. Needs no root."""
    by_hand = f"get the Debian package {PACKAGE} on another machine and give source=FILE.deb"
    if not shutil.which("apt-get"):
        raise UserError(f"{PACKAGE}: there is no apt-get here to download it with; {by_hand}")
    folder.mkdir(parents=True, exist_ok=True)
    LOG.info("downloading %s (130 MB)", PACKAGE)
    command = ["apt-get", "download", "-o", "APT::Sandbox::User=root", PACKAGE]
    with subprocess.Popen(command, cwd=str(folder), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          universal_newlines=True) as process, \
            progress_bar(total=131, desc=f"downloading {PACKAGE}", unit="MB") as progress:
        try:
            messages = _wait(process, folder, progress)
        except BaseException:
            process.terminate()
            raise
    packages = sorted(folder.glob(f"{PACKAGE}_*.deb"))
    if process.returncode != 0 or not packages:
        errors = [line for line in messages.splitlines() if line.startswith("E:")] or messages.splitlines()[-1:]
        raise UserError(f"{PACKAGE}: apt-get download failed ({'; '.join(errors)}); run `apt-get update` first, or {by_hand}")
    return packages[-1]


def _wait(process, folder, progress):
    while True:
        try:
            return process.communicate(timeout=0.5)[0]
        except subprocess.TimeoutExpired:
            megabytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6
            progress.update(min(megabytes, progress.total) - progress.n)


def unpack_package(origin, folder):
    """(folder of the drawings, record of the package) of a .deb or a folder."""
    if origin.is_dir():
        package = {"name": PACKAGE, "deb_version": None, "sha256": None}
        return _pictures_root(origin), package
    if not origin.is_file():
        raise UserError(f"source={origin}: no such file or folder; give the .deb of {PACKAGE}, or a folder with it unpacked")
    package = {"name": PACKAGE, "deb_version": deb_version(origin), "sha256": sha256_of_file(origin)}
    with open_deb(origin) as tar, progress_bar(desc=f"unpacking {PACKAGE}", unit="file") as progress:
        unpack_tar(tar, folder, _place, origin, on_member=progress.update)
    return _pictures_root(folder), package


def _place(path):
    """Only the drawings are unpacked."""
    return path if path.suffix == ".png" and path.parts[1:4] == _PICTURES_ROOT else None


def _pictures_root(folder):
    """The folder that has the classes' folders below it: `folder` itself, or .../share/openclipart/png within."""
    for candidate in (folder, folder.joinpath(*_PICTURES_ROOT), folder.joinpath("usr", *_PICTURES_ROOT), folder / "png"):
        if all((candidate / below).is_dir() for below in CLASS_FOLDERS.values()):
            return candidate
    raise UserError(f"{folder}: does not hold the drawings of {PACKAGE} (no {CLASS_FOLDERS['mammals']} in it or in its "
                    f"{'/'.join(_PICTURES_ROOT)})")
