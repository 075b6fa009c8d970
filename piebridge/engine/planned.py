"""What a scheme would take, without running it."""

from piebridge.engine.compiling import compile as compile_step


def beside_forward(plan):
    """Bytes that training takes on top of the network and of a forward pass, of a MemoryPlan: the most that is allocated at one time from
    the end of the forward pass on (what it kept, gradients, what the backward pass makes), and the update rule's states.

    While the forward pass runs, what it has kept by then is no more. The forward's own peak is the same for every scheme.
    """
    return max((size for _, size in plan.timeline[plan.forward_end + 1:]), default=0) + plan.state_bytes


def whole_step(plan):
    """Bytes that a step takes beside the weights: its peak, wherever that is, and the update rule's states."""
    return plan.peak_bytes + plan.state_bytes


def extra_bytes_of(module, loss, rule, example, counted=beside_forward):
    """A function {key: Part} -> bytes that training these parts takes.

    example: (inputs, targets), a batch as the step will get it. counted: of the MemoryPlan, what counts.
    """

    def extra_bytes(parts):
        return counted(compile_step(module, loss, rule, dict(parts), example, cache=False).memory)

    return extra_bytes
