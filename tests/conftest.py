"""Eight CPU devices for the sharding tests; set before anything touches jax."""

import gc
import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(scope="module", autouse=True)
def few_programs():
    """Drops compiled programs between files before they are too many for Linux.

    Each takes a few of the 65,530 memory maps that a process may have; beyond, it crashes.
    """
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 12_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def bundled_dir():
    """The bundled SmolLM2 target as a Hugging Face directory, in the cache all sessions share."""
    from dspark_jax.weights.gguf import unpack_bundled

    return unpack_bundled()
