"""What a search chooses from: how deep the biases are trained, and which share of which weight above that."""

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Dict

import numpy as np

from piebridge.core.errors import UserError
from piebridge.engine.knapsack import Choice, Problem
from piebridge.engine.layer import TRUNK
from piebridge.engine.layers import layers_of
from piebridge.engine.scheme import Scheme
from piebridge.engine.selectors import select
from piebridge.engine.step_graph import Part

RATIOS = (Fraction(1, 8), Fraction(1, 4), Fraction(1, 2), Fraction(1))


@dataclass(frozen=True)
class Depth:
    """selector: of the layers whose biases are trained, "" for none. first: place, among the items, of the first weight that may be
    trained. parts: {key: Part} of these biases and of what is always trained. probe: the same and, where no bias is that deep, a little of
    the first weight: what it costs to reach down there.
    """

    selector: str
    first: int
    parts: Dict[str, Part]
    probe: Dict[str, Part]


@dataclass(frozen=True)
class Option:
    """A share of one layer's weight. share: of its channels, as many as the ratio comes to; bytes: of that part."""

    ratio: Fraction
    key: str
    part: Part
    share: float
    bytes: float


class SearchSpace:
    """layers: all of the network (see layers.py). items: those whose weight may be trained, in order of execution; options: for each item
    its [Option], ascending. depths: [Depth], the shallowest first, by blocks, outside of blocks by layers.

    always: selectors of layers that are trained whole whatever the search finds, such as a fresh head; a word "head" that names nothing is
    left out. channels, scores: how a share's channels are chosen, see scheme.py. UserError where there is nothing to choose from.
    """

    def __init__(self, module, example, ratios=RATIOS, channels="magnitude", always=("head",), scores=None):
        self._bytes = {key: parameter.numel() * parameter.element_size() for key, parameter in module.named_parameters()}
        self._channels = channels
        self.layers = layers_of(module, example)
        has_head = any(layer.is_head for layer in self.layers)
        self._always = tuple(name for name in always if name != "head" or has_head)
        self._fixed = [layer for name in self._always for layer in select(name, self.layers)]
        fixed = {layer.path for layer in self._fixed}
        trunk = [layer for layer in self.layers if layer.kind in TRUNK and not layer.is_added]
        self.items = [layer for layer in trunk if layer.path not in fixed and layer.weight is not None and not layer.is_tied]
        if not self.items:
            raise UserError(f"engine: search: {type(module).__name__} has no convolution or linear layer to choose from besides "
                            f"{', '.join(self._always) or 'what is tied'}")
        ratios = sorted({Fraction(ratio).limit_denominator(10000) for ratio in ratios})
        self.options = [self._options(module, example, layer, ratios, scores) for layer in self.items]
        self.depths = self._depths(trunk)

    def least(self):
        """The Choice that trains the least: the shallowest depth and nothing else, where that is anything."""
        depth = self.depths[0]
        return Choice(0, tuple(int(not depth.parts and item == depth.first) for item in range(len(self.items))))

    def parts(self, choice):
        """{key: Part} of a Choice, in the order of the module's parameters: what its `scheme` resolves to."""
        parts = dict(self.depths[choice.depth].parts)
        parts.update({option.key: option.part for _, option in self.chosen(choice)})
        return self._ordered(parts)

    def chosen(self, choice):
        """[(Layer, Option)] of the weights that are trained."""
        return [(layer, options[place - 1]) for layer, options, place in zip(self.items, self.options, choice.options) if place]

    def scheme(self, choice, name="", about=""):
        """The Scheme of a Choice: by paths and ratios, and by channel numbers where a ratio alone would need scores to be read."""
        is_listed = self._channels == "fisher"
        weights = [(layer.path, tuple(option.part.index.tolist()) if is_listed and not option.part.is_whole else option.ratio)
                   for layer, option in self.chosen(choice)]
        selector = self.depths[choice.depth].selector
        return Scheme(name=name, about=about, bias=tuple(dict.fromkeys(((selector,) if selector else ()) + self._biased())),
                      weights=tuple(weights + [(word, Fraction(1)) for word in self._always]),
                      **({} if is_listed else {"channels": self._channels}))

    def _biased(self):
        return tuple(name for name in self._always if any(layer.bias is not None for layer in select(name, self.layers)))

    def _ordered(self, parts):
        return {key: parts[key] for key in self._bytes if key in parts}

    def _options(self, module, example, layer, ratios, scores):
        found = []
        for ratio in ratios if layer.cut is not None else [Fraction(1)]:
            scheme = Scheme(weights=((layer.path, ratio),), channels=self._channels if ratio < 1 else "first")
            (key, part), = scheme.resolve(module, example, scores, self.layers).items()
            share = 1.0 if part.is_whole else part.index.numel() / layer.shape[part.dim]
            if not found or share > found[-1].share:  # of few channels, two ratios are the same
                found.append(Option(Fraction(1) if part.is_whole else ratio, key, part, share, share * self._bytes[key]))
        return found

    def _depths(self, trunk):
        always = {key: Part() for layer in self._fixed for key in (layer.weight, layer.bias) if key is not None}
        depths = [Depth("", len(self.items), self._ordered(always), self._ordered(always))] if always else []
        above = len(self.layers)
        for count, layer in enumerate(reversed(trunk), 1):
            is_inside = layer.block is not None and count < len(trunk) and trunk[-count - 1].block == layer.block
            if is_inside:
                continue
            selector, start = self._last(layer, count)
            if all(each in self._fixed for each in self.layers[start:]):
                above = start
                continue
            parts = dict(always, **{each.bias: Part() for each in self.layers[start:] if each.bias is not None})
            first = sum(self.layers.index(item) < start for item in self.items)
            probe = dict(parts)
            if not any(each.bias for each in self.layers[start:above]) and first < len(self.items):
                option = self.options[first][0]
                probe[option.key] = option.part
            if probe:
                depths.append(Depth(selector if any(each.bias for each in self.layers[start:]) else "", first, self._ordered(parts),
                                    self._ordered(probe)))
            above = start
        return depths

    def _last(self, layer, count):
        """The words for everything from a layer, or from its block, on, and the place where that begins."""
        if layer.block is None:
            words = f"last {count} layers"
        else:
            blocks = list(dict.fromkeys(each.block for each in self.layers if each.block))
            words = f"last {len(blocks) - blocks.index(layer.block)} blocks"
        return words, self.layers.index(select(words, self.layers)[0])


