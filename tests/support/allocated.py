"""How much of an array's memory the system has allocated."""

from __future__ import annotations

import ctypes
import mmap

from dflash_protocol.ids import AnyArray

_LIBC = ctypes.CDLL(None, use_errno=True)


def allocated_bytes(array: AnyArray) -> int:
    """Bytes of whole pages that are in memory, of those that a contiguous array lies in."""
    address = array.ctypes.data
    first = address // mmap.PAGESIZE * mmap.PAGESIZE
    num_pages = -(-(address + array.nbytes - first) // mmap.PAGESIZE)
    pages = (ctypes.c_ubyte * num_pages)()
    length = ctypes.c_size_t(num_pages * mmap.PAGESIZE)
    if _LIBC.mincore(ctypes.c_void_p(first), length, pages):
        raise OSError(ctypes.get_errno(), "mincore")
    return mmap.PAGESIZE * sum(page & 1 for page in pages)
