"""Tests against other implementations; `make test-peers` runs them, `make test` does not.

Peers run as scripts in virtual environments of their own (harness.py), so the project's never
holds torch for their sake, and their releases are pinned without binding ours.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "scripts"))

import jax
import pytest

from dspark_jax.core.sharding import make_mesh


@pytest.fixture(autouse=True, scope="session")
def mesh():
    """One device."""
    with jax.set_mesh(make_mesh()):
        yield


@pytest.fixture(scope="module")
def quick_compilation():
    """Compilations that are quick rather than good: many small programs, each run once."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


_FIGURES: list[str] = []


@pytest.fixture(scope="session")
def say():
    """Takes a line that is printed below the results, also when the test passes."""
    return _FIGURES.append


def pytest_terminal_summary(terminalreporter):
    """What the tests measured."""
    for line in _FIGURES:
        terminalreporter.write_line(line)
