"""A training step run by ONNX Runtime's inference session: no training runtime is needed."""

import torch

from piebridge.core.backends.quiet_imports import import_onnxruntime
from piebridge.core.backends.segment import threads
from piebridge.core.errors import UserError
from piebridge.engine.onnx_writer import NEXT, input_name, output_name, to_onnx
from piebridge.engine.step_arguments import given_tensors, given_values
from piebridge.engine.step_graph import BUFFER, LOSSES, OUTPUTS, STATE, TRAINED

LIVE = (TRAINED, BUFFER, STATE)


class OnnxStep:
    """Executor of a StepGraph, or of the frozen prefix of one (see segments.py), in ONNX Runtime on the CPU.

    tensors: {(role, name): tensor}, the live ones. What a step changes is written beside the old and then takes its place: the tensor
    objects stay, their memory alternates between two buffers, so that a view of a live tensor sees every other step only. Frozen tensors
    are read once, when the session is made. general: see to_onnx. UserError where an operator has no standard form.
    """

    def __init__(self, step, tensors, general="columns"):
        self._step = step
        self._session = session_of(to_onnx(step, tensors, general=general))
        declared = {each.name for each in self._session.get_inputs()}
        self._given = [value.name if value.name in declared else None for value in given_values(step)]
        live = {input_name(value): tensors[value.role, value.name] for _, value in step.inputs_of(*LIVE)}
        for tensor in live.values():
            tensor.data = tensor.data.contiguous()
        self._read = {name: tensor for name, tensor in live.items() if name in declared}
        # (live tensor, its other buffer) of what the step changes
        self._changed = {name: [live[name], torch.empty_like(live[name].data)]
                         for name in (input_name(value) for value in step.outputs if value.role in LIVE)}
        self._results = [value for value in step.outputs if value.role in (LOSSES, OUTPUTS)]
        self._binding = self._session.io_binding()

    def run(self, batch, weights=None, rate=None, count=None, draws=()):
        """One step; for its arguments see step_arguments.given_tensors. -> (losses [B], outputs), in memory of their own."""
        losses, outputs = self.results(batch, weights, rate, count, draws)
        return losses, outputs

    def results(self, batch, weights=None, rate=None, count=None, draws=()):
        """What is put out and not fed back, in the order of the step's outputs; also for a graph without losses."""
        given = given_tensors(self._step, batch, weights, rate, count, draws)
        for name, tensor in [*zip(self._given, given), *self._read.items()]:
            if name is not None:
                self._bind(self._binding.bind_input, name, tensor)
        results = [torch.empty(value.shape, dtype=value.dtype) for value in self._results]
        for value, tensor in zip(self._results, results):
            self._bind(self._binding.bind_output, output_name(value), tensor)
        for name, (_, spare) in self._changed.items():
            self._bind(self._binding.bind_output, NEXT + name, spare)
        self._session.run_with_iobinding(self._binding)
        for pair in self._changed.values():
            pair[0].data, pair[1] = pair[1], pair[0].data
        return results

    def _bind(self, bind, name, tensor):
        bind(name, "cpu", 0, _numpy_type(tensor.dtype), list(tensor.shape), tensor.data_ptr())


def session_of(model):
    """An inference session on the CPU, with as many threads as torch may use."""
    try:
        onnxruntime = import_onnxruntime()
    except ImportError:
        raise UserError("engine: this step needs the package onnxruntime; pip install 'piebridge[engine]', or use backend=eager") from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads(), 1
    options.log_severity_level = 3  # errors only
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # spinning threads would take cores from decoding
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _numpy_type(dtype):
    return torch.empty(0, dtype=dtype).numpy().dtype.type
