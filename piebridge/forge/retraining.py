"""Alignment by end-to-end retraining, as PieBridge (SenSys'24) does it, on one process or, through torchrun, on several:

    python -m torch.distributed.run --nproc_per_node 2 -m piebridge.forge.retraining \\
        original.safetensors proxy.safetensors --images DIR --out aligned.safetensors
"""

import argparse
import logging
import sys
from dataclasses import asdict, dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from piebridge.core.dataset import open_dataset
from piebridge.core.errors import UserError
from piebridge.core.files import sha256_of_json
from piebridge.core.loader import ImageLoader, in_batches
from piebridge.core.network_file import load_network_file, save_network
from piebridge.core.networks import load_network
from piebridge.core.optimizers import build_optimizer, learning_rate
from piebridge.core.progress_bar import progress_bar
from piebridge.core.transforms import Transform
from piebridge.forge.alignment import as_vectors, cosine_and_error, measure_alignment
from piebridge.forge.checkpoints import restore_checkpoint, restore_parameters, write_checkpoint
from piebridge.forge.processes import is_first, local_device, mean_of_processes, process_group, shared_batches, world
from piebridge.forge.segments import common_taps, device_of, own_parameters

LOG = logging.getLogger(__name__)
HELD_OUT = 128  # images, at most


@dataclass(frozen=True)
class RetrainingSettings:
    """epochs: the paper's 3. batch_size: of all processes together. rate: of AdamW, falling to zero as a cosine. cosine_weight: the
    paper's lambda. taps: names of the nodes that are aligned; None: each block's output and the head's tap."""

    epochs: int = 3
    batch_size: int = 32
    rate: float = 3e-4
    weight_decay: float = 0.01
    cosine_weight: float = 1.0
    taps: tuple | None = None
    seed: int = 0


def retrain(original, proxy, loader, settings=None, labels=None, folder=None, on_step=lambda: None):
    """Align `proxy` in place, all of it but its head; returns the mean loss of each epoch. Every process calls it alike.

    loader: has `samples` and `batches(index_lists, view_seed)` giving (indices, images) with images float [B,3,H,W], or a list of two
    where the proxy takes another size (core/loader.py). labels: int of each sample, in the head's classes; None: the original's
    logits are distilled. folder: for a checkpoint after each epoch; a call with the same networks and settings goes on from there.
    on_step: called before each batch; what it raises ends the work. UserError for too few images, a batch that the processes cannot
    share, labels that do not fit, an unknown tap, a checkpoint of other work, and a loss that is not finite.
    """
    settings = settings or RetrainingSettings()
    count = len(loader.samples)
    batch_size = _batch_size(count, settings, proxy)
    _check_labels(labels, count, proxy)
    job = sha256_of_json([asdict(settings), count, labels, original.fingerprint(), proxy.fingerprint()])
    with own_parameters(proxy):
        trainee = _Trainee(proxy.eval(), _taps(original, proxy, settings.taps))
        head = {id(parameter) for parameter in proxy.head.parameters()}
        parameters = [parameter.requires_grad_(True) for parameter in proxy.parameters() if id(parameter) not in head]
        optimizer = build_optimizer(parameters, SimpleNamespace(kind="adamw", weight_decay=settings.weight_decay))
        losses = _restore(folder, job, proxy, optimizer)
        parallel = nn.parallel.DistributedDataParallel(trainee) if world()[1] > 1 else trainee
        for epoch in range(len(losses), settings.epochs):
            batches = shared_batches(count, batch_size, settings.seed, epoch)
            total = 0.0
            for step, (indices, images) in enumerate(_with_progress(loader, batches, settings, epoch)):
                on_step()
                optimizer.zero_grad()
                loss = _loss(original, parallel, trainee.taps, indices, images, labels, settings)
                loss.backward()
                optimizer.step(learning_rate(SimpleNamespace(schedule="cosine", lr=settings.rate),
                                             (epoch + step / len(batches)) / settings.epochs))
                total += float(loss.detach())
            losses.append(mean_of_processes(total / len(batches), device_of(proxy)))
            if not torch.isfinite(torch.tensor(losses[-1])):
                raise UserError(f"retraining of {proxy.description['name']}: the loss of epoch {epoch + 1} is {losses[-1]}; lower rate="
                                f"{settings.rate:g}")
            LOG.info("retraining, epoch %d of %d: loss %.4f", epoch + 1, settings.epochs, losses[-1])
            _save(folder, job, proxy, optimizer, losses)
    return losses


