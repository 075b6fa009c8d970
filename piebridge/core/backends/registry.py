"""The backends by name, and what is known of each before it is measured."""

import importlib.util
from collections import namedtuple

import torch

from piebridge.core.backends import eager, onnxruntime_backend, openvino_backend
from piebridge.core.errors import UserError
from piebridge.core.names import closest

# build(network, input_size, batch_size) -> Segment
# packages: what must be installed beside torch; is_cpu_only: runs on the CPU wherever the network is
# speedup: over eager and build_seconds: import, build, compile; both typical, to decide what is worth trying first
# rounding: relative error that its number format makes unavoidable
Backend = namedtuple("Backend", "build packages is_cpu_only speedup build_seconds rounding")

BF16_ROUNDING = 2.0 ** -8
INT8 = "openvino_int8"

BACKENDS = {
    "eager": Backend(eager.build_eager, (), False, 1.0, 0.0, 0.0),
    "channels_last": Backend(eager.build_channels_last, (), False, 1.2, 0.05, 0.0),
    "folded": Backend(eager.build_folded, (), False, 1.5, 0.1, 0.0),
    "bf16": Backend(eager.build_bf16, (), False, 1.8, 0.1, BF16_ROUNDING),
    "torchscript": Backend(eager.build_torchscript, (), False, 1.7, 2.0, 0.0),
    "onnxruntime": Backend(onnxruntime_backend.build_onnxruntime, ("onnx", "onnxruntime"), True, 2.0, 0.4, 0.0),
    "openvino": Backend(openvino_backend.build_openvino, ("openvino",), True, 3.0, 0.2, 0.0),
    "openvino_bf16": Backend(openvino_backend.build_openvino_bf16, ("openvino",), True, 3.0, 0.2, BF16_ROUNDING),
}

# approximate ones run proxies, never the original: the probe does not know them
PROXY_BACKENDS = {INT8: Backend(openvino_backend.build_openvino_int8, ("openvino",), True, 6.0, 0.3, 2.0 ** -4)}


def build_segment(backend, network, input_size, batch_size):
    """The frozen part of `network` (a GraphNetwork), from images [N,3,input_size,input_size] to its tap, on the named backend.

    The segment has the network's weights as they are now; only `eager` follows later changes. UserError for an unknown backend or
    a missing package, Unsupported (a UserError) where this backend cannot run this network.
    """
    known = dict(BACKENDS, **PROXY_BACKENDS)
    if backend not in known:
        raise UserError(f"backend.name={backend}: unknown backend{closest(backend, list(known))}; known: auto, {', '.join(known)}")
    missing = missing_packages(backend)
    if missing:
        raise UserError(f"backend.name={backend}: not installed: {', '.join(missing)}; pip install 'piebridge[engine]', "
                        "or use backend.name=auto or eager")
    device = next(network.parameters()).device.type
    if known[backend].is_cpu_only and device != "cpu":
        raise UserError(f"backend.name={backend}: runs on the CPU, and device={device} does not; use backend.name=auto, or device=cpu")
    with torch.no_grad():
        return known[backend].build(network, int(input_size), int(batch_size))


def bf16_backend(backend):
    """Name of the backend that computes in bfloat16 where float networks run on `backend`."""
    return "openvino_bf16" if backend.startswith("openvino") else "bf16"


def missing_packages(backend):
    """The packages that a known backend lacks here; looked for without importing them."""
    known = dict(BACKENDS, **PROXY_BACKENDS)[backend]
    return [package for package in known.packages if importlib.util.find_spec(package) is None]
