"""The policy's network: two residual blocks on a small image, as large as two shares of the original's costs allow."""

import torch
import torch.nn.functional as F
from torch import nn

from piebridge.core.capture import capture
from piebridge.core.costs import network_costs
from piebridge.core.errors import UserError

PARAMETER_SHARE, MAC_SHARE = 0.05, 0.02  # of the original's, at most
SIZES = (112, 96, 80, 64, 48, 32, 24, 16)  # pixels
WIDTHS = (32, 24, 16, 12, 8, 4)  # channels before the last block, which doubles them


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions beside a 1 x 1 one (ResNet's basic block): [N, inputs, H, W] -> [N, outputs, H/2, W/2]."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride=2, bias=False)
        self.shortcut_norm = nn.BatchNorm2d(outputs)

    def forward(self, x):
        branch = self.second_norm(self.second(F.relu(self.first_norm(self.first(x)))))
        return F.relu(branch + self.shortcut_norm(self.shortcut(x)))


class Policy(nn.Module):
    """Images [N, 3, S, S] -> a logit for each level [N, levels]."""

    def __init__(self, width, level_count):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.Sequential(ResidualBlock(width, width), ResidualBlock(width, 2 * width))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(2 * width, level_count)

    def forward(self, x):
        return self.head(torch.flatten(self.pool(self.blocks(self.stem(x))), 1))


def make_policy(original, level_count, seed=0):
    """A policy with fresh weights for `level_count` levels, the original's included: a GraphNetwork like any other, in eval mode.

    Of the sizes and widths above it has those with the most MACs within both shares of the original's costs; it sees what the
    original sees, smaller. UserError where even the smallest is too large, or there are fewer than two levels.
    """
    name = original.description["name"]
    if level_count < 2:
        raise UserError(f"network {name}: a policy chooses between two or more levels, and there are {level_count}; make proxies first")
    whole = network_costs(original)
    limits = _limits(whole)
    candidates = []
    for width in WIDTHS:
        network = _captured(original, width, SIZES[-1], level_count, seed)
        for size in SIZES:
            costs = network_costs(network, size)
            candidates.append((costs["macs"], costs["parameters"], width, size))
    fitting = [each for each in candidates if each[0] < limits["macs"] and each[1] < limits["parameters"]]
    if not fitting:
        macs, parameters = min(candidates)[:2]
        raise UserError(f"network {name}: too small for a policy, which may have under {limits['macs']:.0f} MACs and "
                        f"{limits['parameters']:.0f} parameters; the smallest has {macs} and {parameters}; forge it with "
                        "policy=false, and route by residual")
    _, _, width, size = max(fitting)
    policy = _captured(original, width, size, level_count, seed)
    _check_costs(policy, whole)
    return policy


def check_policy_costs(policy, original):
    """{"macs", "parameters", "mac_share", "parameter_share"} of a policy. UserError where it costs more than it may."""
    return _check_costs(policy, network_costs(original))


def _check_costs(policy, whole):
    costs = network_costs(policy)
    shares = {kind: costs[kind] / whole[kind] for kind in ("macs", "parameters")}
    for kind, limit in _limits(whole).items():
        if not costs[kind] < limit:
            raise UserError(f"policy {policy.description['name']}: its {costs[kind]} {kind} are {100 * shares[kind]:.2f} % of the "
                            f"original's, and have to be under {100 * limit / whole[kind]:.0f} %; make it with make_policy")
    return {"macs": costs["macs"], "parameters": costs["parameters"], "mac_share": shares["macs"],
            "parameter_share": shares["parameters"]}


def _limits(whole):
    return {"macs": MAC_SHARE * whole["macs"], "parameters": PARAMETER_SHARE * whole["parameters"]}


def _captured(original, width, size, level_count, seed):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = Policy(width, level_count)
    seen = original.description
    return capture(module, seen["name"] + "-policy", [3, size, size], seen["normalization"]["mean"], seen["normalization"]["std"],
                   seen["interpolation"], seen["crop_fraction"])