class _Trainee(nn.Module):
    """A proxy whose forward gives its logits and the values at its taps. DistributedDataParallel wants all in one forward.

    Batch norms keep their statistics, and dropout is off: the original is matched as it is deployed; statistics taken anew from
    other images than those of its pretraining cost 0.2 of cosine where a lower resolution alone cost 0.12 (doc/LOG.md); and each
    process would take its own from its share of the batch, so two processes would not equal one.
    """

    def __init__(self, proxy, taps):
        super().__init__()
        self.proxy, self.taps = proxy, taps  # taps: [(node of the original, node of the proxy)]

    def forward(self, images):
        values = {}
        names = {name for _, name in self.taps}
        logits = self.proxy.observe(images, lambda name, value: values.update({name: value.clone()}) if name in names else None)
        return logits, values


def alignment_loss(found, wanted, cosine_weight):
    """cosine_weight * (1 - cos(f, g)) + |f - g|^2 / |g|^2 of two values [B, ...], mean over the batch.

    The paper's term, and the relative mean square error, without which the scale of the features would be free.
    """
    f, g = as_vectors(found, wanted)
    cosine, error = cosine_and_error(f, g)
    return (cosine_weight * (1 - cosine) + error.square()).mean()


def task_loss(logits, wanted):
    """Cross entropy where `wanted` are labels [B]; else the divergence from the original's logits [B,C], KL(original || proxy)."""
    if wanted.dim() == 1:
        return F.cross_entropy(logits, wanted)
    return F.kl_div(F.log_softmax(logits, 1), F.log_softmax(wanted, 1), reduction="batchmean", log_target=True)


def _loss(original, parallel, taps, indices, images, labels, settings):
    images, proxy_images = images if isinstance(images, (list, tuple)) else (images, images)
    device = device_of(original)
    with torch.no_grad():
        wanted = original.values(images.to(device), [tap for tap, _ in taps] + [original.description["output"]])
    task = wanted[original.description["output"]] if labels is None else torch.tensor([labels[index] for index in indices], device=device)
    logits, found = parallel(proxy_images.to(device))
    return task_loss(logits, task) + sum(alignment_loss(found[other], wanted[tap], settings.cosine_weight) for tap, other in taps)


def _taps(original, proxy, names):
    known = {tap: other for _, tap, other in common_taps(original, proxy)}
    for name in names or ():
        if name not in known:
            raise UserError(f"retraining of {proxy.description['name']}: no tap {name!r}; known: {', '.join(known)}")
    return [(tap, known[tap]) for tap in names or known]


