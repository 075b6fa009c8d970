"""Compiled programs kept on the disk, found again by what they were compiled from."""

import hashlib
import logging
import os
import platform
from pathlib import Path

import torch

from piebridge.core.errors import UserError
from piebridge.core.files import expand_user, user_cache_folder
from piebridge.engine.program_file import content_key, read_program, write_program

LOG = logging.getLogger(__name__)
MOST_BYTES = 4 << 30
SUFFIX = ".safetensors"


class ProgramCache:
    """folder: where the program files lie; None for the user's cache folder. Entries that have not been used for longest go first, where
    all together would be larger than `most_bytes`.
    """

    def __init__(self, folder=None, most_bytes=MOST_BYTES):
        self.folder = expand_user(folder) if folder else user_cache_folder() / "programs"
        self._most_bytes = most_bytes

    def key(self, steps, tensors, facts):
        """Hash of the captured graphs, the frozen tensors, `facts`, the versions of what compiles, and the machine it is compiled for."""
        machine = {"processors": os.cpu_count(), "threads": torch.get_num_threads(), "kind": platform.machine()}
        return content_key(steps, tensors, dict(facts, torch=torch.__version__, engine=_engine_hash(), machine=machine))

    def find(self, key):
        """(steps, tensors, facts) of an entry, or None; an entry that cannot be read goes."""
        path = self._path(key)
        if not path.is_file():
            return None
        try:
            steps, tensors, facts, _ = read_program(path)
            os.utime(str(path))
        except UserError as problem:
            LOG.warning("a cached program cannot be used, and is compiled again: %s", problem)
            path.unlink()
            return None
        return steps, tensors, facts

    def keep(self, key, steps, tensors, facts):
        """Write an entry; a cache that cannot be written is no reason to fail."""
        try:
            write_program(self._path(key), steps, tensors, facts)
            self._evict()
        except (OSError, UserError) as problem:
            LOG.warning("the compiled program is not cached: %s", problem)

    def _path(self, key):
        return self.folder / f"{key}{SUFFIX}"

    def _evict(self):
        entries = sorted(self.folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime, reverse=True)
        total = 0
        for number, path in enumerate(entries):
            total += path.stat().st_size
            if number and total > self._most_bytes:
                path.unlink()


def _engine_hash():
    """Of the engine's own source: whatever changes there may change what is compiled."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
