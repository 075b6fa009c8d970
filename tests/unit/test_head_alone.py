"""The head trained alone at the end: it is kept where it is better on validation, and nowhere else."""

from types import SimpleNamespace

import pytest
import torch
from pet_examples import family, settings

from piebridge.core import head_alone
from piebridge.core.clock import Clock
from piebridge.core.loop import Progress
from piebridge.core.tuning import Tuning

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("kind", ["head", "adapter"])
@pytest.mark.parametrize("before, after, is_kept", [((0.5, 1.0), (0.6, 1.1), True), ((0.5, 1.0), (0.5, 0.9), True),
                                                    ((0.5, 1.0), (0.5, 1.1), False), ((0.5, 1.0), (0.4, 0.1), False)])
def test_the_new_head_is_kept_where_it_is_better(monkeypatch, kind, before, after, is_kept):
    def train(work, name, epochs):
        assert (name, epochs) == ("head_last", 4)
        with torch.no_grad():
            work.network.head.weight.fill_(7.0)
        return SimpleNamespace(validate=_Judge(after), step=SimpleNamespace(trainable=None))

    monkeypatch.setattr(head_alone, "_train", train)
    monkeypatch.setattr(head_alone.dataclasses, "replace", lambda work, **changes: SimpleNamespace(**dict(vars(work), **changes)))
    tuning = Tuning(family("tower"), settings(kind))
    old, progress = tuning.head.weight.detach().clone(), Progress(best_accuracy=before[0], best_loss=before[1])
    work = SimpleNamespace(config=SimpleNamespace(pet=SimpleNamespace(head_last=4)), device=torch.device("cpu"), clock=Clock())
    head_alone.train_head_last(work, tuning, progress)
    new = tuning.bridged().head.weight
    assert torch.equal(new, torch.full_like(new, 7.0) if is_kept else old)
    assert (progress.best_accuracy, progress.best_loss) == (after if is_kept else before)


class _Judge:
    def __init__(self, verdict):
        self._verdict = verdict

    def prepare(self):
        """Nothing to compute beforehand."""

    def __call__(self, trainable):
        return self._verdict
