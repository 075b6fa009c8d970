"""The pruned widths that the forge tries: which channels each keeps, and its aligned network.

All of it is kept in the work folder and read again, scores included: computed anew on another number of threads they may differ in the last
bit, and what a network keeps would then not be what the set says of it.
"""

import logging

from piebridge.core.network_file import load_network_file, save_network
from piebridge.core.safetensors_file import read_safetensors, write_safetensors
from piebridge.forge.block_regression import RegressionSettings, regress_blocks
from piebridge.forge.nested_levels import nested_levels
from piebridge.forge.pruning import prune, tensor_cuts
from piebridge.forge.reconstruction import ReconstructionSettings, reconstruct
from piebridge.forge.reordering import in_nested_order, nested_order
from piebridge.forge.ridge import PENALTIES
from piebridge.forge.scores import taylor_scores

LOG = logging.getLogger(__name__)
SCORED_IMAGES = 100  # as in the paper
ALIGNED_IMAGES = 512  # more give nothing more (doc/LOG.md)
REGRESSED_IMAGES = 128  # of them; on all of them block-wise regression takes three minutes a width


class PrunedWidths:
    """`kept`: {share of the original's MACs: {group: indices}}; `networks`: {share: GraphNetwork}; `order`: see `nested_order`, {} where
    nothing is pruned.

    original: GraphNetwork in eval mode. structure: its Structure. images: ForgeImages. settings: ForgeSettings. work: the folder (Path).
    on_step: called before each batch; what it raises ends the work, and the next time it goes on from there.
    """

    def __init__(self, original, structure, images, settings, work, on_step):
        self.original, self.structure, self.images, self.settings = original, structure, images, settings
        self.work, self.on_step = work, on_step
        self.kept, self.networks, self.order = {}, {}, {}
        if not settings.widths:
            return
        levels = nested_levels(structure, self._scores(), settings.widths, settings.narrowest, settings.multiple)
        levels = in_nested_order(structure, levels)
        self.order = nested_order(structure, levels)
        for level in levels[1:]:
            share = round(level.macs / structure.macs, 2)
            if share < 1 and share not in self.kept:
                self.kept[share], self.networks[share] = level.kept, self._aligned(level)

    def _scores(self):
        path = self.work / "scores.safetensors"
        if not path.is_file():
            write_safetensors(path, taylor_scores(self.original, self.structure, self._batches(SCORED_IMAGES)))
        return read_safetensors(path)[0]

    def _batches(self, count):
        return self.images.batches(self.images.fitted[:count], self.original.description["input_size"][-1])

    def _pairs(self, count):
        return ((images, images) for images in self._batches(count))

    def _aligned(self, level):
        """The network of a level after closed-form alignment and, if asked for, block-wise regression."""
        path = self.work / f"width_{level.number:02d}.safetensors"
        if path.is_file():
            return load_network_file(path)
        LOG.info("aligning the width of %.0f %% of the MACs", 100 * level.macs / self.structure.macs)
        proxy = self._regressed(level, self.work / path.stem) if self.settings.align == "blocks" else self._reconstructed(level)
        save_network(proxy, path)
        return proxy

    def _reconstructed(self, level):
        proxy, align = prune(self.original, level.kept, self.structure), self.settings.align
        if align != "none":
            settings = ReconstructionSettings(penalties=() if align == "statistics" else PENALTIES, seed=self.settings.seed)
            reconstruct(self.original, proxy, self._pairs(ALIGNED_IMAGES), settings, tensor_cuts(self.structure, level.kept), self.work,
                        self.on_step)
        return proxy

    def _regressed(self, level, folder):
        """Its start is kept beside its checkpoint, which is of exactly that network."""
        start = folder / "start.safetensors"
        if not start.is_file():
            save_network(self._reconstructed(level), start)
        proxy = load_network_file(start)
        regress_blocks(self.original, proxy, self._pairs(REGRESSED_IMAGES), RegressionSettings(seed=self.settings.seed), folder, self.work,
                       self.on_step)
        return proxy
