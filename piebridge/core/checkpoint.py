"""Checkpoints: one atomic file of tensors and JSON, no pickle, written beside the training thread."""

import json
import threading

from piebridge.core.errors import UserError
from piebridge.core.safetensors_file import read_safetensors, write_safetensors

STATE_FILE = "state.safetensors"


def read_checkpoint(folder):
    """(tensors, facts) of the checkpoint in `folder`, or None where there is none."""
    path = folder / STATE_FILE
    if not path.exists():
        return None
    tensors, metadata = read_safetensors(path)
    try:
        return tensors, json.loads(metadata["facts"])
    except (KeyError, ValueError, RecursionError):
        raise UserError(f"{path}: is not a checkpoint of a run; add resume=none to start anew") from None


class CheckpointWriter:
    """Writes checkpoints in a thread of its own, the newest one winning when the disk is slower than the training.

    `save` copies the tensors (training changes them in place at once) and returns; `close` waits until the last one is on the disk.
    An error of the thread, such as a full disk, is raised by the next call.
    """

    def __init__(self, folder):
        self._folder = folder
        self._pending = None
        self._error = None
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def save(self, tensors, facts, then=lambda: None):
        """Write the checkpoint, then call `then` (in the thread): what a reader sees beside it is never newer than the checkpoint."""
        self._raise_error()
        # contiguous already here: a thread of its own that runs one parallel operation gets its own OpenMP workers, and with more
        # workers than cores every barrier of the training sleeps instead of spinning (measured: 1.7 times slower from then on)
        copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
        with self._changed:
            after = [then] if self._pending is None else self._pending[2] + [then]  # nobody's `then` is lost with its tensors
            self._pending = (copies, json.dumps(facts), after)
            self._changed.notify()

    def close(self):
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()
        self._raise_error()

    def _run(self):
        while True:
            with self._changed:
                while self._pending is None and not self._is_closed:
                    self._changed.wait()
                if self._pending is None:
                    return
                (tensors, facts, then), self._pending = self._pending, None
            try:
                write_safetensors(self._folder / STATE_FILE, tensors, {"facts": facts})
                for call in then:
                    call()
            except Exception as error:  # handed to the training thread, which is the one that can end the run
                self._error = error

    def _raise_error(self):
        if self._error is not None:
            error, self._error = self._error, None
            raise error
