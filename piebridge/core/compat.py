"""What this torch can do, looked up in one place: the core runs on torch 1.10 (Python 3.6, JetPack 4) and on the current one."""

import inspect

import torch

HAS_FUSED_ATTENTION = hasattr(torch.nn.functional, "scaled_dot_product_attention")  # since torch 2.0
HAS_WEIGHTS_ONLY = "weights_only" in inspect.signature(torch.load).parameters  # torch.load refuses code; since torch 1.13
