"""The policy: its loss against plain torch in float64, what it learns, what it may cost, and a training killed and resumed."""

import logging
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from piebridge.core.capture import capture
from piebridge.core.costs import network_costs
from piebridge.core.dataset import open_dataset
from piebridge.core.descriptions import read_description
from piebridge.core.errors import Cancelled, RunFailed, UserError
from piebridge.core.loader import ImageLoader
from piebridge.core.network import GraphNetwork, expected_shapes
from piebridge.core.network_file import load_network_file, save_network
from piebridge.core.networks import ARCHITECTURES
from piebridge.core.policy import PolicyRouter
from piebridge.core.transforms import Transform
from piebridge.forge.policy_loss import gumbel_mask, policy_loss, temperature
from piebridge.forge.policy_network import Policy, check_policy_costs, make_policy
from piebridge.forge.policy_tasks import make_task
from piebridge.forge.policy_training import PolicySettings, train_policy

pytestmark = pytest.mark.usefixtures("one_thread")

HALVES = ([0.5] * 3, [0.5] * 3)
SCORES = [1.0, 0.5, 0.2]


def small_policy(level_count=3, seed=0, size=16):
    torch.manual_seed(seed)
    return capture(Policy(4, level_count), "small-policy", [3, size, size], *HALVES)


@pytest.fixture(scope="module")
def photos():
    """48 real images [48, 3, 16, 16], light and dark ones in turn, and features [48, 3, 8] of three levels.

    Level 1 misses a tenth of the original's features. Level 2 equals them where the image is light and is useless where it is dark.
    """
    samples = open_dataset("Clipart10", SimpleNamespace(val_fraction=0.1, test_fraction=0.2, seed=0)).train[:24]
    loader = ImageLoader(samples, Transform(16, *HALVES), workers=0)
    _, images = next(loader.batches([list(range(24))]))
    images = torch.stack([0.4 * images + 0.6, 0.4 * images - 0.6], dim=1).flatten(0, 1)
    generator = torch.Generator().manual_seed(0)
    original = torch.randn(48, 8, generator=generator)
    is_light = (torch.arange(48) % 2 == 0)[:, None]
    cheap = torch.where(is_light, original, -original)
    return images, torch.stack([original, 0.9 * original, cheap], dim=1)


# The loss ----------------------------------------------------------------------------------------------------------------

def double_data(seed=0, batch=5, levels=3, width=6, classes=4):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(batch, levels, width, generator=generator, dtype=torch.float64)
    logits = torch.randn(batch, levels, generator=generator, dtype=torch.float64)
    head = nn.Linear(width, classes).double()
    labels = torch.randint(0, classes, (batch,), generator=generator)
    return features, logits, head, labels


def plain_loss(name, mask, features, head, labels, weight):
    """The loss written out image by image, level by level."""
    total = 0
    for row in range(len(features)):
        mixed = sum(mask[row, level] * features[row, level] for level in range(features.shape[1]))
        wanted = features[row, 0]
        if name == "features":
            task = ((mixed - wanted) ** 2).sum() / (wanted ** 2).sum()
        elif name == "logits":
            target = torch.softmax(head(wanted), 0)
            task = (target * (torch.log(target) - torch.log_softmax(head(mixed), 0))).sum()
        else:
            task = -torch.log_softmax(head(mixed), 0)[labels[row]]
        total = total + task + weight * sum(mask[row, level] * SCORES[level] for level in range(features.shape[1]))
    return total / len(features)


@pytest.mark.parametrize("name", ["features", "logits", "labels"])
def test_the_mixing_loss_is_the_formula_in_float64(name):
    features, logits, head, labels = double_data()
    task, everyone = make_task(name, features, head, labels), list(range(len(features)))
    scores = torch.tensor(SCORES, dtype=torch.float64)

    def loss(logits):
        return policy_loss(torch.softmax(logits, 1), features, scores, 0.7, lambda mixed: task(mixed, everyone))

    def plain(logits):
        return plain_loss(name, torch.softmax(logits, 1), features, head, labels, 0.7)

    logits.requires_grad_(True)
    torch.testing.assert_close(loss(logits), plain(logits), rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(loss(logits), logits)[0], torch.autograd.grad(plain(logits), logits)[0],
                               rtol=0, atol=1e-12)
    assert torch.autograd.gradcheck(loss, [logits])
    mask = F.one_hot(torch.tensor([0, 1, 2, 1, 0]), 3).double()
    chosen = policy_loss(mask, features, scores, 0.0, lambda mixed: task(mixed, everyone))
    torch.testing.assert_close(chosen, task(torch.stack([features[row, level] for row, level in enumerate((0, 1, 2, 1, 0))]), everyone))


