"""Alignment in closed form: batch-norm statistics, then the last linear maps of each block refitted to the original's values.

After He et al. (ICCV 2017) and the reconstruction steps of post-training quantisation, with two differences: what is regressed is the
error that the sliced weights leave, so that the penalty pulls towards them instead of towards zero, and each block is fitted on what
the proxy's earlier blocks now give, so that errors do not add up.
"""

import itertools
import logging
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from piebridge.core.operations import pair
from piebridge.core.proxies import match_batch_norm
from piebridge.forge.linear_maps import find_sites
from piebridge.forge.ridge import PENALTIES, NormalEquations, choose_penalty
from piebridge.forge.segments import BATCH, device_of, own_parameters, resampled, walk

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReconstructionSettings:
    """redoes_statistics: match batch norms first. positions: places or tokens sampled per image. held_out: every n-th batch chooses
    the penalty. penalties: to choose from; none: statistics alone. statistics_images: at most this many, in one batch."""

    redoes_statistics: bool = True
    positions: int = 64
    held_out: int = 4
    penalties: tuple = PENALTIES
    statistics_images: int = 64
    seed: int = 0


def reconstruct(original, proxy, batches, settings=None, cuts=None, scratch=None, on_step=lambda: None):
    """Align `proxy` in place; tensors that it shares with the original and that change become its own. Returns a list of dicts.

    batches, scratch: see segments.walk. cuts: of the proxy, {state dict key: [(axis, positions)]} (pruning.tensor_cuts), where channels
    were cut: which of the original's its own are. on_step: called before each batch; what it raises ends the work.
    A dict of the result: block; target, maps: what was refitted, None where nothing can be folded; penalty (None: nothing better
    than the sliced weights); before, after: |f - g| / |g| over the sampled positions of held-out images.
    """
    settings, cuts, report = settings or ReconstructionSettings(), cuts or {}, []
    reading = {key[:-len(".weight")] for key, slices in cuts.items() if key.endswith(".weight") and 1 in dict(slices)}
    with own_parameters(proxy):
        for stretch in walk(original, proxy, batches, scratch):
            if settings.redoes_statistics:
                _match_statistics(stretch, settings.statistics_images, cuts)
            if not settings.penalties:
                continue
            sites = find_sites(stretch.proxy.description, stretch.is_block, reading)
            results = [_refit(stretch, site, settings, cuts, on_step) for site in sites if site.target in _names(stretch.original)]
            results = [result for result in results if result]
            if not results:
                LOG.info("%s: nothing that can be refitted", stretch.name)
            report += results or [_result(stretch, None, None, None, None)]
    return report


def _names(network):
    return {node["name"] for node in network.description["nodes"]}


def _result(stretch, site, penalty, before, after):
    return {"block": stretch.name, "target": site and site.target, "maps": site and [each.module for each in site.maps],
            "penalty": penalty, "before": before, "after": after}


def _match_statistics(stretch, count, cuts):
    images = slice(0, min(count, len(stretch.inputs)))
    channels = {key[:-len(".running_mean")]: positions for key, slices in cuts.items() if key.endswith(".running_mean")
                for _, positions in slices}
    batches = [values.read(images, device_of(network)) for values, network in
               ((stretch.before, stretch.original), (stretch.inputs, stretch.proxy))]
    match_batch_norm(stretch.original, stretch.proxy, *batches, channels)


