"""The layers of a network in the order in which they run: what a scheme can name, and what each would cost to train."""

from dataclasses import replace

import torch

from piebridge.core.costs import eval_mode
from piebridge.core.errors import UserError
from piebridge.engine import compat
from piebridge.engine.layer import TRUNK, Attention
from piebridge.engine.layer_recorder import LayerRecorder
from piebridge.engine.network_blocks import block_at, blocks_of, with_roles


def layers_of(module, example):
    """[Layer] in order of execution, of the parameters that a forward pass in eval mode uses.

    example: the module's input, or a tuple of inputs; shapes and types count. UserError where the module does not take it.
    """
    inputs = example if isinstance(example, tuple) else (example,)
    recorder, mode = LayerRecorder(module), compat.fake_mode()
    try:
        with torch.no_grad(), eval_mode(module), recorder.watching(), mode:
            fake = [mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for value in inputs]
            with recorder:
                module(*fake)
    except UserError:
        raise
    except Exception as error:  # whatever a foreign module does with it
        reason = (str(error).strip().splitlines() or [""])[0][:160]
        raise UserError(f"engine: {type(module).__name__} does not run on the example: {type(error).__name__}: {reason}") from error
    layers = list(recorder.layers.values())
    paths = blocks_of(module, [layer.path for layer in layers if layer.kind in TRUNK])
    layers = [replace(layer, block=block_at(layer.path, paths)) for layer in layers]
    return _with_head(module, with_roles(layers, recorder.flow, Attention))


def _with_head(module, layers):
    """The head marked: the one that the network's description names, or the last layer, where that is behind the blocks."""
    described = getattr(module, "description", {}).get("head")
    own = [layer for layer in layers if layer.kind in TRUNK and not layer.is_added]
    if described is not None:
        own = [layer for layer in own if layer.path == described]
    head = own[-1] if own and own[-1].block is None else None
    return [replace(layer, is_head=layer is head) for layer in layers]
