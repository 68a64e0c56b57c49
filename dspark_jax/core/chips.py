"""What accelerators can do at best: the denominators of MFU and of roofline times.

One table for training metrics, ahead-of-time compiles and GPU checks. Figures are the vendors' own,
dense (without sparsity); `Chip.source` says where they stand.
"""

import dataclasses

import jax


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device as JAX counts them (TPU v4 and later: a chip; GPUs: a card).

    `link_bytes_per_second` is what a chip can send to others of its slice or server in one
    direction over all its links together, half of the vendors' bidirectional figure; 0 = none.
    """

    name: str  # as topologies are named: v5e, v5p, v6e
    device_kind: str  # as `jax.Device.device_kind` says it
    flops_per_second: float  # bfloat16 operands, float32 sums
    hbm_bytes: float
    hbm_bytes_per_second: float
    link_bytes_per_second: float
    source: str


_TPU = "cloud.google.com/tpu/docs"
_NVIDIA = "NVIDIA data sheet"

CHIPS = (
    Chip("v4", "TPU v4", 275e12, 32e9, 1200e9, 300e9, f"{_TPU}/v4"),
    Chip("v5e", "TPU v5 lite", 197e12, 16e9, 819e9, 200e9, f"{_TPU}/v5e"),
    Chip("v5p", "TPU v5", 459e12, 95e9, 2765e9, 600e9, f"{_TPU}/v5p"),
    Chip("v6e", "TPU v6 lite", 918e12, 32e9, 1600e9, 400e9, f"{_TPU}/v6e"),
    Chip("A10G", "NVIDIA A10G", 70e12, 24e9, 600e9, 0, f"{_NVIDIA} A10G"),
    Chip("A100 40GB", "NVIDIA A100-SXM4-40GB", 312e12, 40e9, 1555e9, 300e9, f"{_NVIDIA} A100"),
    Chip("A100 80GB", "NVIDIA A100-SXM4-80GB", 312e12, 80e9, 2039e9, 300e9, f"{_NVIDIA} A100"),
    Chip("A100 PCIe", "NVIDIA A100 80GB PCIe", 312e12, 80e9, 1935e9, 0, f"{_NVIDIA} A100"),
    Chip("L4", "NVIDIA L4", 121e12, 24e9, 300e9, 0, f"{_NVIDIA} L4"),
    Chip("L40S", "NVIDIA L40S", 362e12, 48e9, 864e9, 0, f"{_NVIDIA} L40S"),
    Chip("H100 PCIe", "NVIDIA H100 PCIe", 756e12, 80e9, 2000e9, 0, f"{_NVIDIA} H100"),
    Chip("H100", "NVIDIA H100 80GB HBM3", 989e12, 80e9, 3350e9, 450e9, f"{_NVIDIA} H100"),
    Chip("H200", "NVIDIA H200", 989e12, 141e9, 4800e9, 450e9, f"{_NVIDIA} H200"),
    Chip("B200", "NVIDIA B200", 2250e12, 180e9, 8000e9, 900e9, f"{_NVIDIA} DGX B200"),
)


def chip_of(device: jax.Device | str) -> Chip | None:
    """The chip that a device, or its `device_kind`, is; None for one without a line above.

    The whole kind counts: "NVIDIA H100 NVL" is not taken for another H100, and a CPU for nothing.
    Whoever gets None reports no MFU.
    """
    kind = device if isinstance(device, str) else device.device_kind
    return next((chip for chip in CHIPS if chip.device_kind == kind), None)


def chip_named(name: str) -> Chip | None:
    """The chip of a short name such as v5e, or None."""
    return next((chip for chip in CHIPS if chip.name == name), None)


def mfu(flops: float, seconds: float, chip: Chip, chips: int = 1) -> float:
    """Model FLOPs utilisation: `flops` done in `seconds`, as a share of what the chips could do.

    Args:
      flops: of the products that the model needs, counted from its shapes, without recomputation
        and padding; of all chips together.
    """
    return flops / (seconds * chip.flops_per_second * chips)
