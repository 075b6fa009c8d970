"""The candidates tried, kept in the forge's work folder, so that none is tried twice and an interrupted forge goes on."""

import dataclasses
import logging
from pathlib import Path

import torch

from piebridge.core.files import read_json, write_json
from piebridge.core.safetensors_file import read_safetensors, write_safetensors
from piebridge.forge.pareto import Point, deviation_of_median, pareto_front
from piebridge.forge.set_facts import ORIGINAL

LOG = logging.getLogger(__name__)
SUFFIX = ".features.safetensors"


class Trials:
    """`trials.json` has the figures of each candidate, and a file of its own the features of each that can still be chosen.

    Whoever is dominated stays so, whatever else is tried, and is never chosen: its features are deleted, and the folder holds those
    of the front alone. bench: the Bench whose Trials they are.
    """

    def __init__(self, folder, bench):
        self._folder, self._bench = Path(folder), bench
        self._results = read_json(self._folder / "trials.json") or {}  # {name: [ms, iqr, repeats, error], or why there is no Trial}
        original = bench.original
        first = self._results.setdefault(ORIGINAL, [original.milliseconds, original.iqr, original.repeats, 0.0])
        # candidates are compared with what the original took when the first of them was tried
        bench.original = dataclasses.replace(original, **dict(zip(("milliseconds", "iqr", "repeats"), first)))

    def __contains__(self, name):
        return name in self._results

    def add(self, name, trial):
        """trial: a Trial, or a text that says why there is none."""
        if isinstance(trial, str):
            LOG.info("%s left out: %s", name, trial)
            self._results[name] = trial
        else:
            arrays = {"fitted": trial.fitted, "held_out": trial.held_out}
            write_safetensors(self._folder / (name + SUFFIX), {key: torch.from_numpy(array) for key, array in arrays.items()})
            self._results[name] = [trial.milliseconds, trial.iqr, trial.repeats, trial.after[0]]
        write_json(self._folder / "trials.json", self._results)
        wanted = {point.name + SUFFIX for point in self.front()}
        for path in self._folder.glob("*" + SUFFIX):
            if path.name not in wanted:
                path.unlink()

    def front(self):
        """The Points that no other dominates, slowest first, the original's among them."""
        return pareto_front(_point(name, *result) for name, result in self._results.items() if not isinstance(result, str))

    def point(self, name):
        """The Point of what was tried under a name; None where nothing was, or it gave none."""
        result = self._results.get(name)
        return _point(name, *result) if isinstance(result, list) else None

    def load(self, name):
        """The Trial of a candidate on the front."""
        tensors, _ = read_safetensors(self._folder / (name + SUFFIX))
        return self._bench.judge(self._results[name][:3], tensors["fitted"].numpy(), tensors["held_out"].numpy())


def _point(name, milliseconds, iqr, repeats, error):
    return Point(name, milliseconds, error, deviation_of_median(iqr, repeats))
