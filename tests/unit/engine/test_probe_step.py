"""The race among executors, on a clock that the test winds."""

import json

import pytest
import torch
from backend_examples import PARTS, example, small
from engine_reference import tensors_of

from piebridge.engine.capture import capture
from piebridge.engine.interpreter import Interpreter
from piebridge.engine.losses import cross_entropy
from piebridge.engine.probe_step import Candidate, Trial, probe
from piebridge.engine.step_graph import STATE, TRAINED
from piebridge.engine.update_rules import AdamW


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Timed:
    """The interpreter, which takes as long on the clock as the test says, and changes what it trained by `wrong`."""

    def __init__(self, step, tensors, clock, seconds, wrong=None):
        self.inner, self.tensors, self.clock, self.seconds, self.wrong = Interpreter(step, tensors), tensors, clock, seconds, wrong

    def run(self, *arguments):
        self.clock.now += self.seconds
        results = self.inner.run(*arguments)
        if self.wrong:
            key, number = self.wrong
            self.tensors[key].add_(number)
        return results


@pytest.fixture
def job():
    """(step, tensors, batch) of a trained part with AdamW."""
    module = small()
    step = capture(module, cross_entropy, AdamW(), PARTS, example())
    return step, tensors_of(step, module), list(example())


def race(job, seconds, wrong=None, **options):
    """Outcome of a probe among interpreters that take so many seconds: {name: seconds}."""
    step, tensors, batch = job
    clock = Clock()

    def building(name):
        def make(own):
            clock.now += 10
            return Timed(step, own, clock, seconds[name], (wrong or {}).get(name))
        return make
    entered = [Candidate(name, building(name)) for name in seconds]
    options.setdefault("budget_seconds", 1000)
    return probe(Trial("whole", step, tensors, batch, torch.full((4,), 0.25)), entered, clock=clock, **options)


def verdicts(outcome):
    return {each["candidate"]: each["verdict"] for each in outcome.measurements}


def test_the_fastest_wins_and_all_are_recorded(job):
    outcome = race(job, {"reference": 0.3, "quick": 0.1, "middling": 0.2})
    assert outcome.candidate == "quick" and outcome.milliseconds == pytest.approx(100)
    assert verdicts(outcome) == {"reference": "agrees", "quick": "fastest", "middling": "agrees"}
    assert outcome.measurements[1] == {"part": "whole", "candidate": "quick", "verdict": "fastest", "milliseconds": 100.0, "error": 0.0,
                                       "build_seconds": 10.1}
    json.dumps(outcome.measurements)


def test_one_that_is_wrong_is_refused_with_its_error(job):
    step, tensors, _ = job
    scale = float(tensors[TRAINED, "9.weight"].norm())
    outcome = race(job, {"reference": 0.3, "wrong": 0.1}, wrong={"wrong": ((TRAINED, "9.weight"), scale)}, tolerance=1e-3)
    assert outcome.candidate == "reference"
    verdict = verdicts(outcome)["wrong"]
    assert verdict.startswith("refused: its new trained 9.weight differs by ") and verdict.endswith(", more than the tolerance 0.001")
    note = outcome.measurements[1]
    assert note["error"] > 1e-3 and note["milliseconds"] is None


def test_an_update_is_held_against_itself_and_not_against_the_weight(job):
    """A hundredth of an update is nothing beside its weight, and still an error of 0.01."""
    step, tensors, batch = job
    exact = race(job, {"reference": 0.3})
    before = tensors[TRAINED, "5.weight"].clone()
    assert torch.equal(exact.tensors[TRAINED, "5.weight"], before)
    outcome = race(job, {"reference": 0.3, "wrong": 0.1}, wrong={"wrong": ((TRAINED, "5.weight"), 1e-4 * float(before.abs().mean()))})
    assert "5.weight" in verdicts(outcome)["wrong"]


def test_one_that_gives_no_number_is_refused(job):
    outcome = race(job, {"reference": 0.3, "wrong": 0.1}, wrong={"wrong": ((STATE, "9.bias/mean"), float("nan"))})
    assert verdicts(outcome)["wrong"] == "refused: its new state 9.bias/mean differs by inf, more than the tolerance 0.001"
    assert outcome.measurements[1]["error"] is None


def test_missing_packages_failures_and_rounding_are_named(job):
    step, tensors, batch = job

    def failing(own):
        raise RuntimeError("no such kernel\nand more")

    def never(own):
        raise AssertionError("must not be built")
    entered = [Candidate("interpreter", lambda own: Interpreter(step, own)), Candidate("missing", never, packages=("no_such_library",)),
               Candidate("failing", failing), Candidate("rounded", never, rounding=2.0 ** -8), Candidate("hindered", never, hindrance="no")]
    outcome = probe(Trial("whole", step, tensors, batch, torch.full((4,), 0.25)), entered)
    assert verdicts(outcome) == {
        "interpreter": "fastest", "missing": "not installed: no_such_library", "failing": "refused: no such kernel",
        "rounded": "refused: its numbers are rounded to 0.0039, more than the tolerance 0.001", "hindered": "no"}


def test_a_spent_budget_ends_the_trying(job):
    outcome = race(job, {"reference": 0.3, "quick": 0.1, "late": 0.01}, budget_seconds=15)
    assert verdicts(outcome)["late"] == "not tried: takes about 0 s to build, and 0 s are left for it"
    assert outcome.candidate == "quick"


def test_a_candidate_that_takes_longer_to_build_than_is_left_is_not_tried(job):
    step, tensors, batch = job
    entered = [Candidate("interpreter", lambda own: Interpreter(step, own)), Candidate("slow", None, build_seconds=60.0)]
    outcome = probe(Trial("whole", step, tensors, batch, torch.full((4,), 0.25)), entered, budget_seconds=20, clock=Clock())
    assert verdicts(outcome)["slow"] == "not tried: takes about 60 s to build, and 20 s are left for it"


def test_the_live_tensors_stay_as_they_are(job):
    step, tensors, _ = job
    before = {key: tensor.clone() for key, tensor in tensors.items()}
    outcome = race(job, {"reference": 0.3, "quick": 0.1})
    for key, tensor in before.items():
        assert torch.equal(tensors[key], tensor)
        assert torch.equal(outcome.tensors[key], tensor)
    assert outcome.tensors[TRAINED, "9.weight"] is not tensors[TRAINED, "9.weight"]
