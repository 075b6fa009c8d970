"""Everything that may run a part of a step, by name."""

from dataclasses import dataclass, field
from typing import Any, Callable, Optional

from torch import nn

from piebridge.core.backends import BACKENDS, PROXY_BACKENDS
from piebridge.engine.capture import StepSettings
from piebridge.engine.eager_step import EagerStep
from piebridge.engine.inductor_step import InductorStep
from piebridge.engine.interpreter import Interpreter
from piebridge.engine.onnx_step import OnnxStep
from piebridge.engine.openvino_step import OpenVinoStep
from piebridge.engine.probe_step import Candidate
from piebridge.engine.segment_prefix import SegmentPrefix, hindrance
from piebridge.engine.step_graph import BATCH, DRAW, TRAINED

PREFIX, REST, WHOLE = "prefix", "rest", "whole"
REFERENCE = "interpreter"
BF16_ROUNDING = 2.0 ** -8
ONNX, OPENVINO = ("onnx", "onnxruntime"), ("onnx", "openvino")


@dataclass(frozen=True)
class Origin:
    """What a step was captured of, as capture.capture takes it, for the candidates that need more than the graph. Empty for a program that
    was read from a file.
    """

    module: Optional[nn.Module] = None
    loss: Optional[Callable] = None
    rule: Any = None
    settings: StepSettings = field(default_factory=StepSettings)


@dataclass(frozen=True)
class Kind:
    """build(step, tensors) -> executor. is_for_large_kernels: differs from the one before in their weight gradient only. For the rest see
    probe_step.Candidate.
    """

    build: Callable
    packages: tuple = ()
    rounding: float = 0.0
    build_seconds: float = 0.0
    is_for_large_kernels: bool = False


def _interpreter_channels_last(step, tensors):
    return Interpreter(step, tensors, is_channels_last=True)


def _openvino(**options):
    return lambda step, tensors: OpenVinoStep(step, tensors, **options)


def _onnxruntime_swapped(step, tensors):
    return OnnxStep(step, tensors, general="swapped")


# of any part: the reference, then what is fastest as a rule
GRAPH_KINDS = {
    REFERENCE: Kind(Interpreter),
    "openvino": Kind(_openvino(), OPENVINO),
    "openvino_bf16": Kind(_openvino(precision="bf16"), OPENVINO, BF16_ROUNDING),
    "openvino_swapped": Kind(_openvino(general="swapped"), OPENVINO, is_for_large_kernels=True),
    "openvino_bf16_swapped": Kind(_openvino(precision="bf16", general="swapped"), OPENVINO, BF16_ROUNDING, is_for_large_kernels=True),
    "interpreter_channels_last": Kind(_interpreter_channels_last),
    "onnxruntime": Kind(OnnxStep, ONNX),
    "onnxruntime_swapped": Kind(_onnxruntime_swapped, ONNX, is_for_large_kernels=True),
    "inductor": Kind(InductorStep, build_seconds=60.0),
}
# of a prefix, by the network itself: names of core/backends/registry.py
SEGMENTS = {f"segment_{name}": name for name in ("folded", "bf16", "torchscript", "openvino_int8")}
# of a whole step, by PyTorch
EAGER = {"eager": {}, "eager_channels_last": {"is_channels_last": True}, "eager_bf16": {"is_channels_last": True, "is_bf16": True}}
KNOWN = [*GRAPH_KINDS, *SEGMENTS, *EAGER]


def candidates_for(part, graph, step, origin):
    """[Candidate] for a part (PREFIX, REST or WHOLE; graph: its StepGraph) of a step, the reference first."""
    found = []
    for name, kind in GRAPH_KINDS.items():
        if not kind.is_for_large_kernels or _has_large_weight_gradient(graph):
            found.append(Candidate(name, _on_graph(kind.build, graph), kind.packages, kind.rounding, kind.build_seconds))
    if part == PREFIX:
        found += _of_segments(graph, step, origin)
    if part == WHOLE:
        found += _of_eager(step, origin)
    return found


def _on_graph(build, graph):
    return lambda tensors: build(graph, tensors)


def _of_segments(prefix, step, origin):
    known, against = {**BACKENDS, **PROXY_BACKENDS}, hindrance(prefix, origin.module)

    def build_on(backend):
        return lambda tensors: SegmentPrefix(prefix, origin.module, step.parts, backend)
    return [Candidate(name, build_on(backend), known[backend].packages, known[backend].rounding, hindrance=against)
            for name, backend in SEGMENTS.items()]


def _of_eager(step, origin):
    against = "needs the network itself, beside the program" if origin.module is None else None
    if step.inputs_of(DRAW):
        against = "draws its own random numbers, and the step is given them"
    input_count = sum(value.name.startswith("inputs") for _, value in step.inputs_of(BATCH))
    is_accumulating = not any(value.role == TRAINED for value in step.outputs)

    def build_with(options):
        return lambda tensors: EagerStep(origin.module, origin.loss, origin.rule, step.parts, origin.settings, tensors, is_foreach=True,
                                         is_accumulating=is_accumulating, input_count=input_count, **options)
    return [Candidate(name, build_with(options), rounding=BF16_ROUNDING if "is_bf16" in options else 0.0, hindrance=against)
            for name, options in EAGER.items()]


def _has_large_weight_gradient(step):
    """Whether a dense kernel of more than one number is trained: its gradient has two forms in ONNX, see onnx_convolutions.py."""
    for node in step.graph.nodes:
        if getattr(getattr(node.target, "overloadpacket", None), "__name__", "") == "convolution_backward":
            groups, mask = node.args[9:11]
            if groups == 1 and mask[1] and node.args[2].meta["val"].shape[2:].numel() > 1:
                return True
    return False
