"""What a scheme would take, by planning its step as it would be compiled, without running it."""

from piebridge.engine.capture import capture
from piebridge.engine.memory_plan import plan_memory
from piebridge.engine.passes import run_passes
from piebridge.engine.step_graph import BUFFER, FROZEN


def extra_bytes(plan):
    """Bytes that training takes on top of the network and of a forward pass: the most that is allocated at one time from the end of the
    forward pass on (what it kept, gradients, what the backward pass makes), and the update rule's states.

    While the forward pass runs, what it has kept by then is less than that.
    """
    return max((size for _, size in plan.timeline[plan.forward_end + 1:]), default=0) + plan.state_bytes


def planner_of(module, loss, rule, batch, settings=None, off=(), bytes_of=extra_bytes):
    """A function {key: Part} -> bytes, for search.py. The arguments are those of `capture` and `run_passes`.

    bytes_of: MemoryPlan -> what counts; `lambda plan: plan.total_bytes` for everything together.
    """
    tensors = {(FROZEN, key): parameter.detach() for key, parameter in module.named_parameters()}
    tensors.update({(BUFFER, key): buffer for key, buffer in module.named_buffers()})

    def memory_of(parts):
        step = capture(module, loss, rule, parts, batch, settings)
        run_passes(step, dict(tensors), off)
        return bytes_of(plan_memory(step))

    return memory_of
