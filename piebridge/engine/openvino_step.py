"""A step in OpenVINO: the ONNX model of onnx_writer.py, compiled for the CPU, run on the live tensors' own memory."""

import numpy as np
import torch

from piebridge.core.backends.openvino_backend import shared_core
from piebridge.core.backends.quiet_imports import import_openvino
from piebridge.core.backends.segment import threads
from piebridge.core.errors import UserError
from piebridge.engine.onnx_writer import input_name, output_name, to_onnx
from piebridge.engine.step_arguments import GIVEN, given_tensors, given_values
from piebridge.engine.step_graph import LOSSES, OUTPUTS

LARGEST = 2 ** 31  # bytes of one protobuf message


class OpenVinoStep:
    """An executor, see interpreter.py, also of a step's prefix (see segments.py). Frozen tensors become constants, which OpenVINO packs for
    its kernels: later changes are not seen.

    step: StepGraph. tensors: {(role, name): tensor} on the CPU; trained ones, states and buffers are read where they lie and updated in
    place. precision: f32, or bf16 for kernels in bfloat16; what goes in and out stays as it is. onnx_options: of to_onnx. UserError where
    OpenVINO cannot read or compile the step.
    """

    def __init__(self, step, tensors, precision="f32", **onnx_options):
        self._step, self._tensor = step, import_openvino().Tensor
        compiled = _compiled(step, tensors, precision, onnx_options)
        self._request = compiled.create_infer_request()
        self._held = {}  # name -> tensor that OpenVINO reads or writes
        read = {name for port in compiled.inputs for name in port.get_names()}
        names = [input_name(value) for value in given_values(step)]
        self._given = [name if name in read else None for name in names]
        self._staged = []  # (live tensor, contiguous copy) of what does not lie contiguously
        for value in step.inputs:
            name = input_name(value)
            if value.role not in GIVEN and name in read:
                tensor = tensors[value.role, value.name].detach()
                self._bind(name, tensor if tensor.is_contiguous() else self._stage(tensor))
        live = {value: tensors[value.role, value.name].detach() for value in step.outputs if value.role not in (LOSSES, OUTPUTS)}
        # a partly trained tensor is put out whole, see to_onnx
        results = [(value, torch.empty(live[value].shape if value in live else value.shape, dtype=value.dtype)) for value in step.outputs]
        for value, result in results:
            self._bind(output_name(value), result)
        self._results = [result for value, result in results if value not in live]
        self._writes = [(live[value], result) for value, result in results if value in live]

    def run(self, batch, weights, rate, count, draws=()):
        """-> (losses [B], outputs), copies. weights: float [B]; rate, count: numbers."""
        losses, outputs = self.results(batch, weights, rate, count, draws)
        return losses.clone(), outputs.clone()

    def results(self, batch, weights=None, rate=None, count=None, draws=()):
        """What is put out and not fed back, in the order of the step's outputs, until the next run; also for a graph without losses."""
        for name, tensor in zip(self._given, given_tensors(self._step, batch, weights, rate, count, draws)):
            if name is not None:
                self._bind(name, tensor.detach())
        # numpy copies on this thread: torch would wake its own, which then spin on the cores that OpenVINO is to use
        for live, staged in self._staged:
            np.copyto(staged.numpy(), live.numpy())
        self._request.infer()
        for live, result in self._writes:
            np.copyto(live.numpy(), result.numpy())
        return self._results

    def _bind(self, name, tensor):
        self._held[name] = tensor
        self._request.set_tensor(name, self._tensor(tensor.numpy(), shared_memory=True))

    def _stage(self, live):
        staged = torch.empty(live.shape, dtype=live.dtype)
        self._staged.append((live, staged))
        return staged


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
