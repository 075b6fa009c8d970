"""The reference executor against the graph it runs: the same values, in place, at the right time, and nothing kept too long."""

import pytest
import torch
from memory_examples import NETWORKS, SCHEMES, captured
from program_examples import BATCH_SIZE, batches, everything, network, some_channels, steps_of, tensors_of
from torch import fx

from piebridge.core.errors import UserError
from piebridge.engine.byte_counter import ByteCounter
from piebridge.engine.interpreter import Interpreter
from piebridge.engine.memory_plan import plan_memory
from piebridge.engine.propagate import propagate
from piebridge.engine.step_graph import BATCH, BUFFER, COUNT, DRAW, LOSSES, OUTPUTS, RATE, STATE, TRAINED, WEIGHTS, StepGraph, Value
from piebridge.engine.update_rules import SGD, AdamW

pytestmark = pytest.mark.usefixtures("one_thread")
ATEN = torch.ops.aten
WEIGHT = torch.full((BATCH_SIZE,), 1 / BATCH_SIZE, dtype=torch.float64)


def by_graph(step, tensors, batch, draws=()):
    """{(role, name): result} of the graph as it stands."""
    rate, count = torch.tensor([0.1, 1.0], dtype=torch.float64)
    given = {BATCH: iter(batch), WEIGHTS: iter([WEIGHT]), RATE: iter([rate]), COUNT: iter([count]), DRAW: iter(draws)}
    arguments = [next(given[value.role]) if value.role in given else tensors[value.role, value.name].clone() for value in step.inputs]
    return {(value.role, value.name): result for value, result in zip(step.outputs, step(*arguments))}


@pytest.mark.parametrize("rule", [SGD(), SGD(0.9, 1e-2), AdamW()], ids=["sgd", "momentum", "adamw"])
@pytest.mark.parametrize("kind", ["whole", "parts", "training"])
def test_computes_what_the_graph_computes(rule, kind):
    module = network()
    parts = some_channels() if kind == "parts" else everything(module)
    step = steps_of(module, rule, parts, is_training=kind == "training")["update"]
    tensors = tensors_of(step, module)
    draws = [torch.ones(value.shape, dtype=value.dtype) for _, value in step.inputs_of(DRAW)]
    wanted = by_graph(step, tensors, batches(1)[0], draws)
    places = {key: tensor.data_ptr() for key, tensor in tensors.items()}
    losses, outputs = Interpreter(step, tensors).run(list(batches(1)[0]), WEIGHT, 0.1, 1, draws)
    assert torch.equal(losses, wanted[LOSSES, "losses"]) and torch.equal(outputs, wanted[OUTPUTS, "outputs"])
    changed = [key for key in wanted if key[0] in (TRAINED, STATE, BUFFER)]
    assert len(changed) >= len(parts)
    for role, name in changed:
        part = step.parts[name].of(tensors[role, name]) if role == TRAINED else tensors[role, name]
        assert torch.equal(part, wanted[role, name]), name
    assert places == {key: tensor.data_ptr() for key, tensor in tensors.items()}


def test_leaves_the_other_channels_alone():
    module = network()
    step = steps_of(module, AdamW(weight_decay=0.1), some_channels())["update"]
    tensors = tensors_of(step, module)
    before = tensors[TRAINED, "5.weight"].clone()
    Interpreter(step, tensors).run(list(batches(1)[0]), WEIGHT, 0.1, 1)
    changed = (tensors[TRAINED, "5.weight"] != before).flatten(2).any(2).any(0)
    assert changed.nonzero().flatten().tolist() == [1, 4, 6]


