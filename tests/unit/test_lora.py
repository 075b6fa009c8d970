"""LoRA against its formula, plain torch's autograd, and peft."""

import math

import pytest
import torch
from forge_examples import Tower, module_of
from pet_examples import examples, family, settings, step_of, tuned, vision_transformer
from torch import nn
from torch.nn.utils import parametrize

from piebridge.core.errors import UserError
from piebridge.core.gate import OpenGate
from piebridge.core.pet_lora import LoraLayer
from piebridge.core.tuning import Tuning

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("layer", [nn.Linear(6, 5), nn.Conv2d(6, 5, 1, stride=2), nn.Conv2d(6, 5, 1, bias=False)])
def test_a_layer_is_its_formula(layer):
    layer, torch.manual_seed(0)
    layer.double()
    rest = [1, 1] if isinstance(layer, nn.Conv2d) else []
    down = nn.Parameter(torch.randn([2, 6] + rest, dtype=torch.float64))
    up = nn.Parameter(torch.randn([5, 2] + rest, dtype=torch.float64))
    x = torch.randn([3, 6, 4, 4] if rest else [3, 7, 6], dtype=torch.float64)
    found = LoraLayer(layer, down, up, 1.5, 0.0)(x)
    with torch.no_grad():
        layer.weight += 1.5 * (up.flatten(1) @ down.flatten(1)).view_as(layer.weight)
    torch.testing.assert_close(found, layer(x), rtol=1e-12, atol=1e-12)


def test_dropout_is_on_the_input_of_a_and_only_in_training():
    torch.manual_seed(0)
    layer = LoraLayer(nn.Linear(100, 1), nn.Parameter(torch.ones(1, 100)), nn.Parameter(torch.ones(1, 1)), 1.0, 0.5)
    x = torch.ones(400, 100)
    change = (layer(x) - layer.layer(x)).flatten().detach()
    assert len(set(change.tolist())) > 20 and float(change.mean()) == pytest.approx(100, rel=0.02)
    assert float(change.std()) == pytest.approx(math.sqrt(100), rel=0.15)  # each of 100 inputs is 0 or 2
    torch.testing.assert_close(layer.eval()(x) - layer.layer(x), torch.full((400, 1), 100.0))


def test_it_starts_as_peft_starts():
    tuning = Tuning(family("tower"), settings("lora", r=4))
    down = tuning.state()["blocks.0.expand.lora_A"]
    assert down.shape == (4, 8, 1, 1) and float(down.abs().max()) <= math.sqrt(1 / 8) and float(down.std()) > 0.1
    assert not tuning.state()["blocks.0.expand.lora_B"].any()


class LowRank(nn.Module):
    """W -> W + scale B A, as plain torch has parametrizations."""

    def __init__(self, down, up, scale):
        super().__init__()
        self.down, self.up, self.scale = nn.Parameter(down), nn.Parameter(up), scale

    def forward(self, weight):
        return weight + self.scale * (self.up.flatten(1) @ self.down.flatten(1)).view_as(weight)


def test_gradients_are_those_of_plain_autograd():
    network, (images, labels) = family("tower"), examples("tower")
    plain = Tower()
    plain.head = nn.Linear(24, 4)
    plain = module_of(network, plain).requires_grad_(False)
    tuning = tuned(network, settings("lora", target=("expand", "project")), "tower")  # B is no longer zero
    state = {key: tensor.clone() for key, tensor in tuning.state().items()}
    references = {}
    for number in range(3):
        for name in ("expand", "project"):
            path = f"blocks.{number}.{name}"
            references[path] = LowRank(state[path + ".lora_A"], state[path + ".lora_B"], 3.0)
            parametrize.register_parametrization(plain.blocks[number].expand if name == "expand" else plain.blocks[number].project,
                                                 "weight", references[path])
    with torch.no_grad():
        plain.head.weight.copy_(state["head.weight"])
        plain.head.bias.copy_(state["head.bias"])
    for parameter in tuning.parameters():
        parameter.grad = None
    nn.functional.cross_entropy(tuning(tuning.frozen().features(images)), labels).backward()
    nn.functional.cross_entropy(plain(images), labels).backward()
    found = dict(zip(tuning.state(), [parameter.grad for parameter in tuning.parameters()]))
    for path, reference in references.items():
        torch.testing.assert_close(found[path + ".lora_A"], reference.down.grad, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found[path + ".lora_B"], reference.up.grad, rtol=1e-9, atol=1e-12)


