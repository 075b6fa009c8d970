"""What training a part is worth, against the formulas in plain autograd."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from piebridge.core.errors import UserError
from piebridge.engine.contribution import ShortRuns, fisher, multi_objective_scores, worth
from piebridge.engine.losses import cross_entropy, token_cross_entropy
from piebridge.engine.step_graph import Part
from piebridge.engine.update_rules import SGD, AdamW


def small_network():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU6(inplace=True), nn.Conv2d(6, 6, 3, groups=6), nn.ReLU(),
              nn.Dropout(0.5), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)]
    return nn.Sequential(*layers).double()


def batches(count=3, size=4, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return [(torch.randn(size, 3, 8, 8, generator=draw, dtype=torch.float64), torch.randint(4, (size,), generator=draw))
            for _ in range(count)]


def test_fisher_is_the_mean_squared_gradient_of_single_samples():
    module = small_network()
    found = fisher(module, cross_entropy, batches())
    module.eval()
    expected = {key: torch.zeros_like(parameter) for key, parameter in module.named_parameters()}
    for inputs, targets in batches():
        for image, target in zip(inputs, targets):
            module.zero_grad()
            F.cross_entropy(module(image[None]), target[None]).backward()
            for key, parameter in module.named_parameters():
                expected[key] += parameter.grad ** 2 / 12
    assert set(found) == set(expected)
    for key, squares in expected.items():
        torch.testing.assert_close(found[key], squares, rtol=1e-10, atol=0)
    parts = {"0.weight": Part(1, torch.tensor([0, 2])), "3.weight": Part(0, torch.tensor([1])), "8.bias": Part()}
    values = worth(found, parts)
    assert values["0.weight"] == pytest.approx(expected["0.weight"][:, [0, 2]].sum().item(), rel=1e-10)
    assert values["3.weight"] == pytest.approx(expected["3.weight"][1].sum().item(), rel=1e-10)
    assert values["8.bias"] == pytest.approx(expected["8.bias"].sum().item(), rel=1e-10)


def test_the_module_is_left_as_it_was():
    module = small_network().train()
    module[3].weight.requires_grad_(False)
    module[2].eval()
    before = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    fisher(module, cross_entropy, batches(1))
    parts = {"8.weight": Part(), "3.weight": Part(0, torch.tensor([1, 4]))}
    ShortRuns(module, cross_entropy, batches(2), batches(1, seed=2)).accuracy(parts)
    assert all(torch.equal(before[key], tensor) for key, tensor in module.state_dict().items())
    assert [each.training for each in module] == [index != 2 for index in range(9)]
    assert not module[3].weight.requires_grad and module[0].weight.requires_grad
    assert all(parameter.grad is None for parameter in module.parameters())


def test_fisher_of_chosen_keys():
    assert set(fisher(small_network(), cross_entropy, batches(1), ["8.weight", "8.bias"])) == {"8.weight", "8.bias"}


class Words(nn.Module):
    """Tied weights, and inputs that are no numbers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 4)
        self.middle = nn.Linear(4, 4)
        self.out = nn.Linear(4, 11, bias=False)
        self.out.weight = self.embedding.weight
        self.unused = nn.Linear(2, 2)

    def forward(self, words):
        return self.out(torch.tanh(self.middle(self.embedding(words))))


def test_fisher_of_a_language_model():
    words = torch.randint(11, (3, 5), generator=torch.Generator().manual_seed(0))
    found = fisher(Words(), token_cross_entropy, [(words[:, :-1], words[:, 1:])])
    assert "out.weight" not in found and found["embedding.weight"].sum() > 0
    assert worth(found, {"unused.weight": Part()}) == {"unused.weight": 0.0}


def test_what_cannot_be_measured_is_named():
    with pytest.raises(UserError, match="no batches to measure contributions on"):
        fisher(small_network(), cross_entropy, [])
    with pytest.raises(UserError, match="no parameter '9.weight' in Sequential"):
        ShortRuns(small_network(), cross_entropy, batches(1), batches(1)).accuracy({"9.weight": Part()})
    inputs, targets = batches(1)[0]
    with pytest.raises(UserError, match="gradient of '0.weight' is not finite"):
        fisher(small_network(), cross_entropy, [(inputs * float("inf"), targets)])


def test_multi_objective_score_divides_by_shares_of_the_largest():
    scores = multi_objective_scores([2.0, 3.0], [100, 400], [10, 5])
    assert scores.tolist() == pytest.approx([2.0 / (0.25 * 1.0), 3.0 / (1.0 * 0.5)])


@pytest.mark.parametrize("rule, reference", [
    (SGD(0.9, 1e-3), lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3)),
    (AdamW(1e-2), lambda parameters: torch.optim.AdamW(parameters, lr=0.05, weight_decay=1e-2))])
def test_a_short_run_is_that_of_torch(rule, reference):
    module, data, validation = small_network(), batches(3), batches(1, seed=7)
    seen = []

    def judge(outputs, targets):
        seen.append(outputs)
        return outputs.argmax(-1) == targets

    parts = {"0.weight": Part(), "1.bias": Part(), "8.weight": Part()}
    accuracy = ShortRuns(module, cross_entropy, data, validation, 0.05, 2, rule, judge).accuracy(parts)
    module.eval()
    optimizer = reference([dict(module.named_parameters())[key] for key in parts])
    for inputs, targets in data * 2:
        optimizer.zero_grad()
        F.cross_entropy(module(inputs), targets).backward()
        optimizer.step()
    outputs = module(validation[0][0])
    torch.testing.assert_close(seen[0], outputs.detach(), rtol=1e-9, atol=1e-9)
    assert accuracy == (outputs.argmax(1) == validation[0][1]).double().mean().item()


def test_a_short_run_moves_the_chosen_channels_only():
    module, part = small_network(), Part(1, torch.tensor([1]))
    before, moved = module[0].weight.detach().clone(), []

    def judge(outputs, targets):
        moved.append((module[0].weight.detach() - before).abs().sum((0, 2, 3)))
        return outputs.argmax(-1) == targets

    ShortRuns(module, cross_entropy, batches(1), batches(1), judge=judge).accuracy({"0.weight": part})
    assert (moved[0] > 0).tolist() == [False, True, False]
