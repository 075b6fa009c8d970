"""What the engine takes from inside PyTorch, looked up in one place: none of it is public, all of it may move."""

import contextlib
import re

import torch

from piebridge.core.errors import UserError

OLDEST = (2, 6)


def _unsupported(reason):
    oldest = ".".join(map(str, OLDEST))
    return UserError(f"engine: needs PyTorch {oldest} or newer, and this is {torch.__version__} ({reason}); pip install -U torch, or use "
                     "step=eager")


def check_version():
    """UserError where this PyTorch is older than what the engine was written for."""
    found = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if found < OLDEST:
        raise _unsupported("older")


def make_fx():
    """The tracer of functions into ATen graphs: `make_fx(function, decomposition_table, tracing_mode)(*examples)` gives a GraphModule."""
    check_version()
    try:
        from torch.fx.experimental.proxy_tensor import make_fx as found
    except ImportError as error:
        raise _unsupported(str(error)) from None
    return found


def trace(function, examples, decompositions=None):
    """GraphModule of the ATen calls that `function` makes, lowered by {operator: function}; tensors that it holds become constants.

    In a fake mode without symbols, which refuses at its line what depends on values; make_fx's own would carry the unknown along.
    """
    mode = fake_mode()
    with mode, torch.no_grad():
        return make_fx()(function, decomposition_table=decompositions or {}, tracing_mode="real")(*map(mode.from_tensor, examples))


def is_data_dependent(error):
    """Whether a trace failed because a shape or a branch needs the values of a tensor."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    return isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)) or "_local_scalar_dense" in str(error)


def core_decompositions():
    """{operator: function} of PyTorch's own lowering to its core operators."""
    check_version()
    try:
        from torch._decomp import core_aten_decompositions
    except ImportError as error:
        raise _unsupported(str(error)) from None
    return dict(core_aten_decompositions())


def decompositions_of(operators):
    """{operator: function} of registered lowerings for these operators, whether or not they belong to the core table."""
    from torch._decomp import get_decompositions

    return dict(get_decompositions(operators))


def batch_norm_decompositions():
    """Of batch norm in train mode: exported as it is, its gradients come out wrong elsewhere."""
    operators = aten()
    names = ("native_batch_norm", "native_batch_norm_backward", "_native_batch_norm_legit", "_native_batch_norm_legit_functional",
             "_native_batch_norm_legit_no_training", "_batch_norm_with_update", "_batch_norm_with_update_functional",
             "batch_norm_backward")
    return decompositions_of([getattr(operators, name) for name in names if hasattr(operators, name)])


def functionalised(function):
    """The same function without in-place operators."""
    from torch.func import functionalize

    return functionalize(function, remove="mutations")


def fake_mode():
    """A mode in which tensors have shapes, types and strides but no memory."""
    check_version()
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_mode_of(tensor):
    """The mode in which a fake tensor was made."""
    return tensor.fake_mode


def storage_key(tensor):
    """What tells one storage from another, real or fake: tensors with equal keys share memory, as long as one of them lives."""
    return tensor.untyped_storage()._cdata


def dispatch_mode():
    """The base class of modes that see every ATen call."""
    try:
        from torch.utils._python_dispatch import TorchDispatchMode as found
    except ImportError as error:
        raise _unsupported(str(error)) from None
    return found


@contextlib.contextmanager
def exact_attention():
    """A context in which attention is traced in its plain form.

    The CPU flash kernel's registered lowering gives gradients that are 25 to 58 times off, and frozen encoder layers would become one
    call of a kernel for inference, which no other runtime has.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    has_fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(has_fast_path)


def aten():
    """The ATen operators, `aten().relu.default` and so on."""
    return torch.ops.aten


def callable_of(operator):
    """What calling an operator calls in the end, without the Python method on the way, which costs as much as a small operator."""
    return getattr(operator, "_op", operator)


def into(operator):
    """The operator that computes an elementwise operator's result into the tensor `out`, or None where there is none.

    `out` may be one of the arguments. Those that were generated compute elsewhere and copy, which saves no memory.
    """
    if operator is aten().relu.default:
        return _relu_into
    if torch.Tag.pointwise not in getattr(operator, "tags", ()):
        return None
    packet, name = operator.overloadpacket, operator._overloadname
    for candidate in ("out", f"{name}_out"):
        if candidate in packet.overloads():
            found = getattr(packet, candidate)
            given = [(each.name, str(each.type)) for each in found._schema.arguments if not each.is_out]
            if given == [(each.name, str(each.type)) for each in operator._schema.arguments] and torch.Tag.generated not in found.tags:
                return found
    return None


def _relu_into(values, out):
    return aten().clamp_min.out(values, 0, out=out)


def compile_package(exported, path):
    """Write a torch.export program as a `.pt2` package of compiled code."""
    check_version()
    try:
        from torch._inductor import aoti_compile_and_package
    except ImportError as error:
        raise _unsupported(str(error)) from None
    aoti_compile_and_package(exported, package_path=str(path))


def load_package(path):
    """A `.pt2` package of compiled code as a callable."""
    from torch._inductor import aoti_load_package

    return aoti_load_package(str(path))


def share_constants(package, tensors):
    """Let a loaded package work on these tensors' memory. tensors: {name: tensor}; those that it does not know are left out."""
    known = set(package.get_constant_fqns())
    package.load_constants({name: tensor for name, tensor in tensors.items() if name in known}, check_full_update=False, user_managed=True)
