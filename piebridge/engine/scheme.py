"""A scheme: what a sparse update trains (PockEngine, MICRO'23, section 3: bias only, layer-wise, sub-layer), and of it which channels."""

import fnmatch
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Tuple, Union

import torch

from piebridge.core.errors import UserError
from piebridge.core.names import closest
from piebridge.engine import scheme_text
from piebridge.engine.attention_heads import head_parts
from piebridge.engine.channel_choice import CHOICES, FIRST, channel_count, channels_of_units, chosen, importance_of, unit_scores
from piebridge.engine.layer import EMBEDDING, NORM, TRUNK
from piebridge.engine.layers import layers_of
from piebridge.engine.selectors import is_pattern, select
from piebridge.engine.step_graph import Part

WORDS = {"lora": "*lora_*", "adapters": "*adapter*"}  # for patterns on keys
_LISTS, _TABLES = ("bias", "norm", "parameters"), ("weights", "heads")


@dataclass(frozen=True)
class Scheme:
    """Each name is a selector, see selectors.py; `parameters` are patterns on state dict keys, or lora, adapters, all.

    bias: layers whose bias is trained, norms' too: of a network with batch norm that is where the biases are. weights: (selector, ratio of
    the channels or the channels' numbers), the last that names a layer counts. norm: norms whose weight and bias are trained. heads:
    (selector, ratio of the heads) of attention projections. parameters: whatever else, whole. channels: one of channel_choice.CHOICES.

    A ratio counts input channels; of a convolution in groups (depthwise) it counts groups, all of whose output channels are trained.
    """

    name: str = ""
    about: str = ""
    bias: Tuple[str, ...] = ()
    weights: Tuple[Tuple[str, Union[Fraction, Tuple[int, ...]]], ...] = ()
    norm: Tuple[str, ...] = ()
    heads: Tuple[Tuple[str, Fraction], ...] = ()
    parameters: Tuple[str, ...] = ()
    channels: str = FIRST

    @classmethod
    def read(cls, source):
        """From a preset's name, a YAML file, YAML text, or a mapping. UserError names what cannot be understood."""
        if isinstance(source, Scheme):
            return source
        where, mapping = ("scheme", source) if isinstance(source, dict) else scheme_text.read_mapping(source)
        known = [field.name for field in fields(cls)]
        for key in mapping:
            if key not in known:
                raise UserError(f"{where}: unknown key {key!r:.60}{closest(key, known)}; the keys: {', '.join(known)}")
        return cls(**{key: _value(f"{where}: {key}", key, value) for key, value in mapping.items() if value is not None})

    def text(self):
        """YAML that `read` takes back."""
        return scheme_text.write_text({field.name: getattr(self, field.name) for field in fields(self)
                                       if field.name != "channels" or self.channels != FIRST})

    def __str__(self):
        return self.text()

    def resolve(self, module, example, scores=None, layers=None):
        """{state dict key: Part} in the order of the module's parameters: what is trained of it.

        example: input, or tuple of inputs, of the module. scores: {weight key: tensor of its shape} for channels=fisher, see
        channel_choice.fisher_information. layers: those of layers_of(module, example), if known.
        UserError where a name matches nothing, a part cannot be taken, or nothing is trained.
        """
        layers = layers_of(module, example) if layers is None else layers
        parameters = dict(module.named_parameters())
        parts = {key: Part() for key in self._whole(layers, parameters)}
        amounts = {layer.path: (layer, amount) for name, amount in self.weights for layer in _weighted(name, layers)}
        by_heads = self._heads(layers, parameters, scores)
        for layer, amount in amounts.values():
            if layer.weight in by_heads:
                raise UserError(f"scheme: {layer.path} is named under weights and under heads; leave one of them out")
            parts[layer.weight] = self._part(layer, amount, parameters[layer.weight], scores)
        parts.update(by_heads)
        if not parts:
            raise UserError(f"scheme {self.name or 'given'}: trains nothing of this network; name layers under bias, weights, "
                            "norm, heads or parameters")
        return {key: _beside(parameters[key], parts[key]) for key in parameters if key in parts}

    def _whole(self, layers, parameters):
        """Keys of biases, norms and further parameters."""
        for name in self.bias:
            found = [layer.bias for layer in select(name, layers) if layer.bias is not None]
            if not found and is_pattern(name):
                raise UserError(f"scheme: bias: {name!r} matches layers without a bias; name them under weights or norm")
            yield from found
        for name in self.norm:
            found = [layer for layer in select(name, layers) if layer.kind == NORM]
            if not found and is_pattern(name):
                raise UserError(f"scheme: norm: {name!r} matches no normalisation layer; name other layers under weights")
            yield from (key for layer in found for key in (layer.weight, layer.bias) if key is not None)
        for name in self.parameters:
            if name == "all":  # that take part: of a bare encoder the pooler may not
                found = [key for layer in layers for key in (layer.weight, layer.bias) if key is not None]
            else:
                found = fnmatch.filter(parameters, WORDS.get(name, name))
            if not found:
                raise UserError(f"scheme: parameters: {name!r} matches no parameter{closest(name, list(parameters))}")
            yield from found

    def _part(self, layer, amount, weight, scores):
        """What is trained of one weight."""
        if amount == 1:
            return Part()
        if layer.is_tied:
            raise UserError(f"scheme: weights: {layer.path}: its weight is used in more than one place, so no part of it can be trained; "
                            "give 1, or leave it out")
        if layer.cut is None:
            raise UserError(f"scheme: weights: {layer.path}: of this layer ({layer.kind}) no part can be trained; give 1")
        channels = layer.shape[layer.cut]
        units = layer.groups  # of a convolution in groups; its channels stay together
        if isinstance(amount, tuple):
            if amount[-1] >= channels:
                raise UserError(f"scheme: weights: {layer.path}: channel {amount[-1]}: it has {channels}; give 0 to {channels - 1}")
            index = torch.tensor(amount)
        else:
            units = channels if units == 1 else units
            count = channel_count(units, amount)
            importance = importance_of(self.channels, layer.weight, weight, scores)
            places = torch.arange(count) if importance is None else chosen(count, unit_scores(importance, layer.cut, units))
            index = channels_of_units(places, channels // units)
        return Part() if len(index) == channels else Part(layer.cut, index)

    def _heads(self, layers, parameters, scores):
        attentions, ratios = {}, {}
        for name, ratio in self.heads:
            for layer in select(name, layers):
                if layer.attention is None and is_pattern(name):
                    raise UserError(f"scheme: heads: {layer.path} is no projection of an attention; name it under weights")
                if layer.attention is not None:
                    attentions.setdefault(layer.attention.number, {})[layer.path] = layer
                    ratios[layer.attention.number] = ratio
        if self.heads and not attentions:
            raise UserError("scheme: heads: this network has no attention")
        parts = {}
        for number, found in attentions.items():
            found = list(found.values())
            importances = {layer.weight: importance_of(self.channels, layer.weight, parameters[layer.weight], scores) for layer in found}
            importances = {} if self.channels == FIRST else importances
            tied = [layer.path for layer in found if layer.is_tied]
            if tied:
                raise UserError(f"scheme: heads: {tied[0]}: its weight is used in more than one place; name it whole under weights")
            parts.update(head_parts(found, ratios[number], importances))
        return parts


def _beside(parameter, part):
    """The part with its index on the parameter's device."""
    return part if part.is_whole else Part(part.dim, part.index.to(parameter.device))


def _weighted(name, layers):
    """Layers with a weight that is no norm's."""
    found = [layer for layer in select(name, layers) if layer.weight is not None and layer.kind in TRUNK + (EMBEDDING,)]
    if not found:
        raise UserError(f"scheme: weights: {name!r} matches no convolution, linear layer or embedding; for others use norm or parameters")
    return found


def _value(where, key, value):
    """A value of the YAML mapping as the field's."""
    if key in _LISTS:
        names = value if isinstance(value, (list, tuple)) else [value]
        if any(not isinstance(each, str) for each in names):
            raise UserError(f"{where}: {str(value)!r:.60} is no list of names; for example: last 7 blocks")
        return tuple(each for each in names if each != "none")
    if key in _TABLES:
        if value == "none":
            return ()
        if isinstance(value, str):
            value = {value: 1}
        if not isinstance(value, dict):
            raise UserError(f"{where}: {str(value)!r:.60} are no 'name: ratio' lines; for example: head: 1")
        take = scheme_text.amount_of if key == "weights" else scheme_text.ratio_of
        return tuple((str(name), take(f"{where}: {name}", amount)) for name, amount in value.items())
    if key == "channels" and value not in CHOICES:
        raise UserError(f"{where}: {value!r:.60} is unknown{closest(value, CHOICES)}; known: {', '.join(CHOICES)}")
    if not isinstance(value, str):
        raise UserError(f"{where}: {str(value)!r:.60} is no text")
    return value
