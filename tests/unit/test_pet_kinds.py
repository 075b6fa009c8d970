"""Every PET kind on every family of networks: what is trained, where it starts, that nothing else moves, and how it gets back."""

import pytest
import torch
from pet_examples import CLASSES, FAMILIES, KINDS, captured, examples, family, settings, tuned, vision_transformer
from torch import nn

from piebridge.config import build_config
from piebridge.core.efficientnet_lite import EfficientNetLite0
from piebridge.core.errors import UserError
from piebridge.core.network import GraphNetwork
from piebridge.core.network_file import load_network_file, save_network
from piebridge.core.pet import PET_KINDS
from piebridge.core.tuning import Tuning

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def networks():
    """{name: network}, each with the tensors to begin anew with."""
    made = {name: family(name) for name in FAMILIES}
    return {name: (network, {key: tensor.clone() for key, tensor in network.state_dict().items()}) for name, network in made.items()}


def fresh(networks, name):
    network, tensors = networks[name]
    return GraphNetwork(network.description, {key: tensor.clone() for key, tensor in tensors.items()}).eval()


def test_the_kinds_are_those_of_the_configuration():
    assert set(PET_KINDS) == set(KINDS).union({"head2toe", "lst"})  # these have tests of their own, as they start elsewhere
    for kind in PET_KINDS:
        assert build_config({"method": "FTAll" if kind == "all" else "PET", "pet.kind": kind}, {}).pet.kind == kind


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_training_starts_at_the_original_and_gets_back_into_it(networks, tmp_path, name, kind):
    network, (images, _) = fresh(networks, name), examples(name)
    with torch.no_grad():
        start = network(images)
    before = {key: tensor.clone() for key, tensor in network.state_dict().items()}
    untouched = Tuning(fresh(networks, name), settings(kind)).eval()
    with torch.no_grad():
        torch.testing.assert_close(untouched(untouched.frozen().features(images)), start, rtol=0, atol=1e-12)
    tuning = tuned(network, settings(kind), name)
    with torch.no_grad():
        trained = tuning(tuning.frozen().features(images))
        assert not torch.equal(trained, start)
        bridged = tuning.bridged()
        torch.testing.assert_close(bridged(images), trained, rtol=1e-9, atol=1e-9)
        save_network(bridged, tmp_path / "tuned.safetensors")
        torch.testing.assert_close(load_network_file(tmp_path / "tuned.safetensors")(images), trained, rtol=1e-9, atol=1e-9)
    assert bridged.description["class_names"] == list(CLASSES) and not bridged.training
    changed = set(tuning.state()) | ({key for key in before if kind == "lora" and key.endswith("weight")})
    for key, tensor in bridged.state_dict().items():
        if key not in changed and key in before:
            assert torch.equal(tensor, before[key]), key


def norm_numbers(module):
    return sum(parameter.numel() for each in module.modules() if isinstance(each, (nn.BatchNorm2d, nn.LayerNorm))
               for parameter in each.parameters())


@pytest.mark.parametrize("name, build, width", [
    ("efficientnet_lite0", EfficientNetLite0, 1280), ("vit", lambda: vision_transformer(4), 16)])
def test_counts_are_those_of_the_plain_modules(name, build, width):
    plain, head = build(), 4 * width + 4
    network = family(name, is_narrow=False)
    own_head = list(plain.modules())[-1]
    whole = sum(parameter.numel() for parameter in plain.parameters()) - own_head.weight.numel() - own_head.bias.numel() + head
    biases = sum(parameter.numel() for key, parameter in plain.named_parameters() if key.endswith("bias")) - own_head.bias.numel() + head
    counts = {kind: Tuning(network, settings(kind)).count() for kind in ("head", "norm", "bias", "all")}
    assert counts == {"head": head, "norm": norm_numbers(plain) + head, "bias": biases, "all": whole}
    assert Tuning(network, settings("bias")).share() == pytest.approx(biases / whole)


def test_last_k_trains_what_lies_behind_a_blocks_input(networks):
    module = captured("tower")
    wanted = {key for key, _ in module.named_parameters() if key.startswith(("blocks.1.", "blocks.2.", "last", "head"))}
    tuning = Tuning(fresh(networks, "tower"), settings("last_k"))
    assert set(tuning.state()) == wanted and tuning.tap == module.description["blocks"][1]["input"]
    statistics = {key: tensor.clone() for key, tensor in tuning.network.named_buffers()}
    images, _ = examples("tower")
    tuning(tuning.frozen().features(images))  # in train mode, where only dropout would change
    assert all(torch.equal(tensor, statistics[key]) for key, tensor in tuning.network.named_buffers())


def test_all_is_full_fine_tuning_with_batch_statistics(networks):
    tuning = Tuning(fresh(networks, "tower"), settings("all"))
    assert tuning.tap == "x" and tuning.share() == 1
    before = tuning.state()["stem_norm.running_mean"].clone()
    tuning(examples("tower")[0])
    assert not torch.equal(tuning.state()["stem_norm.running_mean"], before)
    tuning.eval()
    before = tuning.state()["stem_norm.running_mean"].clone()
    tuning(examples("tower")[0])
    assert torch.equal(tuning.state()["stem_norm.running_mean"], before)


@pytest.mark.parametrize("name", ["mobilenet_v3_large", "vit"])
@pytest.mark.parametrize("kind", ["norm", "bias", "last_k"])
def test_gradients_are_those_of_the_plain_network(networks, name, kind):
    network, (images, labels) = fresh(networks, name), examples(name, count=2)
    plain = fresh(networks, name)
    tuning = Tuning(network, settings(kind))
    tuning.eval()  # without dropout
    nn.functional.cross_entropy(tuning(tuning.frozen().features(images)), labels).backward()
    nn.functional.cross_entropy(plain(images), labels).backward()
    wanted = {key: parameter.grad for key, parameter in plain.named_parameters()}
    for key, parameter in zip(tuning.state(), tuning.parameters()):
        torch.testing.assert_close(parameter.grad, wanted[key], rtol=1e-9, atol=1e-12)
    frozen = {key: each for key, each in tuning.network.named_parameters() if key not in tuning.state()}
    assert frozen and all(parameter.grad is None and not parameter.requires_grad for parameter in frozen.values())


@pytest.mark.parametrize("changes, expected", [
    ({"kind": "last_k", "last_k": 4}, "pet.last_k=4: network tower has 3 blocks; give 3 or fewer"),
    ({"kind": "adapter", "blocks": "last:7"}, "pet.blocks=last:7: network tower has 3 blocks; give 3 or fewer"),
    ({"kind": "lora", "blocks": ["blocks.1", "blocks.9"]}, "pet.blocks=blocks.9: network tower has no such block .did you mean 'blocks.")])
def test_what_does_not_fit_is_refused(networks, changes, expected):
    with pytest.raises(UserError, match=expected):
        Tuning(fresh(networks, "tower"), settings(**changes))
