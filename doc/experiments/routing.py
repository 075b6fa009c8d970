"""What routing earns: a learned policy and a conformal residual predictor, against single levels and against lots at equal cost.

    python doc/experiments/routing.py [DATA [EPOCHS [SEEDS [IMAGES]]]]     default Openclipart 20 2, all images; four minutes on two cores

Training images only, IMAGES of them at most: a share fits the bridge maps, one trains the router, the rest is routed. `error` is the
mean square of the residual at the head's tap; `lots` is the least error that drawing levels by lot has at the same cost (the lower hull
of the single levels, so no single level is better either); `earned` is the share of that error which the router takes away, its own
cost counted, and in brackets if it were free. Accuracies are of a head that is trained on the routed features and tested, moved to the
original, on test images.
"""

import statistics
import sys
import time
from types import SimpleNamespace

import numpy as np
import torch
from features import BATCH, features, images, open_part, original
from torch import nn

from piebridge.core import backends
from piebridge.core.bridge_map import fit_bridge_map
from piebridge.core.difficulty import ResidualRouter, fit_residual_predictor, relative_residuals
from piebridge.core.gate import OpenGate
from piebridge.core.policy import PolicyRouter
from piebridge.core.proxies import parse_spec
from piebridge.core.sampler import epoch_batches
from piebridge.core.step import EagerStep, evaluate
from piebridge.forge.policy_network import check_policy_costs, make_policy
from piebridge.forge.policy_training import PolicySettings, train_policy

LADDERS = (("192px", "160px", "96px"), ("224px-int8", "160px-int8", "96px-int8"), ("224px-int8", "160px", "96px"))
MAPS, ROUTERS = 0.15, 0.5  # shares of the training images
WEIGHTS = (0.3, 0.5, 0.7, 1.0, 1.4)  # lambda: the error that one pass of the original is worth
ACCURATE = (0.5, 1.0)  # those of which accuracies are measured
HEAD_SEEDS = range(3)


