"""`as_released=true`, step by step, against the artifact's rules written out in plain torch."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from forge_examples import Tower, images, module_of, network_of, noisy
from pet_examples import Glance
from torch import nn

from piebridge.core.as_released import CountedValidation, FreshAdamStep, NoisyPolicy, counted_images, released_batches
from piebridge.core.capture import capture
from piebridge.core.clock import Clock
from piebridge.core.errors import UserError
from piebridge.core.gate import WholeBatchGate
from piebridge.core.labels import Labels
from piebridge.core.loop import Parts, Progress, run_loop
from piebridge.core.network import GraphNetwork, expected_shapes
from piebridge.core.policy import PolicyRouter
from piebridge.core.router import DataAwareRouter
from piebridge.core.sources import Level, LevelSource
from piebridge.core.step import EagerStep

pytestmark = pytest.mark.usefixtures("one_thread")

COUNT, LEVELS, CLASSES, BATCH, EPOCHS, SEED = 23, 3, 5, 4, 4, 7
RATE = {"head": 0.5, "adapter": 0.05}
SETTINGS = dict(kind="sgd", momentum=0.0, weight_decay=0.0, schedule="constant", label_smoothing=0.0)


@pytest.fixture(scope="module")
def world():
    """An original and two proxies with the plain modules that they stand for, images, labels and a policy; all in float64."""
    networks = [network_of(Tower())]
    networks += [noisy(networks[0], amount, seed) for amount, seed in ((0.2, 5), (0.5, 6))]
    modules = [module_of(network, Tower()) for network in networks]
    for module in modules:
        module.head = nn.Identity()
    description = capture(Glance(LEVELS), "glance", [3, 16, 16], [0.5] * 3, [0.5] * 3).description
    generator = torch.Generator().manual_seed(3)
    tensors = {key: torch.randn(shape, generator=generator, dtype=torch.float64) for key, shape in expected_shapes(description).items()}
    policy = GraphNetwork(description, tensors)
    labels = torch.randint(0, CLASSES, (COUNT,), generator=generator)
    return SimpleNamespace(networks=networks, modules=modules, images=images(COUNT), labels=labels, policy=policy,
                           weight=tensors["out.weight"], bias=tensors["out.bias"])


def parameters_of(kind):
    """Fresh trained tensors: head weight and bias, and for adapters W_down and W_up before them."""
    generator = torch.Generator().manual_seed(1)
    shapes = ([(24, 6), (6, 24)] if kind == "adapter" else []) + [(CLASSES, 24), (CLASSES,)]
    return [nn.Parameter(0.1 * torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in shapes]


def logits_of(parameters, features):
    """y = x + relu(x W_down) W_up where there are adapters, then the head."""
    for down, up in zip(parameters[:-2:2], parameters[1:-2:2]):
        features = features + torch.relu(features @ down) @ up
    return nn.functional.linear(features, *parameters[-2:])


# The artifact's rules -----------------------------------------------------------------------------------------------------

def first_levels(world):
    """argmax of the policy's logits with Gumbel noise, one row of uniform numbers for each image."""
    uniform = np.random.RandomState(SEED).rand(COUNT, LEVELS)
    found = []
    for number in range(COUNT):
        mean = world.images[number].mean(dim=(1, 2))
        noisy_logits = [float(world.weight[level] @ mean + world.bias[level]) - np.log(-np.log(uniform[number, level]))
                        for level in range(LEVELS)]
        found.append(int(np.argmax(noisy_logits)))
    return found


