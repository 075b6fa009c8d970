"""Frozen segments run fast: one small interface over several ways to compute the same features.

`build_segment(backend, network, input_size, batch_size)` gives a callable from images to features; `probe` finds the fastest
backend whose features agree with plain torch's. To add a backend: a builder in a file of its own, a line in registry.py.
"""

from piebridge.core.backends.probe import Choice, probe, relative_error
from piebridge.core.backends.registry import BACKENDS, INT8, PROXY_BACKENDS, bf16_backend, build_segment, missing_packages
from piebridge.core.backends.segment import Segment, Unsupported

__all__ = ["BACKENDS", "INT8", "PROXY_BACKENDS", "Choice", "Segment", "Unsupported", "bf16_backend", "build_segment",
           "missing_packages", "probe", "relative_error"]
