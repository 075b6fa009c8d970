"""What a scheme would take, without running it."""

from piebridge.engine.compiling import compile as compile_step


def extra_bytes_of(module, loss, rule, example):
    """A function {key: Part} -> bytes that a training step takes beside the weights: the planned peak and the update rule's state.

    example: (inputs, targets), a batch as the step will get it.
    """

    def extra_bytes(parts):
        plan = compile_step(module, loss, rule, dict(parts), example, cache=False).memory
        return plan.peak_bytes + plan.state_bytes

    return extra_bytes
