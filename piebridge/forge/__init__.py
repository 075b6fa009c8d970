"""The forge makes proxies of a network on a workstation: cheaper networks whose blocks can stand for the original's.

Current Python and torch; it imports piebridge.core, which never imports it. So far: the structure of a network
(`structure_of`), pruning inside its blocks (`prune`, `tensor_cuts`), which channels to keep (`taylor_scores`, `nested_levels`),
and one order of them for all levels (`nested_order`, `in_nested_order`, `reorder`).
"""

from piebridge.forge.nested_levels import nested_levels
from piebridge.forge.pruning import prune, tensor_cuts
from piebridge.forge.reordering import in_nested_order, nested_order, reorder
from piebridge.forge.scores import taylor_scores
from piebridge.forge.structure import structure_of

__all__ = ["in_nested_order", "nested_levels", "nested_order", "prune", "reorder", "structure_of", "taylor_scores", "tensor_cuts"]
