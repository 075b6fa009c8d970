"""ATen operator -> standard ONNX nodes: shapes, slices, joins, and everything that reads or writes at indices. See onnx_operators.py."""

import torch

from piebridge.engine.onnx_graph import Tensor


def _reshape(graph, result, x, *arguments, **keywords):
    return graph.reshape(x, result.shape)


def _permute(graph, result, x, order):
    return graph.transpose(x, order)


def _transpose(graph, result, x, first=0, second=1):
    order = list(range(len(x.shape)))
    if order:
        order[first], order[second] = order[second], order[first]
    return graph.transpose(x, order)


def _expand(graph, result, x, sizes, **keywords):
    return graph.expand(x, result.shape)


def _select(graph, result, x, dim, index):
    dim %= len(x.shape)
    return graph.node("Gather", [x, graph.number(index % x.shape[dim], torch.int64)], result.shape, x.dtype, axis=dim)


def _bounds(size, start, stop):
    """As Python slices have them."""
    start, stop, _ = slice(start, stop).indices(size)
    return start, max(start, stop)


def _slice(graph, result, x, dim=0, start=None, stop=None, step=1):
    dim %= len(x.shape)
    start, stop = _bounds(x.shape[dim], start, stop)
    return graph.slice(x, [dim], [start], [stop], [step])


def _flip(graph, result, x, dims):
    return graph.flip(x, [dim % len(x.shape) for dim in dims])


def _concatenate(graph, result, values, dim=0):
    values = [graph.cast(value, result.dtype) for value in values if value.shape != (0,)]
    return graph.concatenate(values, dim % len(result.shape))


def _split(graph, result, x, sizes, dim=0):
    dim %= len(x.shape)
    return graph.nodes_results("Split", [x, graph.indices(shape[dim] for shape, _ in result.results)], result.results, axis=dim)