def by_hand(build, states):
    """StepGraph of a graph that `build(graph, *placeholders)` fills, returning (losses, outputs, *new states)."""
    graph = fx.Graph()
    inputs = [Value(STATE, name, (3,), torch.float64) for name in states] + [Value(BATCH, "inputs", (3,), torch.float64)]
    results = build(graph, *[graph.placeholder(f"input_{number}") for number in range(len(inputs))])
    graph.output(tuple(results))
    outputs = [Value(LOSSES, "losses", (3,), torch.float64), Value(OUTPUTS, "outputs", (3,), torch.float64)]
    outputs += [Value(STATE, name, (3,), torch.float64) for name in states]
    step = StepGraph(fx.GraphModule(torch.nn.Module(), graph), inputs, outputs, {})
    return propagate(step).finish()


def run_by_hand(build, **states):
    tensors = {(STATE, name): torch.tensor(state, dtype=torch.float64) for name, state in states.items()}
    losses, outputs = Interpreter(by_hand(build, list(states)), tensors).run([torch.tensor([1.0, 2.0, 3.0]).double()], None, None, None)
    return outputs.tolist(), {name: tensors[STATE, name].tolist() for name in states}


def test_writes_a_value_only_when_nothing_reads_the_old_one():
    def build(graph, old, x):
        new = graph.call_function(ATEN.add.Tensor, (old, x))
        late = graph.call_function(ATEN.mul.Tensor, (old, new))
        return graph.call_function(ATEN.neg.default, (x,)), late, new

    outputs, states = run_by_hand(build, a=[10.0, 20.0, 30.0])
    assert outputs == [110.0, 440.0, 990.0] and states == {"a": [11.0, 22.0, 33.0]}


def test_knows_the_old_value_under_another_name():
    def build(graph, old, x):
        view = graph.call_function(ATEN.view.default, (old, [3]))
        new = graph.call_function(ATEN.add.Tensor, (old, x))
        late = graph.call_function(ATEN.mul.Tensor, (view, x))
        return graph.call_function(ATEN.neg.default, (x,)), late, new

    outputs, states = run_by_hand(build, a=[10.0, 20.0, 30.0])
    assert outputs == [10.0, 40.0, 90.0] and states == {"a": [11.0, 22.0, 33.0]}


def test_computes_into_the_old_value_only_where_that_is_read_as_it_lies():
    def build(graph, old, x):
        flipped = graph.call_function(ATEN.as_strided.default, (old, [3], [0], 2))  # a view: the last value, three times
        return (graph.call_function(ATEN.neg.default, (x,)), graph.call_function(ATEN.abs.default, (x,)),
                graph.call_function(ATEN.mul.Tensor, (old, flipped)))

    assert run_by_hand(build, a=[1.0, 2.0, 3.0])[1] == {"a": [3.0, 6.0, 9.0]}


def test_exchanges_two_states():
    def build(graph, a, b, x):
        return (graph.call_function(ATEN.neg.default, (x,)), graph.call_function(ATEN.abs.default, (x,)),
                graph.call_function(ATEN.clone.default, (b,)), graph.call_function(ATEN.clone.default, (a,)))

    assert run_by_hand(build, a=[1.0, 1.0, 1.0], b=[2.0, 2.0, 2.0])[1] == {"a": [2.0] * 3, "b": [1.0] * 3}


def test_takes_lists_of_values():
    def build(graph, old, x):
        both = graph.call_function(ATEN.stack.default, ([old, x],))
        total = graph.call_function(ATEN.sum.dim_IntList, (both, [0]))
        return graph.call_function(ATEN.neg.default, (x,)), total, graph.call_function(ATEN.mul.Tensor, (old, 2))

    assert run_by_hand(build, a=[1.0, 1.0, 1.0]) == ([2.0, 3.0, 4.0], {"a": [2.0] * 3})


