"""The run folder: what a run leaves behind, written atomically, by one process at a time."""

import contextlib
import fcntl
import json
import os
import shutil
from pathlib import Path

from piebridge.core.errors import UserError
from piebridge.core.files import write_json, write_text

METRICS = "metrics.csv"


class RunFolder:
    """Paths and records of one run.

    `log.txt`: a line per evaluation, `accuracy seconds` (validation accuracy 0..1, train_seconds so far). `metrics.csv`: a row per
    epoch. `run.json`: the record. `trainable.safetensors`, `tuned.safetensors`, `checkpoint/`.
    """

    def __init__(self, path):
        self.path = Path(str(path))
        self.record_file = self.path / "run.json"
        self.trainable_file = self.path / "trainable.safetensors"
        self.tuned_file = self.path / "tuned.safetensors"
        self.splits_file = self.path / "splits.csv"
        self.checkpoint_folder = self.path / "checkpoint"
        self.cache_folder = self.checkpoint_folder / "features"

    @contextlib.contextmanager
    def locked(self):
        """Refuse a second process on the same folder. The lock is on the folder itself, so a killed process leaves none behind."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            handle = os.open(str(self.path), os.O_RDONLY)
        except OSError as error:
            raise UserError(f"output={self.path}: cannot be used as a run folder: {error.strerror}") from None
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UserError(f"{self.path}: another process is training here; wait for it or choose output=DIR") from None
            yield self
        finally:
            os.close(handle)

    def record(self):
        """run.json as a dict, or None where there is none (or none that can be read)."""
        try:
            return json.loads(self.record_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def is_finished(self):
        record = self.record()
        return bool(record) and record.get("status") == "success"

    def clear(self):
        """Remove what an earlier run wrote here; anything else in the folder is the user's and stays."""
        for file in (self.record_file, self.trainable_file, self.tuned_file, self.splits_file,
                     self.path / "log.txt", self.path / METRICS):
            if file.exists():
                file.unlink()
        if self.checkpoint_folder.is_dir():
            shutil.rmtree(str(self.checkpoint_folder))

    def drop_cache(self):
        """The features of a finished run have done their work."""
        if self.cache_folder.is_dir():
            shutil.rmtree(str(self.cache_folder))

    def write_record(self, record):
        write_json(self.record_file, record)

    def write_metrics(self, rows):
        """rows: list of dicts with the same keys, one an epoch."""
        if not rows:
            return
        lines = [",".join(rows[0])] + [",".join(str(value) for value in row.values()) for row in rows]
        write_text(self.path / METRICS, "\n".join(lines) + "\n")
        log = [f"{row['val_accuracy']:.4f} {row['train_seconds']:.2f}" for row in rows if row["val_accuracy"] is not None]
        write_text(self.path / "log.txt", "\n".join(log) + "\n")
