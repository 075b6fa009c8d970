"""Candidates and their choice, against the definitions written out, on points that hypothesis makes up."""

import itertools
import math
import statistics

import numpy as np
import pytest

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from piebridge.core.errors import UserError  # noqa: E402
from piebridge.forge.pareto import (  # noqa: E402
    SURE,
    Candidate,
    Point,
    candidates,
    deviation_of_median,
    dominates,
    even_steps,
    float_of,
    pareto_front,
)

settings.register_profile("small", max_examples=150, deadline=None, database=None, derandomize=True)
settings.load_profile("small")
# few distinct values, so that ties are common
VALUES = st.integers(1, 12).map(lambda number: number / 4)
DEVIATIONS = st.sampled_from([0.0, 0.0, 0.05, 0.2, 0.5])


def points(deviations=DEVIATIONS):
    rows = st.lists(st.tuples(VALUES, VALUES, deviations), min_size=1, max_size=12)
    return rows.map(lambda rows: [Point(f"p{number}", *row) for number, row in enumerate(rows)])


@given(points(st.just(0.0)))
def test_without_noise_the_front_is_the_textbook_one(measured):
    """Not dominated: nobody is at least as good in both and better in one."""
    def is_beaten(point):
        return any(other.milliseconds <= point.milliseconds and other.error <= point.error
                   and (other.milliseconds, other.error) != (point.milliseconds, point.error) for other in measured)

    assert set(pareto_front(measured)) == {point for point in measured if not is_beaten(point)}


@given(points(), st.randoms())
def test_the_front_covers_all_points_whatever_their_order(measured, random):
    front = pareto_front(measured)
    shuffled = list(measured)
    random.shuffle(shuffled)
    assert pareto_front(shuffled) == front == pareto_front(front)
    assert not any(dominates(one, other) for one, other in itertools.product(front, front))
    for point in set(measured) - set(front):
        assert any(dominates(other, point) for other in front)
    assert [point.milliseconds for point in front] == sorted((point.milliseconds for point in front), reverse=True)


@given(points())
def test_dominance_is_a_strict_order(measured):
    for one, other, third in itertools.product(measured, repeat=3):
        assert not (dominates(one, other) and dominates(other, one))
        assert not (dominates(one, other) and dominates(other, third)) or dominates(one, third)


@pytest.mark.parametrize("faster, is_dominant", [(0.01, False), (0.27, False), (0.29, True), (1.0, True)])
def test_a_difference_below_the_noise_dominates_nobody(faster, is_dominant):
    slow, fast = Point("slow", 4.0, 0.3, 0.1), Point("fast", 4.0 - faster, 0.3, 0.1)
    assert SURE * math.hypot(0.1, 0.1) == pytest.approx(0.2828, abs=1e-4)
    assert dominates(fast, slow) == is_dominant
    assert not dominates(slow, fast)
    assert len(pareto_front([slow, fast])) == 2 - is_dominant


def test_what_a_float_candidate_may_be_hoped_to_be():
    """int8 takes half of the time and leaves an error of 0.3 of the original: without it 0.5 would be 0.4."""
    whole, twin = Point("224px-int8", 2.0, 0.3, 0.1), Point("160px-int8", 1.0, 0.5, 0.1)
    hoped_for = float_of("160px", twin, whole, 4.0)
    assert hoped_for == pytest.approx(("160px", 0.8 * 2.0, 0.8 * 0.4, 0.0))
    assert float_of("224px", whole, whole, 4.0) == pytest.approx(("224px", 0.8 * 4.0, 0.0, 0.0))


def with_original(measured):
    """An original that is slower and better than all of them."""
    return [Point("original", 4.0, 0.0, 0.01)] + measured


@given(points(), st.integers(1, 12), st.sampled_from([0.1, 0.2, 0.25, 0.5, 0.8]))
def test_steps_are_even_on_the_front_and_reach_the_target(measured, count, least):
    front = pareto_front(with_original(measured))
    reachable = [point for point in front if point.milliseconds <= 4 * least]
    if not reachable:
        with pytest.raises(UserError, match="no level takes at most"):
            even_steps(front, count, least)
        return
    try:
        chosen = even_steps(front, count, least)
    except UserError:  # the only reachable ones are not clearly faster than the original
        assert all(4.0 - point.milliseconds <= SURE * math.hypot(point.deviation, 0.01) for point in reachable)
        return
    assert 1 <= len(chosen) == len(set(chosen)) <= count
    assert set(chosen) <= set(front) - {front[0]} and "original" not in [point.name for point in chosen]
    assert chosen[-1].milliseconds <= 4 * least
    assert all(4.0 - point.milliseconds > SURE * math.hypot(point.deviation, 0.01) for point in chosen)
    assert chosen == sorted(chosen, key=lambda point: -point.milliseconds) or len({point.milliseconds for point in chosen}) < len(chosen)


@given(points(st.just(0.0)), st.integers(1, 12))
def test_each_step_has_the_nearest_point_of_the_front(measured, count):
    front = pareto_front(with_original(measured + [Point("last", 0.4, 3.5, 0.0)]))
    chosen = [point.milliseconds for point in even_steps(front, count, 0.2)]
    cheaper = [point.milliseconds for point in front if point.milliseconds < 4]
    for step in range(1, count):
        target = 4 * (1 - 0.8 * step / count)
        assert min(abs(each - target) for each in chosen) == min(abs(each - target) for each in cheaper)
    assert max(each for each in cheaper if each <= 0.8) in chosen


