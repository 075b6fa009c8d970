"""Which linear maps of a stretch can be refitted: those that reach a value that the original has too through affine operations alone."""

from dataclasses import dataclass

from piebridge.core import graph

_MAPS = ("Conv2d", "Linear")
_PRODUCTS = _MAPS + ("linear", "matmul", "attention")
_PASSING = ("Identity", "Dropout")


@dataclass(frozen=True)
class LinearMap:
    """node, module: of a Conv2d or Linear; source: the node that it reads; norms: modules of the batch norms on its way."""

    node: str
    module: str
    source: str
    norms: tuple


@dataclass(frozen=True)
class Site:
    """The value of node `target` is the sum of what some maps give, scaled by batch norms, and of what no map here changes."""

    target: str
    maps: tuple


def find_sites(description, is_block=True, reading=()):
    """The sites of a stretch (see forge/segments.py), in order.

    A map's target is the last node that it reaches through eval-mode batch norms, sums, Identity and Dropout with no other reader on
    the way: the value before a final activation, for example. In a block the targets are sums (of the attention and of the MLP in a
    transformer), what no further product follows, and what is given by the modules of `reading`, those that read fewer channels than
    the original's. Elsewhere nothing is cut, and all maps are taken.
    """
    readers, users = {}, {}
    for node in description["nodes"]:
        for name in node["inputs"]:
            readers.setdefault(name, []).append(node)
        if "module" in node:
            users.setdefault(node["module"], []).append(node)
    groups = {}
    for node in description["nodes"]:
        if node["operation"] in _MAPS and node["arguments"].get("groups", 1) == 1 and len(users[node["module"]]) == 1:
            target, norms = _reach(node, readers, users)
            groups.setdefault(target, []).append(LinearMap(node["name"], node["module"], node["inputs"][0], norms))
    sites = [Site(target, tuple(maps)) for target, maps in groups.items()
             if not is_block or any(each.module in reading for each in maps) or _is_last(description, target)]
    order = {node["name"]: position for position, node in enumerate(description["nodes"])}
    return sorted(sites, key=lambda site: order[site.target])


def _reach(node, readers, users):
    """(name of the last node, batch norms on the way)."""
    norms = []
    while len(readers.get(node["name"], ())) == 1:
        following = readers[node["name"]][0]
        is_norm = (following["operation"] == "BatchNorm2d" and following["arguments"]["track_running_stats"]
                   and len(users[following["module"]]) == 1)
        is_sum = following["operation"] == "add" and len(set(following["inputs"])) == len(following["inputs"])
        if not (is_norm or is_sum or following["operation"] in _PASSING):
            break
        norms += [following["module"]] if is_norm else []
        node = following
    return node["name"], tuple(norms)


def _is_last(description, target):
    """Whether it is a sum, or no further product follows."""
    node = graph.nodes_by_name(description)[target]
    if node["operation"] == "add" and len(node["inputs"]) == 2:
        return True
    return not any(node["operation"] in _PRODUCTS and target in graph.ancestors(description, node["name"])
                   for node in description["nodes"] if node["name"] != target)
