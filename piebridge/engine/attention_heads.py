"""Whole heads of an attention as the parts of its projections."""

import math

import torch

from piebridge.core.errors import UserError
from piebridge.engine.channel_choice import channels_of_units, chosen, unit_scores
from piebridge.engine.step_graph import Part


def head_parts(layers, ratio, importances):
    """{weight key: Part} for the projections `layers` of one attention, at a share `ratio` of its heads, one at least.

    Of the projections of query, key and value it is the heads' output features, of the output's its input features. Where several
    queries share a key and value head, they stay together. A joint projection holds query, key and value one after the other, each by
    heads, as torch, timm and torchvision have it; one with the three of each head side by side (GPT-NeoX) looks the same and is not meant,
    so name it under weights. importances: {weight key: tensor of the weight's shape}, {} for the first heads.
    UserError where the features do not divide into the heads.
    """
    heads = {layer.path: _heads(layer) for layer in layers}
    units = min(heads.values())  # queries that share a key are one unit
    count = max(1, math.ceil(units * ratio))
    if count == units:
        return {layer.weight: Part() for layer in layers}
    scores = [_scores(importances[layer.weight], layer, units) for layer in layers if layer.weight in importances]
    places = chosen(count, sum(scores)) if scores else torch.arange(count)
    return {layer.weight: Part(_dim(layer), _features(layer, places, units, heads[layer.path])) for layer in layers}


def _dim(layer):
    return 1 - layer.output_dim if layer.role == "attention out" else layer.output_dim


def _copies(layer):
    """3 for a joint projection, else 1."""
    return 3 if layer.role == "attention in" and layer.shape[_dim(layer)] == 3 * layer.attention.heads * layer.attention.size else 1


def _heads(layer):
    """Of this projection; fewer than the queries' where queries share keys."""
    features, heads, size = layer.shape[_dim(layer)], layer.attention.heads, layer.attention.size
    own = features // (size * _copies(layer)) if size else 0
    if not own or own * size * _copies(layer) != features or heads % own:
        raise UserError(f"scheme: heads: {layer.path} has {features} features, which do not divide into {heads} heads of {size}; "
                        "name it under weights instead")
    return own


def _features(layer, places, units, heads):
    features = layer.shape[_dim(layer)] // _copies(layer)
    index = channels_of_units(places, heads // units * layer.attention.size)
    return torch.cat([index + copy * features for copy in range(_copies(layer))])


def _scores(importance, layer, units):
    return sum(unit_scores(each, _dim(layer), units) for each in importance.chunk(_copies(layer), _dim(layer)))
