"""From an original and unlabelled images to a proxy set: the order of the work, and what of it outlives an interruption.

Finished pieces lie in `OUT.work`; the same command on the same network and images goes on from them, also where it asks for other
levels. The set appears whole, at the end, and the work folder goes.
"""

import dataclasses
import logging
import os
from pathlib import Path

import numpy as np
import torch
from torch import nn

from piebridge.core.capture import capture
from piebridge.core.difficulty import fit_residual_predictor, relative_residuals
from piebridge.core.errors import UserError
from piebridge.core.files import expand_user, read_json, sha256_of_json, write_json
from piebridge.core.interrupt import interruptible
from piebridge.core.network import GraphNetwork
from piebridge.core.networks import load_network
from piebridge.core.progress_bar import progress_bar
from piebridge.core.proxy_set import Proxy, check_target, remove_leftovers, write_proxy_set
from piebridge.core.proxy_specs import LEAST_PIXELS
from piebridge.forge.alignment import measure_alignment
from piebridge.forge.bench import Bench, cross_fitted
from piebridge.forge.dropping import drop_order, recover
from piebridge.forge.images import ForgeImages
from piebridge.forge.pareto import Candidate, candidates, dominates, even_steps, float_of
from piebridge.forge.policy_network import make_policy
from piebridge.forge.policy_training import PolicySettings, train_policy
from piebridge.forge.pruned_widths import PrunedWidths
from piebridge.forge.pruning import prune, tensor_cuts
from piebridge.forge.structure import structure_of
from piebridge.forge.trials import Trials
from piebridge.forge.work_folder import KEY_FILE, empty, locked

LOG = logging.getLogger(__name__)
DROPPING_IMAGES = 64
TAP_IMAGES = 64  # of the held-out ones, for the alignment at every tap
RESOLUTION_SHARES = (6 / 7, 5 / 7, 4 / 7, 3 / 7)
# settings that finished pieces do not depend on: of what comes after them (the policy's checkpoint has a key of its own), or of speed
WITHOUT_EFFECT = ("levels", "least", "policy", "policy_epochs", "profile_seconds", "batch_sizes", "workers", "overwrite")


def forge(original, images, out, settings):
    """Make a proxy set of `original` in the folder `out`; returns the folder.

    original: a name, a network file, a GraphNetwork, or a classifier as a torch.nn.Module (captured at 224 x 224 pixels, values normalised
    with mean and deviation 0.5; capture it yourself with core.capture for others). images: a folder of unlabelled images. settings:
    ForgeSettings. UserError for bad input; Cancelled when it is interrupted, and the next call goes on from there.
    """
    if isinstance(original, nn.Module) and not isinstance(original, GraphNetwork):
        original = capture(original, type(original).__name__, [3, 224, 224], [0.5] * 3, [0.5] * 3)
    elif not isinstance(original, GraphNetwork):
        original = load_network(str(original))
    with interruptible() as interrupt:
        return Build(original, images, out, settings, interrupt).run()


