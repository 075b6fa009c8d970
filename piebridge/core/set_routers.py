"""Routers that a proxy set brings along: the paper's policy, and the predictor of what each level leaves, with its scores."""

import numpy as np

from piebridge.core.difficulty import ResidualRouter
from piebridge.core.errors import UserError
from piebridge.core.policy import PolicyRouter


def policy_of(proxy_set, config, names):
    """(PolicyRouter, level for each of its outputs): a level that is not here gives way to the next more faithful one.

    proxy_set: a ProxySet, or None for proxies made on the device. names: of the levels 1, 2, ... that are here. UserError where there
    is no policy, or it is for other levels.
    """
    if proxy_set is None or proxy_set.policy is None:
        raise UserError(f"router.kind={config.router.kind}: {_place(proxy_set, config)} no policy; give a set that was forged with one, or "
                        "router.kind=random")
    numbers = [0]
    for proxy in proxy_set.proxies:
        numbers.append(names.index(proxy.name) + 1 if proxy.name in names else numbers[-1])
    return PolicyRouter(proxy_set.policy, len(numbers)), np.array(numbers)


def predictor_of(proxy_set, config):
    """The ResidualPredictor of a set. UserError where there is none, or it is of other levels."""
    if proxy_set is None or proxy_set.predictor is None:
        raise UserError(f"router.predictor=set: {_place(proxy_set, config)} no predictor; give a set that was forged with one, or "
                        "router.predictor=device")
    found, wanted = proxy_set.predictor.weights.shape, (proxy_set.original.head.in_features, len(proxy_set.proxies))
    if found != wanted:
        raise UserError(f"proxies.set={config.proxies.set}: its predictor is for {found[0]} features and {found[1]} levels, and the set "
                        f"has {wanted[0]} and {wanted[1]}; forge it anew, or give router.predictor=device")
    return proxy_set.predictor


def residual_router_of(proxy_set, predictor, config, names):
    """A ResidualRouter for the levels that are here, by a set's predictor; it reads the features of the last of them.

    names: of the levels 1, 2, ... that are here, in the set's order. UserError where the cheapest proxy, whose features
    the predictor was fitted on, is not among them.
    """
    known = [proxy.name for proxy in proxy_set.proxies]
    if names[-1] != known[-1]:
        raise UserError(f"router.predictor=set: reads the features of {known[-1]}, which cannot run here; give "
                        "router.predictor=device")
    return ResidualRouter(predictor.of_levels([known.index(name) for name in names]), config.router.tolerance, config.router.delta)


def _place(proxy_set, config):
    return "proxies that are made on the device have" if proxy_set is None else f"proxies.set={config.proxies.set}: has"