def _refit(stretch, site, settings, cuts, on_step):
    """Refit the maps of one site together; None where the shapes do not allow it."""
    modules = [stretch.proxy.get_submodule(each.module) for each in site.maps]
    has_offset = any(each.norms or module.bias is not None for each, module in zip(site.maps, modules))
    kept = dict(cuts.get(site.maps[0].module + ".weight", ())).get(0)
    generator = torch.Generator().manual_seed(settings.seed)
    equations, squares = None, 0.0
    size = max(1, min(BATCH, len(stretch.inputs) // (2 * settings.held_out)))
    for number, images in enumerate(stretch.batches(size)):
        on_step()
        rows = _rows(stretch, site, modules, kept, images, settings.positions, generator)
        if rows is None:
            return None
        inputs, errors, square = rows
        equations = equations or [NormalEquations(inputs.shape[1], errors.shape[1], has_offset, inputs.device) for _ in range(2)]
        is_held_out = number % settings.held_out == settings.held_out - 1
        equations[is_held_out].add(inputs, errors)
        squares += square if is_held_out else 0.0
    fitted, held_out = equations
    penalty, after = choose_penalty(fitted, held_out, settings.penalties), held_out.output_square
    if penalty is not None:
        after = held_out.error(*fitted.solve(penalty))
        both = fitted.plus(held_out)
        _fold(stretch.proxy, site, modules, both, both.solve(penalty)[0])
    squares = max(squares, 1e-30)
    return _result(stretch, site, penalty, (held_out.output_square / squares) ** 0.5, (after / squares) ** 0.5)


def _rows(stretch, site, modules, kept, images, count, generator):
    """Sampled rows of the maps' inputs [n,D], of the errors at the target [n,C], and the sum of squares of the original's values.

    kept: positions of the target's channels in the original, where some were cut, else None.
    """
    sources = [each.source for each in site.maps]
    inputs = stretch.inputs.read(images, device_of(stretch.proxy))
    with torch.no_grad():
        values = stretch.proxy.values(inputs, [site.target] + sources)
        if site.target == stretch.output:
            wanted = stretch.targets.read(images, inputs.device)
        else:
            before = stretch.before.read(images, inputs.device)
            wanted = stretch.original.values(before, [site.target])[site.target]
    found = values[site.target]
    is_map = all(isinstance(module, torch.nn.Conv2d) for module in modules)
    if kept is not None:
        wanted = wanted[:, kept] if is_map else wanted[..., kept]
    wanted = resampled(wanted, found) if is_map else wanted
    if wanted.shape != found.shape or not _fits(found, modules):
        return None
    places = found.shape[2:].numel() if is_map else found.shape[1:-1].numel()
    chosen = torch.randperm(places, generator=generator)[:count].to(found.device)
    columns = [_patches(values[source], module, found, chosen) for source, module in zip(sources, modules)]
    if len({len(each) for each in columns}) > 1:
        return None  # a sum that broadcasts
    wanted, found = (_at(value, chosen, is_map) for value in (wanted, found))
    return torch.cat(columns, 1), wanted - found, float(wanted.double().square().sum())


def _fits(found, modules):
    """Whether all maps are of one kind, and the target's channels are the maps'."""
    is_map = {isinstance(module, torch.nn.Conv2d) for module in modules}
    channels = found.shape[1] if True in is_map else found.shape[-1]
    return len(is_map) == 1 and all(module.weight.shape[0] == channels for module in modules)


def _at(values, chosen, is_map):
    """[B,C,H,W], or [B,...,C], at flat positions [P]: [B * P, C]."""
    if is_map:
        return values.flatten(2)[:, :, chosen].transpose(1, 2).flatten(0, 1)
    return values.reshape(len(values), -1, values.shape[-1])[:, chosen].flatten(0, 1)


def _patches(values, module, found, chosen):
    """What the map reads for each chosen position of its output: [B * P, columns of its weight as a matrix]."""
    if isinstance(module, torch.nn.Linear):
        return _at(values, chosen, is_map=False)
    (top, left), (down, right), (height, width), padding = (
        pair(each) for each in (module.stride, module.dilation, module.kernel_size, module.padding))
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    values = F.pad(values, [padding[1], padding[1], padding[0], padding[0]], mode) if any(padding) else values
    rows, columns = chosen // found.shape[3] * top, chosen % found.shape[3] * left
    if int(rows.max()) + (height - 1) * down >= values.shape[2] or int(columns.max()) + (width - 1) * right >= values.shape[3]:
        return values.new_zeros(0, 1)  # the target is larger than the map's output
    patches = [values[:, :, rows + i * down, columns + j * right] for i, j in itertools.product(range(height), range(width))]
    return torch.stack(patches, -1).transpose(1, 2).flatten(0, 1).flatten(1)


@torch.no_grad()
def _fold(proxy, site, modules, equations, weights):
    """Add the change [D,C] of the target, and its best offset, to the maps' weights and to a bias of theirs or of their norms.

    A batch norm scales the map's output by gamma / sqrt(var + eps), so the weights get the change over that. Channels whose scale is
    zero cannot be reached through the norm; they get the offset alone.
    """
    scales = [_scale(proxy, each.norms, module.weight) for each, module in zip(site.maps, modules)]
    widths = [module.weight[0].numel() for module in modules]
    parts = list(weights.split(widths))
    for number, (module, scale) in enumerate(zip(modules, scales)):
        is_reached = scale.abs() > 1e-6 * scale.abs().max()
        parts[number] = parts[number] * is_reached
        change = parts[number] / torch.where(is_reached, scale, torch.ones_like(scale))
        module.weight += change.T.reshape(module.weight.shape).to(module.weight)
    offset = equations.offset(torch.cat(parts))
    for each, module in zip(site.maps, modules):
        if each.norms:  # the last one's own offset needs no scale
            norm = proxy.get_submodule(each.norms[-1])
            if norm.bias is not None:
                norm.bias += offset.to(norm.bias)
            else:
                norm.running_mean -= (offset * (norm.running_var.double() + norm.eps).sqrt()).to(norm.running_mean)
            return
        if module.bias is not None:
            module.bias += offset.to(module.bias)
            return


def _scale(proxy, norms, weight):
    """Product of the norms' factors, float64 [C]; ones where there are none."""
    scale = torch.ones(len(weight), dtype=torch.float64, device=weight.device)
    for norm in map(proxy.get_submodule, norms):
        scale = scale / (norm.running_var.double() + norm.eps).sqrt() * (1.0 if norm.weight is None else norm.weight.double())
    return scale
