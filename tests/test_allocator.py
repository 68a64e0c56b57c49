"""Memory that is freed is kept for the next block, in a process of its own.

pytest tests/test_allocator.py
"""

import os
import pathlib
import platform
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
SCRIPT = """
import ctypes, resource
from dspark_jax.core.allocator import keep_freed_memory
print(keep_freed_memory())
libc, size = ctypes.CDLL(None), 2**26
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.malloc.argtypes = [ctypes.c_size_t]
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(size)
    ctypes.memset(block, 1, size)
    libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(**variables: str) -> tuple[str, int]:
    """What the function said, and the pages that a 64 MiB block touched anew at last."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    env |= {"PYTHONPATH": str(ROOT)} | variables
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    said, count = done.stdout.split()
    return said, int(count)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc")
def test_a_block_that_was_freed_is_not_mapped_anew():
    said, count = faults()
    assert said == "True" and count < 100


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc")
def test_what_the_environment_says_stays():
    said, count = faults(MALLOC_MMAP_THRESHOLD_="1000000")
    assert said == "False" and count > 1000
