"""Batch size, rate and gate for a head on cached int8 features: best validation accuracy, mean over seeds. Never touches test images.

    python doc/experiments/head_settings.py [DATA ...]        default Clipart10 Openclipart; three minutes on two cores
"""

import statistics
import sys
import time
from types import SimpleNamespace

import torch
from features import features, open_part, original
from torch import nn

from piebridge.core.gate import LossGate, OpenGate
from piebridge.core.sampler import epoch_batches
from piebridge.core.step import EagerStep, evaluate

EPOCHS, SEEDS = 12, range(10, 15)
SETTINGS = [(4, 1e-3), (8, 1e-3), (8, 2e-3), (8, 3e-3), (16, 2e-3), (16, 3e-3), (16, 5e-3)]


class ClosingGate(LossGate):
    """The loss gate, open in the last quarter of the run."""

    epoch = 0

    def select(self, losses, indices=None):
        chosen = super().select(losses)
        return None if self.epoch >= 0.75 * EPOCHS else chosen


class Head(nn.Linear):
    def forward(self, inputs, level=0):
        return super().forward(inputs)


GATES = {"none": OpenGate, "loss": lambda: LossGate(0.8), "loss, closing": lambda: ClosingGate(0.8)}


def train(data, batch_size, rate, gate, seed):
    """Best validation accuracy over the epochs, and seconds."""
    torch.manual_seed(seed)
    inputs, labels, val_inputs, val_labels = data
    head = Head(inputs.shape[1], int(labels.max()) + 1)
    nn.init.normal_(head.weight, std=0.01)
    nn.init.zeros_(head.bias)
    step = EagerStep(head, SimpleNamespace(kind="adamw", lr=rate, weight_decay=0.01, schedule="cosine", label_smoothing=0.1))
    start, best = time.perf_counter(), 0.0
    for epoch in range(EPOCHS):
        gate.epoch = epoch
        batches = epoch_batches(len(inputs), batch_size, seed, epoch)
        for number, batch in enumerate(batches):
            step(inputs[batch], labels[batch], gate, (epoch + number / len(batches)) / EPOCHS)
        best = max(best, evaluate(head, [(val_inputs, val_labels)])[0])
    return best, time.perf_counter() - start


def main(*names):
    torch.set_num_threads(1)
    network = original()
    for name in names or ("Clipart10", "Openclipart"):
        data = []
        for part, backend in (("train", "openvino_int8"), ("val", "openvino")):
            samples = open_part(name, part)
            data += [torch.from_numpy(features(network, samples, backend=backend)), torch.tensor([each.label for each in samples])]
        for batch_size, rate in SETTINGS:
            for gate, make in GATES.items():
                results = [train(data, batch_size, rate, make(), seed) for seed in SEEDS]
                print(f"{name}  batch {batch_size:2d}  rate {rate:.0e}  gate {gate:14s} validation "
                      f"{100 * statistics.mean(accuracy for accuracy, _ in results):.2f} +- "
                      f"{100 * statistics.stdev(accuracy for accuracy, _ in results):.2f} %  "
                      f"{statistics.mean(seconds for _, seconds in results):.2f} s", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
