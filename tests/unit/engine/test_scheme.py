"""Schemes: their text, what they resolve to, the published ones, and every refusal."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scheme_examples import IMAGES, TOKENS, Decoder, EncoderLayer, Tower, resolved
from torch import nn

from piebridge.core.errors import UserError
from piebridge.engine.capture import StepSettings, capture
from piebridge.engine.channel_choice import fisher_information
from piebridge.engine.layers import layers_of
from piebridge.engine.losses import cross_entropy
from piebridge.engine.scheme import Scheme
from piebridge.engine.selectors import select
from piebridge.engine.update_rules import SGD

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = st.text(min_size=1, max_size=12)
AMOUNTS = st.one_of(st.fractions(Fraction(1, 64), 1, max_denominator=64),
                    st.sets(st.integers(0, 99), min_size=1, max_size=4).map(lambda each: tuple(sorted(each))))
EVERYTHING = """\
name: everything
about: "with a colon: and, commas"
bias: [last 2 blocks, head]
weights:
  first 1x1 of the last 2 blocks: 1/2
  blocks.1.depthwise: 1/4
  blocks.0.expand: [0, 3, 5]
  head: 1
norm: blocks.2.*
channels: magnitude
"""


def indexes(parts):
    return {key: None if part.is_whole else (part.dim, part.index.tolist()) for key, part in parts.items()}


# Text ------------------------------------------------------------------------------------------------------------------

def test_a_schemes_text_is_what_was_read():
    scheme = Scheme.read(EVERYTHING)
    assert scheme.text() == EVERYTHING
    assert scheme.weights[0] == ("first 1x1 of the last 2 blocks", Fraction(1, 2)) and scheme.weights[2][1] == (0, 3, 5)
    assert Scheme.read(scheme) is scheme


@settings(max_examples=200, deadline=None)
@given(st.lists(NAMES.filter(lambda text: text != "none"), max_size=3), st.dictionaries(NAMES, AMOUNTS, max_size=3))
def test_any_scheme_round_trips(names, table):
    scheme = Scheme(name="a", bias=tuple(names), weights=tuple(table.items()), channels="fisher")
    assert Scheme.read(scheme.text()) == scheme


def test_a_scheme_is_read_from_a_file_a_name_and_a_mapping(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text(EVERYTHING)
    assert Scheme.read(path) == Scheme.read(str(path)) == Scheme.read(EVERYTHING)
    assert Scheme.read("bert").name == "bert"
    assert Scheme.read({"weights": {"head": 0.5}, "bias": "none"}).weights == (("head", Fraction(1, 2)),)


@pytest.mark.parametrize("text, message", [
    ("- all\n- head", "scheme: holds a list; a scheme is a list of 'key: value' lines"),
    ("weigths:\n  head: 1", "scheme: unknown key 'weigths' (did you mean 'weights'?); the keys: name, about, bias, weights"),
    ("weights:\n  head: 0", "scheme: weights: head: 0 is no ratio; give one above 0 and up to 1, such as 1, 1/2, 1/4 or 1/8"),
    ("weights:\n  head: 1.5", "head: 1.5 is no ratio"),
    ("weights:\n  head: half", "head: 'half' is no ratio"),
    ("weights:\n  head: 1/0", "head: '1/0' is no ratio"),
    ("weights:\n  head: true", "head: True is no ratio"),
    ("weights:\n  head: [1, 1]", "head: [1, 1] are no channels; give different whole numbers from 0"),
    ("weights:\n  head: 1\n  head: 1/2", "scheme:3: not valid YAML: key 'head' is given twice"),
    ("weights: [head]", "weights: \"['head']\" are no 'name: ratio' lines; for example: head: 1"),
    ("heads:\n  all: [1, 2]", "heads: all: [1, 2] is no ratio"),
    ("bias: 7", "bias: '7' is no list of names; for example: last 7 blocks"),
    ("channels: magnitud\n", "channels: 'magnitud' is unknown (did you mean 'magnitude'?); known: first, magnitude, magnitude_l1, fisher"),
    ("name: [a]", "is no text"),
    ("bias: [", "not valid YAML"),
    ("bias: &a [head]\nnorm: *a", "scheme:2: not valid YAML: aliases are not used in schemes"),
    ("mobilnet_v2", "mobilnet_v2: no such scheme (did you mean 'mobilenet_v2'?); give a YAML file, or one of: bert, bias_only"),
    ("/no/such/file.yaml", "/no/such/file.yaml: no such scheme"),
])
def test_what_cannot_be_read_is_named(text, message):
    with pytest.raises(UserError) as caught:
        Scheme.read(text)
    assert message in str(caught.value) and "\n" not in str(caught.value)


# What is trained -------------------------------------------------------------------------------------------------------

def test_everything_at_once():
    parts = indexes(resolved(EVERYTHING))
    norms = [f"blocks.{block}.norm_{part}" for block in (1, 2) for part in ("expand", "depthwise", "project")]
    biases = {f"{norm}.bias" for norm in norms} | {"head.bias"}
    trained_norms = {f"{norm}.weight" for norm in norms if norm.startswith("blocks.2")}
    weights = {"blocks.0.expand.weight", "blocks.1.expand.weight", "blocks.1.depthwise.weight", "blocks.2.expand.weight", "head.weight"}
    assert set(parts) == biases | trained_norms | weights
    assert parts["blocks.0.expand.weight"] == (1, [0, 3, 5]) and parts["head.weight"] is None
    assert [len(parts[f"blocks.{block}.expand.weight"][1]) for block in (1, 2)] == [4, 4]
    assert parts["blocks.1.depthwise.weight"][0] == 0 and len(parts["blocks.1.depthwise.weight"][1]) == 4
    assert list(parts) == [key for key, _ in Tower().named_parameters() if key in parts]


@pytest.mark.parametrize("text, paths", [
    ("head", ["head"]), ("convolution 0", ["stem"]), ("layer 10", ["head"]), ("convolution 9", ["blocks.2.project"]),
    ("first 1x1 of the last 2 blocks", ["blocks.1.expand", "blocks.2.expand"]),
    ("last 1x1 of all blocks", ["blocks.0.project", "blocks.1.project", "blocks.2.project"]),
    ("second conv of block blocks.1", ["blocks.1.depthwise"]),
    ("1x1s of block blocks.1", ["blocks.1.expand", "blocks.1.project"]),
    ("depthwise of the last 1 of 3 blocks", ["blocks.2.depthwise"]),
    ("depthwise of the last 1 of 2 blocks", ["blocks.1.depthwise", "blocks.2.depthwise"]),  # rounded up
    ("first norm of last 1 block", ["blocks.2.norm_expand"]),
    ("last 2 layers", ["blocks.2.project", "blocks.2.norm_project", "head"]),
    ("last 1 convolution", ["blocks.2.project", "blocks.2.norm_project", "head"]),
    ("*.expand", ["blocks.0.expand", "blocks.1.expand", "blocks.2.expand"]),
    ("blocks.[01].project", ["blocks.0.project", "blocks.1.project"]),
])
def test_names_of_layers(text, paths):
    assert [layer.path for layer in select(text, layers_of(Tower(), IMAGES))] == paths


def test_the_later_name_counts():
    parts = indexes(resolved("weights:\n  '*.expand': 1\n  blocks.1.expand: 1/2\n"))
    assert parts == {"blocks.0.expand.weight": None, "blocks.1.expand.weight": (1, [0, 1, 2, 3]), "blocks.2.expand.weight": None}


def test_parts_are_inputs_and_of_grouped_convolutions_whole_groups():
    module = nn.Sequential(nn.Conv2d(4, 6, 3), nn.Conv2d(6, 12, 3, groups=3), nn.Conv2d(12, 24, 3, groups=12), nn.Flatten(),
                           nn.Linear(24 * 10 * 10, 4), nn.Linear(4, 2))
    parts = indexes(resolved("weights:\n  all: 1/2", module, torch.zeros(1, 4, 16, 16)))
    assert parts["0.weight"] == (1, [0, 1])
    assert parts["1.weight"] == (0, [0, 1, 2, 3, 4, 5, 6, 7])  # two of three groups of four
    assert parts["2.weight"] == (0, list(range(12)))  # six of twelve channels, two filters each
    assert parts["5.weight"] == (1, [0, 1]) and parts["4.weight"][0] == 1 and len(parts["4.weight"][1]) == 1200


def test_channels_by_magnitude_and_by_fisher_information():
    module = Tower().double().eval()
    with torch.no_grad():
        module.blocks[1].expand.weight[:, [1, 6]] *= 100
    found = resolved("weights:\n  blocks.1.expand: 1/4\nchannels: magnitude", module, IMAGES.double())["blocks.1.expand.weight"]
    assert found.index.tolist() == [1, 6]
    batch = torch.randn(2, 3, 16, 16, dtype=torch.float64), torch.tensor([0, 3])
    scores = fisher_information(module, cross_entropy, [batch], ["blocks.1.expand.weight"])
    found = resolved("weights:\n  blocks.1.expand: 1/4\nchannels: fisher", module, IMAGES.double(), scores=scores)["blocks.1.expand.weight"]
    nn.functional.cross_entropy(module(batch[0]), batch[1]).backward()
    gains = module.blocks[1].expand.weight.grad.square().sum((0, 2, 3))
    assert set(found.index.tolist()) == set(gains.topk(2).indices.tolist())


def encoder():
    return nn.Sequential(nn.Linear(16, 16), nn.Sequential(EncoderLayer(), EncoderLayer()), nn.Linear(16, 3))


def test_heads_of_a_joint_projection():
    module, example = encoder(), torch.zeros(2, 6, 16)
    parts = indexes(resolved("heads:\n  attention of the last 1 block: 1/2", module, example))
    first_two = list(range(8))
    assert parts == {"1.1.qkv.weight": (0, first_two + [16 + each for each in first_two] + [32 + each for each in first_two]),
                     "1.1.proj.weight": (1, first_two)}
    with torch.no_grad():
        module[1][1].qkv.weight[16 + 8:16 + 12] *= 100  # the keys of head 2
    parts = indexes(resolved("heads:\n  attention of the last 1 block: 1/4\nchannels: magnitude", module, example))
    assert parts["1.1.proj.weight"] == (1, [8, 9, 10, 11])
    assert parts["1.1.qkv.weight"] == (0, [8, 9, 10, 11, 24, 25, 26, 27, 40, 41, 42, 43])


def test_queries_that_share_a_key_stay_together():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.LlamaConfig(hidden_size=16, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2,
                                      intermediate_size=24, vocab_size=13)
    parts = indexes(resolved("heads:\n  attention of the last 1 block: 1/4", transformers.LlamaForCausalLM(config), TOKENS))
    start = "model.layers.1.self_attn."
    assert parts == {f"{start}q_proj.weight": (0, list(range(8))), f"{start}k_proj.weight": (0, list(range(4))),
                     f"{start}v_proj.weight": (0, list(range(4))), f"{start}o_proj.weight": (1, list(range(8)))}


def test_a_joint_projection_stored_in_by_out():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.GPT2Config(n_embd=16, n_head=2, n_layer=2, n_positions=8, vocab_size=13, bos_token_id=0, eos_token_id=0)
    text = "heads:\n  attention of the last 1 block: 1/2\nweights:\n  first mlp linear of the last 1 block: 1/4\n"
    parts = indexes(resolved(text, transformers.GPT2LMHeadModel(config), TOKENS))
    head = list(range(8))
    assert parts == {"transformer.h.1.attn.c_attn.weight": (1, head + [16 + each for each in head] + [32 + each for each in head]),
                     "transformer.h.1.attn.c_proj.weight": (0, head), "transformer.h.1.mlp.c_fc.weight": (0, [0, 1, 2, 3])}


def test_pefts_factors_are_no_layers_of_the_network():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    peft = pytest.importorskip("peft", reason="peft is not installed")
    bert = transformers.BertForSequenceClassification(transformers.BertConfig(
        hidden_size=16, num_attention_heads=4, num_hidden_layers=2, intermediate_size=24, vocab_size=13))
    module = peft.get_peft_model(bert, peft.LoraConfig(r=2, target_modules=["query", "value"]))
    parts = resolved("parameters: lora\nweights:\n  second attention of the last 1 block: 1\n  head: 1", module, TOKENS)
    names = [key.partition("bert.encoder.layer.")[2] or key for key in parts]
    factors = [f"{layer}.attention.self.{name}.lora_{factor}.default.weight" for layer in (0, 1) for name in ("query", "value")
               for factor in "AB"]
    assert sorted(names) == sorted(factors + ["1.attention.self.key.weight", "base_model.model.classifier.weight"])


def test_low_rank_factors_and_adapters_are_trained_whole_beside_the_rest():
    class WithFactors(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.lora_A, self.lora_B = nn.Linear(8, 8), nn.Parameter(torch.zeros(2, 8)), nn.Parameter(torch.zeros(8, 2))
            self.adapter_down = nn.Linear(8, 2)

        def forward(self, x):
            x = self.layer(x) + nn.functional.linear(nn.functional.linear(x, self.lora_A), self.lora_B)
            return x + self.adapter_down(x).sum()

    module, example = WithFactors(), torch.zeros(2, 8)
    assert list(resolved("parameters: lora\nbias: layer", module, example)) == ["lora_A", "lora_B", "layer.bias"]
    assert list(resolved("parameters: [adapters]\n", module, example)) == ["adapter_down.weight", "adapter_down.bias"]
    assert [layer.path for layer in layers_of(module, example) if layer.is_head] == ["layer"]


def test_what_is_resolved_can_be_compiled_and_gives_autograds_gradients():
    module = Tower().double().eval()
    generator = torch.Generator().manual_seed(1)
    images, labels = torch.randn(3, 3, 16, 16, generator=generator, dtype=torch.float64), torch.tensor([0, 4, 2])
    parts = resolved(EVERYTHING, module, images)
    step = capture(module, cross_entropy, SGD(), parts, (images, labels), StepSettings())
    tensors = dict(module.named_parameters(), **dict(module.named_buffers()))
    own = {"weights": torch.full((3,), 1 / 3, dtype=torch.float64), "inputs": images, "targets": labels, "rate": torch.tensor(0.5).double(),
           "count": torch.tensor(1.0).double()}
    known = dict(tensors, **own)
    arguments = [(parts[value.name].index if value.role == "index" else known[value.name]).detach() for value in step.inputs]
    results = {value.name: tensor for value, tensor in zip(step.outputs, step(*arguments)) if value.role == "trained"}
    nn.functional.cross_entropy(module(images), labels).backward()
    assert set(results) == set(parts)
    for key, part in parts.items():
        parameter = tensors[key]
        torch.testing.assert_close(results[key], part.of(parameter.detach() - 0.5 * parameter.grad), rtol=1e-9, atol=1e-12)


# Refusals ----------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("text, message", [
    ("weights:\n  blocks.1.expnd: 1", "scheme: 'blocks.1.expnd' matches no layer (did you mean 'blocks.1.expand'?); the layers: stem,"),
    ("bias: last 4 blocks", "scheme: 'last 4 blocks': the network has 3 blocks; give 1 to 3"),
    ("bias: last 0 layers", "'last 0 layers': the network has 11 layers; give 1 to 11"),
    ("bias: last 5 of 3 blocks", "the first number must lie between 1 and the second"),
    ("weights:\n  convolution 10: 1", "scheme: 'convolution 10' matches no layer"),
    ("weights:\n  attention of all blocks: 1", "scheme: 'attention of all blocks' matches no layer"),
    ("weights:\n  1x1 of the last 2 layers: 1", "'1x1 of the last 2 layers': count blocks here"),
    ("weights:\n  stem_norm: 1", "'stem_norm' matches no convolution, linear layer or embedding; for others use norm or parameters"),
    ("weights:\n  blocks.0.expand: [8]", "weights: blocks.0.expand: channel 8: it has 8; give 0 to 7"),
    ("norm: stem", "norm: 'stem' matches no normalisation layer"),
    ("bias: stem", "bias: 'stem' matches layers without a bias"),
    ("parameters: blocks.0.expand.wight", "'blocks.0.expand.wight' matches no parameter (did you mean 'blocks.0.expand.weight'?)"),
    ("heads:\n  all: 1/2", "scheme: heads: this network has no attention"),
    ("heads:\n  head: 1/2", "scheme: heads: this network has no attention"),
    ("heads:\n  stem: 1/2", "heads: stem is no projection of an attention"),
    ("name: nothing", "scheme nothing: trains nothing of this network"),
    ("weights:\n  head: 1/2\nchannels: fisher", "channels=fisher: no scores for head.weight"),
])
def test_what_does_not_fit_the_network_is_named(text, message):
    with pytest.raises(UserError) as caught:
        resolved(text)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("text, message", [
    ("weights:\n  output: 1/2", "weights: output: its weight is used in more than one place, so no part of it can be trained"),
    ("weights:\n  layers.0.up: 1\n  layers.0.qkv: 1\nheads:\n  layers.0.qkv: 1/2",
     "layers.0.qkv is named under weights and under heads; leave one of them out"),
])
def test_what_does_not_fit_the_decoder_is_named(text, message):
    with pytest.raises(UserError) as caught:
        resolved(text, Decoder(), TOKENS)
    assert message in str(caught.value)
    assert list(resolved("weights:\n  output: 1", Decoder(), TOKENS)) == ["embedding.weight"]


def test_an_embedding_in_part_is_refused():
    module = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 2))
    with pytest.raises(UserError, match=r"weights: 0: of this layer \(embedding\) no part can be trained; give 1"):
        resolved("weights:\n  '0': 1/2", module, TOKENS % 5)


def test_heads_that_do_not_divide_are_refused():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.out = nn.Linear(8, 8), nn.Linear(7, 8)

        def forward(self, x):
            query = self.query(x).view(2, 6, 2, 4).transpose(1, 2)
            mixed = nn.functional.scaled_dot_product_attention(query, query, query).transpose(1, 2).flatten(2)
            return self.out(mixed[..., :7])

    with pytest.raises(UserError, match="heads: query has 8 features, which do not divide into 2 heads of 3; name it under weights"):
        resolved("heads:\n  query: 1/2", Odd(), torch.zeros(2, 6, 8))


def test_no_blocks_and_no_head():
    with pytest.raises(UserError, match="'last 1 blocks': no blocks were found in this network; count layers, or name them by their paths"):
        resolved("bias: last 1 blocks", nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), torch.zeros(1, 3))
    with pytest.raises(UserError, match="'head': the network ends in a block, not in a layer of its own"):
        resolved("head", nn.Sequential(EncoderLayer(), EncoderLayer()), torch.zeros(2, 6, 16))
