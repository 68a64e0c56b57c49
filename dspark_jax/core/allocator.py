"""What the C library does with memory that this process frees."""

import ctypes
import os

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8  # names of glibc's mallopt
_MOST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Lets glibc keep large blocks that are freed and give them out again.

    XLA on CPUs asks for the temporaries of a program as one block at each call and frees it at the
    end. glibc maps blocks above 32 MiB anew every time, so the kernel clears every page again when
    it is first touched, at every step. The most memory that the process needs stays the same; what
    it needs between two calls grows to that.

    Call it before threads are started: only blocks of one common arena are kept. What the
    environment says (MALLOC_..., GLIBC_TUNABLES) is left alone.

    Returns:
      Whether the C library did it; another one than glibc does not.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
        wanted = {_MMAP_THRESHOLD: _MOST, _TRIM_THRESHOLD: _MOST, _TOP_PAD: 2**26, _ARENA_MAX: 1}
        return all(mallopt(name, value) == 1 for name, value in wanted.items())
    except (OSError, AttributeError, TypeError):
        return False
