"""Which proxies to try, and which of those that were measured to keep: the front of time against alignment, in even steps of time."""

import itertools
import math
from collections import namedtuple

from piebridge.core.errors import UserError
from piebridge.core.proxy_specs import LEAST_PIXELS

PRECISIONS = ("float", "bf16", "int8")
BENEFIT_OF_DOUBT = 0.2  # of a predicted time and error
SURE = 2.0  # standard deviations by which two medians have to differ


class Candidate(namedtuple("Candidate", "width resolution precision dropped")):
    """A proxy to try. width: share of the original's MACs that pruning leaves; dropped: how many blocks are left out."""

    @property
    def name(self):
        """"p076-192px-drop2-int8"; what is as in the original is not named, but for the resolution."""
        return "-".join(([f"p{round(100 * self.width):03d}"] if self.width < 1 else []) + [f"{self.resolution}px"]
                        + ([f"drop{self.dropped}"] if self.dropped else []) + ([self.precision] if self.precision != "float" else []))


# A measured level. milliseconds: median; error: relative error at the head's tap, 0 of the original; deviation: the standard
# deviation of the median, in ms
Point = namedtuple("Point", "name milliseconds error deviation")


def deviation_of_median(iqr, repeats):
    """Standard deviation of the median of `repeats` values with this interquartile range, for normal noise.

    sqrt(pi / 2) sigma / sqrt(n), with sigma = iqr / 1.349.
    """
    return math.sqrt(math.pi / 2) / 1.349 * iqr / math.sqrt(repeats)


def candidates(native, widths=(1.0,), resolutions=None, precisions=("float",), drops=(0,)):
    """Every combination as a list of Candidates, without the original itself; the whole, full-size, float ones first.

    native: pixels of the original's input. UserError for a value out of range, and where two combinations have one name.
    """
    resolutions = (native,) if resolutions is None else resolutions
    _check("widths", widths, lambda width: 0 < width <= 1, "shares of the original's MACs, above 0 and at most 1")
    _check("resolutions", resolutions, lambda size: int(size) == size and LEAST_PIXELS <= size <= native,
           f"whole pixels from {LEAST_PIXELS} to the original's {native}")
    _check("precisions", precisions, lambda precision: precision in PRECISIONS, ", ".join(PRECISIONS))
    _check("drops", drops, lambda count: int(count) == count and count >= 0, "numbers of blocks, 0 or more")
    ordered = [sorted(set(widths), reverse=True), sorted(set(resolutions), reverse=True),
               sorted(set(precisions), key=PRECISIONS.index), sorted(set(drops))]
    found = [Candidate(*each) for each in itertools.product(*ordered)]
    names = [each.name for each in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"proxies: two of the widths {list(widths)} give the name {twice}; let them differ by 0.01 or more")
    return [each for each in found if each != (1.0, native, "float", 0)]


def _check(key, values, is_allowed, allowed):
    for value in values:
        is_comparable = isinstance(value, str) if key == "precisions" else isinstance(value, (int, float)) and math.isfinite(value)
        if isinstance(value, bool) or not is_comparable or not is_allowed(value):
            raise UserError(f"proxies: {key}: {value!r} is not possible; give {allowed}")
    if not values:
        raise UserError(f"proxies: {key} is empty; give {allowed}")


def noise(one, other):
    """Difference in ms of two Points that could be chance."""
    return SURE * math.hypot(one.deviation, other.deviation)


def dominates(one, other):
    """Whether Point `one` makes `other` useless: neither slower nor worse aligned, and better aligned or faster by more than noise."""
    is_no_worse = one.error <= other.error and one.milliseconds <= other.milliseconds
    return is_no_worse and (one.error < other.error or other.milliseconds - one.milliseconds > noise(one, other))


def float_of(name, twin, whole, milliseconds):
    """The Point that a float candidate may be hoped to be, from the Points of its twin in int8 and of the original in int8.

    int8 is taken to save the same share of the time everywhere (milliseconds: of the original in float), and to leave an error that is
    independent of the rest; from both figures BENEFIT_OF_DOUBT is taken off.
    """
    share = milliseconds / whole.milliseconds
    error = math.sqrt(max(0.0, twin.error ** 2 - whole.error ** 2))
    return Point(name, (1 - BENEFIT_OF_DOUBT) * share * twin.milliseconds, (1 - BENEFIT_OF_DOUBT) * error, 0.0)


def pareto_front(points):
    """The Points that no other dominates, slowest first. Where two differ by nothing but noise, both stay."""
    points = list(points)
    front = [point for point in points if not any(dominates(other, point) for other in points)]
    return sorted(front, key=lambda point: (-point.milliseconds, point.error, point.name))


def even_steps(front, count, least):
    """At most `count` Points of the front, slowest first: the nearest to even steps of time from the original to `least` of it.

    front: of `pareto_front`, the original (the one with the least error) among them, which is level 0 and not returned. Where
    several are equally near but for noise, the best aligned one is taken; where a point is the nearest to two steps, since the front has
    none between, the widest gaps elsewhere are halved instead. The last level takes at most `least` of the original's time. UserError
    where none does, with what can be had.
    """
    if isinstance(count, bool) or int(count) != count or count < 1 or not 0 < least < 1:
        raise UserError(f"proxies: count={count!r}, least={least!r}: at least one level, and a share of the original's time between "
                        "0 and 1")
    if not front:
        raise UserError("proxies: nothing was measured, not even the original")
    original = min(front, key=lambda point: (point.error, -point.milliseconds, point.name))
    cheaper = [point for point in front if original.milliseconds - point.milliseconds > noise(original, point)]
    cheap_enough = [point for point in cheaper if point.milliseconds <= least * original.milliseconds]
    if not cheap_enough:
        fastest = min([point.milliseconds for point in cheaper], default=original.milliseconds) / original.milliseconds
        raise UserError(f"proxies: no level takes at most {100 * least:.3g} % of the original's {original.milliseconds:.3g} ms; the "
                        f"fastest takes {100 * fastest:.3g} %: ask for that or more, or allow lower resolutions, smaller widths or int8")
    chosen = {min(cheap_enough, key=lambda point: (point.error, -point.milliseconds, point.name))}
    for number in range(1, count):
        chosen.add(_nearest(cheaper, original.milliseconds * (1 - (1 - least) * number / count)))
    left = [point for point in cheaper if point.milliseconds >= min(each.milliseconds for each in chosen)]
    while len(chosen) < count:
        between = _in_widest_gap(sorted(chosen | {original}, key=lambda point: point.milliseconds), left)
        if between is None:
            break
        chosen.add(between)
    return sorted(chosen, key=lambda point: (-point.milliseconds, point.error, point.name))


def _in_widest_gap(ordered, points):
    """The point nearest to the middle of the widest gap between neighbours of `ordered`, fastest first, that has any; or None."""
    gaps = sorted(zip(ordered, ordered[1:]), key=lambda gap: gap[0].milliseconds - gap[1].milliseconds)
    for low, high in gaps:
        inside = [point for point in points if noise(low, point) < point.milliseconds - low.milliseconds
                  and noise(high, point) < high.milliseconds - point.milliseconds]
        if inside:
            return _nearest(inside, (low.milliseconds + high.milliseconds) / 2)
    return None


def _nearest(points, milliseconds):
    def distance(point):
        return abs(point.milliseconds - milliseconds)

    nearest = min(points, key=lambda point: (distance(point), point.error, point.name))
    as_near = [point for point in points if distance(point) <= distance(nearest) + noise(nearest, point)]
    return min(as_near, key=lambda point: (point.error, distance(point), point.name))
