"""Sparse updates against plain torch: gradients of whole tensors, of which the chosen channels are taken."""

import copy

import pytest
import torch
from forge_examples import noisy
from pet_examples import examples, family, settings, sparse_parts
from torch import nn

from piebridge.core.errors import UserError
from piebridge.core.gate import OpenGate
from piebridge.core.network import GraphNetwork
from piebridge.core.optimizers import build_optimizer
from piebridge.core.step import EagerStep
from piebridge.core.tuning import Tuning
from piebridge.forge import prune, structure_of, tensor_cuts

pytestmark = pytest.mark.usefixtures("one_thread")
SPARSE = settings("sparse")


def optimizer(kind="adamw"):
    from types import SimpleNamespace

    return SimpleNamespace(kind=kind, lr=1e-2, momentum=0.9, weight_decay=0.1, schedule="constant", label_smoothing=0.1)


def tuning_of(name, body="eager", network=None):
    network = network or family(name)
    return Tuning(network, SPARSE, body, sparse_parts(network))


def trained(name, steps=4):
    tuning = tuning_of(name)
    step = EagerStep(tuning, optimizer())
    for number in range(steps):
        images, labels = examples(name, seed=10 + number)
        step(tuning.frozen().features(images).detach(), labels, OpenGate(), 0.0)
    return tuning.eval()


@pytest.mark.parametrize("name, tap, count", [("tower", "add_1", 16 + 3 * 16 + 4 * 9 + 8 * 16 + 24 + 24 + 24 * 4 + 4),
                                              ("vit", None, 5 * 16 + 24 * 3 + 16 * 24 + 16 + 16 * 4 + 4)])
def test_what_is_trained_and_from_where_on(name, tap, count):
    tuning = tuning_of(name)
    assert tuning.count() == count == sum(tensor.numel() for tensor in tuning.state().values())
    assert tuning.share() == count / sum(parameter.numel() for parameter in family(name).parameters())
    assert tap in (None, tuning.tap) and tuning.tap != "x"
    assert [key for key in tuning.state() if key.endswith("_part")] == [
        key + "_part" for key, _ in family(name).named_parameters() if sparse_parts(family(name)).get(key)]


@pytest.mark.parametrize("name", ["tower", "vit"])
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_steps_are_those_of_plain_torch_on_the_chosen_channels(name, kind):
    """By hand: gradients of the whole network's tensors, parts of which torch.optim updates."""
    network = family(name)
    plain = copy.deepcopy(network)
    tuning = Tuning(network, SPARSE, parts=sparse_parts(network))
    parts = dict(sparse_parts(plain), **{f"{plain.description['head']}.{key}": None for key in ("weight", "bias")})
    wholes = dict(plain.named_parameters())
    own = {key: nn.Parameter(wholes[key].detach().index_select(part[0], torch.tensor(part[1])) if part else wholes[key].detach().clone())
           for key, part in parts.items()}
    rule = torch.optim.AdamW(own.values(), lr=1e-2, weight_decay=0.1) if kind == "adamw" else torch.optim.SGD(
        own.values(), lr=1e-2, momentum=0.9, weight_decay=0.1)
    step = EagerStep(tuning, optimizer(kind))
    for number in range(6):
        images, labels = examples(name, seed=number)
        losses, _ = step(tuning.frozen().features(images).detach(), labels, OpenGate(), 0.0)
        wanted = nn.functional.cross_entropy(plain(images), labels, reduction="none", label_smoothing=0.1)
        torch.testing.assert_close(losses, wanted.detach(), rtol=1e-9, atol=1e-11)
        gradients = torch.autograd.grad(wanted.mean(), [wholes[key] for key in parts])
        for (key, part), gradient in zip(parts.items(), gradients):
            own[key].grad = gradient.index_select(part[0], torch.tensor(part[1])) if part else gradient
        rule.step()
        with torch.no_grad():
            for key, part in parts.items():
                wholes[key].index_copy_(part[0], torch.tensor(part[1]), own[key]) if part else wholes[key].copy_(own[key])
    for key, tensor in tuning.bridged().state_dict().items():
        torch.testing.assert_close(tensor, plain.state_dict()[key], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["tower", "vit"])
