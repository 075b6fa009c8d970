"""The run folder: what a run leaves behind, written atomically, by one process at a time."""

import contextlib
import os
import shutil
from pathlib import Path

from piebridge.core.errors import UserError
from piebridge.core.files import locked_folder, read_json, remove_parts, write_json, write_text


class RunFolder:
    """Paths and records of one run.

    `log.txt`: a line per evaluation, `accuracy seconds` (validation accuracy 0..1, train_seconds so far). `metrics.csv`: a row per
    epoch. `run.json`: the record. `trainable.safetensors`, `tuned.safetensors`, `splits.csv`, `checkpoint/`.
    """

    def __init__(self, path):
        self.path = Path(str(path))
        self.record_file = self.path / "run.json"
        self.trainable_file = self.path / "trainable.safetensors"
        self.tuned_file = self.path / "tuned.safetensors"
        self.splits_file = self.path / "splits.csv"
        self.log_file = self.path / "log.txt"
        self.metrics_file = self.path / "metrics.csv"
        self.checkpoint_folder = self.path / "checkpoint"
        self.cache_folder = self.checkpoint_folder / "features"

    @contextlib.contextmanager
    def locked(self):
        """Refuse a second process on the same folder."""
        with locked_folder(self.path, f"output={self.path}: cannot be used as a run folder: {{reason}}",
                           f"{self.path}: another process is training here; wait for it or choose output=DIR"):
            remove_parts(self.checkpoint_folder)
            yield self

    def record(self):
        """run.json as a dict, or None where there is none that can be read."""
        record = read_json(self.record_file)
        is_ours = isinstance(record, dict) and isinstance(record.get("config"), dict) and "status" in record
        return record if is_ours else None

    def refuse_finished(self):
        """A finished run is never replaced unasked."""
        if (self.record() or {}).get("status") == "success":
            raise UserError(f"{self.path}: holds a finished run; add overwrite=true to replace it, or output=DIR to keep it")

    def refuse_foreign(self):
        """Files with a run's names that no run.json accounts for are somebody's, and are not deleted."""
        found = [path.name for path in self._files() + [self.checkpoint_folder] if path.exists()]
        if found and self.record() is None:
            raise UserError(f"{self.path}: has {found[0]} but no run.json of a run, so it is not a run's folder; "
                            "choose another output=DIR")

    def refuse_inside(self, what, folder):
        """Results among the images would be taken for a class the next time."""
        mine, theirs = os.path.realpath(str(self.path)), os.path.realpath(str(folder))
        if (mine + os.sep).startswith(theirs + os.sep):
            raise UserError(f"output={self.path}: lies inside {what}; choose a folder outside")

    def refuse_own(self, network):
        """The network to start from must not be a file that starting removes."""
        if os.path.realpath(str(network)) in [os.path.realpath(str(path)) for path in self._files()]:
            raise UserError(f"network={network}: is a file of the run folder itself; copy it, or choose another output=DIR")

    def clear(self):
        """Remove what an earlier run wrote here; anything else in the folder is the user's and stays. The record goes last."""
        if self.checkpoint_folder.is_symlink():
            self.checkpoint_folder.unlink()
        elif self.checkpoint_folder.is_dir():
            shutil.rmtree(str(self.checkpoint_folder))
        for path in self._files() + [self.record_file]:
            if path.exists():
                path.unlink()

    def drop_cache(self):
        """The features of a finished run have done their work."""
        if self.cache_folder.is_dir():
            shutil.rmtree(str(self.cache_folder))

    def write_record(self, record):
        write_json(self.record_file, record)

    def write_metrics(self, rows):
        """rows: list of dicts with the same keys, one an epoch; an unknown value is an empty cell."""
        if not rows:
            return
        lines = [",".join(rows[0])] + [",".join("" if value is None else str(value) for value in row.values()) for row in rows]
        write_text(self.metrics_file, "\n".join(lines) + "\n")
        log = [f"{row['val_accuracy']:.4f} {row['train_seconds']:.2f}" for row in rows if row["val_accuracy"] is not None]
        write_text(self.log_file, "".join(line + "\n" for line in log))

    def _files(self):
        return [self.trainable_file, self.tuned_file, self.splits_file, self.log_file, self.metrics_file]
