"""Which backend is fastest here? A race on a few real images that stops when there is too little left to win."""

import logging
import math
import time

import torch

from piebridge.core.backends import device_profile
from piebridge.core.backends.registry import BACKENDS, build_segment, missing_packages
from piebridge.core.device import describe_device
from piebridge.core.errors import UserError
from piebridge.core.packages import one_line, package_version

LOG = logging.getLogger(__name__)
# A candidate may be this much faster than what is typical of it before the race would have left it out wrongly.
OPTIMISM = 1.5
CLEARLY_FASTER = 0.7
CHECKED_IMAGES = 2  # eager is slow: it computes no more than the comparison needs
VERSIONED = ("torch", "openvino", "onnxruntime", "onnx")


class Choice:
    """The outcome of a probe.

    backend: the winner's name. reason: a sentence for the log. milliseconds: per image, of the winner. measurements: a list of
    {backend, verdict} with milliseconds, error and build_seconds where measured. seconds: what the probe took. segment: the
    winner, ready to use, or None where the choice was recalled and nothing was built.
    """

    def __init__(self, backend, reason, milliseconds, measurements, seconds, segment=None, is_recalled=False):
        self.backend, self.reason, self.milliseconds = backend, reason, milliseconds
        self.measurements, self.seconds, self.segment, self.is_recalled = measurements, seconds, segment, is_recalled

    def as_dict(self):
        """JSON values."""
        return {"backend": self.backend, "reason": self.reason, "milliseconds": self.milliseconds,
                "measurements": self.measurements, "seconds": round(self.seconds, 4), "is_recalled": self.is_recalled}


def relative_error(features, reference):
    """max over samples of |f - r| / |r| (Euclidean norms over [N,...]); inf where a feature is not a number."""
    features, reference = features.detach().flatten(1).double(), reference.detach().flatten(1).double()
    errors = (features - reference).norm(dim=1) / reference.norm(dim=1).clamp_min(1e-30)
    return float(errors.max()) if bool(torch.isfinite(errors).all()) else math.inf


def probe(network, images, batch_size, tolerance=1e-3, expected_images=None, budget_seconds=5.0, candidates=None,
          fingerprint=None, is_remembered=True):
    """The fastest installed backend whose features agree with eager's: a Choice.

    images: float32 [N,3,S,S], real and normalised (N from 1; the first batch_size are used, repeated where there are fewer).
    tolerance: largest `relative_error` accepted. expected_images: how many forward passes the choice is for; a candidate is tried
    only while it could save more time on them than trying it costs (None: no limit). budget_seconds: after it nothing new is
    tried, but for the first candidate. candidates: names, all by default. fingerprint: of the network, where the caller has it.
    is_remembered: recall the choice of an earlier probe of the same network, sizes, versions and device, and remember this one.
    """
    start = time.perf_counter()
    names = _order(network, candidates)
    key = _key(network, images, batch_size, tolerance, expected_images, names, fingerprint) if is_remembered else None
    recalled = device_profile.recall(key) if is_remembered else None
    if _is_choice(recalled) and recalled["backend"] in ["eager"] + names and not missing_packages(recalled["backend"]):
        return Choice(recalled["backend"], f"recalled from {device_profile.profile_path().name}: {recalled['reason']}",
                      recalled["milliseconds"], recalled["measurements"], time.perf_counter() - start, is_recalled=True)
    race = _Race(network, images, batch_size, tolerance)
    for name in names:
        race.enter(name, start, expected_images, budget_seconds)
    choice = Choice(race.best, _reason(race, tolerance), race.milliseconds(race.best), race.measurements,
                    time.perf_counter() - start, race.segment)
    if is_remembered:
        device_profile.remember(key, {"backend": choice.backend, "reason": choice.reason, "milliseconds": choice.milliseconds,
                                      "measurements": choice.measurements})
    return choice


def _is_choice(recalled):
    """Whether a remembered value is what `probe` remembers: the profile is a file that anything may have happened to."""
    return (isinstance(recalled, dict) and isinstance(recalled.get("backend"), str) and isinstance(recalled.get("reason"), str)
            and isinstance(recalled.get("milliseconds"), float) and isinstance(recalled.get("measurements"), list))


