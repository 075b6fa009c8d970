"""The layers of a network, whatever kind of module it is."""

import pytest
import torch
from scheme_examples import IMAGES, TOKENS, Decoder, Tower
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from piebridge.core.capture import capture
from piebridge.core.errors import UserError
from piebridge.engine.layer import TRUNK
from piebridge.engine.layers import layers_of

pytestmark = pytest.mark.usefixtures("one_thread")

VISION = {"mobilenet_v2": dict(width_mult=0.25), "mobilenet_v3_small": {}, "resnet18": {}, "shufflenet_v2_x0_5": {}}


def flops_of(module, *inputs):
    """Of the forward pass, as PyTorch counts them."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module.eval()(*inputs)
    return counter.get_total_flops()


def small_vision_transformer():
    from torchvision.models import VisionTransformer
    return VisionTransformer(image_size=16, patch_size=8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=24, num_classes=5)


def test_a_tower_is_told_layer_by_layer():
    layers = layers_of(Tower(), IMAGES)
    assert [layer.path for layer in layers[:4]] == ["stem", "stem_norm", "blocks.0.expand", "blocks.0.norm_expand"]
    assert [layer.kind for layer in layers if layer.kind != "norm"] == ["conv"] + ["1x1", "depthwise", "1x1"] * 3 + ["linear"]
    assert [layer.block for layer in layers if layer.kind == "depthwise"] == ["blocks.0", "blocks.1", "blocks.2"]
    depthwise = layers[4]
    assert (depthwise.weight, depthwise.bias, depthwise.shape) == ("blocks.0.depthwise.weight", None, (16, 1, 3, 3))
    assert (depthwise.cut, depthwise.groups, layers[2].cut) == (0, 16, 1)
    assert (depthwise.input_shape, depthwise.output_shape) == ((2, 16, 8, 8), (2, 16, 8, 8))
    assert depthwise.input_bytes == 2 * 16 * 8 * 8 * 4 and depthwise.macs == 2 * 16 * 8 * 8 * 9
    assert [layer.path for layer in layers if layer.is_head] == ["head"] and layers[-1].bias == "head.bias"


@pytest.mark.parametrize("name", VISION)
def test_multiply_adds_and_shapes_are_those_that_pytorch_finds(name):
    torchvision = pytest.importorskip("torchvision")
    module, images = getattr(torchvision.models, name)(**VISION[name]).eval(), torch.randn(2, 3, 32, 32)
    shapes = {}
    for path, each in module.named_modules():
        if isinstance(each, (nn.Conv2d, nn.Linear)):
            each.register_forward_hook(lambda _, given, result, path=path: shapes.update({path: (given[0].shape, result.shape)}))
    flops = flops_of(module, images)
    layers = [layer for layer in layers_of(module, images) if layer.kind in TRUNK]
    assert 2 * sum(layer.macs for layer in layers) == flops
    assert {layer.path: (layer.input_shape, layer.output_shape) for layer in layers} == shapes


def test_blocks_are_found_from_structure():
    torchvision = pytest.importorskip("torchvision")
    wanted = {"mobilenet_v2": 17, "mobilenet_v3_small": 11, "resnet18": 8, "efficientnet_b0": 16, "convnext_tiny": 18, "squeezenet1_1": 8}
    images = torch.zeros(1, 3, 64, 64)
    found = {name: layers_of(getattr(torchvision.models, name)(), images) for name in wanted}
    assert {name: len({layer.block for layer in layers if layer.block}) for name, layers in found.items()} == wanted
    assert [layer.path for layers in found.values() for layer in layers if layer.is_head] == \
        ["classifier.1", "classifier.3", "fc", "classifier.1", "classifier.2", "classifier.1"]


def test_torchs_attention_and_the_captured_network_have_the_same_layers():
    pytest.importorskip("torchvision")
    module, images = small_vision_transformer().eval(), torch.zeros(2, 3, 16, 16)
    network = capture(module, "vit", [3, 16, 16], [0.5] * 3, [0.5] * 3)
    plain, captured = ({layer.weight: layer for layer in layers_of(each, images)} for each in (module, network))
    assert set(plain) == set(captured) == {key for key in dict(module.named_parameters()) if not key.endswith("bias")}
    for key, layer in plain.items():
        other = captured[key]
        assert (layer.path, layer.kind, layer.bias, layer.macs, layer.role) == (other.path, other.kind, other.bias, other.macs, other.role)
    first = "encoder.layers.encoder_layer_0."
    roles = {layer.path: layer.role for layer in plain.values() if layer.path.startswith(first) and layer.kind == "linear"}
    assert list(roles.values()) == ["attention in", "attention out", "mlp", "mlp"]
    assert plain[first + "self_attention.in_proj_weight"].attention == captured[first + "self_attention.in_proj_weight"].attention
    assert (plain[first + "self_attention.in_proj_weight"].attention.heads, plain[first + "mlp.0.weight"].attention) == (2, None)


def test_the_fused_path_of_torchs_encoder_is_not_taken():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), 2, enable_nested_tensor=False).eval()
    layers = layers_of(encoder, torch.zeros(2, 5, 16))
    names = [layer.path[len("layers.0."):] for layer in layers if layer.block == "layers.0"]
    assert names == ["self_attn.in_proj", "self_attn.out_proj", "norm1", "linear1", "linear2", "norm2"]
    assert layers[0].macs == 2 * 5 * 16 * 48 and sorted(layers[0].input_shape) == [2, 5, 16]


def test_a_decoder_tells_what_is_tied():
    layers = {layer.path: layer for layer in layers_of(Decoder(), TOKENS)}
    assert list(layers)[:2] == ["embedding", "position"] and list(layers)[-1] == "output"
    assert layers["output"].weight == layers["embedding"].weight == "embedding.weight"
    assert [path for path, layer in layers.items() if layer.is_tied] == ["embedding", "output"]
    assert (layers["output"].kind, layers["output"].is_head, layers["embedding"].kind) == ("linear", True, "embedding")
    assert (layers["position"].kind, layers["position"].weight) == ("parameter", "position")
    assert layers["layers.1.qkv"].attention.number == 1 and layers["layers.1.qkv"].attention.size == 4


def test_a_module_that_is_called_twice_is_one_tied_layer():
    layer = nn.Linear(4, 4)
    (found,) = layers_of(nn.Sequential(layer, nn.ReLU(), layer), torch.zeros(2, 4))
    assert found.is_tied and found.macs == 2 * 2 * 16


def test_weights_stored_in_by_out_and_hand_written_norms():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.zeros(4, 6)), nn.Parameter(torch.zeros(6))
            self.norm = RootMeanSquareNorm()

        def forward(self, x):
            return self.norm(torch.addmm(self.bias, x, self.weight))

    class RootMeanSquareNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6))

        def forward(self, x):
            return self.weight * (x / x.square().mean(-1, keepdim=True).sqrt())

    linear, norm = layers_of(Net(), torch.zeros(2, 4))
    assert (linear.kind, linear.cut, linear.output_dim, linear.bias, linear.macs) == ("linear", 0, 1, "bias", 2 * 4 * 6)
    assert (norm.path, norm.kind) == ("norm", "norm")


def test_looking_leaves_no_trace():
    module = Tower().train()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    layers_of(module, IMAGES)
    assert all(each.training for each in module.modules())
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    assert not nn.modules.module._global_forward_pre_hooks and not nn.modules.module._global_forward_hooks


def test_an_example_that_does_not_fit_is_one_line():
    with pytest.raises(UserError, match=r"^engine: Tower does not run on the example: RuntimeError: .+$"):
        layers_of(Tower(), torch.zeros(2, 4, 16, 16))
    assert not nn.modules.module._global_forward_pre_hooks


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_hugging_faces_encoder_and_decoder(attention):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = dict(hidden_size=16, num_attention_heads=4, num_hidden_layers=2, intermediate_size=24, vocab_size=13,
                 attn_implementation=attention)
    bert = transformers.BertForSequenceClassification(transformers.BertConfig(**sizes)).eval()
    layers = [layer for layer in layers_of(bert, TOKENS) if layer.block == "bert.encoder.layer.1" and layer.kind == "linear"]
    assert [layer.role for layer in layers] == ["attention in"] * 3 + ["attention out", "mlp", "mlp"]
    assert {(layer.attention.heads, layer.attention.size) for layer in layers[:4]} == {(4, 4)}
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=2, tie_word_embeddings=True, **sizes)).eval()
    layers = layers_of(llama, TOKENS)
    names = {layer.path.rpartition(".")[2]: layer.role for layer in layers if layer.block == "model.layers.0" and layer.kind == "linear"}
    assert names == {"q_proj": "attention in", "k_proj": "attention in", "v_proj": "attention in", "o_proj": "attention out",
                     "gate_proj": "mlp", "up_proj": "mlp", "down_proj": "mlp"}
    assert [layer.kind for layer in layers if layer.block is None] == ["embedding", "norm", "linear"] and layers[-1].is_tied


def test_a_block_may_be_made_of_parts_of_different_classes():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.T5Config(d_model=16, d_kv=4, num_heads=4, d_ff=24, num_layers=2, vocab_size=13)
    layers = layers_of(transformers.T5EncoderModel(config).eval(), TOKENS)
    roles = {layer.path.rpartition(".")[2]: layer.role for layer in layers if layer.block == "encoder.block.1" and layer.kind == "linear"}
    assert roles == {"q": "attention in", "k": "attention in", "v": "attention in", "o": "attention out", "wi": "mlp", "wo": "mlp"}
