"""A training step as files for other programs: `step.onnx`, and the tensors that change, `state.safetensors`, under the same names.

Any inference runtime trains with these two: feed the state and a batch, take each output `next/<name>` as the next input `<name>`. See
doc/examples/train_in_node.mjs.
"""

from piebridge.core.errors import UserError
from piebridge.core.files import atomic_path
from piebridge.core.safetensors_file import read_safetensors, write_safetensors
from piebridge.engine.onnx_writer import input_name, to_onnx
from piebridge.engine.step_graph import BUFFER, STATE, TRAINED


def write_step(path, step, tensors, general="columns"):
    """Write a StepGraph as an ONNX file; see onnx_writer.to_onnx."""
    model = to_onnx(step, tensors, general=general)
    with atomic_path(path) as temporary:
        temporary.write_bytes(model.SerializeToString())


def write_state(path, step, tensors):
    """Write what the step changes: trained tensors, states and buffers. tensors: {(role, name): tensor}."""
    write_safetensors(path, {input_name(value): tensors[value.role, value.name] for value in _changed(step)})


def read_state(path, step, tensors):
    """Read such a file, also one that another program has written, into the live tensors.

    UserError where a tensor is missing, or has another shape or type.
    """
    found, _ = read_safetensors(path)
    for value in _changed(step):
        name, live = input_name(value), tensors[value.role, value.name]
        if name not in found:
            raise UserError(f"{path}: has no {name}; write it from the same step")
        if found[name].shape != live.shape or found[name].dtype != live.dtype:
            raise UserError(f"{path}: {name} is {found[name].dtype} {list(found[name].shape)}, and the step has {live.dtype} "
                            f"{list(live.shape)}; write it from the same step")
    for value in _changed(step):
        tensors[value.role, value.name].data.copy_(found[input_name(value)])


def _changed(step):
    return [value for value in step.outputs if value.role in (TRAINED, STATE, BUFFER)]
