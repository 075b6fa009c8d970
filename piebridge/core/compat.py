"""The one place that looks at versions. The core runs on torch 1.10 (the last for JetPack 4, Python 3.6) and on the current one."""

import inspect
import re

import torch


def version_tuple(text):
    """'1.10.0+cu102' -> (1, 10, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0])[:3])


def has_weights_only():
    """Whether torch.load can refuse to run code by itself (since torch 1.13)."""
    return "weights_only" in inspect.signature(torch.load).parameters


def has_fused_attention():
    """Whether torch has scaled_dot_product_attention (since torch 2.0)."""
    return hasattr(torch.nn.functional, "scaled_dot_product_attention")
