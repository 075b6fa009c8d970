"""Original and proxy walked side by side: the same stretch of both at a time, over all images, with the memory of one batch.

A stretch ends where one value alone goes on: at the output of a block that both networks have, and at the head's tap. The values
there lie in files of a scratch folder, so each network runs over the images about twice, where running it anew for each block
would take half as many passes as it has blocks.
"""

import contextlib
import copy
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from piebridge.core import graph
from piebridge.core.errors import UserError
from piebridge.core.network import GraphNetwork, expected_shapes
from piebridge.core.progress_bar import progress_bar
from piebridge.forge.blocks import spine
from piebridge.forge.structure import structure_of

BATCH = 32  # images
LEAST_IMAGES = 8


@dataclass(frozen=True)
class Stretch:
    """name: of the block at its end, or "tail"; original, proxy: networks that compute this stretch alone and share the tensors.

    before: Values of the original where the stretch begins; inputs: the same of the proxy; targets: of the original where it ends.
    """

    name: str
    is_block: bool
    original: GraphNetwork
    proxy: GraphNetwork
    before: "Values"
    inputs: "Values"
    targets: "Values"

    @property
    def output(self):
        """Name of the proxy's last node."""
        return self.proxy.description["output"]

    def batches(self, size=BATCH):
        """Slices that cut the images into batches."""
        return [slice(start, min(start + size, len(self.inputs))) for start in range(0, len(self.inputs), size)]


def common_taps(original, proxy):
    """[(name, node of the original, node of the proxy)]: the output of each block that both have, in order, and the head's tap."""
    nodes = graph.nodes_by_name(proxy.description)
    taps = [(block.name, block.tap, block.tap) for block in structure_of(original).blocks if block.tap in nodes]
    head = (original.description["tap"], proxy.description["tap"])
    return [tap for tap in taps if tap[1:] != head] + [("tail",) + head]


def walk(original, proxy, batches, scratch=None):
    """Yield a Stretch after the other; what a stretch of the proxy has become when the next is asked for is what that one is fed.

    batches: iterable of pairs (images at the original's size, images at the proxy's), float [B,3,H,W], normalised. scratch: a folder
    for the values where a stretch begins and ends, of both networks; None: the system's. Per image of 224 x 224 pixels that is 2 MB of
    a MobileNet or a ViT-B, and 13 MB of a ResNet50. UserError for too few images, and where a
    network gives values that are not finite.
    """
    with tempfile.TemporaryDirectory(prefix="piebridge-", dir=scratch) as folder:
        before, inputs = _images(Path(folder), batches)
        if len(inputs) < LEAST_IMAGES:
            raise UserError(f"alignment of {proxy.description['name']}: {len(inputs)} images; give at least {LEAST_IMAGES}")
        places = _places(original, proxy)
        starts = [(graph.INPUT, graph.INPUT)] + [place[1:] for place in places]
        for start, (name, *ends) in zip(starts, progress_bar(places, desc="align", unit="block")):
            parts = [part_of(network, first, last) for network, first, last in zip((original, proxy), start, ends)]
            targets = _passed(parts[0], before, Path(folder) / f"{name}.original")
            yield Stretch(name, name != "tail", *parts, before, inputs, targets)
            outputs = _passed(parts[1], inputs, Path(folder) / f"{name}.proxy")
            for values in {id(each): each for each in (before, inputs)}.values():
                values.remove()
            before, inputs = targets, outputs


def _places(original, proxy):
    """The common taps whose value alone goes on, in both networks."""
    alone = [{name for name, _ in spine(network.description)} for network in (original, proxy)]
    return [tap for tap in common_taps(original, proxy) if tap[1] in alone[0] and tap[2] in alone[1]]


def part_of(network, first, last):
    """The nodes of a network after node `first` up to node `last`, as a network of their own on the same tensors."""
    description = network.description
    nodes = copy.deepcopy(graph.block_nodes(description, {"input": first, "output": last}))
    for node in nodes:
        node["inputs"] = [graph.INPUT if name == first else name for name in node["inputs"]]
    graph.limit_inplace(nodes)  # the values that enter belong to a file
    part = dict(description, nodes=nodes, blocks=[], output=last, tap=last)
    tensors = dict(network.named_buffers(), **dict(network.named_parameters()))
    return GraphNetwork(part, {key: tensors[key] for key in expected_shapes(part)}).eval()


class Values:
    """Values [N, ...] of N images at one place, in a file. Maps lie with their channels last, which convolutions are faster on."""

    def __init__(self, path):
        self._path, self._count, self._shape, self._dtype, self._array = path, 0, None, None, None
        self._stream = open(path, "wb")

    def __len__(self):
        return self._count

    def append(self, batch):
        """batch: [B,C,H,W], [B,T,C] or [B,C]."""
        batch = batch.permute(0, 2, 3, 1) if batch.dim() == 4 else batch
        array = batch.detach().contiguous().cpu().numpy()
        self._shape, self._dtype = array.shape[1:], array.dtype
        self._count += len(array)
        array.tofile(self._stream)

    def read(self, images, device="cpu"):
        """A copy of the values of some images: a slice, or an array of positions."""
        if self._array is None:
            self._stream.close()
            self._array = np.memmap(self._path, self._dtype, "r", shape=(self._count,) + self._shape)
        batch = torch.from_numpy(np.array(self._array[images])).to(device)
        return batch.permute(0, 3, 1, 2) if batch.dim() == 4 else batch

    def remove(self):
        self._stream.close()
        self._array = None
        self._path.unlink()


def _images(folder, batches):
    original, proxy = Values(folder / "images.original"), Values(folder / "images.proxy")
    is_same = None
    for images, proxy_images in batches:
        is_same = proxy_images is images if is_same is None else is_same
        original.append(images)
        if not is_same:
            proxy.append(proxy_images)
    return original, original if is_same else proxy


def _passed(network, inputs, path):
    """The Values that a network makes of others. UserError where they are not finite."""
    outputs = Values(path)
    for start in range(0, len(inputs), BATCH):
        with torch.no_grad():
            batch = network(inputs.read(slice(start, start + BATCH), device_of(network)))
        if not torch.isfinite(batch).all():
            raise UserError(f"network {network.description['name']}: node {network.description['output']!r} gives values that are not "
                            f"finite for images {start} to {start + len(batch) - 1}; are the weights or the images broken?")
        outputs.append(batch)
    return outputs


def device_of(network):
    """Of its first parameter; the CPU for what has none."""
    return next((parameter.device for parameter in network.parameters()), torch.device("cpu"))


def resampled(values, like):
    """The original's map [B,C,H,W] on the grid of a proxy's at another resolution, antialiased; what is no map is left as it is."""
    if values.dim() != 4 or values.shape[2:] == like.shape[2:]:
        return values
    return F.interpolate(values, size=like.shape[2:], mode="bilinear", antialias=True, align_corners=False)


@contextlib.contextmanager
def own_parameters(network):
    """Inside, each parameter is the network's own, free to change in place; those that did not change are shared again after it."""
    shared = dict(network.named_parameters())
    for key, parameter in shared.items():
        _put(network, key, nn.Parameter(parameter.detach().clone(), requires_grad=False))
    try:
        yield
    finally:
        for key, parameter in list(network.named_parameters()):
            if torch.equal(parameter, shared[key]):
                _put(network, key, shared[key])
            else:
                parameter.requires_grad_(shared[key].requires_grad)


def _put(network, key, parameter):
    path, _, name = key.rpartition(".")
    network.get_submodule(path)._parameters[name] = parameter
