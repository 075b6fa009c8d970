"""Unpack archives from elsewhere: nothing outside of the folder, no devices, no surprise sizes. Read Debian packages."""

import contextlib
import lzma
import os
import shutil
import subprocess
import tarfile
import tempfile
import zlib
from pathlib import Path, PurePosixPath

from piebridge.core.errors import UserError

MAX_UNPACKED_BYTES = 8 << 30

_AR_MAGIC = b"!<arch>\n"
_AR_HEADER_BYTES = 60
_COPY_BYTES = 1 << 20


def unpack_tar(tar, destination, place, source, max_bytes=MAX_UNPACKED_BYTES, on_member=None):
    """Write the regular files of an open tar file below `destination`, which must be a folder of ours; returns their number.

    Args:
        tar: a `tarfile.TarFile`, may be a stream.
        destination: folder (Path).
        place: function from a member's path (PurePosixPath) to its path below `destination`, or None to leave it out.
        source: what errors name as the archive.
        max_bytes: more than that in all is refused.
        on_member: called after each member, for a progress bar.

    Links are made last, so that nothing is written through one, and only those that end at a file below `destination`. Owners,
    modes, devices and pipes are ignored.

    Raises:
        UserError: a member that points outside, too many bytes, a damaged archive.
    """
    links, count, total = [], 0, 0
    with _damage_as_user_error(source):
        for member in tar:
            if on_member:
                on_member()
            path = _checked(member.name, source)
            target = place(path)
            if target is None or not (member.isfile() or member.issym() or member.islnk()):
                continue
            target = _checked(str(target), source)
            if member.issym():
                links.append((target, path.parent / member.linkname))
            elif member.islnk():
                links.append((target, PurePosixPath(member.linkname)))
            else:
                total += member.size
                if total > max_bytes:
                    raise UserError(f"{source}: unpacks to more than {max_bytes >> 20} MiB, which is refused")
                _write(tar.extractfile(member), destination / str(target))
                count += 1
    return count + sum(_make_link(destination, target, linked, place) for target, linked in links)


@contextlib.contextmanager
def open_deb(path):
    """The files of a Debian package as a tarfile stream. Plain Python for xz, gz and uncompressed; else `dpkg-deb` unpacks it.

    Raises:
        UserError: not a Debian package, damaged, or compressed in a way that needs dpkg-deb.
    """
    name, offset, size = _find_ar_member(path, "data.tar")
    with _damage_as_user_error(path):
        if name.endswith((".tar", ".xz", ".gz", ".bz2", ".lzma")):
            with open(str(path), "rb") as stream:
                with tarfile.open(fileobj=_Section(stream, offset, size), mode="r|*") as tar:
                    yield tar
        elif shutil.which("dpkg-deb"):
            with _dpkg_stream(path) as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
                yield tar
        else:
            raise UserError(f"{path}: {name} needs the program dpkg-deb; unpack it elsewhere and give source=FOLDER")


def deb_version(path):
    """The package's version, such as "1:0.18+dfsg-19", or None where it cannot be told."""
    try:
        _, offset, size = _find_ar_member(path, "control.tar")
        with open(str(path), "rb") as stream, tarfile.open(fileobj=_Section(stream, offset, size), mode="r|*") as tar:
            for member in tar:
                if PurePosixPath(member.name).name == "control" and member.isfile():
                    fields = tar.extractfile(member).read(1 << 16).decode("utf-8", "replace").splitlines()
                    return next((line.split(":", 1)[1].strip() for line in fields if line.startswith("Version:")), None)
    except (UserError, tarfile.TarError, lzma.LZMAError, EOFError, OSError):
        pass
    return None


class _Section:
    """A part of a file, readable as a stream."""

    def __init__(self, stream, offset, size):
        stream.seek(offset)
        self._stream = stream
        self._left = size

    def read(self, size=-1):
        wanted = self._left if size is None or size < 0 else min(size, self._left)
        data = self._stream.read(wanted)
        self._left -= len(data)
        if len(data) < wanted:  # tarfile takes the end of a stream for the end of the archive, and would say nothing
            raise EOFError(f"{self._left} bytes are missing")
        return data


def _find_ar_member(path, prefix):
    """(name, offset, size) of the first member of an `ar` archive (which a .deb is) whose name starts with `prefix`."""
    with open(str(path), "rb") as stream:
        if stream.read(len(_AR_MAGIC)) != _AR_MAGIC:
            raise UserError(f"{path}: not a Debian package")
        while True:
            header = stream.read(_AR_HEADER_BYTES)
            if len(header) < _AR_HEADER_BYTES or not header[48:58].strip().isdigit():
                raise UserError(f"{path}: not a whole Debian package (no {prefix} in it); download it again")
            name, size = header[:16].decode("ascii", "replace").strip().rstrip("/"), int(header[48:58])
            if name.startswith(prefix):
                return name, stream.tell(), size
            stream.seek(size + size % 2, os.SEEK_CUR)  # members start at even places


@contextlib.contextmanager
def _dpkg_stream(path):
    with tempfile.TemporaryFile() as messages:
        process = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(path)], stdout=subprocess.PIPE, stderr=messages)
        try:
            yield process.stdout
            while process.stdout.read(_COPY_BYTES):  # padding after the last member
                pass
            if process.wait() != 0:
                messages.seek(0)
                raise EOFError(messages.read().decode("utf-8", "replace").strip() or "dpkg-deb failed")
        finally:
            process.stdout.close()
            process.terminate()
            process.wait()


@contextlib.contextmanager
def _damage_as_user_error(source):
    try:
        yield
    except (tarfile.TarError, lzma.LZMAError, zlib.error, EOFError) as error:
        raise UserError(f"{source}: damaged or cut short ({error}); download it again") from error


def _checked(name, source):
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
        raise UserError(f"{source}: refused, as its member '{name}' points outside of the folder it is unpacked into")
    return path


def _write(stream, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(str(path), "wb") as output:
        shutil.copyfileobj(stream, output, _COPY_BYTES)


def _make_link(destination, target, linked, place):
    """Link `target` to the unpacked file that `linked` (a path in the archive) became. Returns 1, or 0 where there is none."""
    if linked.is_absolute():
        return 0
    linked = PurePosixPath(os.path.normpath(str(linked)))
    placed = None if ".." in linked.parts else place(linked)
    if placed is None:
        return 0
    path, end = destination / str(target), Path(os.path.abspath(str(destination / str(placed))))
    if not end.is_file() or path.exists():
        return 0
    path.parent.mkdir(parents=True, exist_ok=True)
    os.symlink(os.path.relpath(str(end), os.path.abspath(str(path.parent))), str(path))
    return 1