def option_bytes(layer, option, states):
    """What training this share adds in the additive model: the kept input channels, and `states` states of the update rule.

    The gradient is applied and freed as soon as it exists; it counts in the planner's peak, not here.
    """
    return option.share * layer.input_bytes + states * option.bytes


def problem_of(space, depth_values, option_values, depth_costs, option_costs):
    """The Problem of a SearchSpace. depth_values: [depths]; option_values: [items][options]; depth_costs: [depths][resources];
    option_costs: [items][options][resources]. Depths may be fewer than the space has.
    """
    items, options, resources = len(space.items), max(map(len, space.options)), len(depth_costs[0])
    values, costs = np.full((items, 1 + options), -np.inf), np.zeros((items, 1 + options, resources))
    values[:, 0] = 0.0
    for item, (own_values, own_costs) in enumerate(zip(option_values, option_costs)):
        values[item, 1:1 + len(own_values)] = own_values
        costs[item, 1:1 + len(own_costs)] = own_costs
    first = np.array([depth.first for depth in space.depths[:len(depth_costs)]], dtype=np.int64)
    return Problem(values, costs, first, np.asarray(depth_values, dtype=np.float64)[:len(depth_costs)],
                   np.asarray(depth_costs, dtype=np.float64).reshape(-1, resources))


def with_option(choice, item, place):
    """The same Choice with another option of one item."""
    return replace(choice, options=choice.options[:item] + (place,) + choice.options[item + 1:])
