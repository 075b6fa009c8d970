"""Checkpoints of the forge's long work, in the format of core/checkpoint.py, written at once: they are rare here."""

import json
from pathlib import Path

import torch

from piebridge.core.checkpoint import STATE_FILE, read_checkpoint
from piebridge.core.errors import UserError
from piebridge.core.safetensors_file import write_safetensors


def write_checkpoint(folder, job, tensors, facts):
    """Atomically; job: a text that says whose it is; facts: a dict of JSON values."""
    write_safetensors(Path(folder) / STATE_FILE, {name: tensor.detach() for name, tensor in tensors.items()},
                      {"facts": json.dumps(dict(facts, job=job))})


def restore_checkpoint(folder, job):
    """(tensors, facts) of the checkpoint in `folder`; None where there is none, or no folder. UserError where it is another job's."""
    found = None if folder is None else read_checkpoint(Path(folder))
    if found is not None and found[1].get("job") != job:
        raise UserError(f"{Path(folder) / STATE_FILE}: is of other networks or settings; delete it, or give another folder")
    return found


def restore_parameters(network, tensors, prefix=""):
    """Put tensors, by their keys behind a prefix, into the parameters of a network."""
    with torch.no_grad():
        for key, parameter in network.named_parameters():
            parameter.copy_(tensors[prefix + key])
