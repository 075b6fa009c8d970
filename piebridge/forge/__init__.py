"""The forge makes proxies of a network on a workstation: cheaper networks whose blocks can stand for the original's.

Current Python and torch; it imports piebridge.core, which never imports it. So far: the structure of a network (`structure_of`).
"""

from piebridge.forge.structure import structure_of

__all__ = ["structure_of"]
