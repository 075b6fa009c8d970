"""Mapped files in a process's resident memory, and out of it again."""

import ctypes
import mmap

_DONTNEED = 4  # of Linux's madvise; Python has it since 3.8


def release(array):
    """Take the pages of a mapped file out of this process. array: numpy, the memory of a file that is mapped and shared (np.memmap).

    What was written is in the system's page cache, as before; what is read next comes from there, one minor fault a page. Without
    this a file that is read through a map counts as resident until the system is short of memory, and the peak of a run grows with
    the number of its samples. Does nothing where the system has no such call.
    """
    start = array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    length = array.ctypes.data + array.nbytes - start
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is not None and array.nbytes:
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), ctypes.c_int(_DONTNEED))
