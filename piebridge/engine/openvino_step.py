"""A step in OpenVINO: the ONNX model of onnx_writer.py, compiled for the CPU, run on the live tensors' own memory."""

import torch

from piebridge.core.backends.openvino_backend import shared_core
from piebridge.core.backends.quiet_imports import import_openvino
from piebridge.core.backends.segment import threads
from piebridge.core.errors import UserError
from piebridge.engine.onnx_writer import input_name, output_name, to_onnx
from piebridge.engine.step_arguments import given_tensors, given_values
from piebridge.engine.step_graph import BUFFER, LOSSES, OUTPUTS, STATE, TRAINED

LIVE = (TRAINED, BUFFER, STATE)
LARGEST = 2 ** 31  # bytes of one protobuf message


class OpenVinoStep:
    """An executor, see interpreter.py, also of a step's prefix (see segments.py). Frozen tensors become constants, which OpenVINO packs for
    its kernels: later changes are not seen.

    step: StepGraph. tensors: {(role, name): tensor} on the CPU. What a step changes is written beside the old and then takes its place,
    as in onnx_step.py. precision: f32, or bf16 for kernels in bfloat16; what goes in and out stays as it is. onnx_options: of to_onnx.
    UserError where OpenVINO cannot read or compile the step.
    """

    def __init__(self, step, tensors, precision="f32", **onnx_options):
        self._step, self._tensor = step, import_openvino().Tensor
        compiled = _compiled(step, tensors, precision, onnx_options)
        self._request = compiled.create_infer_request()
        self._held = {}  # name -> tensor that OpenVINO reads or writes
        read = {name for port in compiled.inputs for name in port.get_names()}
        self._given = [name if name in read else None for name in map(input_name, given_values(step))]
        live = {input_name(value): tensors[value.role, value.name] for value in step.inputs if value.role in LIVE}
        for tensor in live.values():
            tensor.data = tensor.data.contiguous()
        self._read = {name: tensor for name, tensor in live.items() if name in read}
        # (live tensor, its other buffer) of what the step changes; a partly trained tensor is put out whole, see to_onnx
        self._changed = {output_name(value): [live[input_name(value)], torch.empty_like(live[input_name(value)].data)]
                         for value in step.outputs if value.role in LIVE}
        self._results = {output_name(value): torch.empty(value.shape, dtype=value.dtype)
                         for value in step.outputs if value.role in (LOSSES, OUTPUTS)}

    def run(self, batch, weights, rate, count, draws=()):
        """-> (losses [B], outputs), copies. weights: float [B]; rate, count: numbers."""
        losses, outputs = self.results(batch, weights, rate, count, draws)
        return losses.clone(), outputs.clone()

    def results(self, batch, weights=None, rate=None, count=None, draws=()):
        """What is put out and not fed back, in the order of the step's outputs, until the next run; also for a graph without losses."""
        given = given_tensors(self._step, batch, weights, rate, count, draws)
        spare = {name: pair[1] for name, pair in self._changed.items()}
        for name, tensor in [*zip(self._given, given), *self._read.items(), *spare.items(), *self._results.items()]:
            if name is not None:
                self._bind(name, tensor.detach())
        self._request.infer()
        for pair in self._changed.values():
            pair[0].data, pair[1] = pair[1], pair[0].data
        return list(self._results.values())

    def _bind(self, name, tensor):
        held = self._held.get(name)
        if held is None or held.data_ptr() != tensor.data_ptr():
            self._request.set_tensor(name, self._tensor(tensor.numpy(), shared_memory=True))
        self._held[name] = tensor


def _compiled(step, tensors, precision, onnx_options):
    model = to_onnx(step, tensors, is_frozen_constant=True, **onnx_options)
    if model.ByteSize() >= LARGEST:
        raise UserError(f"openvino: the step with its frozen weights has {model.ByteSize() >> 20} MiB, and one ONNX message holds 2048; "
                        "use another backend for this part")
    # one stream over all cores, see core/backends/openvino_backend.py
    settings = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": threads(), "NUM_STREAMS": 1}
    try:
        return shared_core().compile_model(shared_core().read_model(model.SerializeToString()), "CPU", settings)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise UserError(f"openvino: cannot compile the step: {lines[-1][:200] if lines else error}") from error
