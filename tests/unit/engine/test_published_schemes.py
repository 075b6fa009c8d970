"""The schemes that come with the package, against what was published of them."""

import pytest
import torch
from scheme_examples import IMAGES, TOKENS, Decoder, Tower, resolved

from piebridge.engine.scheme import Scheme
from piebridge.engine.scheme_text import presets

pytestmark = pytest.mark.usefixtures("one_thread")


def weights_of(parts):
    """Paths of the layers whose weight is trained, in the network's order."""
    return [key[:-len(".weight")] for key in parts if key.endswith(".weight")]


def test_mobilenets_scheme_is_as_published():
    torchvision = pytest.importorskip("torchvision")
    module = torchvision.models.mobilenet_v2(width_mult=0.35)
    parts = resolved("mobilenet_v2", module, torch.zeros(1, 3, 32, 32))
    convolutions = [f"features.{block}.conv.0.0" for block in range(11, 18)]
    assert weights_of(parts) == convolutions + ["classifier.1"] and all(part.is_whole for part in parts.values())
    biases = [key for key in parts if key.endswith(".bias")]
    assert biases == [key for key in dict(module.named_parameters()) if key.endswith(".bias") and
                      (key.startswith("classifier") or int(key.split(".")[1]) >= 11)]


def test_resnets_scheme_is_as_published():
    torchvision = pytest.importorskip("torchvision")
    module = torchvision.models.ResNet(torchvision.models.resnet.Bottleneck, [3, 4, 6, 3], groups=1, width_per_group=4)
    parts = resolved("resnet50", module, torch.zeros(1, 3, 32, 32))
    blocks = [f"layer3.{block}" for block in range(1, 6)] + [f"layer4.{block}" for block in range(3)]
    assert weights_of(parts) == [f"{block}.conv1" for block in blocks] + ["fc"]
    assert "layer3.1.bn1.bias" in parts and "layer3.0.bn3.bias" not in parts and "layer4.0.downsample.1.bias" in parts


def test_encoders_schemes_are_as_published():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    small = dict(vocab_size=13, num_labels=2)
    bert = transformers.BertForSequenceClassification(transformers.BertConfig(
        hidden_size=8, num_attention_heads=2, num_hidden_layers=12, intermediate_size=12, **small))
    names = ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense", "intermediate.dense")
    parts = resolved("bert", bert, TOKENS)
    assert weights_of(parts) == [f"bert.encoder.layer.{layer}.{name}" for layer in range(8, 12) for name in names] + ["classifier"]
    assert {key.split(".")[3] for key in parts if key.startswith("bert.encoder")} == set("6789") | {"10", "11"}
    distilbert = transformers.DistilBertForSequenceClassification(transformers.DistilBertConfig(
        dim=8, n_heads=2, n_layers=6, hidden_dim=12, **small))
    parts = resolved("distilbert", distilbert, TOKENS)
    names = ("attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin", "ffn.lin1")
    assert weights_of(parts) == [f"distilbert.transformer.layer.{layer}.{name}" for layer in (4, 5) for name in names] + ["classifier"]
    assert {key.split(".")[3] for key in parts if key.startswith("distilbert.transformer")} == set("345")


def test_llamas_scheme_is_as_published():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    module = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        hidden_size=8, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=32, intermediate_size=12, vocab_size=13))
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj")
    parts = resolved("llama", module, TOKENS)
    assert list(parts) == [f"model.layers.{layer}.{name}.weight" for layer in range(27, 32) for name in names]


def test_the_predecessors_schemes_are_as_published():
    torchvision = pytest.importorskip("torchvision")
    parts = resolved("mbv2-w0.35", torchvision.models.mobilenet_v2(width_mult=0.35), torch.zeros(1, 3, 32, 32))
    assert weights_of(parts) == [f"features.{block}.conv.0.0" for block in range(10, 18)] + ["classifier.1"]
    found = {key: part.index.tolist() for key, part in parts.items() if not part.is_whole}
    inputs = {"features.15.conv.0.0.weight": 56 // 8, "features.16.conv.0.0.weight": 56 // 2}
    assert {key: len(index) for key, index in found.items()} == inputs
    biases = [key for key in parts if key.endswith(".bias")]
    assert len(biases) == 25 + 1 and biases[0] == "features.10.conv.0.1.bias"
    parts = resolved("mcunet-5fps", Tower(width=16, blocks=14), IMAGES)  # 43 convolutions, with the first 1x1 at 1, 4, 7, ...
    assert len([key for key in parts if key.endswith(".bias")]) == 22 + 1
    whole = ["blocks.6.project", "blocks.7.project", "blocks.8.project", "blocks.9.project"]
    assert [key[:-7] for key, part in parts.items() if part.is_whole and key.endswith(".weight")] == whole + ["head"]
    assert {key: len(part.index) for key, part in parts.items() if not part.is_whole} == {
        "blocks.11.project.weight": 2, "blocks.12.project.weight": 4}


def test_the_plain_schemes():
    every = [key for key, _ in Tower().named_parameters()]
    assert list(resolved("full")) == every
    assert list(resolved("bias_only")) == [key for key in every if key.endswith(".bias") or key == "head.weight"]
    assert list(resolved("head")) == ["head.weight", "head.bias"]
    assert list(resolved("last_block")) == [key for key in every if key.startswith(("blocks.2", "head"))]
    assert list(resolved("full", Decoder(), TOKENS)) == [key for key, _ in Decoder().named_parameters()]


def test_every_shipped_scheme_is_named_as_its_file_and_round_trips():
    assert len(presets()) == 11
    for name in presets():
        scheme = Scheme.read(name)
        assert scheme.name == name and scheme.about and Scheme.read(scheme.text()) == scheme