def _batch_size(count, settings, proxy):
    """Images per step of all processes. Each process takes as many, since the mean of gradients must be that of the joint batch."""
    processes = world()[1]
    size = min(settings.batch_size, count // processes * processes)
    if size < processes or size % processes:
        raise UserError(f"retraining of {proxy.description['name']}: batch_size={settings.batch_size} with {count} images cannot be "
                        f"shared by {processes} processes; give a multiple of {processes}, and at least as many images")
    return size


def _check_labels(labels, count, proxy):
    name, classes = proxy.description["name"], proxy.head.out_features
    if labels is not None and (len(labels) != count or not all(0 <= label < classes for label in labels)):
        raise UserError(f"retraining of {name}: needs a label for each of {count} images, 0 to {classes - 1} as its head has them; there "
                        f"are {len(labels)}, from {min(labels, default=None)} to {max(labels, default=None)}")


def _with_progress(loader, batches, settings, epoch):
    stream = loader.batches(batches, (settings.seed, epoch))
    return progress_bar(stream, total=len(batches), desc=f"retrain {epoch + 1}/{settings.epochs}") if is_first() else stream


def _save(folder, job, proxy, optimizer, losses):
    if folder is not None and is_first():
        tensors = {f"proxy/{key}": parameter for key, parameter in proxy.named_parameters()}
        tensors.update({f"optimizer/{key}": tensor for key, tensor in optimizer.state().items()})
        write_checkpoint(folder, job, tensors, {"losses": losses})


def _restore(folder, job, proxy, optimizer):
    """Losses of the epochs that are done; their state is put into proxy and optimizer."""
    found = restore_checkpoint(folder, job)
    if found is None:
        return []
    tensors, facts = found
    restore_parameters(proxy, tensors, "proxy/")
    optimizer.restore({key[len("optimizer/"):]: tensor for key, tensor in tensors.items() if key.startswith("optimizer/")})
    return facts["losses"]


def main(arguments=None):
    """Retrain a proxy's network file against its original's and write the result as a network file.

    The log tells how near its features are to the original's, before and after, on validation images.
    """
    parser = argparse.ArgumentParser(prog="piebridge.forge.retraining", description="Align a proxy with its original, end to end.")
    parser.add_argument("original", help="a known network's name or a network file")
    parser.add_argument("proxy", help="a network file")
    parser.add_argument("--images", required=True, help="data set, or folder of images; its training part is used")
    parser.add_argument("--out", required=True, help="network file to write")
    parser.add_argument("--checkpoint", help="folder for a checkpoint after each epoch, from which the same command goes on")
    parser.add_argument("--labels", action="store_true", help="train on the labels, which must be the head's classes")
    defaults = RetrainingSettings()
    for name in ("epochs", "batch_size", "rate", "cosine_weight", "seed"):
        parser.add_argument("--" + name.replace("_", "-"), type=type(getattr(defaults, name)), default=getattr(defaults, name))
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        with process_group():
            _retrain_files(given, RetrainingSettings(given.epochs, given.batch_size, given.rate, cosine_weight=given.cosine_weight,
                                                     seed=given.seed))
    except UserError as error:
        LOG.error("%s", error)
        return 2
    return 0


def _retrain_files(given, settings):
    original, proxy = load_network(given.original), load_network_file(given.proxy)
    for network in (original, proxy):
        network.to(local_device())
    dataset = open_dataset(given.images, SimpleNamespace(val_fraction=0.1, test_fraction=0.2, seed=settings.seed))
    labels = _labels(dataset, original) if given.labels else None
    sizes = [network.description["input_size"][-1] for network in (original, proxy)]
    transforms = [Transform.for_network(original.description, size) for size in sizes]
    loaders = [ImageLoader(samples, transforms if sizes[0] != sizes[1] else transforms[0])
               for samples in (dataset.train, dataset.val[:HELD_OUT])]
    before = _alignment(original, proxy, loaders[1], settings.batch_size) if is_first() else None
    retrain(original, proxy, loaders[0], settings, labels, given.checkpoint)
    if is_first():
        save_network(proxy, given.out)
        after = _alignment(original, proxy, loaders[1], settings.batch_size)
        for tap in after:
            LOG.info("%s: cosine %.4f -> %.4f, relative error %.4f -> %.4f", tap,
                     *[each[tap][key] for key in ("cosine", "relative_error") for each in (before, after)])


def _labels(dataset, network):
    """Labels of the training images. UserError where the classes are not those of the network's head."""
    names, count = network.description["class_names"] or dataset.classes, network.head.out_features
    if list(names) != list(dataset.classes) or count != len(dataset.classes):
        raise UserError(f"--labels: {dataset.name} has {len(dataset.classes)} classes, which are not the {count} of the head of network "
                        f"{network.description['name']}; leave --labels out, or give images of its classes")
    return [sample.label for sample in dataset.train]


def _alignment(original, proxy, loader, batch_size):
    """See `measure_alignment`; of the loader's images."""
    batches = (images for _, images in loader.batches(in_batches(len(loader.samples), batch_size)))
    return measure_alignment(original, proxy, (each if isinstance(each, (list, tuple)) else (each, each) for each in batches))


if __name__ == "__main__":
    sys.exit(main())