def test_the_bridged_original_is_what_was_trained(name):
    tuning, before = trained(name), family(name).state_dict()
    bridged = tuning.bridged()
    images, _ = examples(name)
    with torch.no_grad():
        torch.testing.assert_close(bridged(images), tuning(tuning.frozen().features(images)), rtol=1e-12, atol=1e-12)
    assert list(bridged.state_dict()) == list(before) and bridged.description == family(name).description
    parts = sparse_parts(family(name))
    for key, tensor in bridged.state_dict().items():
        changed = tensor != before[key]
        if not key.startswith("head"):
            assert changed.any() == (key in parts), key
        if parts.get(key):
            dim, channels = parts[key]
            others = [number for number in range(tensor.shape[dim]) if number not in channels]
            assert not changed.index_select(dim, torch.tensor(others)).any(), key


@pytest.mark.parametrize("name", ["tower", "vit"])
@pytest.mark.parametrize("body", ["channels_last", "folded"])
def test_a_faster_body_computes_the_same(name, body):
    images, labels = examples(name)
    found = []
    for each in ("eager", body):
        tuning = tuning_of(name, each)
        logits = tuning(tuning.frozen().features(images))
        nn.functional.cross_entropy(logits, labels).backward()
        found.append([logits.detach(), *[parameter.grad for parameter in tuning.parameters()]])
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-11)


def test_state_and_restore():
    tuning, other = trained("tower"), tuning_of("tower").eval()
    other.restore({key: tensor.clone() for key, tensor in tuning.state().items()})
    images, _ = examples("tower")
    assert torch.equal(other(other.frozen().features(images)), tuning(tuning.frozen().features(images)))


def test_the_tail_has_the_present_values_as_plain_tensors():
    tuning = trained("tower")
    images, _ = examples("tower")
    values = tuning.frozen().features(images)
    module, parts = tuning.tail()
    assert torch.equal(module(values), tuning(values)) and list(parts) == list(tuning.state())
    module, parts = tuning.tail()
    assert all(isinstance(parameter, nn.Parameter) for parameter in module.parameters())
    for key, (whole, part) in parts.items():
        tensor = dict(module.named_parameters())[whole]
        assert torch.equal(tensor if part is None else tensor.index_select(part.dim, part.index), tuning.state()[key])


def test_a_level_has_the_parts_in_its_own_weights():
    tuning, proxy = trained("tower"), noisy(family("tower"))
    tensors = {key: tensor.clone() for key, tensor in proxy.state_dict().items()}
    level = tuning.add_level(proxy)
    parts = sparse_parts(proxy)
    for key, tensor in tuning.bridged().state_dict().items():
        if key in parts and parts[key]:
            index = torch.tensor(parts[key][1])
            tensors[key] = tensors[key].index_copy(parts[key][0], index, tensor.index_select(parts[key][0], index))
        elif key in parts or key.startswith("head"):
            tensors[key] = tensor
    plain = GraphNetwork(tuning.network.description, tensors).eval()
    images, _ = examples("tower")
    with torch.no_grad():
        torch.testing.assert_close(tuning(tuning.frozen(level).features(images), level), plain(images), rtol=1e-12, atol=1e-12)


def test_a_level_that_lacks_channels_of_a_part_is_refused():
    network = family("tower")
    structure, kept = structure_of(network), {"blocks.2.expand": [3, 0, 5, 6, 9, 14]}
    cuts, proxy = tensor_cuts(structure, kept), prune(network, kept, structure)
    with pytest.raises(UserError, match=r"pet.kind=sparse: a part of blocks.2.expand.weight is trained, and a proxy has other channels"):
        tuning_of("tower", network=network).add_level(proxy, cuts)


def test_what_does_not_fit_is_refused():
    with pytest.raises(UserError, match=r"pet.kind=sparse: network tower has no parameter 'blocks.2.expand.wait' \(did you mean"):
        Tuning(family("tower"), SPARSE, parts={"blocks.2.expand.wait": None})
    with pytest.raises(UserError, match="pet.kind=sparse: what its scheme trains of this network is not known here"):
        Tuning(family("tower"), SPARSE)


def test_weight_decay_and_states_are_of_the_parts():
    tuning = tuning_of("tower")
    states = build_optimizer(tuning.parameters(), optimizer()).state()
    assert sum(tensor.numel() for name, tensor in states.items() if name != "steps") == 2 * tuning.count()