def reference_run(world, kind, factor):
    """[(epoch, samples, level, whether it ran backward, weights after it)] of each step, and all levels at the end."""
    parameters, trace = parameters_of(kind), []
    first, ups, average = first_levels(world), [0] * COUNT, -1
    for epoch in range(EPOCHS):
        random = np.random.RandomState((SEED * 1000003 + epoch * 7919 + 17) % 2 ** 32)
        levels = [min(level + up, LEVELS - 1) for level, up in zip(first, ups)]
        shuffled = random.permutation(COUNT)
        line = [int(sample) for level in range(LEVELS) for sample in shuffled if levels[sample] == level]
        for number in random.permutation(COUNT // BATCH):
            samples = line[number * BATCH:(number + 1) * BATCH]
            level = levels[samples[0]]
            if kind == "adapter":
                optimizer = torch.optim.Adam(parameters, lr=RATE[kind] / 10 ** level)
            else:
                optimizer = torch.optim.SGD(parameters, lr=RATE[kind])
            with torch.no_grad():
                features = world.modules[level](world.images[samples])
            loss = nn.CrossEntropyLoss()(logits_of(parameters, features), world.labels[samples])
            runs = loss.item() > factor * average
            if runs:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            else:
                for sample in samples:
                    ups[sample] += 1
            average = loss.item() if average == -1 else 2 / 11 * loss.item() + 9 / 11 * average
            trace.append((epoch, samples, level, runs, [parameter.detach().clone() for parameter in parameters]))
    return trace, [min(level + up, LEVELS - 1) for level, up in zip(first, ups)]


# The same with the loop's objects -----------------------------------------------------------------------------------------

class Trained:
    """The contract of core/tuning.py on the tensors of `parameters_of`; `start`: (inputs, level) -> features."""

    def __init__(self, parameters, start):
        self._parameters, self._start = parameters, start

    def parameters(self):
        return self._parameters

    def state(self):
        return {str(number): parameter for number, parameter in enumerate(self._parameters)}

    def __call__(self, inputs, level=0):
        return logits_of(self._parameters, self._start(inputs, level))


class Recorder:
    """A step that remembers what it was given and what came of it."""

    def __init__(self, step):
        self._step, self.trainable, self.trace, self.end_epoch = step, step.trainable, [], step.end_epoch

    def __call__(self, inputs, labels, gate, progress, level=0):
        losses, is_selected = self._step(inputs, labels, gate, progress, level)
        assert is_selected is None or not bool(is_selected.any())  # the whole batch, or none of it
        weights = [parameter.detach().clone() for parameter in self.trainable.parameters()]
        self.trace.append((level, is_selected is None, weights))
        return losses, is_selected


class MemoryLoader:
    def __init__(self, stored):
        self._stored, self.asked = stored, []

    def batches(self, index_lists, view_seed=None):
        for indices in index_lists:
            self.asked.append(indices)
            yield indices, self._stored[indices]


def parts_of(world, kind, factor):
    def features(images, level):
        with torch.no_grad():
            return world.networks[level].features(images)

    loader = MemoryLoader(world.images)
    if kind == "adapter":  # the trainable part starts at the images, and has a way through each network
        trainable, segments = Trained(parameters_of(kind), features), [None] * LEVELS
    else:
        trainable = Trained(parameters_of(kind), lambda inputs, level: inputs)
        segments = [lambda images, level=level: features(images, level) for level in range(LEVELS)]
    levels = [Level(str(number), loader, segment, number=number if kind == "adapter" else 0)
              for number, segment in enumerate(segments)]
    source = LevelSource(levels, list(range(COUNT)), lambda epoch: None, torch.device("cpu"), Clock())
    policy = NoisyPolicy(PolicyRouter(world.policy, LEVELS), COUNT, SEED)
    routing = np.concatenate([policy(world.images[start:start + 8], list(range(start, min(start + 8, COUNT))))
                              for start in range(0, COUNT, 8)])
    settings = SimpleNamespace(lr=RATE[kind], **SETTINGS)
    step = Recorder((FreshAdamStep if kind == "adapter" else EagerStep)(trainable, settings))
    parts = Parts(source=source, step=step, gate=WholeBatchGate(factor, 9 / 11), router=DataAwareRouter(routing, LEVELS - 1),
                  labels=Labels(world.labels), validate=lambda trainable: (None, None), settings=settings, epochs=EPOCHS, batch_size=BATCH,
                  seed=SEED, batches=released_batches)
    return parts, loader


def run(parts):
    checkpoints = SimpleNamespace(due=lambda: False, save=lambda is_epoch_end=False: None)
    interrupt = SimpleNamespace(signal_name=None, check=lambda: None)
    run_loop(parts, Progress(), {}, Clock(), checkpoints, interrupt)


@pytest.mark.parametrize("factor", [0.8, 1.1, -1])
@pytest.mark.parametrize("kind", ["head", "adapter"])
def test_each_step_is_the_artifacts(world, kind, factor):
    expected, last_levels = reference_run(world, kind, factor)
    parts, loader = parts_of(world, kind, factor)
    run(parts)
    assert len(parts.step.trace) == len(loader.asked) == len(expected) == EPOCHS * (COUNT // BATCH)
    for (level, runs, weights), asked, (_, samples, wanted_level, wanted_runs, wanted_weights) in zip(
            parts.step.trace, loader.asked, expected):
        assert (asked, runs) == (samples, wanted_runs)
        assert level == (wanted_level if kind == "adapter" else 0)
        for found, wanted in zip(weights, wanted_weights):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)
    assert parts.router.levels.tolist() == last_levels


def test_the_reference_meets_what_it_is_to_show(world):
    """Batches of several levels, skipped ones, samples that go up, data left out: the parity above is about something."""
    first = first_levels(world)
    assert set(first) == {0, 1, 2}
    trace, last = reference_run(world, "head", 1.1)
    assert any(len({first[sample] for sample in samples}) > 1 for epoch, samples, *_ in trace if epoch == 0)
    assert {runs for _, _, _, runs, _ in trace} == {True, False}
    assert last != first and all(after >= before for after, before in zip(last, first))
    assert {level for _, _, level, _, _ in trace} == {0, 1, 2}
    assert all(runs for _, _, _, runs, _ in reference_run(world, "head", -1)[0])


# Each rule by itself ------------------------------------------------------------------------------------------------------

def test_noise_draws_levels_by_the_policys_softmax():
    logits = torch.tensor([[0.5, -0.3, 1.0]], dtype=torch.float64)
    policy = SimpleNamespace(size=8, network=SimpleNamespace(head=nn.Linear(1, 3)), logits=lambda images: logits.expand(len(images), 3))
    count = 20000
    levels = NoisyPolicy(policy, count, 0)(torch.zeros(count, 3, 8, 8), list(range(count)))
    shares = np.bincount(levels, minlength=3) / count
    np.testing.assert_allclose(shares, torch.softmax(logits[0], 0).numpy(), atol=0.012)  # 3.5 deviations of a share of one half


def test_a_samples_noise_depends_on_seed_and_sample_alone(world):
    router = PolicyRouter(world.policy, LEVELS)
    whole = NoisyPolicy(router, COUNT, SEED)(world.images, list(range(COUNT)))
    assert whole.tolist() == first_levels(world)
    odd = list(range(1, COUNT, 2))
    assert NoisyPolicy(router, COUNT, SEED)(world.images[odd], odd).tolist() == whole[odd].tolist()
    assert NoisyPolicy(router, COUNT, SEED + 1)(world.images, list(range(COUNT))).tolist() != whole.tolist()


def test_batches_are_whole_mixed_at_the_borders_and_in_random_order():
    levels = np.array([0] * 5 + [1] * 5 + [2] * 5)
    batches = released_batches(15, 4, seed=1, epoch=0, levels=levels)
    assert len(batches) == 3 and all(len(batch) == 4 for batch in batches)
    assert sorted(tuple(levels[batch]) for batch in batches) == [(0, 0, 0, 0), (0, 1, 1, 1), (1, 1, 2, 2)]
    missing = set(range(15)) - {index for batch in batches for index in batch}
    assert [levels[index] for index in missing] == [2, 2, 2]  # the tail: of the cheapest level
    orders = {tuple(levels[batch[0]] + levels[batch[-1]] for batch in released_batches(15, 4, 1, epoch, levels)) for epoch in range(12)}
    assert len(orders) > 2
    assert batches == released_batches(15, 4, 1, 0, levels)
    with pytest.raises(UserError, match="3 training images do not fill a batch of 4"):
        released_batches(3, 4, 1, 0)


def test_a_gate_with_factor_minus_one_passes_all_but_a_small_first_loss():
    gate = WholeBatchGate(-1.0, 9 / 11)
    select, none = gate.select(torch.tensor([0.5, 0.9]))
    assert select.tolist() == [False, False] and none is None
    assert gate.select(torch.tensor([0.0, 0.1])) is None
    gate = WholeBatchGate(-1.0, 9 / 11)
    assert gate.select(torch.tensor([3.0, 0.9])) is None


def test_the_gates_state_is_all_of_it():
    gate, other = WholeBatchGate(1.0, 0.5), WholeBatchGate(1.0, 0.5)
    gate.select(torch.tensor([2.0]))
    other.restore(gate.state())
    assert gate.state() == {"average": 2.0}
    for each in (gate, other):
        assert each.select(torch.tensor([1.0]))[0].tolist() == [False]
        assert each.state() == {"average": 1.5}


@pytest.mark.parametrize("count, counted", [(0, 0), (3, 0), (4, 4), (11, 8)])
def test_the_last_test_images_are_dropped_and_counted(count, counted):
    kept, share = counted_images(list(range(count)))
    assert kept == list(range(counted)) and share == (counted / count if count else 1.0)


def test_a_dropped_test_image_counts_as_wrong():
    validation = SimpleNamespace(prepare=lambda: None)
    found = CountedValidation(lambda trainable: (0.75, 0.5), 8 / 11)(None)
    assert found == (pytest.approx(6 / 11), 0.5)
    assert CountedValidation(lambda trainable: (None, None), 1.0)(None) == (None, None)
    CountedValidation(validation, 1.0).prepare()