def test_the_mask_is_one_level_with_the_gradient_of_the_relaxed_one():
    _, logits, _, _ = double_data(seed=1)
    logits.requires_grad_(True)
    weights = torch.randn(5, 3, dtype=torch.float64)
    mask = gumbel_mask(logits, 0.8, torch.Generator().manual_seed(2))
    uniform = torch.exp(-torch.empty(5, 3, dtype=torch.float64).exponential_(generator=torch.Generator().manual_seed(2)))
    relaxed = torch.softmax((logits - torch.log(-torch.log(uniform))) / 0.8, 1)
    torch.testing.assert_close(mask, F.one_hot(relaxed.argmax(1), 3).double())
    torch.testing.assert_close(torch.autograd.grad((mask * weights).sum(), logits)[0],
                               torch.autograd.grad((relaxed * weights).sum(), logits)[0], rtol=0, atol=1e-12)


def test_levels_are_drawn_as_often_as_the_logits_say():
    logits = torch.tensor([[1.0, 0.0, -1.0]]).expand(20000, 3)
    for heat in (0.1, 5.0):  # the temperature changes the gradient, not the draw
        shares = gumbel_mask(logits, heat, torch.Generator().manual_seed(0)).mean(0)
        torch.testing.assert_close(shares, torch.softmax(logits[0], 0), rtol=0, atol=0.015)


def test_the_temperature_falls_geometrically():
    assert [temperature(share, 8.0, 0.5) for share in (0.0, 0.5, 1.0)] == pytest.approx([8.0, 2.0, 0.5])
    assert temperature(0.25, 8.0, 0.5) == pytest.approx(8.0 * (0.5 / 8.0) ** 0.25)


# What is learned ---------------------------------------------------------------------------------------------------------

def trained(photos, seed=0, **settings):
    images, features = photos
    policy = small_policy(seed=seed)
    values = dict({"epochs": 40, "batch_size": 16, "lr": 0.01, "seed": seed}, **settings)
    return policy, train_policy(policy, images, features, SCORES, PolicySettings(**values))


def test_a_policy_learns_which_images_are_easy(photos):
    images, features = photos
    policy, facts = trained(photos, cost_weight=0.3, epochs=60)
    levels = PolicyRouter(policy, 3)(images)
    assert (levels[::2] == 2).mean() > 0.9  # light: nothing is lost at the cheapest level
    assert (levels[1::2] == 1).mean() > 0.9  # dark: 0.01 + 0.3 * 0.5 is less than the original's 0.3 and the cheapest's 4.06
    lost = ((features[torch.arange(48), levels] - features[:, 0]) ** 2).sum(1) / (features[:, 0] ** 2).sum(1)
    assert facts["task_loss"] == pytest.approx(lost.mean().item(), rel=1e-4)
    assert facts["relative_cost"] == pytest.approx(np.take(SCORES, levels).mean())
    assert facts["shares"] == pytest.approx((np.bincount(levels, minlength=3) / 48).tolist())
    assert facts["level_losses"] == pytest.approx([0.0, 0.01, 2.0], abs=0.3)  # 4 for each dark image, whatever its features


@pytest.mark.parametrize("weight, level", [(50.0, 2), (0.0, 0)])
def test_the_price_alone_takes_the_cheapest_level_and_fidelity_alone_the_original(photos, weight, level):
    images, features = photos
    original = features[:, 0]
    _, facts = trained((images, torch.stack([original, 0.5 * original, -original], dim=1)), cost_weight=weight)
    assert facts["shares"][level] == 1.0 and facts["relative_cost"] == pytest.approx(SCORES[level])


def test_the_published_joint_training_with_labels(photos):
    """Classes that show in the original's features and, of dark images, not in the cheapest level's."""
    images, features = photos
    labels = (features[:, 0, 0] > 0).long()
    head = nn.Linear(8, 2)
    policy = small_policy()
    settings = PolicySettings(task="labels", cost_weight=0.05, epochs=60, batch_size=16, lr=0.02)
    facts = train_policy(policy, images, features, SCORES, settings, head=head, labels=labels)
    assert facts["task_loss"] < 0.35 and facts["relative_cost"] < 0.9
    assert facts["shares"][2] > 0.2


def test_equal_seeds_give_equal_weights(photos):
    first, again, other = (trained(photos, seed=seed, epochs=3)[0].fingerprint() for seed in (4, 4, 5))
    assert first == again != other


