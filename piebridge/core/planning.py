"""Plans a run before its parts are built: measures for a stated time, predicts every strategy, takes the cheapest."""

import dataclasses
import logging

from piebridge.core.device import resident_mib
from piebridge.core.offers import offers
from piebridge.core.plan_costs import Ruler
from piebridge.core.planner import MIB, Planner, as_record, describe, strategies, with_settings
from piebridge.core.preparation import FrozenPart
from piebridge.core.step_kinds import STEPS

LOG = logging.getLogger(__name__)
SHARE_OF_RUN = 0.004  # for measuring within a run
SURELY_MILLISECONDS = 5.0  # of a frozen forward, where nothing was measured yet


def planned(work, tuning):
    """(Workplace with the settings of the chosen strategy, the FrozenPart that was measured with, or None in a resumed run).

    work: an `assembly.Workplace`; tuning: a Tuning. What was decided is `work.decisions.values["strategy"]`; it is measured once in a run.
    """
    decided, part = work.decisions.values.get("strategy"), None
    if decided is None:
        part, chosen, predictions = make_plan(work, tuning)
        decided = work.decisions.decide("strategy", lambda: as_record(chosen, predictions))
        for line in describe(chosen, predictions):
            LOG.debug("%s", line)
    LOG.info("strategy: %s, predicted to take %.1f s of training", decided["name"], decided["predicted_seconds"])
    return dataclasses.replace(work, config=with_settings(work.config, decided["settings"])), part


def make_plan(work, tuning, seconds=None):
    """(the FrozenPart that was measured with, the chosen Prediction, all Predictions). UserError where nothing can serve.

    seconds: about how long to measure; None: what a run can afford.
    """
    part = FrozenPart(dataclasses.replace(work, config=with_settings(work.config, {"cache.kind": "auto"})), tuning)
    config, affordable = part.config, _affordable(part)
    levels = offers(config, work.network, work.fingerprint)[0] if part.uses_proxies else []
    levels = levels if part.is_at_head else [level for level in levels if level.precision != "int8"]
    spent = work.clock.train_seconds
    with work.clock.phase("probe"):
        costs = Ruler(part, levels, STEPS[config.step](tuning, config), affordable if seconds is None else seconds).measure()
    network_mib = sum(tensor.numel() * tensor.element_size() for tensor in work.network.state_dict().values()) / MIB
    planner = Planner(config, costs, levels, part.samples, spent + min(work.clock.train_seconds - spent, affordable),
                      resident_mib(), network_mib)  # a run measures no longer than it can afford
    predictions = [planner.predict(strategy) for strategy in strategies(config, tuning, levels)]
    return part, planner.choose(predictions), predictions


def _affordable(part):
    """Seconds: a share of what the cheapest strategy may take, one pass of the original where features can be kept."""
    known = part.decisions.values.get("backend", {}).get("milliseconds") or SURELY_MILLISECONDS
    passes = 1 if part.is_at_head else part.config.epochs
    return min(part.config.plan.seconds, SHARE_OF_RUN * part.samples * passes * known / 1000)
