"""OpenVINO on the CPU: its graph is built straight from the description, which takes a tenth of what a conversion takes."""

import functools

import numpy as np
import torch

from piebridge.core.backends.openvino_emitter import OpenVinoEmitter
from piebridge.core.backends.openvino_int8 import Int8Emitter
from piebridge.core.backends.quiet_imports import import_openvino
from piebridge.core.backends.segment import Segment, threads
from piebridge.core.backends.translation import translate


def build_openvino(network, input_size, batch_size):
    """float32."""
    return _build("openvino", OpenVinoEmitter(), "f32", network, input_size, batch_size)


def build_openvino_bf16(network, input_size, batch_size):
    """bfloat16 kernels: faster where the processor has AMX, slower where it only has AVX512."""
    return _build("openvino_bf16", OpenVinoEmitter(), "bf16", network, input_size, batch_size)


def build_openvino_int8(network, input_size, batch_size):
    """int8 kernels (see core/backends/openvino_int8.py): approximate, so a proxy and not a way to run the original."""
    return _build("openvino_int8", Int8Emitter(), "f32", network, input_size, batch_size)


@functools.lru_cache(maxsize=None)
def shared_core():
    """OpenVINO, once in a process and for as long as it runs.

    Each one of its own gives the thread that makes it a stack for signal handlers, and takes it away with itself; two that go in the
    order in which they came leave the first one's, which is no more, and the next signal ends the process.
    """
    return import_openvino().Core()


def _build(name, emitter, precision, network, input_size, batch_size):
    openvino = import_openvino()
    shape = [batch_size, 3, input_size, input_size]
    parameter = emitter.parameter(shape)
    model = emitter.model(parameter, translate(network, emitter, parameter))
    # one stream over all cores: as fast as a stream per core, and batches leave in order
    compiled = shared_core().compile_model(model, "CPU", {
        "INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": threads(), "NUM_STREAMS": 1})
    request = compiled.create_infer_request()

    def run(images):
        request.set_input_tensor(openvino.Tensor(np.ascontiguousarray(images.numpy()), shared_memory=True))
        request.infer(share_inputs=True)
        return torch.from_numpy(np.array(request.get_output_tensor(0).data, dtype=np.float32))
    return Segment(name, run, input_size, batch_size, is_fixed=True)