def test_the_joint_projection_of_torchs_attention_is_one_target():
    """Against torch's own MultiheadAttention with the low rank added to in_proj_weight."""
    network, (images, _) = family("vit"), examples("vit")
    tuning = tuned(network, settings("lora", target=("in_proj", "out_proj")), "vit")
    bridged = tuning.bridged()
    assert [node["operation"] for node in bridged.description["nodes"]].count("linear") == 3
    path = "encoder.layers.encoder_layer_0.self_attention"
    state, before = tuning.state(), family("vit").state_dict()
    for name, key in (("in_proj", "in_proj_weight"), ("out_proj", "out_proj.weight")):
        low = 3.0 * state[f"{path}.{name}.lora_B"] @ state[f"{path}.{name}.lora_A"]
        assert low.shape == ((48, 16) if name == "in_proj" else (16, 16)) and float(low.abs().max()) > 1e-4
        torch.testing.assert_close(bridged.state_dict()[f"{path}.{key}"], before[f"{path}.{key}"] + low, rtol=1e-12, atol=1e-12)
    plain = vision_transformer(4).double()
    plain.load_state_dict(bridged.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(tuning(tuning.frozen().features(images)), plain.eval()(images), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name, given, paths", [
    ("tower", {}, [f"blocks.{number}.{layer}" for number in range(3) for layer in ("expand", "project")] + ["last"]),
    ("tower", {"target": ("expand",), "blocks": "last:1"}, ["blocks.2.expand"]),
    ("tower", {"target": ("blocks.0.project", "last")}, ["blocks.0.project", "last"]),
    ("deit", {"target": ("qkv", "attn.proj"), "blocks": ["blocks.1"]}, ["blocks.1.attn.qkv", "blocks.1.attn.proj"]),
    ("vit", {"blocks": "last:1"}, ["encoder.layers.encoder_layer_2." + name for name in (
        "self_attention.in_proj", "self_attention.out_proj", "mlp.0", "mlp.3")])])
def test_targets(name, given, paths):
    tuning = Tuning(family(name), settings("lora", **given))
    assert [key[:-len(".lora_A")] for key in tuning.state() if key.endswith(".lora_A")] == paths


@pytest.mark.parametrize("given, expected", [
    ({"target": ("expanded",)}, r"pet.target=expanded: network tower has no linear layer or 1x1 convolution of that name "
                                r"\(did you mean 'expand'\?\); names are the last parts of paths such as blocks.0.expand, "),
    ({"target": ("depthwise",)}, "pet.target=depthwise: network tower has no linear layer"),
    ({"target": ("head",)}, "pet.target=head: network tower has no linear layer"),
    ({"r": 65}, "pet.r=65: the widest layer that pet.kind=lora changes in network tower has 24 channels; give 64 or fewer"),
    ({"target": ("last",), "blocks": ["blocks.0"]},
     r"pet.kind=lora: no layer of network tower is in pet.blocks=\['blocks.0'\] and pet.target=last; name other blocks or targets")])
def test_targets_that_do_not_exist(given, expected):
    with pytest.raises(UserError, match=expected):
        Tuning(family("tower"), settings("lora", **given))


def test_it_trains_as_peft_does():
    peft = pytest.importorskip("peft")
    network = family("tower")
    plain = Tower()
    plain.head = nn.Linear(24, 4)
    plain = module_of(network, plain)
    config = peft.LoraConfig(r=2, lora_alpha=6, lora_dropout=0.0, target_modules=["expand", "project"], modules_to_save=["head"])
    theirs = peft.get_peft_model(plain, config).double().eval()
    tuning = Tuning(network, settings("lora", target=("expand", "project")))
    assert tuning.count() == theirs.get_nb_trainable_parameters()[0]
    named = dict(theirs.named_parameters())
    with torch.no_grad():
        for key, tensor in tuning.state().items():
            if "lora_" in key:
                path, _, part = key.rpartition(".")
                tensor.copy_(named[f"base_model.model.{path}.{part}.default.weight"])
    trained = [parameter for parameter in theirs.parameters() if parameter.requires_grad]
    peer = torch.optim.AdamW(trained, lr=0.01, weight_decay=0.0)
    step = step_of(tuning, lr=0.01)
    for number in range(6):
        images, labels = examples("tower", seed=20 + number)
        peer.zero_grad()
        nn.functional.cross_entropy(theirs(images), labels).backward()
        peer.step()
        step(tuning.frozen().features(images).detach(), labels, OpenGate(), 0.0)
    images, _ = examples("tower")
    with torch.no_grad():
        torch.testing.assert_close(tuning.bridged()(images), theirs.merge_and_unload()(images), rtol=1e-6, atol=1e-8)
