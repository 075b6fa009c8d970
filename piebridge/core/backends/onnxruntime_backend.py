"""ONNX Runtime on the CPU, with an ONNX model made straight from the description."""

import numpy as np
import torch

from piebridge.core.backends.onnx_emitter import OnnxEmitter
from piebridge.core.backends.quiet_imports import import_onnxruntime
from piebridge.core.backends.segment import Segment, threads
from piebridge.core.backends.translation import translate


def build_onnxruntime(network, input_size, batch_size):
    """float32."""
    onnxruntime = import_onnxruntime()
    emitter = OnnxEmitter()
    parameter = emitter.parameter([batch_size, 3, input_size, input_size])
    model = emitter.model(parameter, translate(network, emitter, parameter))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads(), 1
    options.log_severity_level = 3  # errors only
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # spinning threads would take cores from decoding
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def run(images):
        return torch.from_numpy(session.run(None, {parameter.name: np.ascontiguousarray(images.numpy())})[0])
    return Segment("onnxruntime", run, input_size, batch_size, is_fixed=True)
