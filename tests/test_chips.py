"""The table of chips, and that the TPUs in it call themselves as it says.

pytest tests/test_chips.py
"""

import jax
import pytest

from dspark_jax.core.chips import CHIPS, chip_named, chip_of, mfu


def test_every_chip_is_found_by_its_own_kind_and_no_other():
    assert len({chip.device_kind for chip in CHIPS}) == len({chip.name for chip in CHIPS})
    for chip in CHIPS:
        assert chip_of(chip.device_kind) is chip
        assert chip_named(chip.name) is chip
    for kind in ("cpu", "TPU v5e", "TPU v5 lite pod", "NVIDIA H100 NVL", "NVIDIA L40", ""):
        assert chip_of(kind) is None
    assert chip_of(jax.devices("cpu")[0]) is None


def test_figures_are_in_the_same_units():
    """A wrong power of ten stands out: bytes per FLOP and time to read the memory are narrow."""
    for chip in CHIPS:
        assert 60 < chip.flops_per_second / chip.hbm_bytes_per_second < 600, chip
        assert 0.005 < chip.hbm_bytes / chip.hbm_bytes_per_second < 0.1, chip
        assert chip.link_bytes_per_second < chip.hbm_bytes_per_second, chip


def test_mfu():
    chip = chip_named("v5e")
    assert mfu(197e12, 1.0, chip) == pytest.approx(1.0)
    assert mfu(197e12, 2.0, chip, chips=4) == pytest.approx(1 / 8)
