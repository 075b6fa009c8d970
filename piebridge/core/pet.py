"""The PET kinds: which tensors of a network are trained, and what is added to it for that."""

from piebridge.core import graph
from piebridge.core.errors import UserError
from piebridge.core.head2toe import head2toe
from piebridge.core.pet_adapters import adapter
from piebridge.core.pet_lora import lora
from piebridge.core.pet_sparse import sparse
from piebridge.core.pet_structure import Structure, head_keys, in_order, last_blocks, parameters_of
from piebridge.core.side_network import lst

NORMS = ("BatchNorm2d", "LayerNorm", "GroupNorm")


def structure_of(network, settings, parts=None):
    """The Structure of a network with a fresh head for the section `pet` of a configuration. UserError where the two do not fit.

    parts: of kind sparse, what its scheme means for this network, see core/pet_sparse.py.
    """
    if settings.kind == "sparse":
        if parts is None:
            raise UserError("pet.kind=sparse: what its scheme trains of this network is not known here; use `piebridge train`")
        return sparse(network, parts)
    return PET_KINDS[settings.kind](network, settings)


def _head(network, settings):
    """The final linear layer."""
    return Structure(head_keys(network))


def _all(network, settings):
    """Every layer, batch norm in train mode: full fine-tuning."""
    return Structure([key for key, _ in network.named_parameters()], moves_statistics=True)


def _last_k(network, settings):
    """Every parameter behind the input of the K-th last block; batch norm keeps its statistics, its weight and bias are trained."""
    (first, *_) = last_blocks(network, settings.last_k, f"pet.last_k={settings.last_k}")
    frozen = graph.ancestors(network.description, first["input"])
    beyond = [node for node in network.description["nodes"] if node["name"] not in frozen]
    return Structure(in_order(network, {key for node in beyond for key in parameters_of(node, network)}))


def _norm(network, settings):
    """Weight and bias of every normalisation layer, and the head."""
    nodes = [node for node in network.description["nodes"] if node["operation"] in NORMS]
    return Structure(in_order(network, set(head_keys(network)).union(*[parameters_of(node, network) for node in nodes])))


def _bias(network, settings):
    """Every bias, and the head (BitFit, Ben Zaken et al. 2022)."""
    joint = {node["inputs"][2] for node in network.description["nodes"] if node["operation"] == "linear" and len(node["inputs"]) > 2}
    biases = {key for node in network.description["nodes"] for key in parameters_of(node, network)
              if key.endswith(".bias") and "module" in node or node["name"] in joint}
    return Structure(in_order(network, biases.union(head_keys(network))))


PET_KINDS = {"head": _head, "last_k": _last_k, "norm": _norm, "bias": _bias, "adapter": adapter, "lora": lora, "head2toe": head2toe,
             "lst": lst, "all": _all}
