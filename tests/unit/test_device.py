"""Devices: what is there is taken, what is not is refused in words; threads and memory are as the system says."""

import os

import pytest
import torch

from piebridge.core.device import PeakMemory, describe_device, limited_threads, resolve_device, synchronizer, warn_of_other_work
from piebridge.core.errors import UserError
from piebridge.core.workers import usable_cores

HAS_GPU = torch.cuda.is_available()


def refused(name):
    with pytest.raises(UserError) as caught:
        resolve_device(name)
    return str(caught.value)


def test_auto_takes_the_gpu_where_there_is_one():
    assert resolve_device("auto").type == ("cuda" if HAS_GPU else "cpu")
    assert resolve_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["gpu", "", "cuda:one", "0", "cpu,cuda"])
def test_what_is_no_device_is_refused(name):
    assert refused(name) == f"device={name}: not a device; write auto, cpu, cuda or cuda:N"


@pytest.mark.parametrize("name", ["meta", "mps", "xpu"])
def test_devices_of_other_kinds_are_refused(name):
    assert refused(name) == f"device={name}: only cpu and cuda devices are supported"


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU here")
@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:7"])
def test_a_gpu_that_is_not_there(name):
    assert refused(name) == f"device={name}: torch {torch.__version__} sees no CUDA device; use device=auto to run on the CPU"


def test_a_gpu_beyond_the_last(monkeypatch):
    if not HAS_GPU:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    count = torch.cuda.device_count()
    assert resolve_device(f"cuda:{count - 1}") == torch.device("cuda", count - 1)
    assert refused(f"cuda:{count}") == f"device=cuda:{count}: there are {count} CUDA devices, numbered from 0"


def test_facts_for_the_record():
    facts = describe_device(torch.device("cpu"))
    assert facts["cores"] == len(os.sched_getaffinity(0)) and facts["threads"] == torch.get_num_threads()
    with open("/proc/cpuinfo") as stream:
        names = [line.partition(":")[2].strip() for line in stream if line.startswith("model name")]
    assert facts["type"] == "cpu" and facts["name"] and (not names or facts["name"] == names[0])
    assert synchronizer(torch.device("cpu"))() is None


def test_threads_are_given_back_whatever_happens():
    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError), limited_threads(before + 1):
        assert torch.get_num_threads() == before + 1
        raise ZeroDivisionError
    assert torch.get_num_threads() == before
    with limited_threads(None):
        assert torch.get_num_threads() == before


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the system keeps the peak of the whole process")
@pytest.mark.parametrize("load, is_told", [(0.4, False), (1.0, False), (1.6, True)])
def test_other_work_on_the_machine_is_told(load, is_told, monkeypatch, caplog):
    monkeypatch.setattr(os, "getloadavg", lambda: (load * usable_cores(), 0.0, 0.0))
    warn_of_other_work(torch.device("cpu"))
    assert ("OMP_WAIT_POLICY=PASSIVE" in caplog.text) == is_told
    caplog.clear()
    warn_of_other_work(torch.device("cuda"))
    assert not caplog.text


def test_peak_memory_is_that_since_the_start_and_stays():
    memory = PeakMemory(torch.device("cpu"))
    before = memory.mib()
    block = torch.ones(48 << 20, dtype=torch.uint8) + 1  # two at once, each too large for memory that was freed before
    assert before + 40 < memory.mib() < before + 200
    peak = memory.mib()
    del block
    assert memory.mib() >= peak - 4  # the kernel counts pages per processor, and adds them up now and then
