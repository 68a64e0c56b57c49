"""Eight CPU devices for the sharding tests; set before anything touches jax."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(scope="session")
def bundled_dir():
    """The bundled SmolLM2 target as a Hugging Face directory, in the cache all sessions share."""
    from dspark_jax.weights.gguf import unpack_bundled

    return unpack_bundled()