def test_steps_of_a_dense_front():
    """With something everywhere, the steps are exact: tenths of the way from 100 % down to 20 %."""
    front = pareto_front(Point(f"{number}", 10 * number / 100, 1 - number / 100, 0.0) for number in range(5, 101))
    assert [point.name for point in even_steps(front, 10, 0.2)] == ["92", "84", "76", "68", "60", "52", "44", "36", "28", "20"]


def test_a_gap_of_the_front_gives_its_levels_to_the_rest():
    """Nothing between 100 and 50 % of the time, as with int8: the eight levels lie below, halving the widest gaps."""
    front = pareto_front([Point("original", 100.0, 0.0, 0.0)] + [Point(f"{number}", float(number), 1 - number / 100, 0.0)
                                                                for number in (50, 48, 45, 40, 38, 33, 30, 25, 20, 10)])
    assert [point.name for point in even_steps(front, 8, 0.2)] == ["50", "45", "40", "38", "33", "30", "25", "20"]
    assert [point.name for point in even_steps(front, 20, 0.2)] == ["50", "48", "45", "40", "38", "33", "30", "25", "20"]


def test_among_equally_fast_points_the_best_aligned_is_taken():
    front = pareto_front([Point("original", 10.0, 0.0, 0.01), Point("worse", 5.0, 0.5, 0.3), Point("better", 5.2, 0.2, 0.3),
                          Point("last", 1.9, 0.9, 0.01)])
    assert [point.name for point in even_steps(front, 2, 0.2)] == ["better", "last"]  # the step is at 6 ms
    assert [point.name for point in even_steps(front, 8, 0.2)] == ["better", "last"]


@pytest.mark.parametrize("front, count, least, message", [
    ([], 3, 0.5, "nothing was measured"),
    ([Point("original", 4.0, 0.0, 0.0)], 0, 0.5, "count=0, least=0.5: at least one level"),
    ([Point("original", 4.0, 0.0, 0.0)], 3, 1.0, "count=3, least=1.0: at least one level"),
    ([Point("original", 4.0, 0.0, 0.0)], 3, 0.5, "no level takes at most 50 % of the original's 4 ms; the fastest takes 100 %"),
    ([Point("original", 4.0, 0.0, 0.0), Point("p", 1.0, 0.1, 0.0)], 3, 0.2,
     "no level takes at most 20 % of the original's 4 ms; the fastest takes 25 %: ask for that or more, or allow lower resolutions"),
])
def test_steps_that_cannot_be(front, count, least, message):
    with pytest.raises(UserError) as caught:
        even_steps(front, count, least)
    assert message in str(caught.value)


def test_the_deviation_of_a_median():
    """Against the medians of many samples."""
    random = np.random.RandomState(0)
    samples = random.normal(10, 2, (4000, 25))
    iqr = statistics.mean(np.subtract(*np.percentile(samples, [75, 25], axis=1)))
    assert deviation_of_median(iqr, 25) == pytest.approx(np.median(samples, axis=1).std(), rel=0.1)


def test_candidates_are_all_combinations_but_the_original():
    found = candidates(224, (1.0, 0.76), (224, 192), ("float", "int8"), (0, 1))
    assert len(found) == len(set(found)) == 2 * 2 * 2 * 2 - 1
    assert Candidate(1.0, 224, "float", 0) not in found
    assert [each.name for each in found] == [
        "224px-drop1", "224px-int8", "224px-drop1-int8", "192px", "192px-drop1", "192px-int8", "192px-drop1-int8", "p076-224px",
        "p076-224px-drop1", "p076-224px-int8", "p076-224px-drop1-int8", "p076-192px", "p076-192px-drop1", "p076-192px-int8",
        "p076-192px-drop1-int8"]
    assert candidates(224) == []
    assert candidates(224, resolutions=(160, 160)) == [Candidate(1.0, 160, "float", 0)]


@pytest.mark.parametrize("values, message", [
    ({"widths": (1.2,)}, "proxies: widths: 1.2 is not possible; give shares of the original's MACs, above 0 and at most 1"),
    ({"widths": (float("nan"),)}, "proxies: widths: nan is not possible"),
    ({"widths": ()}, "proxies: widths is empty; give shares"),
    ({"widths": (0.501, 0.502)}, "two of the widths [0.501, 0.502] give the name p050-224px; let them differ by 0.01 or more"),
    ({"resolutions": (256,)}, "proxies: resolutions: 256 is not possible; give whole pixels from 8 to the original's 224"),
    ({"resolutions": (160.5,)}, "proxies: resolutions: 160.5 is not possible"),
    ({"resolutions": ("160",)}, "proxies: resolutions: '160' is not possible"),
    ({"precisions": ("int4",)}, "proxies: precisions: 'int4' is not possible; give float, bf16, int8"),
    ({"drops": (-1,)}, "proxies: drops: -1 is not possible; give numbers of blocks, 0 or more"),
    ({"drops": (True,)}, "proxies: drops: True is not possible"),
])
def test_candidates_that_cannot_be(values, message):
    with pytest.raises(UserError) as caught:
        candidates(224, **values)
    assert message in str(caught.value)