def milliseconds(run, batch, repeats=15):
    """Per image, median."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run(batch)
        seconds.append(time.perf_counter() - start)
    return 1000 * statistics.median(seconds) / len(batch)


def all_levels(network, samples, names):
    """(features {name: float32 [n, D]}, ms per image {name}); "original" among them."""
    found, costs = {}, {}
    for name in ("original",) + names:
        spec = parse_spec("224px" if name == "original" else name)
        backend = "openvino_int8" if spec.precision == "int8" else "openvino"
        segment = backends.build_segment(backend, network, spec.resolution, BATCH)
        costs[name] = milliseconds(segment, torch.randn(BATCH, 3, spec.resolution, spec.resolution))
        found[name] = features(network, samples, spec.resolution, backend)
    return found, costs


def hull(scores, errors, cost):
    """Least error of a mixture of two levels with this mean cost."""
    cost, best = min(max(cost, min(scores)), max(scores)), np.inf
    for cheap in range(len(scores)):
        for dear in range(len(scores)):
            if scores[cheap] <= cost <= scores[dear]:
                share = 0.0 if scores[dear] == scores[cheap] else (cost - scores[cheap]) / (scores[dear] - scores[cheap])
                best = min(best, share * errors[dear] + (1 - share) * errors[cheap])
    return best


class Ladder:
    """The features of the routed images at all levels, what each leaves, and what each costs."""

    def __init__(self, found, costs, names, labels, test):
        self.names, count = ("original",) + names, len(labels)
        maps, trained = int(MAPS * count), int((MAPS + ROUTERS) * count)
        wanted = found["original"]
        bridged = [wanted] + [fit_bridge_map(found[name][:maps], wanted[:maps])[0](found[name]) for name in names]
        self.features = np.stack(bridged, axis=1).astype(np.float32)  # [n, N + 1, D]
        self.residuals = np.stack([relative_residuals(each, wanted) for each in bridged[1:]], axis=1)
        self.original_milliseconds = costs["original"]
        self.scores = np.array([costs[name] / costs["original"] for name in self.names])
        self.training, self.routed = slice(maps, trained), slice(trained, count)
        self.labels, self.test = torch.tensor(labels), test
        lost = np.concatenate([np.zeros((count, 1)), self.residuals], axis=1)[self.routed] ** 2
        self.lost, self.errors = lost, lost.mean(0)
        levels = zip(self.names, self.scores, self.errors)
        print("  ".join(f"{name} {score:.2f} / {error:.3f}" for name, score, error in levels), flush=True)

    def row(self, name, levels, own_cost, with_accuracy=False):
        """own_cost: of the router, per image, relative to the original."""
        cost, error = self.scores[levels].mean() + own_cost, self.lost[np.arange(len(levels)), levels].mean()
        lots, lots_if_free = self.by_lot(cost), self.by_lot(cost - own_cost)
        shares = " ".join(f"{share:.2f}" for share in np.bincount(levels, minlength=len(self.scores)) / len(levels))
        earned, earned_if_free = (f"{100 * (1 - error / each):+.0f} %" if each > 1e-6 else "-" for each in (lots, lots_if_free))
        text = (f"{name:47s} levels {shares}  cost {cost:.3f}  error {error:.4f}  lots {lots:.4f}  earned {earned:>7s} "
                f"({earned_if_free})")
        if with_accuracy:
            drawn = np.random.RandomState(0).permutation(levels)
            text += f"  accuracy {self.accuracy(levels)}, the same shares by lot {self.accuracy(drawn)}"
        print(text, flush=True)

    def by_lot(self, cost):
        return hull(self.scores, self.errors, cost)

    def accuracy(self, levels):
        routed = torch.from_numpy(self.features[self.routed][np.arange(len(levels)), levels])
        results = [head_accuracy(routed, self.labels[self.routed], *self.test, seed) for seed in HEAD_SEEDS]
        return f"{100 * statistics.mean(results):.1f} +- {100 * statistics.stdev(results):.1f}"


class Head(nn.Linear):
    def forward(self, inputs, level=0):
        return super().forward(inputs)


def head_accuracy(inputs, labels, test_inputs, test_labels, seed, epochs=12, batch_size=8):
    torch.manual_seed(seed)
    head = Head(inputs.shape[1], int(max(labels.max(), test_labels.max())) + 1)
    nn.init.normal_(head.weight, std=0.01)
    nn.init.zeros_(head.bias)
    step = EagerStep(head, SimpleNamespace(kind="adamw", lr=2e-3, weight_decay=0.01, schedule="cosine", label_smoothing=0.1))
    for epoch in range(epochs):
        batches = epoch_batches(len(inputs), batch_size, seed, epoch)
        for number, batch in enumerate(batches):
            step(inputs[batch], labels[batch], OpenGate(), (epoch + number / len(batches)) / epochs)
    return evaluate(head, [(test_inputs, test_labels)])[0]


def policies(ladder, network, samples, epochs, seeds):
    """The paper's policy at several prices of a pass; of one the accuracy."""
    count = len(ladder.names)
    policy = make_policy(network, count)
    facts = check_policy_costs(policy, network)
    size = policy.description["input_size"][-1]
    small = images(policy, samples, size)
    segment = backends.build_segment("openvino", policy, size, BATCH)
    own = milliseconds(PolicyRouter(policy, count, segment), small[:BATCH]) / ladder.original_milliseconds
    print(f"policy: {size} px, {100 * facts['mac_share']:.2f} % of the MACs, {100 * facts['parameter_share']:.2f} % of the parameters, "
          f"{100 * own:.2f} % of the time", flush=True)
    given = small[ladder.training], torch.from_numpy(ladder.features[ladder.training]), ladder.scores
    for weight in WEIGHTS:
        for seed in range(seeds):
            policy = make_policy(network, count, seed)
            start = time.perf_counter()
            trained = train_policy(policy, *given, PolicySettings(cost_weight=weight, epochs=epochs, seed=seed))
            seconds = time.perf_counter() - start
            levels = PolicyRouter(policy, count)(small[ladder.routed])
            ladder.row(f"policy, lambda {weight:g}, seed {seed}, {seconds:.0f} s", levels, own, seed == 0 and weight in ACCURATE)
            lots = hull(ladder.scores, trained["level_losses"], trained["relative_cost"])
            print(f"    on the images that it was trained on: error {trained['task_loss']:.4f}, lots {lots:.4f}", flush=True)


