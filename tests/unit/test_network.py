"""Capture and `GraphNetwork`, on a small network that has every kind of block; references are plain PyTorch."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from piebridge.core import graph
from piebridge.core.capture import capture
from piebridge.core.costs import network_costs
from piebridge.core.errors import UserError


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.act(x + self.norm(self.conv(x)))


class Widen(nn.Module):
    def __init__(self, channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, out_channels, 3, stride=2, padding=1)
        self.short = nn.Conv2d(channels, out_channels, 1, stride=2)

    def forward(self, x):
        return self.conv(x) + self.short(x)


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.features = nn.Sequential(Residual(8), Residual(8), Widen(8, 16), Residual(16))  # also the name of a method
        self.scale = nn.Parameter(torch.full((1, 16), 2.0))
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        return self.head(self.features(self.stem(x)).mean([2, 3]) * self.scale)


def captured(module, **more):
    return capture(module, "small", [3, 16, 16], [0.5] * 3, [0.5] * 3, **more)


@pytest.fixture
def module():
    torch.manual_seed(0)
    module = Small()
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2)
    return module.eval()


@pytest.fixture
def network(module):
    return captured(module)


def images(count=3, size=16):
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(7))


def test_computes_what_the_module_computes_at_any_batch_and_size(module, network):
    for batch in (images(1), images(4), images(2, 24)):
        torch.testing.assert_close(network(batch), module(batch))
        tap = module.features(module.stem(batch)).mean([2, 3]) * module.scale
        torch.testing.assert_close(network.features(batch), tap)
        torch.testing.assert_close(network.head(network.features(batch)), network(batch))


def test_keeps_the_keys_and_copies_the_tensors(module, network):
    assert list(network.state_dict()) != [] and set(network.state_dict()) == set(module.state_dict())
    before = network(images())
    with torch.no_grad():
        module.stem.weight.zero_()
    torch.testing.assert_close(network(images()), before)
    network.load_state_dict(module.state_dict())
    torch.testing.assert_close(network(images()), module(images()))


def test_trains_as_the_module_does(module, network):
    """One step of SGD in train mode: gradients, batch-norm statistics and in-place activations included."""
    for each in (module, network):
        each.train()
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        nn.functional.cross_entropy(each(images(4)), torch.tensor([0, 1, 2, 3])).backward()
        optimizer.step()
    for key, tensor in module.state_dict().items():
        torch.testing.assert_close(network.state_dict()[key], tensor, msg=key)


def test_finds_blocks_head_and_tap(network):
    description = network.description
    assert [(block["name"], block["is_residual"]) for block in description["blocks"]] == [
        ("features.0", True), ("features.1", True), ("features.2", False), ("features.3", True)]
    assert description["head"] == "head" and network.head.in_features == 16
    nodes = graph.nodes_by_name(description)
    assert nodes[description["output"]]["inputs"] == [description["tap"]]
    inside = graph.block_nodes(description, description["blocks"][2])
    assert [node.get("module", node["operation"]) for node in inside] == ["features.2.conv", "features.2.short", "add"]


def test_values_at_named_nodes(module, network):
    blocks = network.description["blocks"]
    values = network.values(images(), [blocks[0]["input"], blocks[1]["output"], "x"])
    stem = module.stem(images())
    torch.testing.assert_close(values[blocks[0]["input"]], stem)
    torch.testing.assert_close(values[blocks[1]["output"]], module.features[1](module.features[0](stem)))
    assert torch.equal(values["x"], images())
    with pytest.raises(UserError, match=r"network small: no node 'sten' \(did you mean 'stem'\?\)"):
        network.values(images(), ["sten"])


def test_leaves_blocks_out_and_shares_parameters(module, network):
    smaller = network.without_blocks(["features.1", "features.3"])
    reference = copy.deepcopy(module)
    reference.features[1] = reference.features[3] = nn.Identity()
    torch.testing.assert_close(smaller(images()), reference(images()))
    assert [block["name"] for block in smaller.description["blocks"]] == ["features.0", "features.2"]
    full, rest = dict(network.named_parameters()), dict(smaller.named_parameters())
    assert rest and all(full[name] is parameter for name, parameter in rest.items())
    assert not any(name.startswith(("features.1.", "features.3.")) for name in rest)
    smaller.get_submodule("features.0.norm").running_mean.fill_(9)
    assert network.get_submodule("features.0.norm").running_mean.max() < 9, "statistics are each network's own"
    torch.testing.assert_close(network(images()), module(images()))


def test_without_blocks_keeps_each_modules_mode(network):
    network.train()
    network.get_submodule("features.0.norm").eval()
    smaller = network.without_blocks(["features.1"])
    assert smaller.training and not smaller.get_submodule("features.0.norm").training


@pytest.mark.parametrize("name, message", [
    ("features.2", "network small: block 'features.2' cannot be left out: it is no residual block .*; those are: features.0, "),
    ("feature.1", r"network small: no block 'feature.1' \(did you mean 'features.1'\?\)"),
])
def test_refuses_to_leave_out(network, name, message):
    with pytest.raises(UserError, match=message):
        network.without_blocks([name])


def test_costs_by_hand(network):
    """One image of 16 px: each convolution's and the head's output values times their products."""
    pixels = 16 * 16
    residual, wide, last = 8 * 8 * 9 * pixels, (8 * 16 * 9 + 8 * 16) * pixels // 4, 16 * 16 * 9 * pixels // 4
    costs = network_costs(network)
    assert costs["blocks"] == {"features.0": residual, "features.1": residual, "features.2": wide, "features.3": last}
    assert costs["macs"] == 3 * 8 * 9 * pixels + 2 * residual + wide + last + 16 * 5
    assert costs["parameters"] == sum(parameter.numel() for parameter in Small().parameters())
    assert network_costs(network.without_blocks(["features.1"]))["macs"] == costs["macs"] - residual
    assert network_costs(network, 32)["macs"] == 4 * (costs["macs"] - 80) + 80


def test_costs_leave_the_network_as_it_was(network):
    network.train()
    before = network.fingerprint()
    network_costs(network)
    assert network.training and network.fingerprint() == before


def test_replaces_the_head(network):
    network.train()
    network.replace_head(["cat", "dog"])
    assert network.head.out_features == 2 and network.head.training
    assert network.head.bias.abs().max() == 0 and 0 < network.head.weight.std() < 0.02
    assert network(images()).shape == (3, 2)
    assert network.description["class_names"] == ["cat", "dog"]
    nodes = graph.nodes_by_name(network.description)
    assert nodes[network.description["output"]]["arguments"] == {"in_features": 16, "out_features": 2, "bias": True}


def test_fingerprint_follows_every_weight_and_the_description(module, network):
    first = network.fingerprint()
    assert first == captured(module).fingerprint() == copy.deepcopy(network).fingerprint() and len(first) == 64
    for key, tensor in network.state_dict().items():
        kept = tensor.clone()
        tensor.view(-1)[0] += 1
        assert network.fingerprint() != first, key
        tensor.copy_(kept)
    assert network.fingerprint() == first
    network.description["crop_fraction"] = 0.9
    assert network.fingerprint() != first


def test_uses_a_module_that_is_put_in_anothers_place(network):
    """Adapters and low-rank layers are put in so."""
    before = network.features(images())
    stem = network.get_submodule("stem")
    network._modules["stem"] = nn.Sequential(stem, nn.Dropout(0.0), nn.ReLU())
    assert not torch.equal(network.features(images()), before)


def test_releases_intermediates_and_itself(network):
    alive = []

    def watch(name, value):
        if not isinstance(value, nn.Parameter):
            alive.append(weakref.ref(value))

    with torch.no_grad():
        network.observe(images(), watch)
    gc.disable()
    try:
        assert not any(each() is not None for each in alive[:-1])
        gone = weakref.ref(network.without_blocks([]))
        assert gone() is None, "a network is freed without the garbage collector"
    finally:
        gc.enable()


def test_peak_of_live_values(network):
    """At no step are more values alive than the graph needs: here a block's input, its branch and the step's result."""
    values, most = {}, 0

    def watch(name, value):
        nonlocal most
        values[name] = weakref.ref(value)
        most = max(most, sum(each() is not None for each in values.values()))

    with torch.no_grad():
        network.observe(images(), watch)
    assert most <= 3


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
def test_exports_from_below_a_prefix(network):
    nested = network.below("network")
    assert set(nested.state_dict()) == {"network." + key for key in network.state_dict()}
    assert torch.equal(torch.fx.symbolic_trace(nested)(images()), network(images()))
    assert torch.equal(torch.jit.trace(nested, images())(images(5)), network(images(5)))


def test_turns_in_place_off_where_others_read(module):
    class Reader(Small):
        def forward(self, x):
            x = self.stem(x)
            return self.head(self.features[2](self.features[0].conv(x) + self.features[0].act(x)).mean([2, 3]))

    assert inplace_of(captured(Reader())) == [False]
    assert inplace_of(captured(module)) == [True, True, True]


def inplace_of(network):
    return [node["arguments"]["inplace"] for node in network.description["nodes"] if node["operation"] == "ReLU"]


def test_refuses_a_value_that_is_overwritten_and_read_again():
    class Overwriting(Small):
        def forward(self, x):
            x = self.stem(x)
            return self.head(self.features[2](self.features[0].act(x) + x).mean([2, 3]))

    with pytest.raises(UserError, match="or overwrites a value that is read again"):
        captured(Overwriting())


class Head(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.body = body
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.body(self.conv(x)).mean([2, 3]))


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Attend(nn.Module):
    def __init__(self, **arguments):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, **arguments)

    def forward(self, x):
        tokens = x.flatten(2).transpose(1, 2)
        return self.attention(tokens, tokens, tokens, need_weights=False)[0].transpose(1, 2).reshape(x.shape)


@pytest.mark.parametrize("body", [
    nn.GELU(), nn.Hardswish(), nn.SiLU(), nn.GroupNorm(3, 6), nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2), nn.ZeroPad2d((0, 1, 2, 3)),
    nn.Conv2d(6, 6, 3, padding=1, padding_mode="reflect"), nn.Dropout(0.5), nn.AdaptiveAvgPool2d(3), nn.LayerNorm([6, 16, 16]),
    Calls(lambda x: torch.cat([x[:, 3:], x[:, :3] - 0.5], 1) / 2), Calls(lambda x: 2 * x[:, :, 3:-2, -1:] + x[:, :, 3:-2, 4:5]),
    Calls(lambda x: x.reshape(x.shape[0], 2, 3, -1).permute(0, 2, 1, 3).reshape(x.size(0), 6, 16, 16)),
    Calls(lambda x: x.view(x.shape[0] * 6, 16, 16).view(-1, 6, 16, 16)), Calls(lambda x: x.expand(x.shape[0], 6, 16, 16)),
    Calls(lambda x: x.unbind(1)[2].reshape(x.shape[0], 1, 16, 16) + x), Calls(lambda x: x * x.mean(dim=1, keepdim=True)),
    Calls(lambda x: torch.softmax(x.transpose(2, 3) @ x, dim=-1) + x), Calls(lambda x: torch.sigmoid(x) * torch.tanh(x)),
    Attend(batch_first=True),
], ids=lambda body: type(body).__name__)
def test_captures(body):
    """`capture` compares with the module itself; other batch sizes are compared here."""
    torch.manual_seed(0)
    module = Head(body).eval()
    torch.testing.assert_close(captured(module)(images(5)), module(images(5)))


@pytest.mark.parametrize("body, message", [
    (nn.PReLU(), "network small: cannot capture module 'body': unknown operation 'PReLU' \\(did you mean 'ReLU'\\?\\)"),
    (nn.ConvTranspose2d(6, 6, 1), "module 'body': unknown operation 'ConvTranspose2d' \\(did you mean 'Conv2d'"),
    (Calls(lambda x: torch.cumsum(x, 1)), "'cumsum' in body: unknown operation 'cumsum'"),
    (Calls(lambda x: x.clamp(0, 1)), "unknown operation 'clamp'"),
    (Calls(lambda x: 1 - x), "cannot capture 'sub': sub of a number and a tensor"),
    (Calls(lambda x: x / x.shape[0]), "'getitem': an argument that depends on the batch size"),
    (Calls(lambda x: x[:, :, ::2]), "an index other than whole numbers and slices of step 1"),
    (Calls(lambda x: x[:, :1].expand(x.shape[0], 6, 16, 16)), "'expand': expand to"),
    (Calls(lambda x: x if x.sum() > 0 else -x), "cannot capture a forward whose course depends on its input"),
    (Calls(lambda x: x + x.mean(1, keepdim=True, dtype=torch.float32)), "'mean': arguments of 'mean' that are not provided for"),
    (Attend(batch_first=False), "MultiheadAttention other than plain self-attention"),
    (Attend(batch_first=True, bias=False), "MultiheadAttention other than plain self-attention"),
], ids=lambda value: type(value).__name__)
def test_refuses_by_name(body, message):
    with pytest.raises(UserError, match=message) as caught:
        captured(Head(body))
    assert "\n" not in str(caught.value)


def test_refuses_a_subclass_that_computes_something_else():
    class Doubled(nn.Conv2d):
        def forward(self, x):
            return 2 * super().forward(x)

    with pytest.raises(UserError, match="network small: the captured graph differs from the module by .* the torch.nn class"):
        captured(Head(Doubled(6, 6, 1)))


def test_refuses_networks_without_a_linear_at_the_end():
    with pytest.raises(UserError, match="the network ends in 'ReLU', not in a Linear: nothing to fine-tune"):
        captured(nn.Sequential(nn.Flatten(), nn.Linear(768, 4), nn.ReLU()))


def test_joins_two_heads_whose_mean_is_the_output():
    class Distilled(Head):
        def __init__(self):
            super().__init__(nn.Identity())
            self.other = nn.Linear(6, 4)

        def forward(self, x):
            x = self.conv(x)
            return (self.head(x.mean([2, 3])) + self.other(x[:, :, 0, 0])) / 2

    torch.manual_seed(0)
    module = Distilled().eval()
    network = captured(module)
    torch.testing.assert_close(network(images()), module(images()))
    assert network.head.in_features == 12 and network.features(images()).shape == (3, 12)
    assert "other.weight" not in network.state_dict()


def test_costs_where_images_and_positions_share_an_axis():
    class Windows(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside, self.head = nn.Linear(48, 5), nn.Linear(5, 2)

        def forward(self, x):  # [N,3,8,8]: four windows of 48 values each, as rows beside those of the other images
            rows = self.inside(x.reshape(-1, 48))
            return self.head(rows.reshape(-1, 4, 5).mean(1))
    network = capture(Windows().eval(), "windows", [3, 8, 8], [0.5] * 3, [0.5] * 3)
    assert network_costs(network)["macs"] == 4 * 48 * 5 + 5 * 2
