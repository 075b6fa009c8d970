"""The planner: what each way of training would cost on this device, and the cheapest that the limits allow."""

import dataclasses
import logging
import math
from collections import namedtuple

from piebridge.core.byte_sizes import parse_bytes, shown_bytes
from piebridge.core.errors import UserError
from piebridge.core.graph import INPUT
from piebridge.core.levels import BUILD_SECONDS
from piebridge.core.row_codec import RowCodec

LOG = logging.getLogger(__name__)
MIB = 2 ** 20
MOST_VIEWS = 4  # kept of each image, where views may be kept
EPOCH_SECONDS = 0.01  # a checkpoint, and the bookkeeping of an epoch
# settings: dotted keys of the configuration that the strategy stands for; is_exact: whether every sample that is trained on is what plain
# training would have trained on; why_not: what it lacks here, None where it can serve
Strategy = namedtuple("Strategy", "name text settings is_exact why_not")
# Predictions for a Strategy. seconds: of training in all; ram_mib: of the process; disk_mib: of what is kept; parts: {what: seconds};
# why_not: as above, or the limit that it would break
Prediction = namedtuple("Prediction", "strategy seconds ram_mib disk_mib parts why_not")


def strategies(config, tuning, levels):
    """Every Strategy, those too that cannot serve here. levels: the Offers that samples could be given."""
    is_at_head = tuning.tap == tuning.network.description["tap"]
    views = max(2, min(MOST_VIEWS, config.epochs // 2))
    no_tap = f"pet.kind={config.pet.kind} trains from the image on" if tuning.tap == INPUT else None
    once = "samples come once" if config.stream.samples else None
    fresh = once or ("each epoch shows fresh views" if config.loader.augment != "none" else None)
    same = once or ("all epochs show the same view" if config.loader.augment == "none" else None)
    few = "there are too few epochs to show a view twice" if config.epochs <= views else None
    no_map = None if is_at_head else "only features at the head's tap can be kept of proxies"
    no_level = None if levels else "no proxies are on offer"
    no_rows = None if config.cache.augment == "none" else f"keeps no features that cache.augment={config.cache.augment} could change"
    no_router = {"none": "router.kind=none", "residual": None if is_at_head else "router.kind=residual goes by features at the head's tap"}
    is_exact = config.cache.dtype == "float32" and no_rows is None
    original, kept = {"router.kind": "none"}, {"cache.kind": "features", "cache.views": 0}
    several = {"cache.kind": "features", "cache.views": views}
    return [
        Strategy("plain", "every image through the original, each epoch anew",
                 dict(original, **{"cache.kind": "none", "cache.views": 0}), True, no_rows),
        Strategy("pixels", "decoded once, through the original each epoch anew",
                 dict(original, **{"cache.kind": "pixels", "cache.views": 0}), True, fresh or no_rows),
        Strategy("features", "through the original once", dict(original, **kept), is_exact, no_tap or fresh),
        Strategy("proxy features", "through a proxy once", dict(kept, **{"router.kind": "residual"}), False,
                 no_tap or fresh or no_map or no_level),
        Strategy("views", f"{views} views of each image, each through the original once", dict(original, **several), False,
                 no_tap or same or few),
        Strategy("hybrid", f"{views} views of each image, each through a proxy once where that keeps its features",
                 dict(several, **{"router.kind": "residual"}), False, no_tap or same or few or no_map or no_level),
        Strategy("proxies", "through a proxy, each epoch anew", {"cache.kind": "none", "cache.views": 0}, False,
                 no_level or no_router.get(config.router.kind) or no_rows),
    ]


class Planner:
    """Predicts strategies from Costs.

    config: of the run. costs: Costs. levels: the Offers that samples could be given, the most faithful first. samples: training images.
    spent: seconds that are gone already. resident_mib: of the process now. network_mib: of one network's weights.
    """

    def __init__(self, config, costs, levels, samples, spent, resident_mib, network_mib):
        self.config, self.costs, self.levels, self.samples = config, costs, levels, samples
        self.spent, self.resident_mib, self.network_mib = spent, resident_mib, network_mib

    def predict(self, strategy):
        """The Prediction of a Strategy, which may break the configured limits."""
        if strategy.why_not:
            return Prediction(strategy, math.nan, math.nan, math.nan, {}, strategy.why_not)
        parts = dict(self._passes(strategy), **{"set-up": self.spent, "epochs": EPOCH_SECONDS * self.config.epochs})
        uses_proxy = strategy.settings.get("router.kind") != "none"
        parts["building"] = BUILD_SECONDS if uses_proxy else 0.0
        ram = self.resident_mib + (self.network_mib if uses_proxy else 0.0)
        disk = self._kept_bytes(strategy) / MIB
        return Prediction(strategy, sum(parts.values()), ram, disk, parts, self._broken_limit(strategy, ram, disk))

    def choose(self, predictions):
        """The Prediction with the fewest seconds among those that can serve. UserError where none can."""
        able = [each for each in predictions if each.why_not is None]
        if not able:
            reasons = "; ".join(f"{each.strategy.name}: {each.why_not}" for each in predictions)
            raise UserError(f"plan: no strategy respects the limits ({reasons}); raise plan.ram or plan.disk, or use plan.exact=false")
        return min(able, key=lambda each: each.seconds)

    def _passes(self, strategy):
        """{what: seconds} of everything that is done for each image."""
        costs, config, native = self.costs, self.config, max(self.costs.decode)
        kind, views = strategy.settings["cache.kind"], max(1, strategy.settings["cache.views"])
        level = self._level(strategy)
        name, size = (level.name, level.resolution) if level else ("original", native)
        trained = costs.trained[name]
        if kind == "features":
            return {"decoding": self._seconds(views, costs.decode[size]), "frozen": self._seconds(views, costs.frozen[name]),
                    "training": self._seconds(config.epochs, costs.cached)}
        closing = min(config.router.closing, config.epochs) if level else 0
        early = config.epochs - closing
        run = self._share_that_runs()
        decoded = 1 if kind == "pixels" else early * run
        return {"decoding": self._seconds(decoded, costs.decode[size]) + self._seconds(closing, costs.decode[native]),
                "frozen": self._seconds(early * run, costs.frozen[name]) + self._seconds(closing, costs.frozen["original"]),
                "training": self._seconds(early * run, trained) + self._seconds(closing, costs.trained["original"])}

    def _seconds(self, passes, milliseconds):
        return passes * self.samples * milliseconds / 1000

    def _level(self, strategy):
        """The Offer that is expected to serve: the most faithful one, or that which the configuration names."""
        kind = strategy.settings.get("router.kind", self.config.router.kind)
        if kind == "none" or not self.levels:
            return None
        number = int(kind[len("level:"):]) if kind.startswith("level:") else 1
        return self.levels[min(number, len(self.levels)) - 1] if number else None

    def _share_that_runs(self):
        """Of the samples, in an epoch: losses are skewed, about three in five lie below their mean."""
        gate = self.config.gate
        return 1 - 0.6 * gate.drop * (1 - gate.full_epochs) if gate.kind == "infobatch" else 1.0

    def _kept_bytes(self, strategy):
        views = max(1, strategy.settings["cache.views"])
        if strategy.settings["cache.kind"] == "features":
            return views * self.samples * RowCodec(self.config.cache.dtype, (self.costs.row_values,)).row_bytes
        return 3 * max(self.costs.decode) ** 2 * self.samples if strategy.settings["cache.kind"] == "pixels" else 0

    def _broken_limit(self, strategy, ram_mib, disk_mib):
        limits = self.config.plan
        if limits.exact and not strategy.is_exact:
            return "plan.exact=true"
        if limits.ram and ram_mib * MIB > parse_bytes(limits.ram):
            return f"takes {shown_bytes(int(ram_mib * MIB))} of memory, plan.ram={limits.ram}"
        if limits.disk and disk_mib * MIB > parse_bytes(limits.disk):
            return f"keeps {shown_bytes(int(disk_mib * MIB))}, plan.disk={limits.disk}"
        return None


def with_settings(config, settings):
    """A Config with other values for dotted keys."""
    sections, top = {}, {}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        if name:
            sections.setdefault(section, {})[name] = value
        else:
            top[section] = value
    return dataclasses.replace(config, **top, **{section: dataclasses.replace(getattr(config, section), **values)
                                                 for section, values in sections.items()})


def as_record(chosen, predictions):
    """What is kept of a plan, as JSON values: the chosen strategy's name, settings and figures, and every strategy's."""
    rows = [{"name": each.strategy.name, "seconds": _rounded(each.seconds), "ram_mib": _rounded(each.ram_mib),
             "disk_mib": _rounded(each.disk_mib), "is_exact": each.strategy.is_exact, "why_not": each.why_not} for each in predictions]
    return {"name": chosen.strategy.name, "settings": chosen.strategy.settings, "predicted_seconds": _rounded(chosen.seconds),
            "predicted_parts": {name: _rounded(seconds) for name, seconds in chosen.parts.items()},
            "predicted_mib": _rounded(chosen.ram_mib), "strategies": rows}


def describe(chosen, predictions):
    """A plan as lines of text: every strategy's figures, then the choice and its reason."""
    table = [["strategy", "seconds", "RAM MiB", "disk MiB", "exact", "what it does"]]
    for each in predictions:
        figures = [f"{each.seconds:.1f}", f"{each.ram_mib:.0f}", f"{each.disk_mib:.0f}"] if not math.isnan(each.seconds) else ["-"] * 3
        note = f" (not here: {each.why_not})" if each.why_not else ""
        table.append([each.strategy.name] + figures + ["yes" if each.strategy.is_exact else "no", each.strategy.text + note])
    widths = [max(len(row[column]) for row in table) for column in range(5)]
    lines = ["  ".join([row[0].ljust(widths[0])] + [row[column].rjust(widths[column]) for column in range(1, 5)] + [row[5]])
             for row in table]
    parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in chosen.parts.items() if seconds)
    return lines + ["", f"chosen: {chosen.strategy.name}, the fewest seconds within the limits ({parts})"]


def _rounded(value):
    return None if math.isnan(value) else round(value, 3)
