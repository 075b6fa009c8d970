"""Levels on offer, before it is known whether they pay: proxies that the device makes by itself, or those of a proxy set."""

from piebridge.core.errors import UserError
from piebridge.core.proxies import CostModel, make_proxy, match_batch_norm
from piebridge.core.proxy_set import load_proxy_set
from piebridge.core.proxy_specs import parse_spec


class Offer:
    """A proxy that could be a level.

    share: expected cost of one forward over the original's. bridge: the map of a set, which its features go through first, or None.
    make: (images at the original's size, images at the proxy's size) -> its GraphNetwork; needs_images: whether it looks at them.
    cuts: of the original's tensors, where the proxy is pruned.
    """

    def __init__(self, name, resolution, precision, share, make, needs_images=False, bridge=None, cuts=None):
        self.name, self.resolution, self.precision, self.share = name, resolution, precision, share
        self.make, self.needs_images, self.bridge, self.cuts = make, needs_images, bridge, cuts


def offers(config, network, fingerprint):
    """(list of Offers, the ProxySet they come from or None), the most faithful first.

    network: the original, with whatever head; fingerprint: of the original as it was loaded. UserError where `proxies.set` is the set of
    another network.
    """
    if config.proxies.set is None:
        costs = CostModel(network)
        specs = sorted({parse_spec(text) for text in config.proxies.levels},
                       key=lambda spec: (-spec.resolution, spec.dropped, spec.precision != "int8"))
        return [_made_here(network, spec, costs) for spec in specs], None
    proxy_set = load_proxy_set(config.proxies.set, keeps_networks=config.proxies.loading == "resident")
    found = proxy_set.manifest["original"].get("fingerprint")
    if found != fingerprint:
        raise UserError(f"proxies.set={config.proxies.set}: was made of {proxy_set.original.description['name']} with other weights than "
                        f"network={config.network} has; forge a set from that network, or train with "
                        f"network={proxy_set.folder / 'original.safetensors'}")
    whole = proxy_set.manifest["original"]["macs"]
    return [_from_set(proxy, entry["macs"] / whole) for proxy, entry in zip(proxy_set.proxies, proxy_set.manifest["proxies"])], proxy_set


def _made_here(network, spec, costs):
    def make(images, proxy_images):
        proxy = make_proxy(network, spec, images)
        match_batch_norm(network, proxy, images, proxy_images)
        return proxy

    as_it_is = spec.dropped == 0  # lower resolution and int8 leave the network alone
    return Offer(str(spec), spec.resolution, spec.precision, costs.share(spec), (lambda *_: network) if as_it_is else make, not as_it_is)


def _from_set(proxy, share):
    share = share * (0.5 if proxy.precision == "int8" else 1.0)
    return Offer(proxy.name, proxy.resolution, proxy.precision, share, lambda *_: proxy.network, bridge=proxy.bridge, cuts=proxy.cuts)
