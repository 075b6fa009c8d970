"""Head2Toe (Evci et al., ICML 2022): a linear head on a few features of all layers.

Each layer's value is averaged over a grid, so that it gives about `pet.layer_features` numbers, and brought to unit length; a linear
head with a group lasso is trained on all of them together, the relevance of a feature is the norm of its weights over the classes,
    s_i = sqrt(sum_j w_ij^2),
and the features of the highest relevance, the share `pet.keep` of them, feed the head that is trained (sections 3 and 4).

As published: the pooling rule, unit length after the selection, the penalty on the norms, Adam with a cosine schedule on batches of 128
for 500 steps. Different: layers are blocks and the head's former input, not each convolution, so there are fewer features; tokens are
averaged; the grid divides the map; relevance is computed on 4,096 images at most; fraction, penalty and rate are settings, where the
paper searches them for each data set.

The selection is a mask, a parameter of the network file. It is set by `select_features`, not by gradients, and everything before it is
frozen: the node `head2toe_layers_...` may be cached and serves the relevance and the training alike.
"""

import contextlib
import copy
import math
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F

from piebridge.core import graph
from piebridge.core.added_nodes import binary_node, block_values, function_node, module_node, parameter_node, value_shapes
from piebridge.core.bad_images import NOTHING_READABLE
from piebridge.core.errors import UserError
from piebridge.core.files import sha256_of_json
from piebridge.core.optimizers import build_optimizer, learning_rate
from piebridge.core.pet_structure import Structure, chosen_blocks, head_keys

LAYERS = "head2toe_layers_"  # begins the name of the node with every layer's pooled features; what follows tells caches apart
JOINED = "head2toe_joined"  # the node with the selected ones, at unit length: the head's input
MASK, NORM = "head2toe.mask", "head2toe.norm_"
MOST_LAYERS = 64  # inputs of one `cat`
MOST_IMAGES = 4096  # that the relevance is computed on
STEPS, BATCH, RATE = 500, 128, 0.01  # of the head that gives the relevance
LEAST_SQUARE = 1e-12  # added to a layer's mean square; a layer of which nothing is selected stays zero


def head2toe(network, settings):
    """The Structure of a multi-layer head on `network`, for the section `pet`: blocks (the layers), layer_features. UserError."""
    description, originals, old = network.description, network.description["blocks"], network.head
    blocks = chosen_blocks(network, settings)
    if any(node.get("parameter") == MASK for node in description["nodes"]):
        raise UserError(f"pet.kind=head2toe: network {description['name']} has a multi-layer head already; give the original it was made "
                        "of")
    if not 1 <= len(blocks) < MOST_LAYERS:
        raise UserError(f"pet.kind=head2toe: a head on {len(blocks)} blocks is not possible; choose 1 to {MOST_LAYERS - 1} with pet.blocks")
    names = [block["output"] for block in blocks] + [description["tap"]]
    shapes = value_shapes(network, names)
    layers = [pooled(shapes[name], settings.layer_features) for name in names]

    name = LAYERS + sha256_of_json([names, [vars(layer) for layer in layers]])[:8]

    def edit(proxy):
        return _with_layers(proxy, block_values(proxy, blocks, originals) + [proxy["tap"]], layers, name)

    width = sum(layer.width for layer in layers)
    weight = torch.nn.Parameter(torch.randn(old.out_features, width).mul_(0.01).to(old.weight))
    mask = torch.nn.Parameter(torch.ones(width).to(old.weight))
    keys = head_keys(network)
    return Structure([MASK] + keys, edit, added={MASK: mask, keys[0]: weight}, set_once=(MASK,))