def test_refuses_to_put_out_a_view_of_what_it_overwrites():
    def build(graph, old, x):
        return (graph.call_function(ATEN.neg.default, (x,)), graph.call_function(ATEN.view.default, (old, [3])),
                graph.call_function(ATEN.mul.Tensor, (old, 2)))

    with pytest.raises(UserError, match=r"the step's outputs 'outputs' is a view of an input; put a copy out, x\.clone\(\)"):
        run_by_hand(build, a=[1.0, 1.0, 1.0])


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_takes_the_memory_that_was_planned(name, scheme):
    """But for updates that it computes into the old value, which may make the highest point lower."""
    _, step, tensors = captured(name, scheme, is_training=True)
    draws = [tensors[value.role, value.name].clone for _, value in step.inputs_of(DRAW)]
    batch = [tensors[value.role, value.name] for _, value in step.inputs_of(BATCH)]
    executor = Interpreter(step, tensors)
    with ByteCounter() as counter:
        executor.run(batch, tensors[WEIGHTS, "weights"], 0.1, 1, draws)
    planned = plan_memory(step).peak_bytes
    assert planned * 0.95 <= counter.peak <= planned


def test_frees_all_but_what_comes_out():
    module = network()
    step = steps_of(module, AdamW())["update"]
    executor = Interpreter(step, tensors_of(step, module))
    freed = [register for _, _, _, free in executor._instructions for register in free]
    kept = len(step.inputs_of(BATCH, WEIGHTS, RATE, COUNT)) - 2  # losses and outputs stay
    assert len(freed) == len(set(freed)) == sum(node.op == "call_function" for node in step.graph.nodes) + kept


@pytest.mark.parametrize("kind", ["whole", "parts"])
def test_channels_last_gives_the_same_training(kind):
    module = network()
    step = steps_of(module, SGD(0.9), some_channels() if kind == "parts" else None)["update"]
    plain, last = tensors_of(step, module), tensors_of(step, module)
    executors = Interpreter(step, plain), Interpreter(step, last, is_channels_last=True)
    assert last[TRAINED, "3.weight"].is_contiguous(memory_format=torch.channels_last)
    for images, labels in batches(3):
        (losses, outputs), (own, others) = [executor.run([images, labels], WEIGHT, 0.1, 1) for executor in executors]
        torch.testing.assert_close(losses, own, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(outputs, others, rtol=1e-11, atol=1e-12)
    for key, tensor in plain.items():
        torch.testing.assert_close(tensor, last[key], rtol=1e-10, atol=1e-12, msg=str(key))


def test_channels_last_refuses_a_fixed_layout():
    def build(graph, old, x):
        laid_out = graph.call_function(ATEN.as_strided.default, (x, [3], [1]))
        return (graph.call_function(ATEN.neg.default, (x,)), graph.call_function(ATEN.abs.default, (laid_out,)),
                graph.call_function(ATEN.mul.Tensor, (old, 2)))

    with pytest.raises(UserError, match="as_strided.*fixes the layout of its value; compile with is_channels_last=False"):
        Interpreter(by_hand(build, ["a"]), {(STATE, "a"): torch.zeros(3).double()}, is_channels_last=True)


def test_names_a_tensor_that_is_missing_or_another():
    module = network()
    step = steps_of(module)["update"]
    tensors = tensors_of(step, module)
    gone = {key: tensor for key, tensor in tensors.items() if key != (TRAINED, "9.bias")}
    with pytest.raises(UserError, match="the step needs the trained tensor '9.bias', which is not there"):
        Interpreter(step, gone)
    tensors[TRAINED, "9.bias"] = torch.zeros(7).double()
    with pytest.raises(UserError, match=r"tensor '9.bias' is torch.float64 \[7\], and the step was compiled for torch.float64 \[5\]"):
        Interpreter(step, tensors)


def test_what_comes_out_stays_as_it_is():
    module = network()
    step = steps_of(module)["update"]
    executor = Interpreter(step, tensors_of(step, module))
    losses, outputs = executor.run(list(batches(1)[0]), WEIGHT, 0.1, 1)
    before = losses.clone(), outputs.clone()
    executor.run(list(batches(1, seed=2)[0]), WEIGHT, 0.1, 2)
    assert torch.equal(losses, before[0]) and torch.equal(outputs, before[1])
    losses.add_(1)  # not a tensor of inference mode
