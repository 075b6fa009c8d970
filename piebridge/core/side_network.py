"""LST, a ladder side network (Sung et al. 2022): a small network beside the backbone that is fed by it, and never feeds it.

    s_0 = D_0 h_0,   z_i = mu_i D_i h_i + (1 - mu_i) s_(i-1),   s_i = z_i + B_i(z_i),   mu_i = sigmoid(alpha_i / T),
    logits = head(U norm(s_n))

h_i: the value of the i-th chosen block (a rung), and at last the head's former input; D_i: a learned map down to the side network's width,
which is 1/r of the last block's; B_i: a side block; U: a learned map up to the width that the head had. No gradient enters the backbone,
so that one value, `side_ladder_...`, holds all that training needs of it and may be cached. All of it are nodes of the description, the
gates as well, so the tuned network is a plain network file.

As published: the ladder, the gates with T = 0.1 and alpha = 0 at the start, width 1/r, normalisation and map up at the end. Different, as
the published networks are transformers for text: a rung of a convolutional network is averaged to a grid, and its side block is normalise,
3x3 depthwise, ReLU, 1x1; a rung of a vision transformer is its class token, and its side block is normalise, linear, GELU, linear; side
blocks start at random, where the published ones are pruned from the backbone's.
"""

import copy

from piebridge.core import graph
from piebridge.core.added_nodes import (
    binary_node,
    block_values,
    conv_node,
    fresh_tensors,
    function_node,
    linear_node,
    module_node,
    parameter_node,
    value_shapes,
)
from piebridge.core.errors import UserError
from piebridge.core.files import sha256_of_json
from piebridge.core.pet_structure import Structure, chosen_blocks, head_keys

TEMPERATURE = 0.1  # T of the gates
LEAST_WIDTH = 8
MOST_RUNGS = 64  # inputs of one `cat`
PREFIX = "side."
LADDER = "side_ladder_"  # begins the name of the node from which on everything is trained; what follows tells caches apart


