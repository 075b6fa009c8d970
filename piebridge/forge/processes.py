"""The processes that torchrun starts: one does all the work alone, several share each batch."""

import contextlib
import os

import torch
from torch import distributed


def world():
    """(this process's number, how many there are)."""
    return (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)


def is_first():
    """Whether this process is the one that writes files and shows progress."""
    return world()[0] == 0


def local_device():
    """This process's own GPU, where its machine has one for each of its processes; else the CPU."""
    number, count = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return torch.device("cuda", number) if torch.cuda.device_count() >= count else torch.device("cpu")


@contextlib.contextmanager
def process_group():
    """Join the processes that torchrun started, each with its networks on its `local_device`; alone, nothing."""
    is_shared = int(os.environ.get("WORLD_SIZE", "1")) > 1
    is_on_gpu = local_device().type == "cuda"
    if is_shared and is_on_gpu:
        torch.cuda.set_device(local_device())
    if is_shared:
        distributed.init_process_group("nccl" if is_on_gpu else "gloo")
    try:
        yield
        if is_shared:
            distributed.barrier()  # gloo aborts a process whose peer closes the connection while it still listens
    finally:
        if is_shared:
            distributed.destroy_process_group()


def shared_batches(count, size, seed, epoch):
    """Lists of positions: this process's part of each batch of an epoch, in an order that is the same in all of them.

    size: of the joint batch, a multiple of the number of processes. What is left over for a last smaller batch waits for another epoch.
    """
    rank, processes = world()
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed * 1000003 + epoch)).tolist()
    share = size // processes
    return [order[start + rank * share:start + (rank + 1) * share] for start in range(0, count - size + 1, size)]


def mean_of_processes(value, device="cpu"):
    """The mean of a number that each process has."""
    if not distributed.is_initialized():
        return value
    total = torch.tensor([value], dtype=torch.float64, device=device)
    distributed.all_reduce(total)
    return float(total) / world()[1]
