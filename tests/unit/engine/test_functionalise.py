import pytest
import torch

from piebridge.engine import compat
from piebridge.engine.functionalise import functionalise, is_functional

CONSTANT = torch.ones(4)


def sums(x, y):
    """As autograd adds gradients up."""
    total = x * 2
    total.add_(y)
    total.mul_(y)
    return total + x


def through_a_view(x, y):
    total = x * 2
    total[:, 0].add_(y[:, 0])
    return total


def read_through_a_view(x, y):
    total = x * 2
    row = total[0]
    total.add_(y)
    return row + 1


def before_and_after(x, y):
    total = x * 2
    before = total + 1
    total.add_(y)
    return before, total


def of_an_input(x, y):
    x = x.clone()
    return x.add_(y), x.relu_()


def rounded(x, y):
    return x.bfloat16().mul_(y)


def of_a_constant(x, y):
    return (x * 2).add_(CONSTANT)


def lowered(x, y):
    return torch.nn.functional.silu(x + y, inplace=True)


@pytest.mark.parametrize("function, is_traced_again", [
    (sums, False), (before_and_after, False), (of_an_input, False), (through_a_view, True), (read_through_a_view, True), (rounded, True),
    (of_a_constant, False), (lowered, True)])
def test_computes_the_same_without_in_place_operators(monkeypatch, function, is_traced_again):
    examples, table = [torch.randn(3, 4), torch.randn(3, 4)], compat.core_decompositions()
    traced = compat.trace(function, examples, {})
    assert not is_functional(traced.graph)
    traces = []
    trace = compat.trace
    monkeypatch.setattr(compat, "trace", lambda *arguments: traces.append(arguments) or trace(*arguments))
    functional = functionalise(traced, examples, table)
    assert is_functional(functional.graph) and len(traces) == is_traced_again
    before = [example.clone() for example in examples]
    torch.testing.assert_close(functional(*examples), function(*[example.clone() for example in examples]))
    assert all(map(torch.equal, examples, before))
    assert not [node for node in functional.graph.nodes if node.target in table]