def lst(network, settings):
    """The Structure of a side network beside `network`, for the section `pet`: r (the reduction), blocks (the rungs). UserError."""
    description, originals = network.description, network.description["blocks"]
    blocks = chosen_blocks(network, settings)
    tap = description["tap"]
    if any(node.get("module", "").startswith(PREFIX) for node in description["nodes"]):
        raise UserError(f"pet.kind=lst: network {description['name']} has a side network already; give the original it was made of")
    if not 1 <= len(blocks) < MOST_RUNGS:
        raise UserError(f"pet.kind=lst: {len(blocks)} blocks make no ladder; choose 1 to {MOST_RUNGS - 1} with pet.blocks")
    shapes = value_shapes(network, [block["output"] for block in blocks] + [tap])
    rungs = [shapes[block["output"]] for block in blocks] + [shapes[tap]]
    grid = min(shape[1] for shape in rungs if len(shape) == 3) if any(len(shape) == 3 for shape in rungs) else 1
    width = max(LEAST_WIDTH, _channels(rungs[-2]) // settings.r)

    ladder = LADDER + sha256_of_json([[block["output"] for block in blocks], rungs, grid])[:8]

    def edit(proxy):
        values = block_values(proxy, blocks, originals) + [proxy["tap"]]
        return _with_side(proxy, values, rungs, ladder, grid, width, network.head.in_features)

    edited = edit(description)
    side = [node for node in edited["nodes"] if _is_side(node)]
    added = fresh_tensors(side, network.head.weight)
    return Structure(list(added) + head_keys(network), edit, added=added)


def _is_side(node):
    return (node.get("module") or node.get("parameter") or "").startswith(PREFIX)


def _channels(shape):
    """Of a map [C, H, W], of tokens [T, C], of a vector [C]."""
    return shape[-1] if len(shape) == 2 else shape[0]


def _with_side(description, values, rungs, ladder, grid, width, tap_width):
    """The description with a side network between the nodes `values`, whose shapes are `rungs`, and the head."""
    description = copy.deepcopy(description)
    head = graph.nodes_by_name(description)[description["output"]]
    nodes, pieces = [], []
    for number, (value, shape) in enumerate(zip(values, rungs)):
        taken, size = _taken(number, value, shape, grid)
        nodes += taken
        pieces.append((taken[-1]["name"] if taken else value, size))
    nodes.append(function_node(ladder, "cat", [name for name, _ in pieces], dim=1))
    state, is_map, start = None, False, 0
    for number, (shape, (_, size)) in enumerate(zip(rungs, pieces)):
        nodes.append(function_node(f"side_rung_{number}", "slice", [ladder], dim=1, start=start, stop=start + size))
        start += size
        if is_map and len(shape) != 3:
            nodes.append(function_node(f"side_pooled_{number}", "mean", [state], dims=[2, 3], keepdim=False))
            state = nodes[-1]["name"]
        is_map = len(shape) == 3
        nodes += _rung(number, shape, grid, width, state)
        state = nodes[-1]["name"]
    nodes += [module_node("side.norm", "LayerNorm", state, normalized_shape=[width], eps=1e-5, elementwise_affine=True),
              linear_node("side.up", "side_norm", width, tap_width)]
    place = description["nodes"].index(head)
    description["nodes"][place:place] = nodes
    head["inputs"], description["tap"] = ["side_up"], "side_up"
    graph.limit_inplace(description["nodes"])
    return description


def _taken(number, value, shape, grid):
    """(nodes, numbers): what makes a rung's value a vector, and its length."""
    if len(shape) == 3:
        return [function_node(f"side_pool_{number}", "adaptive_avg_pool2d", [value], output_size=[grid, grid]),
                function_node(f"side_flat_{number}", "flatten", [f"side_pool_{number}"], start_dim=1, end_dim=-1)], shape[0] * grid ** 2
    if len(shape) == 2:
        return [function_node(f"side_token_{number}", "select", [value], dim=1, index=0)], shape[1]
    return [], shape[0]


def _rung(number, shape, grid, width, state):
    """The nodes of a rung: down, gated into the side network's state (a node; None for the first rung), through the side block."""
    down, channels, nodes = f"side.down_{number}", _channels(shape), []
    if len(shape) == 3:
        nodes.append(function_node(f"side_map_{number}", "reshape", [f"side_rung_{number}"], shape=[-1, channels, grid, grid]))
        nodes.append(conv_node(down, f"side_map_{number}", channels, width))
    else:
        nodes.append(linear_node(down, f"side_rung_{number}", channels, width))
    joined = f"side_down_{number}"
    if state is not None:
        nodes += _gate(number, joined, state)
        joined = nodes[-1]["name"]
    nodes += _map_block(number, joined, width) if len(shape) == 3 else _vector_block(number, joined, width)
    return nodes + [binary_node(f"side_state_{number}", "add", joined, nodes[-1]["name"])]


def _gate(number, lateral, state):
    """mu * lateral + (1 - mu) * state, mu = sigmoid(alpha / T), and 1 - mu = sigmoid(-alpha / T)."""
    name = f"side_gate_{number}"
    return [parameter_node(f"side.alpha_{number}", [1]),
            binary_node(name + "_scaled", "mul", f"side_alpha_{number}", 1 / TEMPERATURE),
            function_node(name + "_open", "sigmoid", [name + "_scaled"]),
            binary_node(name + "_opposite", "mul", name + "_scaled", -1.0),
            function_node(name + "_shut", "sigmoid", [name + "_opposite"]),
            binary_node(name + "_lateral", "mul", lateral, name + "_open"),
            binary_node(name + "_state", "mul", state, name + "_shut"),
            binary_node(name, "add", name + "_lateral", name + "_state")]


def _map_block(number, source, width):
    name = f"side.block_{number}"
    node = name.replace(".", "_")
    return [module_node(name + "_norm", "GroupNorm", source, num_groups=1, num_channels=width, eps=1e-5, affine=True),
            conv_node(name + "_depthwise", node + "_norm", width, width, kernel_size=3, groups=width),
            function_node(node + "_relu", "relu", [node + "_depthwise"]),
            conv_node(name + "_pointwise", node + "_relu", width, width)]


def _vector_block(number, source, width):
    name = f"side.block_{number}"
    node = name.replace(".", "_")
    return [module_node(name + "_norm", "LayerNorm", source, normalized_shape=[width], eps=1e-5, elementwise_affine=True),
            linear_node(name + "_wide", node + "_norm", width, 4 * width),
            function_node(node + "_gelu", "gelu", [node + "_wide"]),
            linear_node(name + "_narrow", node + "_gelu", 4 * width, width)]
