"""What a PET kind makes of a network."""

from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Tuple

from piebridge.core.errors import UserError
from piebridge.core.names import closest

USUAL_WIDTH = 64  # r that no network is too narrow for


def _as_it_is(description):
    return description


@dataclass
class Structure:
    """trained: state dict keys of the edited network, in a fixed order. edit: description -> description with what the kind adds, for the
    original and for any level of it. added: the trained tensors that the original lacks. renamed: {key in the edited network: key in the
    original}. factors: {module path: Factors} of LoRA. parts: {key: TensorPart} of trained tensors that are parts of others.
    moves_statistics: whether batch norm is in train mode. set_once: those of `trained` that are set before the training, and not by
    gradients.
    """

    trained: List[str]
    edit: Callable = _as_it_is
    added: Dict[str, Any] = field(default_factory=dict)
    renamed: Dict[str, str] = field(default_factory=dict)
    factors: Dict[str, Any] = field(default_factory=dict)
    parts: Dict[str, Any] = field(default_factory=dict)
    moves_statistics: bool = False
    set_once: Tuple[str, ...] = ()


def head_keys(network):
    """The state dict keys of the head."""
    return [f"{network.description['head']}.{name}" for name, _ in network.head.named_parameters()]


def chosen_blocks(network, settings):
    """The blocks of a network that `pet.blocks` names: all, last:N, or a list of names. UserError for one that it does not have."""
    blocks, wanted = network.description["blocks"], settings.blocks
    if wanted == "all":
        return blocks
    if isinstance(wanted, str) and wanted.startswith("last:"):
        return last_blocks(network, int(wanted[len("last:"):]), f"pet.blocks={wanted}")
    names = [block["name"] for block in blocks]
    for name in [wanted] if isinstance(wanted, str) else wanted:
        if name not in names:
            raise UserError(f"pet.blocks={name}: network {network.description['name']} has no such block{closest(name, names)}; "
                            f"its blocks: {', '.join(names)}")
    return [block for block in blocks if block["name"] in wanted]


def last_blocks(network, count, setting):
    """The last `count` blocks; UserError, beginning with `setting` (its words), where there are fewer."""
    blocks = network.description["blocks"]
    if count > len(blocks):
        raise UserError(f"{setting}: network {network.description['name']} has {len(blocks)} blocks; give {len(blocks)} or fewer")
    return blocks[len(blocks) - count:]


def parameters_of(node, network):
    """The state dict keys of a node's parameters (not its buffers)."""
    if "parameter" in node:
        return [node["parameter"]]
    if "module" not in node:
        return []
    return [f"{node['module']}.{name}" for name, _ in network.get_submodule(node["module"]).named_parameters(recurse=False)]


def in_order(network, keys):
    """Those of the network's parameters that are among `keys`, in the network's order."""
    return [key for key, _ in network.named_parameters() if key in keys]


def check_width(network, settings, widest):
    """UserError for a `pet.r` beyond the widest of the layers that it is to be narrower than: no gain, and no end of memory."""
    most = max(USUAL_WIDTH, widest)
    if settings.r > most:
        raise UserError(f"pet.r={settings.r}: the widest layer that pet.kind={settings.kind} changes in network "
                        f"{network.description['name']} has {widest} channels; give {most} or fewer")
