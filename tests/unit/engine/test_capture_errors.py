"""What capture refuses: one line that names what is wrong and the cure."""

import re

import pytest
import torch
from engine_networks import batch_of, family
from torch import nn

from piebridge.core.errors import UserError
from piebridge.engine.capture import StepSettings, capture
from piebridge.engine.losses import cross_entropy
from piebridge.engine.step_graph import Part
from piebridge.engine.update_rules import SGD

WHOLE = {"linear.weight": Part()}


class Toy(nn.Module):
    """linear(x), with a body that a test gives."""

    def __init__(self, body=lambda module, x: module.linear(x)):
        super().__init__()
        self.linear, self.unused, self.drop, self.body = nn.Linear(4, 3), nn.Linear(2, 2), nn.Dropout(0.5), body

    def forward(self, x):
        return self.body(self, x)


def batch(dtype=torch.float32):
    return torch.randn(2, 4, dtype=dtype), torch.tensor([0, 2])


def refusal(module, parts=WHOLE, example=None, loss=cross_entropy, **settings):
    with pytest.raises(UserError) as caught:
        capture(module, loss, SGD(), parts, example or batch(), StepSettings(**settings))
    text = str(caught.value)
    assert text.startswith("engine: ") and "\n" not in text
    return text[len("engine: "):]


def test_nothing_to_train():
    assert refusal(Toy(), {}) == ("the scheme trains nothing of Toy; let it name at least one parameter: "
                                  "linear.weight, linear.bias, unused.weight, unused.bias")


def test_unknown_parameter():
    assert refusal(Toy(), {"linear.wieght": Part()}) == ("Toy has no parameter 'linear.wieght' (did you mean 'linear.weight'?); it has "
                                                         "linear.weight, linear.bias, unused.weight, unused.bias")
    assert refusal(family("lite0"), {"nothing": Part()}, batch_of("lite0")).endswith("0.weight, 1.weight, 1.bias, 3.body.0.weight, ...")


def test_tied_name():
    text = refusal(family("decoder"), {"head.weight": Part()}, batch_of("decoder"))
    assert text == "Decoder has no parameter 'head.weight' of its own: it is tied to 'embedding.weight', train that"


@pytest.mark.parametrize("index", [[0, 4], [-1], [2, 1], [1, 1], [], [[1]], [0.5]])
def test_channels_that_are_not_there(index):
    text = refusal(Toy(), {"linear.weight": Part(1, torch.tensor(index))})
    assert re.fullmatch(r"linear.weight: channels \[.*\] of dimension 1; give ascending int64 in 0..3", text)


def test_dimension_that_is_not_there():
    text = refusal(Toy(), {"linear.bias": Part(1, torch.tensor([0]))})
    assert text == "linear.bias: channels of dimension 1 of a tensor [3]; give one of 0..0"


def test_trained_tensor_that_the_loss_does_not_depend_on():
    message = "the loss does not depend on 'unused.weight'; leave it out of the scheme"
    assert refusal(Toy(), {"unused.weight": Part()}) == message
    assert refusal(Toy(), {**WHOLE, "unused.weight": Part()}) == message


def branches(module, x):
    return module.linear(x) if x.sum() > 0 else x[:, :3]


def reads(module, x):
    return module.linear(x) * x.max().item()


def selects(module, x):
    return module.linear(x[x[:, 0] > 0])


@pytest.mark.parametrize("body, line", [(branches, "return module.linear(x) if x.sum() > 0 else x[:, :3]"),
                                        (reads, "return module.linear(x) * x.max().item()"),
                                        (selects, "return module.linear(x[x[:, 0] > 0])")])
def test_control_flow_or_shapes_that_depend_on_data(body, line):
    text = refusal(Toy(body))
    place = rf"Toy cannot be traced at test_capture_errors.py:\d+ `{re.escape(line)}`: "
    assert re.fullmatch(place + r"what it does, or the shape of what it computes, depends on a tensor's values, .* torch.where", text)