def pooled(shape, target):
    """(operation or None, its arguments, width) that make a value of `shape` about `target` features.

    shape: of a map [C, H, W], of tokens [T, C], of a vector [C]. A map becomes p x p cells, C p^2 <= target (p = 1 at least), p a divisor
    of both sides.
    """
    if len(shape) == 1:
        return SimpleNamespace(operation=None, arguments={}, width=shape[0])
    if len(shape) == 2:
        return SimpleNamespace(operation="mean", arguments={"dims": [1], "keepdim": False}, width=shape[1])
    most = int(math.sqrt(max(1, target // shape[0])))
    cells = max(p for p in range(1, most + 1) if shape[1] % p == 0 and shape[2] % p == 0)
    return SimpleNamespace(operation="adaptive_avg_pool2d", arguments={"output_size": [cells, cells]}, width=shape[0] * cells ** 2)


def _with_layers(description, values, layers, name):
    description = copy.deepcopy(description)
    head = graph.nodes_by_name(description)[description["output"]]
    nodes, pieces = [], []
    for number, (value, layer) in enumerate(zip(values, layers)):
        if layer.operation:
            nodes.append(function_node(f"head2toe_pool_{number}", layer.operation, [value], **layer.arguments))
            value = nodes[-1]["name"]
        if layer.operation == "adaptive_avg_pool2d":
            nodes.append(function_node(f"head2toe_flat_{number}", "flatten", [value], start_dim=1, end_dim=-1))
            value = nodes[-1]["name"]
        pieces.append(value)
    nodes += [function_node(name, "cat", pieces, dim=1), parameter_node(MASK, [sum(layer.width for layer in layers)]),
              binary_node("head2toe_selected", "mul", name, "head2toe_mask")]
    start, units = 0, []
    for number, layer in enumerate(layers):
        nodes += _unit_length(number, "head2toe_selected", start, layer.width)
        start += layer.width
        units.append(nodes[-1]["name"])
    nodes.append(function_node(JOINED, "cat", units, dim=1))
    place = description["nodes"].index(head)
    description["nodes"][place:place] = nodes
    head["inputs"], description["tap"] = [JOINED], JOINED
    head["arguments"] = dict(head["arguments"], in_features=start)
    graph.limit_inplace(description["nodes"])
    return description


def _unit_length(number, source, start, width):
    """The nodes of u = v / |v| for a piece v of `source`: [v, -v] has the mean 0 and the variance |v|^2 / width, which layer norm takes
    away, so that [v, -v] becomes sqrt(width) [u, -u]."""
    name = f"head2toe_layer_{number}"
    return [function_node(name, "slice", [source], dim=1, start=start, stop=start + width),
            binary_node(name + "_negative", "mul", name, -1.0),
            function_node(name + "_both", "cat", [name, name + "_negative"], dim=1),
            module_node(f"{NORM}{number}", "LayerNorm", name + "_both", normalized_shape=[2 * width], eps=LEAST_SQUARE,
                        elementwise_affine=False),
            function_node(name + "_half", "slice", [f"head2toe_norm_{number}"], dim=1, start=0, stop=width),
            binary_node(name + "_unit", "mul", name + "_half", width ** -0.5)]


def group_lasso_head(features, labels, classes, penalty, seed, steps=STEPS, rate=RATE):
    """Weights [classes, D] of a linear head on features float [N, D], labels int [N]: cross-entropy + penalty * sum_i |w_i|, w_i the
    weights of feature i over the classes. From zero, so a feature that earns nothing stays at nothing."""
    weight = torch.zeros(classes, features.shape[1], dtype=features.dtype, device=features.device, requires_grad=True)
    bias = torch.zeros(classes, dtype=features.dtype, device=features.device, requires_grad=True)
    settings = SimpleNamespace(kind="adamw", weight_decay=0.0, schedule="cosine", lr=rate)
    rule, random = build_optimizer([weight, bias], settings), np.random.RandomState(seed)
    for step in range(steps):
        batch = torch.from_numpy(random.permutation(len(features))[:BATCH]).to(features.device)
        loss = F.cross_entropy(F.linear(features[batch], weight, bias), labels[batch]) + penalty * weight.norm(dim=0).sum()
        rule.zero_grad()
        loss.backward()
        rule.step(learning_rate(settings, step / steps))
    return weight.detach()


def relevance(weight):
    """Weights [C, D] -> s [D], the norm of each feature's weights over the classes."""
    return weight.norm(dim=0)


def top_share(scores, keep):
    """Scores [D] -> bool [D], true for the share `keep` of highest scores, one at least."""
    count = max(1, int(round(keep * len(scores))))
    chosen = torch.zeros(len(scores), dtype=torch.bool, device=scores.device)
    chosen[torch.topk(scores, count).indices] = True
    return chosen


def select_features(tuning, source, labels, config, decide, check=lambda: None):
    """Set the mask of a `head2toe` Tuning from what `source` gives for the training images (a source of the loop's, level 0).

    labels: core/labels.py; those that are known now count. decide: (name, make) -> the recorded value, see core/decisions.py, so that a
    resumed run selects the same without looking again. check: called after each batch, raises where the run is to stop. Returns the
    numbers of the selected features.
    """
    mask = dict(tuning.network.named_parameters())[MASK]
    selected = decide("head2toe", lambda: _relevant(tuning, source, labels, config, check))
    mask.zero_()
    mask[selected] = 1
    return selected


def unit_lengths(values, widths):
    """Layers [N, D] side by side, of these widths -> each brought to unit length."""
    return torch.cat([F.normalize(piece, dim=1) for piece in values.split(widths, dim=1)], dim=1)


def _relevant(tuning, source, labels, config, check):
    batch_size = config.loader.batch_size
    usable = np.random.RandomState(config.seed).permutation(np.asarray(labels.known(source.usable)))[:MOST_IMAGES].tolist()
    batches = [usable[start:start + batch_size] for start in range(0, len(usable), batch_size)]
    pieces, seen = [], []
    with contextlib.closing(source.stream(batches, 0, np.zeros(max(usable) + 1, dtype=np.int64))) as stream:
        for indices, values, _ in stream:
            if indices:
                pieces.append(values)
                seen.extend(indices)
            check()
    if not seen:
        raise UserError(NOTHING_READABLE)
    widths = [node["arguments"]["normalized_shape"][0] // 2 for node in tuning.network.description["nodes"]
              if node.get("module", "").startswith(NORM)]
    features = unit_lengths(torch.cat(pieces), widths)
    weight = group_lasso_head(features, labels[seen], tuning.head.out_features, config.pet.penalty, config.seed)
    return torch.nonzero(top_share(relevance(weight), config.pet.keep)).flatten().tolist()