class Build:
    """One run of the forge. original: GraphNetwork; images: a folder; out: the set's folder; settings: ForgeSettings."""

    def __init__(self, original, images, out, settings, interrupt):
        self.original, self.settings, self.interrupt = original.eval(), settings, interrupt
        self.out = Path(os.path.abspath(str(expand_user(out))))
        check_target(self.out, settings.overwrite)
        self.structure = structure_of(original)
        height, self.native = original.description["input_size"][1:]
        if height != self.native:
            raise UserError(f"network {original.description['name']}: its input of {height} x {self.native} pixels is not square, as those "
                            "of proxies are; capture it at a square size")
        self.sizes = [self.native] + ([int(size) for size in settings.resolutions]
                                      or [max(LEAST_PIXELS, round(self.native * share / 8) * 8) for share in RESOLUTION_SHARES])
        self._check_settings()
        self.images = ForgeImages(images, original.description, settings)
        self.work = self.out.parent / (self.out.name + ".work")
        self.networks = {}  # {(width, number of dropped blocks): GraphNetwork}, where some are dropped

    def _check_settings(self):
        """UserError for what the network does not allow, which would else be found after minutes of work."""
        candidates(self.native, resolutions=self.sizes, precisions=self.settings.precisions)
        if self.settings.policy:
            make_policy(self.original, self.settings.levels + 1)

    def run(self):
        """Make the set; returns its folder. Until it is whole, nothing but the work folder is written."""
        self.images.hold(self.native)
        self.interrupt.check()
        self.bench = Bench(self.images, self.original, self.settings.batch_size)
        with locked(self.work):
            remove_leftovers(self.out)
            self._keep_what_fits()
            self._make()
            empty(self.work)
            self.work.rmdir()
        return self.out

    def _make(self):
        settings = self.settings
        self.pruned = PrunedWidths(self.original, self.structure, self.images, settings, self.work, self.interrupt.check)
        self.drops = self._blocks_to_drop()
        chosen, trials = self._choose()
        bar = progress_bar(trials, desc="alignment", unit="level")
        proxies = [self._proxy(candidate, trial) for candidate, trial in zip(chosen, bar)]
        self.interrupt.check()
        # as an image that no map has seen: on those that it was fitted on, a cheap level looks better than it is
        unseen = [cross_fitted(trial.fitted, self.bench.original.fitted) for trial in trials]
        policy, policy_facts = self._policy(trials, unseen) if settings.policy else (None, None)
        order = self.pruned.order if any(proxy.kept for proxy in proxies) else {}
        facts = self._facts(policy_facts, {candidate.precision for candidate in chosen})
        predictor, cuts = self._predictor(trials, unseen), tensor_cuts(self.structure, order)
        write_proxy_set(self.out, self.original, proxies, facts, policy, predictor, cuts, settings.overwrite)

    def _keep_what_fits(self):
        settings = {name: value for name, value in dataclasses.asdict(self.settings).items() if name not in WITHOUT_EFFECT}
        stats = [os.stat(each.path) for each in self.images.samples]
        files = [(each.path, stat.st_size, stat.st_mtime_ns) for each, stat in zip(self.images.samples, stats)]
        key = sha256_of_json([self.original.fingerprint(), files, settings, self.bench.backend])
        if read_json(self.work / KEY_FILE) != {"forge": key}:
            empty(self.work)
            write_json(self.work / KEY_FILE, {"forge": key})

    def _pairs(self, indices, size):
        """(images at the original's size, at `size`) of some images."""
        if size == self.native:
            return ((images, images) for images in self.images.batches(indices, size))
        return self.images.batches(indices, [self.native, size])

    def _blocks_to_drop(self):
        """Names of the blocks to drop, in order; as many as asked for and there are. Kept, as what PrunedWidths has is."""
        path = self.work / "drops.json"
        droppable = sum(block["is_residual"] for block in self.original.description["blocks"])
        most = min(self.settings.drops, droppable)
        if most and not path.is_file():
            write_json(path, [drop.block for drop in drop_order(self.original, self._some_images(DROPPING_IMAGES), most)])
        return read_json(path) if most else []

    def _some_images(self, count):
        return torch.cat(list(self.images.batches(self.images.fitted[:count], self.native)))

    def _network(self, candidate):
        """The network of a candidate, made once; dropped blocks are recovered in closed form."""
        whole = self.original if candidate.width == 1 else self.pruned.networks[candidate.width]
        if not candidate.dropped:
            return whole
        key = candidate.width, candidate.dropped
        if key not in self.networks:
            self.networks[key] = recover(whole, self.drops[:candidate.dropped], self._some_images(DROPPING_IMAGES)).network
        return self.networks[key]

    def _choose(self):
        """(candidates, their Trials) of the levels that the set is to have, dearest first: all that may be on the front are tried."""
        settings, trials = self.settings, Trials(self.work, self.bench)
        every = candidates(self.native, [1.0] + list(self.pruned.kept), self.sizes, settings.precisions, range(len(self.drops) + 1))
        # images of each size are decoded once; int8 goes first, see _is_hopeless
        every.sort(key=lambda candidate: (-candidate.resolution, candidate.precision != "int8"))
        for candidate in progress_bar(every, desc="candidates", unit="proxy"):
            self.interrupt.check()
            if candidate.name not in trials and not self._is_hopeless(candidate, trials):
                self.images.hold(candidate.resolution)
                trials.add(candidate.name, self.bench.try_out(self._network(candidate), candidate.resolution, candidate.precision))
        points = even_steps(trials.front(), settings.levels, settings.least)
        by_name = {candidate.name: candidate for candidate in every}
        return [by_name[point.name] for point in points], [trials.load(point.name) for point in points]

    def _is_hopeless(self, candidate, trials):
        """Whether something tried already is faster and closer than the candidate will be, going by its twin in int8."""
        twin, whole = (trials.point(each._replace(precision="int8").name) for each in (
            candidate, Candidate(1.0, self.native, "int8", 0)))
        if candidate.precision == "int8" or twin is None or whole is None:
            return False
        hoped_for = float_of(candidate.name, twin, whole, self.bench.original.milliseconds)
        return any(dominates(point, hoped_for) for point in trials.front())

    def _proxy(self, candidate, trial):
        kept, dropped, network = self.pruned.kept.get(candidate.width, {}), self.drops[:candidate.dropped], self._network(candidate)
        raw, before = network, trial.before
        if kept or dropped:
            raw = prune(self.original, kept, self.structure).without_blocks(dropped).eval()
            before = self.bench.alignment_of(raw, candidate.resolution, candidate.precision)
        tap, some = self.original.description["tap"], self.images.held_out[:TAP_IMAGES]
        alignment = {when: dict(measure_alignment(self.original, each, self._pairs(some, candidate.resolution)), **{tap: _as_facts(at_tap)})
                     for when, each, at_tap in (("before", raw, before), ("after", network, trial.after))}
        facts = {"width": candidate.width, "dropped": dropped, "alignment": alignment}
        return Proxy(candidate.name, network, candidate.resolution, candidate.precision, trial.bridge, kept,
                     tensor_cuts(self.structure, kept), facts)

    def _policy(self, trials, unseen):
        settings, original = self.settings, self.bench.original
        policy = make_policy(self.original, len(trials) + 1, settings.seed)
        images = torch.cat(list(self.images.batches(self.images.fitted, policy.description["input_size"][-1])))
        features = torch.from_numpy(np.stack([original.fitted] + unseen, 1)).float()
        scores = [trial.milliseconds / original.milliseconds for trial in trials]
        facts = train_policy(policy, images, features, torch.tensor([1.0] + scores),
                             PolicySettings(epochs=settings.policy_epochs, seed=settings.seed), folder=self.work / "policy",
                             interrupt=self.interrupt)
        return policy, facts

    def _predictor(self, trials, unseen):
        """Residuals of all levels, from the cheapest one's features; scored on the held-out images."""
        original = self.bench.original
        fitted = np.stack([relative_residuals(features, original.fitted) for features in unseen], 1)
        held_out = np.stack([relative_residuals(trial.bridged, original.held_out) for trial in trials], 1)
        return fit_residual_predictor(unseen[-1], fitted, (trials[-1].bridged, held_out))[0]

    def _facts(self, policy, used):
        return {"tap": self.original.description["tap"], "resolution": self.native,
                "backends": sorted({self.bench.backend_of(precision) for precision in ("float",) + tuple(used)}),
                "images": {"fitted": len(self.images.fitted), "held_out": len(self.images.held_out)}, "policy": policy,
                "settings": {name: list(value) if isinstance(value, tuple) else value for name, value in
                             dataclasses.asdict(self.settings).items()}}


def _as_facts(pair):
    error, cosine = pair
    return {"cosine": cosine, "relative_error": error}
