"""The search from end to end on a narrow network: the budget holds, the choice is the best one, and nothing is measured twice."""

import itertools

import pytest
import torch
from search_examples import Biasless, Narrow, image_batches, kept_inputs, way_down

from piebridge.core.errors import UserError
from piebridge.engine.contribution import ShortRuns, fisher, worth
from piebridge.engine.knapsack import Choice
from piebridge.engine.layers import layers_of
from piebridge.engine.losses import cross_entropy, smoothed
from piebridge.engine.remembered import Remembered, batches_hash, module_hash, name_of
from piebridge.engine.scheme import Scheme
from piebridge.engine.search import SearchSettings, search
from piebridge.engine.search_space import SearchSpace

KIB = 1024


def peak(layers, parts):
    """Not additive: the largest gradient counts once, and what the forward takes anyhow is free."""
    gradient = max(4 * torch.Size(layer.shape).numel() for layer in layers if layer.weight in parts)
    return max(24 * KIB, way_down(layers, parts) + kept_inputs(layers, parts) + gradient)


def sum_of(layers, parts):
    return way_down(layers, parts) + kept_inputs(layers, parts)


def found(budget, memory=peak, module=None, settings=None, folder=False, **given):
    module = module or Narrow()
    batches = image_batches()
    layers = layers_of(module, batches[0][0])
    result = search(module, cross_entropy, batches, budget, lambda parts: memory(layers, parts), settings=settings, folder=folder, **given)
    return module, layers, result


@pytest.mark.parametrize("method", ["knapsack", "evolution"])
@pytest.mark.parametrize("budget", [26 * KIB, 40 * KIB, 80 * KIB, 1024 * KIB])
def test_the_written_scheme_is_within_the_budget(method, budget):
    module, layers, result = found(budget, settings=SearchSettings(method=method))
    parts = Scheme.read(result.scheme.text()).resolve(module, image_batches()[0][0])
    assert list(parts) == list(result.parts)
    assert peak(layers, parts) == result.planned_bytes <= budget
    assert result.report["planned_bytes"] == result.planned_bytes and result.report["planner_calls"] <= 6 + 12 + 12


def test_of_all_schemes_within_the_budget_it_is_the_one_worth_most():
    """On a sum, where the model is the truth, so that nothing excuses a lesser one."""
    settings = SearchSettings(ratios=(1,))
    for budget in (12 * KIB, 30 * KIB, 60 * KIB):
        module, layers, result = found(budget, sum_of, settings=settings)
        scores = fisher(module, cross_entropy, image_batches())
        space = SearchSpace(module, image_batches()[0][0], (1,))
        values = []
        for depth, known in enumerate(space.depths):
            for tail in itertools.product((0, 1), repeat=len(space.items) - known.first):
                parts = space.parts(Choice(depth, (0,) * known.first + tail))
                if sum_of(layers, parts) <= budget:
                    values.append(sum(worth(scores, parts).values()))
        assert sum(worth(scores, result.parts).values()) >= (1 - 1e-9) * max(values)


def test_what_lies_below_the_peak_anyhow_is_used():
    """The forward takes 24 KiB; the model alone would leave that room to nothing."""
    _, layers, result = found(24 * KIB)
    assert way_down(layers, result.parts) + kept_inputs(layers, result.parts) > 16 * KIB


def test_a_larger_budget_is_worth_no_less():
    values = [found(budget * KIB)[2].report["value"] for budget in (25, 30, 45, 70, 200, 2000)]
    assert values == sorted(values)
    everything = found(2000 * KIB)[2]
    assert all(row["ratio"] == "1" for row in everything.report["layers"])


def test_a_budget_that_cannot_be_met_names_the_least_that_can():
    with pytest.raises(UserError) as error:
        found(20 * KIB)
    assert str(error.value) == ("engine: search: a budget of 20 KiB cannot be met: the least, training head.weight, head.bias, takes "
                                "24 KiB; give 24KiB or more, or a smaller batch or image")
    _, _, result = found(24 * KIB)
    assert result.planned_bytes <= 24 * KIB


def milliseconds_by(table):
    layers = layers_of(Narrow(), image_batches()[0][0])

    def milliseconds_of(parts):
        return 1.0 + sum(table.get(layer.path, 0.5) for layer in layers if layer.weight in parts)

    return milliseconds_of


