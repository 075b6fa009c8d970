"""A frozen prefix on the segments that levels and proxies use (core/backends): for networks with a description."""

import torch

from piebridge.core import graph
from piebridge.core.backends import build_segment
from piebridge.core.errors import UserError
from piebridge.core.network import GraphNetwork, expected_shapes
from piebridge.engine.step_graph import BATCH, OUTPUTS


class SegmentPrefix:
    """Runs a step's prefix, see segments.py.

    prefix: StepGraph. network: GraphNetwork that the step was captured of, frozen but for the parts named in `trained` (state dict keys).
    backend: a name of core/backends/registry.py. UserError, before anything is built, where the two are not cut at one and the same value.
    """

    def __init__(self, prefix, network, trained, backend):
        reason = hindrance(prefix, network)
        if reason:
            raise UserError(reason)
        tap = graph.last_cut(network.description, _trained_nodes(network.description, trained))
        description = graph.before(network.description, tap)
        tensors = {key: tensor.detach() for key, tensor in network.state_dict().items()}
        frozen = GraphNetwork(description, {key: tensors[key] for key in expected_shapes(description)}).eval()
        (_, images), = prefix.inputs_of(BATCH)
        self._segment = build_segment(backend, frozen, images.shape[-1], images.shape[0])

    def results(self, batch, weights=None, rate=None, count=None, draws=()):
        """[the value at the cut], without a gradient."""
        return [self._segment(batch[0])]


def hindrance(prefix, network):
    """Why these segments cannot stand in for a prefix, or None. That they give the same values is for the probe to see."""
    if not isinstance(network, GraphNetwork):
        return f"takes a network with a description, and this is a {type(network).__name__}"
    if [value.role for value in prefix.outputs] != [OUTPUTS]:
        return f"gives one value, and the prefix has {len(prefix.outputs)}"
    images = [value for _, value in prefix.inputs_of(BATCH)]
    if len(images) != 1 or len(images[0].shape) != 4 or images[0].shape[1] != 3 or images[0].shape[2] != images[0].shape[3]:
        return "takes square images of three channels"
    return None if images[0].dtype == torch.float32 else f"takes float32, and the images are {images[0].dtype}"


def _trained_nodes(description, trained):
    owners = set(trained) | {key.rpartition(".")[0] for key in trained}
    return {node["name"] for node in description["nodes"] if (node.get("module") or node.get("parameter")) in owners}
