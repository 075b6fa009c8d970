"""Choices against what they truly take: the additive model proposes, the planner decides."""

from piebridge.core.byte_sizes import shown_bytes
from piebridge.core.errors import UserError
from piebridge.engine.search_space import with_option

CLOSE = 0.01  # of the budget: a closer limit for the model is not looked for


class Meter:
    """What `parts` ({key: Part}) truly take, each asked for once. latency, milliseconds_of: None where time is not limited."""

    def __init__(self, memory_of, milliseconds_of, budget, latency):
        self._memory_of, self._milliseconds_of = memory_of, milliseconds_of
        self.limits = [float(budget)] + ([] if latency is None else [float(latency)])
        self._known, self.calls = {}, 0

    @property
    def has_latency(self):
        return len(self.limits) == 2

    def memory(self, parts):
        """Bytes."""
        name = frozenset((key, None if part.is_whole else (part.dim, tuple(part.index.tolist()))) for key, part in parts.items())
        if name not in self._known:
            self._known[name] = self._memory_of(parts)
            self.calls += 1
        return self._known[name]

    def milliseconds(self, parts):
        return self._milliseconds_of(parts) if self.has_latency else None

    def cost(self, parts):
        """[bytes, milliseconds], as far as they are limited."""
        return [self.memory(parts)] + ([self.milliseconds(parts)] if self.has_latency else [])

    def fits(self, parts):
        if self.has_latency and self.milliseconds(parts) > self.limits[1]:
            return False  # which is quicker to say
        return self.memory(parts) <= self.limits[0]


def affordable_depths(space, meter):
    """[depths][resources], costs of the depths that fit, the shallowest first; each deeper one takes more.

    UserError where not even the first one does.
    """
    costs = []
    for depth in space.depths:
        cost = meter.cost(depth.probe)
        if any(own > limit for own, limit in zip(cost, meter.limits)):
            if not costs:
                raise UserError(_least(depth, cost, meter.limits))
            break
        costs.append(cost)
    return costs


def _least(depth, cost, limits):
    keys = list(depth.probe)
    what = ", ".join(keys[:3]) + (f", ... ({len(keys)} tensors)" if len(keys) > 3 else "")
    if cost[0] > limits[0]:
        return (f"engine: search: a budget of {shown_bytes(int(limits[0]))} cannot be met: the least, training {what}, takes "
                f"{shown_bytes(int(cost[0]))}; give {-(-int(cost[0]) // 1024)}KiB or more, or a smaller batch or image")
    return (f"engine: search: a latency of {limits[1]:.3g} ms cannot be met: the least, training {what}, takes {cost[1]:.3g} ms; "
            f"give {cost[1] * 1.005:.3g} or more, or a smaller batch or image")


def fitted(problem, space, meter, pick, checks):
    """The Choice of the largest value among those that `pick(limits)` proposes and the planner finds to fit.

    A peak is less than the sum that the model takes it for where a value is counted twice, or does not lie on the peak at all, and more
    where a gradient or a copy does. So the model's limit in bytes is doubled until the choice no longer fits, and the step then halved;
    at most `checks` choices are tried. The least that can be trained is known to fit.
    """
    best, limits = space.least(), list(meter.limits)
    low, high = float(problem.depth_costs[0, 0]), None
    reach = float(problem.depth_costs[:, 0].max() + problem.costs[:, :, 0].max(1).sum())  # all that there is
    for _ in range(checks):
        choice = pick(limits)
        parts = choice and space.parts(choice)
        if not parts:  # the model affords nothing, or a depth without biases and no weight
            low = limits[0]
        elif meter.fits(parts):
            best, low = max(best, choice, key=problem.value), limits[0]
        else:
            high = limits[0]
        if low >= reach or high is not None and high - low < CLOSE * meter.limits[0]:
            break
        limits[0] = min(2 * low, reach) if high is None else (low + high) / 2
    return best


def filled(problem, space, meter, choice, checks):
    """The Choice with more of its layers, or more layers, as long as the planner finds that they fit; it is asked `checks` times at most.

    Tried first is what the model holds for affordable, and of that what adds the most value.
    """
    refused, last = set(), meter.calls + checks
    while meter.calls < last:
        room = meter.limits[0] - meter.memory(space.parts(choice))
        steps = [step for step in _steps(problem, choice, room) if step[2:] not in refused]
        if not steps:
            break
        _, _, item, place = max(steps)
        more = with_option(choice, item, place)
        if meter.fits(space.parts(more)):
            choice = more
        else:
            refused.add((item, place))
    return choice


def _steps(problem, choice, room):
    """(whether the model has room for it, added value, item, option) of what could be trained in addition."""
    for item in range(int(problem.first[choice.depth]), len(problem.values)):
        values, costs, now = problem.values[item], problem.costs[item, :, 0], choice.options[item]
        for place in range(1, len(values)):
            if values[place] > values[now]:
                yield bool(costs[place] - costs[now] <= room), float(values[place] - values[now]), item, place