def predictors(ladder):
    """Ours, from the cheapest proxy's features, which every image then has to pass."""
    cheapest = ladder.features[:, -1]
    middle = (ladder.training.start + 2 * ladder.training.stop) // 3
    fit, held = slice(ladder.training.start, middle), slice(middle, ladder.training.stop)
    predictor, _ = fit_residual_predictor(cheapest[fit], ladder.residuals[fit], held_back=(cheapest[held], ladder.residuals[held]))
    predicted = predictor(cheapest[ladder.routed])
    truth = ladder.residuals[ladder.routed]
    print("correlation of predicted and true log residuals: "
          + " ".join(f"{np.corrcoef(np.log(predicted[:, level]), np.log(truth[:, level]))[0, 1]:.2f}" for level in range(truth.shape[1]))
          + f"; bound at delta 0.1 exceeded for {100 * (truth > predictor.bound(predicted, 0.1)).any(1).mean():.1f} % of the images")

    def row(name, levels, with_accuracy):
        passes = (levels != truth.shape[1]).mean() * ladder.scores[-1]  # the cheapest proxy's, where another level serves
        ladder.row(name, levels, passes, with_accuracy)

    for delta in (0.1, 0.5):
        for level in range(1, truth.shape[1] + 1):  # half of the images may use this level
            tolerance = float(np.median(predictor.bound(predicted, delta)[:, level - 1]))
            levels = ResidualRouter(predictor, tolerance, delta).levels(predicted)
            wrong = (levels > 0) & (truth[np.arange(len(levels)), levels - 1] > tolerance)
            row(f"residual, delta {delta:g}, tolerance {tolerance:.2f}, {100 * wrong.mean():.1f} % wrong", levels, delta == 0.1)
    for weight in WEIGHTS:
        dearness = np.concatenate([np.zeros((len(predicted), 1)), predicted ** 2], axis=1) + weight * ladder.scores
        row(f"residual, no tolerance but lambda {weight:g}", np.argmin(dearness, axis=1), weight in ACCURATE)


def oracle(ladder):
    for weight in WEIGHTS:
        ladder.row(f"the true residuals, lambda {weight:g}", np.argmin(ladder.lost + weight * ladder.scores, axis=1), 0.0)


def main(data="Openclipart", epochs="20", seeds="2", count=None):
    network = original()
    samples, test = (open_part(data, part)[:count and int(count)] for part in ("train", "test"))
    found, costs = all_levels(network, samples, tuple(sorted({name for names in LADDERS for name in names})))
    tested = torch.from_numpy(features(network, test)), torch.tensor([each.label for each in test])
    torch.set_num_threads(1)  # for networks this small a second thread saves little, and anything else that runs costs it much
    for names in LADDERS:
        print(f"\n{data}, {len(samples)} images; level cost / error", flush=True)
        ladder = Ladder(found, costs, names, [each.label for each in samples], tested)
        print(f"accuracy of the original's features: {ladder.accuracy(np.zeros(len(ladder.lost), dtype=int))}", flush=True)
        oracle(ladder)
        predictors(ladder)
        policies(ladder, network, samples, int(epochs), int(seeds))


if __name__ == "__main__":
    main(*sys.argv[1:])
