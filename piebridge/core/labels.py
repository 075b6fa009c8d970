"""The targets of the training samples: known from the start, or given by the network itself as it learns."""

import contextlib
import logging

import torch

from piebridge.core.sampler import epoch_batches

LOG = logging.getLogger(__name__)
UNKNOWN = -1  # cross-entropy refuses it, should it ever get there


class Labels:
    """Labels that stay what they are. labels: int64 [samples], on the run's device."""

    def __init__(self, labels):
        self._labels = labels

    @property
    def device(self):
        return self._labels.device

    def __getitem__(self, indices):
        """Samples (list of int [B]) -> int64 [B]."""
        return self._labels[indices]

    def start_epoch(self, epoch, parts):
        """Called before each epoch (from 0), but not where a run goes on in the middle of one. parts: those of the loop."""

    def known(self, usable):
        """Those of the samples `usable` (list of int) that have a label now."""
        return usable

    def record(self):
        """What run.json says of them; None where there is nothing to say."""
        return None

    def state(self):
        return {}

    def restore(self, state):
        pass


class PseudoLabels(Labels):
    """Some labels are known; the other samples take the network's own prediction while it is confident.

    Pseudo-labels (Lee, ICML workshop 2013) with the fixed threshold of FixMatch (Sohn et al., NeurIPS 2020): a sample's label is
    argmax p where max p >= threshold, p the softmax of the logits, in eval mode. Both papers label anew with every update; here
    it is done before each epoch, since one more forward of everything unlabelled per update is no option where the frozen part is
    the cost: labels are given anew, and taken back, with the network that the epoch before left. The labelled samples go alone for
    `warmup_epochs`. The view that is labelled is the epoch's own, which is also the one that is trained on.

    labels: int64 [samples], the true ones where they are known (for the record's accuracy) and UNKNOWN elsewhere; is_labelled: bool
    [samples], which of them training may use. settings: the section `pseudo` of a configuration.
    """

    def __init__(self, labels, is_labelled, settings, clock, interrupt):
        super().__init__(torch.where(is_labelled, labels, torch.full_like(labels, UNKNOWN)))
        self._true, self._is_labelled, self._settings = labels, is_labelled, settings
        self._clock, self._interrupt = clock, interrupt
        self._rounds = []

    def start_epoch(self, epoch, parts):
        if epoch < self._settings.warmup_epochs:
            return
        given = self._confident(epoch, parts)
        self._labels[~self._is_labelled] = UNKNOWN
        indices = list(given)
        self._labels[indices] = torch.tensor([given[index] for index in indices], dtype=torch.int64, device=self.device)
        true = self._true[indices]
        checked = int((true != UNKNOWN).sum())
        right = int((self._labels[indices] == true).sum())
        self._rounds.append({"epoch": epoch + 1, "pseudo_labelled": len(indices), "accuracy": right / checked if checked else None})
        LOG.info("epoch %d: %d of %d unlabelled images have a pseudo-label%s", epoch + 1, len(indices), int((~self._is_labelled).sum()),
                 f", {100 * right / checked:.1f} % of them right" if checked else "")

    def known(self, usable):
        has_label = (self._labels != UNKNOWN).tolist()
        return [index for index in usable if has_label[index]]

    def record(self):
        labelled = int(self._is_labelled.sum())
        last = self._rounds[-1] if self._rounds else {"pseudo_labelled": 0, "accuracy": None}
        return {"labelled": labelled, "unlabelled": len(self._labels) - labelled, "pseudo_labelled": last["pseudo_labelled"],
                "pseudo_accuracy": last["accuracy"], "rounds": list(self._rounds)}

    def state(self):
        return {"labels": self._labels.tolist(), "rounds": list(self._rounds)}

    def restore(self, state):
        self._labels = torch.tensor(state["labels"], dtype=torch.int64, device=self.device)
        self._rounds = list(state["rounds"])

    def _confident(self, epoch, parts):
        """{sample: label} of the unlabelled samples that the network is sure of."""
        is_labelled, trainable, given = self._is_labelled.tolist(), parts.step.trainable, {}
        unlabelled = [index for index in parts.source.usable if not is_labelled[index]]
        levels = parts.router.levels[unlabelled] if parts.source.needs_level_batches else None
        batches = [[unlabelled[position] for position in batch]
                   for batch in epoch_batches(len(unlabelled), parts.batch_size, parts.seed, epoch, levels)]
        was_training = trainable.training
        trainable.eval()
        with contextlib.closing(parts.source.stream(batches, epoch, parts.router.levels)) as stream, torch.no_grad():
            for indices, inputs, level in stream:
                with self._clock.phase("trainable"):
                    if indices:
                        confidences, labels = trainable(inputs, level).softmax(1).max(1)
                        given.update((index, label) for index, label, confidence in zip(indices, labels.tolist(), confidences.tolist())
                                     if confidence >= self._settings.threshold)
                self._interrupt.check()
        trainable.train(was_training)
        return given