class _Race:
    """Eager first, as the reference; then one candidate after the other against the best so far."""

    def __init__(self, network, images, batch_size, tolerance):
        self.network, self.tolerance, self.size = network, tolerance, images.shape[-1]
        repeats = -(-batch_size // len(images))
        self.images = images.repeat(repeats, 1, 1, 1)[:batch_size].contiguous()
        self.measurements, self.is_any_tried = [], False
        eager = build_segment("eager", network, self.size, batch_size)
        few = self.images[:CHECKED_IMAGES]
        self.reference = eager(few)  # warms up as well
        self.best, self.segment = "eager", eager
        self._note("eager", "reference", _milliseconds(eager, few), 0.0, 0.0)

    def enter(self, name, start, expected_images, budget_seconds):
        is_late = self.is_any_tried and time.perf_counter() - start > budget_seconds
        verdict = self._why_not(name, expected_images) or (
            f"not tried: the probe's {budget_seconds:.3g} s are over" if is_late else None)
        if verdict:
            self._note(name, verdict)
            return
        self.is_any_tried = True  # on a busy machine the reference alone may use up the budget
        try:
            begin = time.perf_counter()
            segment = build_segment(name, self.network, self.size, len(self.images))
            error = relative_error(segment(self.images)[:CHECKED_IMAGES], self.reference)
            build_seconds = time.perf_counter() - begin
        except Exception as failure:  # whatever a library raises, the others can still run
            LOG.debug("backend %s failed", name, exc_info=True)
            self._note(name, "refused: " + one_line(failure))
            return
        if error > self.tolerance:
            verdict = f"refused: its features differ from eager's by {error:.2g}, more than the tolerance {self.tolerance:.2g}"
            self._note(name, verdict, error=error, build_seconds=build_seconds)
            return
        milliseconds = _milliseconds(segment, self.images)
        if milliseconds > CLEARLY_FASTER * self.milliseconds(self.best):  # another process can only make a call longer
            milliseconds = min(milliseconds, _milliseconds(segment, self.images))
        self._note(name, "agrees", milliseconds, error, build_seconds)
        if milliseconds < self.milliseconds(self.best):
            self.best, self.segment = name, segment

    def _why_not(self, name, expected_images):
        known, missing = BACKENDS[name], missing_packages(name)
        if missing:
            return "not installed: " + ", ".join(missing)
        if known.rounding > self.tolerance:
            return f"refused: its numbers are rounded to {known.rounding:.2g}, more than the tolerance {self.tolerance:.2g}"
        eager, best = self.milliseconds("eager"), self.milliseconds(self.best)
        gain = best - eager / known.speedup / OPTIMISM  # ms per image, at best
        cost = known.build_seconds + 3 * len(self.images) * eager / known.speedup / 1000
        if gain <= 0:
            return f"not tried: slower than {self.best} as a rule"
        if expected_images is not None and gain / 1000 * expected_images < cost:
            return f"not tried: could save {gain / 1000 * expected_images:.2g} s of {expected_images} images for {cost:.2g} s"
        return None

    def milliseconds(self, name):
        return next(each["milliseconds"] for each in self.measurements if each["backend"] == name)

    def _note(self, name, verdict, milliseconds=None, error=None, build_seconds=None):
        self.measurements.append({
            "backend": name, "verdict": verdict, "milliseconds": None if milliseconds is None else round(milliseconds, 3),
            "error": error if error is None or math.isfinite(error) else "not finite",
            "build_seconds": None if build_seconds is None else round(build_seconds, 3)})


def _milliseconds(segment, images):
    """Per image, of one call (of a segment that has been warmed up)."""
    begin = time.perf_counter()
    segment(images)
    return 1000 * (time.perf_counter() - begin) / len(images)


def _order(network, candidates):
    """Names to try, the fastest as a rule first; on a GPU only those that run there."""
    for name in candidates or ():
        if name not in BACKENDS:
            raise UserError(f"the probe knows no backend {name!r}; known: {', '.join(BACKENDS)}")
    is_on_cpu = next(network.parameters()).device.type == "cpu"
    names = [name for name in candidates or BACKENDS if name != "eager" and (is_on_cpu or not BACKENDS[name].is_cpu_only)]
    return sorted(names, key=lambda name: -BACKENDS[name].speedup)


def _reason(race, tolerance):
    others = {}  # what happened -> names
    for each in race.measurements:
        if each["backend"] not in ("eager", race.best):
            happened = each["verdict"] if each["milliseconds"] is None else f"{each['milliseconds']:.3g} ms"
            others.setdefault(happened, []).append(each["backend"])
    notes = "".join(f"; {', '.join(names)} {happened}" for happened, names in others.items())
    eager, best = race.milliseconds("eager"), race.milliseconds(race.best)
    if race.best == "eager":
        return f"{eager:.3g} ms per image, and nothing faster agrees with it to {tolerance:.2g}{notes}"
    error = next(each["error"] for each in race.measurements if each["backend"] == race.best)
    return (f"{best:.3g} ms per image, {eager / best:.2g} times as fast as eager ({eager:.3g} ms); "
            f"features differ by {error:.1g} (tolerance {tolerance:.2g}){notes}")


def _key(network, images, batch_size, tolerance, expected_images, names, fingerprint):
    """What a choice depends on. The amount of work counts by its power of ten: more of it is worth more trying."""
    work = None if expected_images is None else len(str(int(expected_images)))
    device = describe_device(next(network.parameters()).device)
    return {"network": fingerprint or network.fingerprint(), "input_size": int(images.shape[-1]), "batch_size": int(batch_size),
            "tolerance": float(tolerance), "digits_of_work": work, "candidates": list(names), "device": device,
            "versions": {package: package_version(package) for package in VERSIONED}}