class InterruptAfter:
    """As if a signal came in the given step."""

    def __init__(self, steps):
        self.left = steps

    @property
    def signal_name(self):
        self.left -= 1
        return None if self.left else "SIGTERM"

    def check(self):
        raise Cancelled("interrupted by SIGTERM")


@pytest.mark.parametrize("task", ["features", "labels"])
def test_an_interrupted_training_ends_with_the_same_weights(photos, tmp_path, caplog, task):
    images, features = photos
    settings = PolicySettings(task=task, epochs=4, batch_size=16, lr=0.01)
    given = {"head": nn.Linear(8, 2), "labels": (features[:, 0, 0] > 0).long()}
    whole, stopped = small_policy(), small_policy()
    facts = train_policy(whole, images, features, SCORES, settings, **given)
    with pytest.raises(Cancelled):
        train_policy(stopped, images, features, SCORES, settings, folder=tmp_path, interrupt=InterruptAfter(5), **given)
    assert stopped.fingerprint() != whole.fingerprint()
    resumed = small_policy()
    with caplog.at_level(logging.INFO, "piebridge"):
        assert train_policy(resumed, images, features, SCORES, settings, folder=tmp_path, **given) == facts
        assert resumed.fingerprint() == whole.fingerprint()
        finished = small_policy()
        assert train_policy(finished, images, features, SCORES, settings, folder=tmp_path, **given) == facts
        assert finished.fingerprint() == whole.fingerprint()
        train_policy(small_policy(), images, features, SCORES, PolicySettings(task=task, epochs=1), folder=tmp_path, **given)
    assert caplog.messages[:2] == ["policy: going on after step 5 of 12", "policy: going on after step 12 of 12"]
    assert "is of other images or settings: starting anew" in caplog.messages[2]


def test_a_checkpoint_of_other_inputs_is_not_gone_on_from(photos, tmp_path, caplog):
    images, features = photos
    head, labels = nn.Linear(8, 2), (features[:, 0, 0] > 0).long()
    others = features.clone()
    others[20, 1] = 0  # neither the first image nor the last
    settings = PolicySettings(task="labels", epochs=1, batch_size=16)

    def train(features=features, labels=labels, head=head):
        train_policy(small_policy(), images, features, SCORES, settings, head=head, labels=labels, folder=tmp_path)
    with caplog.at_level(logging.INFO, "piebridge"):
        train()
        train(others)
        train(labels=1 - labels)
        train(head=nn.Linear(8, 2))
    assert ["starting anew" in message for message in caplog.messages] == [True] * 3


# What it may cost --------------------------------------------------------------------------------------------------------

def without_memory(description):
    """The network on the meta device: shapes, no weights."""
    return GraphNetwork(description, {key: torch.empty(shape, device="meta") for key, shape in expected_shapes(description).items()})


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_a_policy_costs_less_than_its_shares_of_every_known_network(name):
    original = without_memory(read_description(name))
    policy = make_policy(original, 11)
    costs, whole = network_costs(policy), network_costs(original)
    assert costs["parameters"] < 0.05 * whole["parameters"] and 0.001 * whole["macs"] < costs["macs"] < 0.02 * whole["macs"]
    facts = check_policy_costs(policy, original)
    assert facts["mac_share"] == pytest.approx(costs["macs"] / whole["macs"]) and facts["parameters"] == costs["parameters"]
    assert policy.description["normalization"] == original.description["normalization"]
    assert policy.fingerprint() == make_policy(original, 11).fingerprint() != make_policy(original, 11, seed=1).fingerprint()


def test_costs_are_those_of_the_layers():
    """Width 4, 16 px: places after the stem 8 x 8, after the blocks 4 x 4 and 2 x 2."""
    costs = network_costs(small_policy())
    assert costs["macs"] == (27 * 4 * 64 + (9 * 4 * 4 * 2 + 4 * 4) * 16 + (9 * 4 * 8 + 9 * 8 * 8 + 4 * 8) * 4 + 8 * 3)
    assert costs["parameters"] == 27 * 4 + 2 * 9 * 16 + 16 + 9 * 4 * 8 + 9 * 8 * 8 + 4 * 8 + 2 * 4 * 4 + 2 * 8 * 3 + 8 * 3 + 3