def test_an_exception_of_the_modules_own():
    def fails(module, x):
        raise KeyError("no such\nkey")

    assert re.fullmatch(r"Toy cannot be traced at test_capture_errors.py:\d+ `raise KeyError.*`: KeyError: 'no such.*", refusal(Toy(fails)))


def test_random_operator():
    text = refusal(Toy(lambda module, x: module.linear(x + torch.randn_like(x))))
    assert re.fullmatch(r"random operator aten.randn_like.default \(\w+\): only dropout and stochastic depth are known; put the network "
                        "into eval mode, or draw outside and pass it in", text)


def test_wrong_mode():
    text = refusal(Toy().eval(), is_training=True)
    assert text == ("is_training, and Toy is in eval mode; call .train() on it or on those of its modules that shall train so, "
                    "or leave is_training out")


def test_batch_norm_of_single_values_in_train_mode():
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    text = refusal(module, {"0.weight": Part()}, (torch.randn(1, 4), torch.tensor([0])), is_training=True)
    assert text.startswith("Sequential cannot be traced") and "Expected more than 1 value per channel when training" in text


def test_example_of_another_type():
    text = refusal(Toy(), example=batch(torch.float64))
    assert text == "the example inputs are float64, Toy is float32; convert one of them with .to(dtype)"
    assert refusal(Toy(), example=([1, 2], torch.tensor([0]))) == "the example inputs hold a list; give a tensor or a tuple of tensors"


def test_example_that_does_not_fit_the_module():
    text = refusal(Toy(), example=(torch.randn(2, 5), torch.tensor([0, 1])))
    assert text.startswith("Toy cannot be traced at ") and "RuntimeError: " in text


def test_outputs_that_are_no_tensor():
    text = refusal(Toy(lambda module, x: {"logits": module.linear(x)}))
    assert text == "Toy puts out a dict, not one tensor; wrap it in a module that returns what the loss needs"


def test_loss_that_is_an_average():
    text = refusal(Toy(), loss=nn.functional.cross_entropy)
    assert text == ("the loss has shape [], not [2], one value per sample; give it reduction='none', and average over all dimensions "
                    "but the first")


@pytest.mark.parametrize("changes, message", [({"clip": 0.0}, "clip=0.0: the largest norm of the gradients is above 0, or None"),
                                              ({"accumulation": 0}, "accumulation=0: at least 1 batch per update")])
def test_settings(changes, message):
    assert refusal(Toy(), **changes) == message


def test_accumulating_step_of_one_batch():
    with pytest.raises(UserError, match="^engine: an accumulating step is one of several per update: set accumulation above 1$"):
        capture(Toy(), cross_entropy, SGD(), WHOLE, batch(), is_accumulating=True)


def test_old_pytorch(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "1.13.1+cu117")
    assert refusal(Toy()) == ("needs PyTorch 2.6 or newer, and this is 1.13.1+cu117 (older); pip install -U torch, or use step=eager")


def test_another_batch_at_call_time():
    module = Toy()
    step = capture(module, cross_entropy, SGD(), WHOLE, batch())
    arguments = [torch.zeros(value.shape, dtype=value.dtype) for value in step.inputs]
    position = [value.name for value in step.inputs].index("inputs")

    def text(tensor):
        with pytest.raises(UserError) as caught:
            step(*arguments[:position], tensor, *arguments[position + 1:])
        return str(caught.value)

    assert text(torch.zeros(3, 4)) == ("step: inputs is torch.float32 [3, 4], and the step was captured for torch.float32 [2, 4]; capture "
                                       "a step for that, or fill the batch up with samples of weight 0")
    assert text(torch.zeros(2, 4).double()).endswith("for torch.float32 [2, 4]; capture a step for that")
    with pytest.raises(UserError, match=rf"^step: takes {len(arguments)} inputs, 1 given$"):
        step(arguments[0])
