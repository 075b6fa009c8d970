"""Adapters against plain torch modules that have them in the same places."""

import pytest
import torch
from forge_examples import Tower, module_of
from pet_examples import examples, family, settings, tuned
from torch import nn

from piebridge.core.errors import UserError
from piebridge.core.network_file import load_network_file, save_network
from piebridge.core.tuning import Tuning

pytestmark = pytest.mark.usefixtures("one_thread")


class Adapter(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.down, self.up = nn.Conv2d(8, width, 1), nn.Conv2d(width, 8, 1)

    def forward(self, x):
        return x + self.up(torch.relu(self.down(x)))


class Adapted(Tower):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(24, 4)

    def place(self):
        """An adapter behind each block."""
        self.adapters = nn.ModuleDict({f"blocks_{number}": Adapter(2) for number in range(3)})
        self.blocks = nn.Sequential(*[nn.Sequential(*pair) for pair in zip(self.blocks, self.adapters.values())])
        return self.double()


def test_convolutional_adapters_are_the_plain_modules():
    network, (images, labels) = family("tower"), examples("tower")
    plain = module_of(network, Adapted()).requires_grad_(False).place()
    tuning = tuned(network, settings("adapter"), "tower")
    own = dict(plain.adapters.named_parameters())
    with torch.no_grad():
        for key, tensor in tuning.state().items():
            (own[key[len("adapters."):]] if key.startswith("adapters.") else dict(plain.named_parameters())[key]).copy_(tensor)
    for parameter in tuning.parameters():
        parameter.grad = None
    logits, wanted = tuning(tuning.frozen().features(images)), plain.eval()(images)
    torch.testing.assert_close(logits, wanted, rtol=1e-10, atol=1e-12)
    nn.functional.cross_entropy(logits, labels).backward()
    nn.functional.cross_entropy(wanted, labels).backward()
    for key, parameter in zip(tuning.state(), tuning.parameters()):
        if key.startswith("adapters."):
            torch.testing.assert_close(parameter.grad, own[key[len("adapters."):]].grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["vit", "deit"])
def test_transformers_get_linear_adapters(name):
    tuning = Tuning(family(name), settings("adapter", r=3))
    shapes = {key: tuple(tensor.shape) for key, tensor in tuning.state().items() if key.startswith("adapters.")}
    assert len(shapes) == 3 * 4 and set(shapes.values()) == {(3, 16), (3,), (16, 3), (16,)}
    assert [node["operation"] for node in tuning.network.description["nodes"]].count("gelu") == 3


@pytest.mark.parametrize("blocks, count", [("all", 3), ("last:2", 2), (["blocks.1"], 1), ("blocks.0", 1)])
def test_blocks_choose_where_adapters_are(blocks, count):
    tuning = Tuning(family("tower"), settings("adapter", blocks=blocks, r=2))
    assert tuning.count() == count * (8 * 2 + 2 + 2 * 8 + 8) + 24 * 4 + 4


@pytest.mark.parametrize("name", ["tower", "efficientnet_lite0", "vit"])
def test_the_start_is_the_original_bit_for_bit(name):
    images, _ = examples(name, dtype=torch.float32)
    network = family(name, dtype=torch.float32)
    network.float()
    with torch.no_grad():
        before = network(images)
        tuning = Tuning(network, settings("adapter")).eval()
        assert torch.equal(tuning.bridged()(images), before)


def test_the_file_holds_known_operations_alone(tmp_path):
    network = family("tower")
    known = {node["operation"] for node in network.description["nodes"]} | {"Conv2d", "relu", "add"}
    tuning = tuned(network, settings("adapter"), "tower")
    save_network(tuning.bridged(), tmp_path / "tuned.safetensors")
    loaded = load_network_file(tmp_path / "tuned.safetensors")  # checks every node
    assert {node["operation"] for node in loaded.description["nodes"]} <= known
    again = Tuning(loaded, settings("head"))  # a tuned network can be tuned again
    assert again.tap == "flatten"
    with pytest.raises(UserError, match="pet.kind=adapter: network tower has adapters already; give the original it was made of"):
        Tuning(loaded, settings("adapter"))


def test_an_adapter_that_is_wider_than_any_block_is_refused():
    with pytest.raises(UserError, match="pet.r=65: the widest layer that pet.kind=adapter changes in network tower has 8 channels"):
        Tuning(family("tower"), settings("adapter", r=65))


def test_a_network_without_blocks_is_refused():
    network = family("tower")
    network.description["blocks"] = []
    with pytest.raises(UserError, match="pet.kind=adapter: network tower has no blocks that .* use pet.kind=lora"):
        Tuning(network, settings("adapter"))


def test_a_dropped_blocks_adapter_still_runs():
    network, (images, labels) = family("tower"), examples("tower")
    tuning = tuned(network, settings("adapter"), "tower")
    level = tuning.add_level(network.without_blocks(["blocks.1"]))
    plain = module_of(family("tower"), Adapted()).place()
    own = dict(plain.adapters.named_parameters())
    with torch.no_grad():
        for key, tensor in tuning.state().items():
            (own[key[len("adapters."):]] if key.startswith("adapters.") else dict(plain.named_parameters())[key]).copy_(tensor)
    plain.blocks[1][0] = nn.Identity()
    logits = tuning(tuning.frozen(level).features(images), level)
    wanted = plain.eval()(images)
    torch.testing.assert_close(logits, wanted, rtol=1e-10, atol=1e-12)
    for parameter in tuning.parameters():
        parameter.grad = None
    nn.functional.cross_entropy(logits, labels).backward()
    nn.functional.cross_entropy(wanted, labels).backward()
    middle = [key for key in tuning.state() if key.startswith("adapters.blocks_1")]
    assert len(middle) == 4
    for key, parameter in zip(tuning.state(), tuning.parameters()):
        if key in middle:
            torch.testing.assert_close(parameter.grad, own[key[len("adapters."):]].grad, rtol=1e-9, atol=1e-12)
