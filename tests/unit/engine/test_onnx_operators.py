"""Each operator's ONNX form, run by ONNX Runtime, against PyTorch."""

import itertools

import pytest
import torch
from onnx_examples import graph_of

from piebridge.core.errors import UserError
from piebridge.engine.onnx_operators import RULES
from piebridge.engine.onnx_step import OnnxStep

pytest.importorskip("onnx", reason="the package onnx is not installed")
pytest.importorskip("onnxruntime", reason="the package onnxruntime is not installed")
ATEN = torch.ops.aten


def check(function, *examples, general="columns"):
    found = OnnxStep(graph_of(function, *examples), {}, general).results(list(examples))
    expected = function(*examples)
    expected = expected if isinstance(expected, (tuple, list)) else [expected]
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def numbers(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + len(shape)))


X = numbers(2, 3, 4)
WHOLE = torch.tensor([[1, -2, 3], [0, 5, -6]])
TRUTH = torch.tensor([[True, False, True], [False, False, True]])
FUNCTIONS = {
    "scaled sums": lambda: (lambda x: (ATEN.add.Tensor(x, x, alpha=2), ATEN.sub.Tensor(x, 3, alpha=0.5), ATEN.rsub.Scalar(x, 2.0)), X),
    "types of sums": lambda: (lambda x: (x + 1.5, x / 2, x * True, x + x.double()), WHOLE),
    "products of truths": lambda: (lambda x: (x * x, x.sum(1), x.logical_not(), x | ~x, x & x, x ^ x), TRUTH),
    "comparisons": lambda: (lambda x: (x < 0.5, x <= 1, x > 1, x >= 0, x == 3, x != 3, x > x.float()), WHOLE),
    "powers": lambda: (lambda x: (x.pow(2), x.abs().pow(1.5), ATEN.pow.Scalar(0.9, x), x.abs().pow(x)), X),
    "functions": lambda: (lambda x: (x.sigmoid(), x.tanh(), x.exp(), x.abs().log(), x.erf(), x.sin(), x.cos(), x.abs().rsqrt(), x.round(),
                                     x.neg(), x.sign(), x.floor(), x.ceil(), x.relu()), X),
    "bounds": lambda: (lambda x: (x.clamp(-1, 1), x.clamp(min=0), x.clamp(max=0), ATEN.hardtanh(x, 0.0, 0.5), x.maximum(x * 0)), X),
    "bounds of whole numbers": lambda: (lambda x: (x.clamp(-1, 2), x.clamp(min=0)), WHOLE),
    "gelu": lambda: (lambda x: (ATEN.gelu(x), ATEN.gelu(x, approximate="tanh")), X),
    "choices": lambda: (lambda x, y: torch.where(y, x, 0.0), numbers(2, 3), TRUTH),
    "softmax": lambda: (lambda x: (ATEN._softmax(x, 1, False), ATEN._log_softmax(x, -1, False)), X),
    "reductions": lambda: (lambda x: (x.sum(), x.sum((0, 2)), x.sum(1, keepdim=True), x.mean(), x.mean((-1, 0)), x.amax(1),
                                      x.amin((0, 1))), X),
    "reductions of numbers": lambda: (lambda x: (x.sum(), x.sum((0,)), x.sum(0, keepdim=True)), torch.tensor(3.0)[None]),
    "any": lambda: (lambda x: (ATEN.any.dim(x, -1, True), ATEN.any.default(x)), TRUTH),
    "moments": lambda: (lambda x: (*ATEN.var_mean.correction(x, [0, 2], correction=0, keepdim=True),
                                   *ATEN.var_mean.correction(x, [1], correction=1), ATEN.var.correction(x, [0, 1])), X),
    "running sums": lambda: (lambda x: (x.cumsum(1), x.gt(0).cumsum(-1)), X),
    "layer norm": lambda: (lambda x, w, b: ATEN.native_layer_norm(x, [4], w, b, 1e-5), X, numbers(4), numbers(4)),
    "layer norm alone": lambda: (lambda x: ATEN.native_layer_norm(x, [3, 4], None, None, 1e-5)[0], X),
    "group norm": lambda: (lambda x, w, b: ATEN.native_group_norm(x, w, b, 2, 4, 15, 2, 1e-5),
                           numbers(2, 4, 3, 5), numbers(4), numbers(4)),
    "small numbers": lambda: (lambda x: (x.to(torch.uint8) + 3, x.to(torch.int8) * x.to(torch.int8), x.to(torch.int8) > 0,
                                         x.abs().sum(0, dtype=torch.uint8), ATEN.div.Tensor_mode(x, 4, rounding_mode="floor"),
                                         ATEN.div.Tensor_mode(x.to(torch.int8), 4, rounding_mode="floor")), WHOLE),
    "bits": lambda: (lambda x: ATEN.bitwise_and.Tensor(x, torch.tensor([[1], [2], [8], [128]], dtype=torch.uint8)),
                     torch.arange(0, 255, 7, dtype=torch.uint8)),
    "matrices": lambda: (lambda x, y: (ATEN.mm(x, y), ATEN.addmm(x[:, :2], x, y, beta=0.5, alpha=2), ATEN.bmm(x[None], y[None])),
                         numbers(3, 4), numbers(4, 2)),
    "made tensors": lambda: (lambda x: (ATEN.full([2, 70], 3.0) + x[0, 0, 0], ATEN.full_like(x, 2) + x,
                                        ATEN.arange.start_step(1, 9, 2) + x[0, 0], ATEN.scalar_tensor(1.5) * x), X),
    "conversions": lambda: (lambda x: (x.to(torch.int64), x.to(torch.bool), x.to(torch.float64)), X),
    "shapes": lambda: (lambda x: (x.view(6, 4).view(2, 12), x[:, None], x.permute(2, 0, 1), x.transpose(0, -1), x[None].expand(5, 2, 3, 4),
                                  ATEN.squeeze.dims(x[:1], [0])), X),
    "pieces": lambda: (lambda x: (x[:, 1], x[..., -1], x[:, -2:], x[..., ::2], x[..., 1:3], x.flip(0, 2)), X),
    "joins": lambda: (lambda x: (torch.cat([x, x[:1]]), torch.cat([x, x], -1), x.repeat(2, 1, 3), *x.split_with_sizes([1, 2], 1)), X),
    "padding": lambda: (lambda x: (ATEN.constant_pad_nd(x, [1, 2], 3.0), ATEN.constant_pad_nd(x, [0, 1, -1, 2])), X),
    "replaced slices": lambda: (lambda x: (ATEN.slice_scatter(x, x[:, :1], 1, 1, 2), ATEN.slice_scatter(x, x[..., :2] * 2, 2, 0, 4, 2),
                                           ATEN.slice_scatter(x, x, 0), ATEN.select_scatter(x, x[:, 0], 1, -1)), X),
    "selected": lambda: (lambda x, i: (x.index_select(1, i), x[i - 1], x[:, i], ATEN.index.Tensor(x, [None, i, i + 1]),
                                       ATEN.index.Tensor(x, [i - 1, i]), ATEN.index.Tensor(x, [None, None, i[:, None] + i])),
                         X, torch.tensor([0, 1, 0])),
    "written": lambda: (lambda x, i: (ATEN.index_put(x, [i], x[:1] * 3, True), ATEN.index_put(x, [None, i], x, True),
                                      ATEN.index_put(x[0], [i[:2], i[1:]], x[0, 0, :2]), ATEN.scatter.value(x[0], 1, i[:, None], 9.0),
                                      ATEN.scatter_add(x[0], 1, i[:, None], x[0])), X, torch.tensor([0, 1, 0])),
    "gathered": lambda: (lambda x, i: (x.gather(1, i), ATEN.embedding(x, i)), numbers(3, 4), torch.tensor([[0, 2], [1, 1], [2, 0]])),
    "max pool": lambda: (lambda x: ATEN.max_pool2d_with_indices(x, [3, 3], [2, 2], [1, 1]), numbers(2, 3, 7, 8)),
    "max pool's gradient": lambda: (lambda x, y: ATEN.max_pool2d_with_indices_backward(
        y, x, [3, 3], [2, 2], [1, 1], [1, 1], False, ATEN.max_pool2d_with_indices(x, [3, 3], [2, 2], [1, 1])[1]),
        numbers(2, 3, 7, 8), numbers(2, 3, 4, 4)),
    "average pool": lambda: (lambda x: (ATEN.avg_pool2d(x, [3, 3], [2, 2], [1, 1]),
                                        ATEN.avg_pool2d(x, [2, 2], [2, 2], [1, 1], False, False),
                                        ATEN.avg_pool2d(x, [3, 2], [2, 2], [0, 0], True, False)), numbers(2, 3, 7, 8)),
    "average pool's gradient": lambda: (lambda x, y: ATEN.avg_pool2d_backward(y, x, [3, 3], [2, 2], [1, 1], False, True, None),
                                        numbers(2, 3, 7, 8), numbers(2, 3, 4, 4)),
    "adaptive pool": lambda: (lambda x, y: (ATEN._adaptive_avg_pool2d(x, [3, 2]), ATEN._adaptive_avg_pool2d_backward(y, x)),
                              numbers(2, 3, 6, 8), numbers(2, 3, 3, 2)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_operators(one_thread, name):
    check(*FUNCTIONS[name]())


# channels, outputs and groups by kind; of each geometry kernel, stride, padding and dilation
CHANNELS = {"general": (4, 6, 1), "depthwise": (4, 4, 4), "grouped": (4, 6, 2), "multiplied": (3, 6, 3)}
GEOMETRIES = [((1, 1), (1, 1), (0, 0), (1, 1)), ((1, 1), (2, 2), (0, 0), (1, 1)), ((3, 3), (1, 1), (1, 1), (1, 1)),
              ((3, 3), (2, 2), (1, 1), (1, 1)), ((5, 3), (2, 1), (2, 0), (1, 1)), ((3, 3), (1, 1), (2, 2), (2, 2)),
              ((2, 2), (2, 2), (0, 0), (1, 1)), ((3, 2), (3, 3), (1, 2), (1, 2)), ((1, 1), (1, 1), (1, 1), (1, 1))]


@pytest.mark.parametrize("kind, general", [*itertools.product(CHANNELS, ["columns"]), ("general", "swapped"),
                                           ("general", "shifts")])
def test_convolutions_and_their_gradients(one_thread, kind, general):
    channels, outputs, groups = CHANNELS[kind]
    for kernel, stride, padding, dilation in GEOMETRIES:
        x, weight, bias = numbers(2, channels, 9, 8), numbers(outputs, channels // groups, *kernel), numbers(outputs)
        geometry = (list(stride), list(padding), list(dilation), False, [0, 0], groups)
        y = ATEN.convolution(x, weight, bias, *geometry)

        def values(x, weight, bias, y, geometry=geometry, outputs=outputs):
            return [ATEN.convolution(x, weight, bias, *geometry),
                    *ATEN.convolution_backward(y, x, weight, [outputs], *geometry, [True, True, True])]
        check(values, x, weight, bias, numbers(*y.shape), general=general)


@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_convolutions(one_thread, groups):
    x, weight, bias = numbers(2, 4, 5, 6), numbers(4, 3, 3, 3), numbers(3 * groups)
    geometry = ([2, 2], [1, 1], [1, 1], True, [1, 0], groups)
    y = ATEN.convolution(x, weight, bias, *geometry)

    def values(x, weight, bias, y):
        return [ATEN.convolution(x, weight, bias, *geometry),
                *ATEN.convolution_backward(y, x, weight, [3 * groups], *geometry, [True, True, True])]
    check(values, x, weight, bias, numbers(*y.shape))


def test_convolutions_of_signals_and_volumes(one_thread):
    for spatial, kernel in (((9,), (3,)), ((4, 5, 6), (2, 3, 1))):
        rank = len(kernel)
        geometry = ([1] * rank, [1] * rank, [1] * rank, False, [0] * rank, 1)
        x, weight = numbers(2, 3, *spatial), numbers(4, 3, *kernel)
        y = ATEN.convolution(x, weight, None, *geometry)
        check(lambda x, w, y, geometry=geometry: ATEN.convolution_backward(y, x, w, None, *geometry, [True, True, False])[:2],
              x, weight, numbers(*y.shape))


@pytest.mark.parametrize("function, examples, name", [
    (lambda x: ATEN.sort.default(x)[0], [X], "aten.sort.default (sort"),
    (lambda x, y: ATEN.index_put(x, [y], torch.tensor(1.0)), [numbers(2, 3), TRUTH], "aten.index_put.default"),
    (lambda x: ATEN.bitwise_and.Tensor(x, x), [WHOLE], "aten.bitwise_and.Tensor"),
    (lambda x: ATEN.avg_pool2d(x, [2, 2], [2, 2], [0, 0], True), [numbers(1, 1, 5, 5)], "aten.avg_pool2d.default"),
    (lambda x: ATEN._adaptive_avg_pool2d(x, [4, 4]), [numbers(1, 1, 6, 6)], "aten._adaptive_avg_pool2d.default"),
])
def test_what_has_no_standard_form_is_named(function, examples, name):
    with pytest.raises(UserError) as caught:
        OnnxStep(graph_of(function, *examples), {})
    assert name in str(caught.value) and "use backend=eager" in str(caught.value) and "\n" not in str(caught.value)


def test_every_rule_is_of_an_operator():
    for name in RULES:
        packet, _, overload = name.partition(".")
        assert overload in getattr(ATEN, packet).overloads(), name
