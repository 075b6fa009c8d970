"""What this torch can do, looked up in one place: the core runs on torch 1.10 (Python 3.6, JetPack 4) and on the current one."""

import inspect

import torch

HAS_FUSED_ATTENTION = hasattr(torch.nn.functional, "scaled_dot_product_attention")  # since torch 2.0
HAS_WEIGHTS_ONLY = "weights_only" in inspect.signature(torch.load).parameters  # torch.load refuses code; since torch 1.13


def _fused_adamw():
    """torch's AdamW in one call, or None. It came with torch 2.0, and runs on the CPU since 2.4."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return getattr(torch, "_fused_adamw_", None) if version >= (2, 4) else None


fused_adamw = _fused_adamw()
