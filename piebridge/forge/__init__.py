"""The forge makes proxies of a network on a workstation: cheaper networks whose blocks can stand for the original's.

Current Python and torch; it imports piebridge.core, which never imports it. `forge` makes a whole proxy set; the parts beside it can be
used alone: the structure of a network, which channels to keep, pruning, one order of channels for all levels, alignment.
"""

from piebridge.forge.alignment import measure_alignment
from piebridge.forge.block_regression import regress_blocks
from piebridge.forge.build import forge
from piebridge.forge.nested_levels import nested_levels
from piebridge.forge.pruning import prune, tensor_cuts
from piebridge.forge.reconstruction import reconstruct
from piebridge.forge.reordering import in_nested_order, nested_order
from piebridge.forge.scores import taylor_scores
from piebridge.forge.structure import structure_of

__all__ = ["forge", "in_nested_order", "measure_alignment", "nested_levels", "nested_order", "prune", "reconstruct", "regress_blocks",
           "structure_of", "taylor_scores", "tensor_cuts"]
