"""The forge makes proxies of a network on a workstation: cheaper networks whose blocks can stand for the original's.

Current Python and torch; it imports piebridge.core, which never imports it. So far: the structure of a network
(`structure_of`), pruning inside its blocks (`prune`), and which channels to keep (`taylor_scores`, `nested_levels`).
"""

from piebridge.forge.nested_levels import nested_levels
from piebridge.forge.pruning import prune
from piebridge.forge.scores import taylor_scores
from piebridge.forge.structure import structure_of

__all__ = ["nested_levels", "prune", "structure_of", "taylor_scores"]
