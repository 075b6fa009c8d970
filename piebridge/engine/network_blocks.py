"""Which layers make up a block, and what a linear layer is within a transformer's: told from structure, not from names."""

from dataclasses import replace

from torch import nn


def blocks_of(module, paths):
    """Paths of the network's blocks, in order.

    Of a GraphNetwork those of its description. Elsewhere the members of a Sequential, ModuleList or ModuleDict that hold two or more of
    the layers at `paths`; of a member that itself holds several such blocks of one class (a stage), those.
    """
    if "blocks" in getattr(module, "description", ()):
        return [block["name"] for block in module.description["blocks"]]
    return _blocks_below("", module, False, paths)


def _blocks_below(path, module, is_member, paths):
    count = sum(each.startswith(path + ".") or not path for each in paths)
    if count < 2:
        return []
    is_container = isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
    found = [block for name, child in module.named_children()
             for block in _blocks_below(f"{path}.{name}".lstrip("."), child, is_container, paths)]
    return [path] if is_member and not _is_stage(path, module, found) else found


def _is_stage(path, module, blocks):
    """Whether the blocks found in a member of a container are the network's, rather than the member."""
    if type(module) in (nn.Sequential, nn.ModuleList):
        return bool(blocks)
    classes = [type(module.get_submodule(block[len(path) + 1:])) for block in blocks]
    return len(set(classes)) < len(classes)


def block_at(path, blocks):
    """The block that holds a layer, or None."""
    return next((block for block in blocks if path.startswith(block + ".")), None)


def with_roles(layers, flow, attention):
    """The layers with their `role` and `attention`.

    flow: in order of execution the (path, None) of linear layers and ("attention", heads) between them. In each block, the linear layer
    behind an attention projects its output, the up to three before it project query, key and value; what else is linear in a block with
    attention is its MLP.
    """
    by_path = {layer.path: layer for layer in layers}
    scopes = {}  # block: its part of the flow; an attention belongs to the block of the linear layer before it
    block, number = None, 0
    for name, heads in flow:
        if name == "attention":
            scopes.setdefault(block, []).append((None, attention(number, heads, 0)))
            number += 1
        elif not by_path[name].is_added:
            block = by_path[name].block
            scopes.setdefault(block, []).append((name, None))
    for block, steps in scopes.items():
        places = [place for place, (name, _) in enumerate(steps) if name is None]
        for place in places:
            _mark_attention(by_path, steps, place)
        if places and block is not None:
            for name, _ in steps:
                if name is not None and not by_path[name].role:
                    by_path[name] = replace(by_path[name], role="mlp")
    return [by_path[layer.path] for layer in layers]


def _mark_attention(by_path, steps, place):
    """Give the layers around steps[place] their role."""
    if place + 1 == len(steps) or steps[place + 1][0] is None:
        return  # no projection of the output: a softmax of something else
    out, found = by_path[steps[place + 1][0]], steps[place][1]
    found = replace(found, size=out.shape[1 - out.output_dim] // found.heads)
    by_path[out.path] = replace(out, role="attention out", attention=found)
    for name, _ in reversed(steps[max(0, place - 3):place]):
        if name is None or by_path[name].role:
            break
        by_path[name] = replace(by_path[name], role="attention in", attention=found)
        if by_path[name].shape[by_path[name].output_dim] == 3 * found.heads * found.size:
            break  # one projection for all three