def test_what_costs_too_much_is_refused():
    tower = capture(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)), "tower",
                    [3, 32, 32], *HALVES)
    macs, parameters = 27 * 8 * 900 + 40, 27 * 8 + 8 + 45
    with pytest.raises(UserError, match=f"network tower: too small for a policy, which may have under {0.02 * macs:.0f} MACs and "
                                        f"{0.05 * parameters:.0f} parameters; the smallest has "):
        make_policy(tower, 3)
    share = 100 * network_costs(small_policy())["macs"] / macs
    with pytest.raises(UserError, match=f"macs are {share:.2f} % of the original's, and have to be under 2 %; make it with make_policy"):
        check_policy_costs(small_policy(), tower)
    with pytest.raises(UserError, match="chooses between two or more levels, and there are 1; make proxies first"):
        make_policy(tower, 1)


# On the device -----------------------------------------------------------------------------------------------------------

def test_a_policy_file_routes_as_the_network_does(photos, tmp_path):
    images, _ = photos
    policy, _ = trained(photos, epochs=2)
    path = tmp_path / "policy.safetensors"
    save_network(policy, path)
    router = PolicyRouter(load_network_file(path), 3)
    levels = router(images)
    with torch.no_grad():
        assert levels.tolist() == policy(images).argmax(1).tolist()
    assert levels.dtype == np.int64 and router.size == 16
    assert router(images.repeat_interleave(4, 2).repeat_interleave(4, 3)).tolist() == levels.tolist()  # averaged down again
    with pytest.raises(UserError, match="policy small-policy: it tells 3 levels apart, and there are 4 .the original and 3 proxies.; "
                                        "train it for this set"):
        PolicyRouter(policy, 4)


def test_a_policy_that_is_broken_is_refused():
    policy = small_policy()
    with torch.no_grad():
        policy.head.weight[0, 0] = math.nan
    with pytest.raises(UserError, match="policy small-policy: gives values that are not finite; is its file whole?"):
        PolicyRouter(policy, 3)(torch.zeros(2, 3, 16, 16))
    wide = small_policy()
    wide.description["input_size"] = [3, 16, 24]
    with pytest.raises(UserError, match="its input of 16 x 24 pixels is not square"):
        PolicyRouter(wide, 3)


# Bad input ---------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("change, problem", [
    ({"images": torch.zeros(48, 3, 24, 24)}, r"it is for images of \[3, 16, 16\], and these are \[3, 24, 24\]; load them at its size"),
    ({"images": torch.zeros(5, 3, 16, 16)}, "5 images are too few to train it; give 8 or more"),
    ({"features": torch.zeros(48, 2, 8)}, r"features must be \[48, 3, D\] for these images and its levels, and are \[48, 2, 8\]"),
    ({"features": torch.full((48, 3, 8), math.inf)}, "level 0 gives features that are not finite; make that proxy anew or leave it out"),
    ({"scores": [1.0, 0.5]}, r"scores=\[1.0, 0.5\] must be 3 costs above zero, relative to the original's, the first: 1"),
    ({"scores": [2.0, 1.0, 0.5]}, ".* must be 3 costs above zero"), ({"scores": [1.0, 0.0, 0.5]}, ".* must be 3 costs above zero")])
def test_inputs_that_do_not_fit_are_refused(photos, change, problem):
    given = dict({"images": photos[0], "features": photos[1], "scores": SCORES}, **change)
    with pytest.raises(UserError, match="policy small-policy: " + problem):
        train_policy(small_policy(), settings=PolicySettings(epochs=1), **given)


@pytest.mark.parametrize("name, head, labels, problem", [
    ("feature", None, None, r"task='feature' is not known \(did you mean 'features'\?\); choose one of features, logits, labels"),
    ("logits", None, None, "task=logits needs a head for 8 features; give the original's, or task=features"),
    ("labels", nn.Linear(7, 2), None, "task=labels needs a head for 8 features"),
    ("labels", nn.Linear(8, 2), None, "task=labels needs a label for each of 48 images"),
    ("labels", nn.Linear(8, 2), torch.arange(48), "labels from 0 to 47 do not fit a head of 2 classes")])
def test_tasks_that_lack_something_are_refused(photos, name, head, labels, problem):
    with pytest.raises(UserError, match="policy: " + problem):
        make_task(name, photos[1], head, labels)


def test_settings_and_losses_that_make_no_sense_are_refused(photos):
    with pytest.raises(UserError, match="policy: epochs=0 is below the least allowed, 1"):
        PolicySettings(epochs=0)
    with pytest.raises(UserError, match="policy: first_temperature=nan is below the least allowed"):
        PolicySettings(first_temperature=math.nan)
    with pytest.raises(RunFailed, match="policy: the loss is not finite at step 0; lower its learning rate, 0.002"):
        train_policy(small_policy(), photos[0], photos[1] * 1e30, SCORES, PolicySettings(epochs=1))
