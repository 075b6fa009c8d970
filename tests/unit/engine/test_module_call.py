"""A module called with other tensors."""

import pytest
import torch
from scheme_examples import TOKENS, Decoder, Tower
from torch import nn

from piebridge.core.descriptions import read_description
from piebridge.core.network import GraphNetwork, expected_shapes
from piebridge.engine.capture import capture
from piebridge.engine.losses import cross_entropy
from piebridge.engine.module_call import call_with
from piebridge.engine.scheme import Scheme
from piebridge.engine.update_rules import SGD

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("module, example", [(Tower().train(), torch.randn(2, 3, 16, 16)), (Decoder(), TOKENS)])
def test_it_gives_what_functional_call_gives_and_leaves_the_module_alone(module, example):
    before = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    own = dict(module.named_parameters(), **dict(module.named_buffers()))
    tensors, reference = ({key: tensor.detach().clone() + 1 for key, tensor in own.items()} for _ in range(2))
    found = call_with(module, tensors, (example,))
    wanted = torch.func.functional_call(module, reference, (example,), tie_weights=True)
    assert torch.equal(found, wanted)
    assert all(torch.equal(tensors[key], reference[key]) for key in tensors)  # statistics of batch norm moved in the given tensors
    assert all(torch.equal(tensor, before[key]) for key, tensor in module.state_dict().items())
    assert all(isinstance(parameter, nn.Parameter) for parameter in module.parameters())


def test_a_network_whose_submodule_has_a_methods_name():
    description = read_description("mobilenet_v3_large")
    for node in description["nodes"]:
        for key in ("in_channels", "out_channels", "groups", "num_features", "in_features", "out_features"):
            if node["arguments"].get(key, 0) >= 8:
                node["arguments"][key] //= 8
    shapes = expected_shapes(description)
    first, second = ({key: torch.rand(shape) if shape else torch.tensor(0) for key, shape in shapes.items()} for _ in range(2))
    image = torch.randn(1, 3, 32, 32)
    network, other = GraphNetwork(description, first).eval(), GraphNetwork(description, second).eval()
    with pytest.raises(TypeError, match="features"):  # why there is a function of our own
        torch.func.functional_call(network, second, (image,))
    assert torch.equal(call_with(network, second, (image,)), other(image))
    parts = Scheme.read("head").resolve(network, image)
    step = capture(network, cross_entropy, SGD(), parts, (image, torch.tensor([0])))
    assert [value.name for value in step.inputs if value.role == "trained"] == ["classifier.3.weight", "classifier.3.bias"]


def test_the_module_is_put_back_when_it_fails():
    module = nn.Sequential(nn.Linear(3, 2))
    weight = module[0].weight
    with pytest.raises(RuntimeError):
        call_with(module, {"0.weight": torch.zeros(2, 3)}, (torch.zeros(1, 4),))
    assert module[0].weight is weight
