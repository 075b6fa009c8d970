"""A training step run by ONNX Runtime's inference session: no training runtime is needed."""

import logging

import numpy as np
import torch

from piebridge.core.backends.quiet_imports import import_onnxruntime
from piebridge.core.backends.segment import threads
from piebridge.core.errors import UserError
from piebridge.engine.onnx_writer import NEXT, input_name, output_name, to_onnx
from piebridge.engine.step_graph import BATCH, BUFFER, COUNT, DRAW, LOSSES, OUTPUTS, RATE, STATE, TRAINED, WEIGHTS

LOG = logging.getLogger(__name__)
LIVE = (TRAINED, BUFFER, STATE)


class OnnxStep:
    """Executor of a StepGraph in ONNX Runtime on the CPU.

    step: StepGraph. tensors: {(role, name): tensor}, the live ones. What a step changes is written beside the old and then takes its
    place: the tensor objects stay, their memory alternates between two buffers (so a view of an earlier value keeps that value). Frozen
    tensors are read once, when the session is made. general: see to_onnx.
    UserError where an operator has no standard form.
    """

    def __init__(self, step, tensors, general="columns"):
        self.step, self.tensors = step, tensors
        self._session = session_of(to_onnx(step, tensors, general=general))
        self._declared = {each.name for each in self._session.get_inputs()}
        fed = {value.name: value for value in step.outputs if value.role in LIVE}
        self._live = {input_name(value): tensors[value.role, value.name] for _, value in step.inputs_of(*LIVE)
                      if input_name(value) in self._declared or value.name in fed}
        self._changed = [input_name(value) for value in step.outputs if value.role in LIVE]
        for name in self._live:
            tensor = self._live[name]
            tensor.data = tensor.data.contiguous()
        self._spare = {name: torch.empty_like(self._live[name].data) for name in self._changed}
        self._results = [value for value in step.outputs if value.role in (LOSSES, OUTPUTS)]
        self._binding = self._session.io_binding()

    def run(self, batch, weights, rate, count, draws=()):
        """One step. batch, draws: tensors in the order of the step's BATCH and DRAW inputs; weights: float [B]; rate, count: numbers.

        -> (losses [B], outputs), in memory of their own.
        """
        losses, outputs = self.results(batch, weights, rate, count, draws)
        return losses, outputs

    def results(self, batch, weights=None, rate=None, count=None, draws=()):
        """What is put out and not fed back, in the order of the step's outputs; also for a graph without losses."""
        given = self._given(batch, weights, rate, count, draws)
        for name, tensor in list(given.items()) + list(self._live.items()):
            if name in self._declared:
                self._bind(self._binding.bind_input, name, tensor)
        results = [torch.empty(value.shape, dtype=value.dtype) for value in self._results]
        for value, tensor in zip(self._results, results):
            self._bind(self._binding.bind_output, output_name(value), tensor)
        for name, tensor in self._spare.items():
            self._bind(self._binding.bind_output, NEXT + name, tensor)
        self._session.run_with_iobinding(self._binding)
        for name in self._changed:
            live = self._live[name]
            live.data, self._spare[name] = self._spare[name], live.data
        return results

    def _given(self, batch, weights, rate, count, draws):
        given = {}
        for role, tensors in ((BATCH, batch), (WEIGHTS, [weights]), (RATE, [rate]), (COUNT, [count]), (DRAW, draws)):
            tensors = [each for each in tensors if each is not None]
            values = [value for _, value in self.step.inputs_of(role)]
            if len(values) != len(tensors):
                raise UserError(f"step: takes {len(values)} tensors as {role}, {len(tensors)} given")
            for value, tensor in zip(values, tensors):
                tensor = torch.as_tensor(tensor, dtype=value.dtype).contiguous()
                if tuple(tensor.shape) != value.shape:
                    raise UserError(f"step: {value.name} must be of shape {list(value.shape)}, not {list(tensor.shape)}; "
                                    "compile the step for this shape")
                given[value.name] = tensor
        return given

    def _bind(self, bind, name, tensor):
        bind(name, "cpu", 0, _numpy_type(tensor.dtype), list(tensor.shape), tensor.data_ptr())


def session_of(model):
    """An inference session on the CPU, with as many threads as torch may use."""
    onnxruntime = import_onnxruntime()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads(), 1
    options.log_severity_level = 3  # errors only
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # spinning threads would take cores from decoding
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _numpy_type(dtype):
    return np.dtype(torch.empty(0, dtype=dtype).numpy().dtype).type