def _pad(graph, result, x, sizes, value=0.0):
    """sizes: begin and end of the last axis, then of the one before it, ..."""
    rank = len(x.shape)
    begins, ends = [0] * rank, [0] * rank
    for position in range(len(sizes) // 2):
        begins[rank - 1 - position], ends[rank - 1 - position] = sizes[2 * position:2 * position + 2]
    return graph.pad(x, begins, ends, value)


def _repeat(graph, result, x, times):
    x = graph.reshape(x, (1,) * (len(times) - len(x.shape)) + x.shape)
    return graph.node("Tile", [x, graph.indices(times)], result.shape, x.dtype)


def _slice_scatter(graph, result, x, source, dim=0, start=None, stop=None, step=1):
    """x with source in place of a slice of it: joined from what stands before, the source, and what stands behind."""
    dim %= len(x.shape)
    start, stop = _bounds(x.shape[dim], start, stop)
    source = graph.expand(graph.cast(source, x.dtype), x.shape[:dim] + (-((start - stop) // step),) + x.shape[dim + 1:])
    if step != 1:
        shape = [1] * len(x.shape)
        shape[dim] = source.shape[dim]
        index = graph.constant(torch.arange(start, stop, step).reshape(shape))
        return graph.node("ScatterElements", [x, graph.expand(index, source.shape), source], x.shape, x.dtype, axis=dim)
    before, after = graph.slice(x, [dim], [0], [start]), graph.slice(x, [dim], [stop], [x.shape[dim]])
    return graph.concatenate([part for part in (before, source, after) if part.shape[dim]], dim)


def _select_scatter(graph, result, x, source, dim, index):
    dim %= len(x.shape)
    index %= x.shape[dim]
    return _slice_scatter(graph, result, x, graph.reshape(source, x.shape[:dim] + (1,) + x.shape[dim + 1:]), dim, index, index + 1)


def _index_select(graph, result, x, dim, index):
    return graph.node("Gather", [x, index], result.shape, x.dtype, axis=dim % max(1, len(x.shape)))


def _embedding(graph, result, weight, index, *arguments):
    return graph.node("Gather", [weight, index], result.shape, weight.dtype, axis=0)


def _gather(graph, result, x, dim, index, **keywords):
    return graph.node("GatherElements", [x, index], result.shape, x.dtype, axis=dim % max(1, len(x.shape)))


def _scatter(reduction):
    def rule(graph, result, x, dim, index, source):
        updates = graph.expand(graph.operand(source, x.dtype), index.shape)
        if isinstance(source, Tensor) and source.shape and source.shape != index.shape:
            updates = graph.slice(source, list(range(len(index.shape))), [0] * len(index.shape), list(index.shape))
        attributes = {} if reduction == "none" else {"reduction": reduction}
        return graph.node("ScatterElements", [x, index, updates], x.shape, x.dtype, axis=dim % max(1, len(x.shape)), **attributes)
    return rule


def _indexed(graph, indices):
    """(first indexed axis, [index]) where they stand side by side and are numbers; None where ONNX has no standard form."""
    axes = [axis for axis, index in enumerate(indices) if index is not None]
    found = [indices[axis] for axis in axes]
    if axes != list(range(axes[0], axes[0] + len(axes))) or any(index.dtype in (torch.bool, torch.uint8) for index in found):
        return None
    return axes[0], [graph.cast(index, torch.int64) for index in found]


def _positions(graph, x, axis, indices):
    """[..., k]: what GatherND and ScatterND read; indices from the end are counted from the start."""
    shape = torch.broadcast_shapes(*[index.shape for index in indices])
    columns = []
    for offset, index in enumerate(indices):
        size = graph.number(x.shape[axis + offset], torch.int64)
        counted = graph.node("Add", [index, size], index.shape, torch.int64)
        is_negative = graph.node("Less", [index, graph.number(0, torch.int64)], index.shape, torch.bool)
        index = graph.node("Where", [is_negative, counted, index], index.shape, torch.int64)
        columns.append(graph.reshape(graph.expand(index, shape), tuple(shape) + (1,)))
    return graph.concatenate(columns, len(shape)), tuple(shape)


def _to_front(rank, axis, count):
    """An order of axes with `count` from `axis` on moved to the front, and the order that undoes it."""
    order = list(range(axis, axis + count)) + list(range(axis)) + list(range(axis + count, rank))
    return order, [order.index(position) for position in range(rank)]


def _index(graph, result, x, indices):
    found = _indexed(graph, indices)
    if found is None:
        return None
    axis, indices = found
    if len(indices) == 1:
        return graph.node("Gather", [x, indices[0]], result.shape, x.dtype, axis=axis)
    front = graph.transpose(x, _to_front(len(x.shape), axis, len(indices))[0])
    positions, shape = _positions(graph, x, axis, indices)
    rest = front.shape[len(indices):]
    picked = graph.node("GatherND", [front, positions], shape + rest, x.dtype)
    return graph.transpose(picked, _to_front(len(picked.shape), len(shape), axis)[0])


def _index_put(graph, result, x, indices, values, accumulates=False):
    found = _indexed(graph, indices)
    if found is None:
        return None
    axis, indices = found
    order, back = _to_front(len(x.shape), axis, len(indices))
    front = graph.transpose(x, order)
    positions, shape = _positions(graph, x, axis, indices)
    values = graph.expand(graph.cast(values, x.dtype), x.shape[:axis] + shape + x.shape[axis + len(indices):])
    values = graph.transpose(values, _to_front(len(values.shape), axis, len(shape))[0])
    attributes = {"reduction": "add"} if accumulates else {}
    return graph.transpose(graph.node("ScatterND", [front, positions, values], front.shape, x.dtype, **attributes), back)


RULES = {
    **dict.fromkeys("view.default _unsafe_view.default reshape.default unsqueeze.default squeeze.dims squeeze.dim squeeze.default "
                    "view_copy.default".split(), _reshape),
    "permute.default": _permute, "transpose.int": _transpose, "t.default": _transpose, "expand.default": _expand,
    "select.int": _select, "slice.Tensor": _slice, "flip.default": _flip, "cat.default": _concatenate,
    "split_with_sizes.default": _split, "split.Tensor": _split, "constant_pad_nd.default": _pad, "repeat.default": _repeat,
    "slice_scatter.default": _slice_scatter, "select_scatter.default": _select_scatter, "index_select.default": _index_select,
    "embedding.default": _embedding, "gather.default": _gather, "index.Tensor": _index,
    "scatter.value": _scatter("none"), "scatter.src": _scatter("none"), "scatter_add.default": _scatter("add"),
    "index_put.default": _index_put, "_unsafe_index.Tensor": _index, "_unsafe_index_put.default": _index_put,
}