@pytest.mark.parametrize("method", ["knapsack", "evolution"])
def test_a_latency_limit_holds_and_steers(method):
    settings = SearchSettings(method=method)
    unlimited = found(200 * KIB, settings=settings)[2]
    assert unlimited.parts["blocks.0.0.weight"].is_whole
    slow = milliseconds_by({"blocks.0.0": 50.0})
    result = found(200 * KIB, settings=settings, latency=6.0, milliseconds_of=slow)[2]
    assert slow(result.parts) == result.milliseconds <= 6.0 and result.planned_bytes <= 200 * KIB
    assert "blocks.0.0.weight" not in result.parts and len(result.parts) > 4
    with pytest.raises(UserError, match=r"a latency of 0.5 ms cannot be met: the least, training head.weight, head.bias, takes 1.5 ms"):
        found(200 * KIB, settings=settings, latency=0.5, milliseconds_of=slow)


def test_contributions_are_measured_once(tmp_path):
    first = found(40 * KIB, folder=tmp_path)[2]
    again = found(60 * KIB, folder=tmp_path)[2]
    assert [first.report[name] for name in ("measured", "remembered")] == [1, 0]
    assert [again.report[name] for name in ("measured", "remembered")] == [0, 1]
    changed = Narrow()
    with torch.no_grad():
        changed.head.weight[0, 0] += 1
    assert found(40 * KIB, folder=tmp_path, module=changed)[2].report["measured"] == 1
    for path in tmp_path.glob("*.safetensors"):
        path.write_bytes(b"spoilt")
    assert found(40 * KIB, folder=tmp_path)[2].report["measured"] == 1


def test_short_runs_decide_by_accuracy_and_go_on_where_they_were_stopped(tmp_path):
    settings = SearchSettings(contribution="runs", channels="magnitude", ratios=(1,))
    validation, seen = image_batches(1, 8, seed=5), []

    class Stopped(Exception):
        pass

    class Runs(ShortRuns):
        def accuracy(self, parts):
            seen.append(tuple(parts))
            if len(seen) == 5:
                raise Stopped
            return 0.9 if "blocks.1.3.weight" in parts else 0.5

    def run():
        module = Narrow()
        return found(60 * KIB, module=module, settings=settings, folder=tmp_path,
                     runs=Runs(module, cross_entropy, image_batches(), validation))[2]

    with pytest.raises(Stopped):
        run()
    result = run()
    assert "blocks.1.3.weight" in result.parts and result.report["value"] == pytest.approx(0.4)
    assert len(seen) == len(set(seen)) + 1  # only the one that was stopped ran twice
    before = len(seen)
    assert run().report["measured"] == 0 and len(seen) == before


def test_a_network_without_biases_and_head():
    module, example = Biasless(), torch.randn(4, 16)
    layers = layers_of(module, example)
    batches = [(example, torch.tensor([0, 1, 2, 3]))]
    result = search(module, cross_entropy, batches, 600, lambda parts: sum_of(layers, parts), folder=False)
    assert 0 < len(result.parts) and sum_of(layers, result.parts) <= 600
    with pytest.raises(UserError, match=r"a budget of 10 bytes cannot be met: the least, training blocks.2.0.weight, takes 48 bytes"):
        search(module, cross_entropy, batches, 10, lambda parts: sum_of(layers, parts), folder=False)


def test_settings_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match=r"method='knapsak' \(did you mean 'knapsack'\?\); known: knapsack, evolution"):
        SearchSettings(method="knapsak")
    with pytest.raises(UserError, match="give latency and milliseconds_of together"):
        found(40 * KIB, latency=3.0)
    with pytest.raises(UserError, match="no batches to measure contributions on"):
        search(Narrow(), cross_entropy, [], 1, None)


def test_names_and_hashes_are_by_content(tmp_path):
    assert module_hash(Narrow()) == module_hash(Narrow()) != module_hash(Narrow(has_bias=False))
    assert batches_hash(image_batches()) == batches_hash(image_batches()) != batches_hash(image_batches(seed=2))
    assert name_of(smoothed(0.1)) == "piebridge.engine.losses.cross_entropy(label_smoothing=0.1)"
    (tmp_path / "file").write_text("in the way")
    kept = Remembered({"a": 1}, tmp_path / "file")
    assert kept.value("x", lambda: 3) == 3 == kept.value("x", lambda: 4)
