"""The search on the planner's own figures: what it promises is what the compiled step's plan says."""

import pytest
import torch
from search_examples import Narrow, image_batches

from piebridge.core.errors import UserError
from piebridge.engine.capture import capture
from piebridge.engine.losses import cross_entropy
from piebridge.engine.memory_plan import plan_memory
from piebridge.engine.planned import beside_forward, extra_bytes_of, whole_step
from piebridge.engine.scheme import Scheme
from piebridge.engine.search import SearchSettings, search
from piebridge.engine.step_graph import Part
from piebridge.engine.update_rules import SGD


def parts_of(module, *keys):
    return {key: Part() for key, _ in module.named_parameters() if key in keys}


def test_extra_memory_is_what_training_adds_to_the_forward():
    module, batch = Narrow(), image_batches(1)[0]
    plan = plan_memory(capture(module, cross_entropy, SGD(0.9), parts_of(module, "head.weight", "head.bias"), batch))
    assert beside_forward(plan) < plan.peak_bytes / 4  # the forward's own is the most by far
    assert beside_forward(plan) >= plan.state_bytes + 4 * 24 * 4  # the head's kept input, of 4 samples
    assert plan.state_bytes == 4 * (24 * 4 + 4)
    assert whole_step(plan) == plan.peak_bytes + plan.state_bytes


def test_momentum_takes_a_state_for_each_trained_number():
    module, batch = Narrow(), image_batches(1)[0]
    parts = parts_of(module, "last.weight", "head.weight", "head.bias")
    without, with_momentum = (extra_bytes_of(module, cross_entropy, rule, batch)(parts) for rule in (SGD(), SGD(0.9)))
    assert with_momentum - without == 4 * (24 * 8 + 24 * 4 + 4)


def test_a_share_keeps_that_share():
    module, batch = Narrow(), image_batches(1)[0]
    memory_of = extra_bytes_of(module, cross_entropy, SGD(), batch)
    head = parts_of(module, "head.weight", "head.bias")
    whole, half = (memory_of(dict(head, **{"last.weight": part})) for part in (Part(), Part(1, torch.arange(4))))
    assert whole - half == 4 * 4 * 8 * 8 * 4  # half of the input of `last`: 4 samples, 4 of 8 channels, 8 x 8, 4 bytes


def test_the_found_scheme_fits_as_it_is_compiled():
    module, batches = Narrow(), image_batches()
    memory_of = extra_bytes_of(module, cross_entropy, SGD(0.9), batches[0])
    full = memory_of(parts_of(module, *dict(module.named_parameters())))
    result = search(module, cross_entropy, batches, full / 4, memory_of, settings=SearchSettings(states=1, checks=6), folder=False)
    parts = Scheme.read(result.scheme.text()).resolve(module, batches[0][0])
    assert memory_of(parts) == result.planned_bytes <= full / 4
    assert set(parts) > {"head.weight", "head.bias"}
    with pytest.raises(UserError, match="a budget of 100 bytes cannot be met: the least, training head.weight, head.bias, takes"):
        search(module, cross_entropy, batches, 100, memory_of, folder=False)
