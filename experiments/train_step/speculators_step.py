"""speculators: one train step of a DSpark drafter, timed. Runs in .venv-peers/speculators.

    python speculators_step.py FOLDER

bench_train_step.py writes FOLDER/case.json and inputs.npz and reads speculators.json; nothing of
this project is imported. Anchors are given, so that both sides compute the same loss.
"""

import ctypes
import json
import sys
import time
from pathlib import Path

import numpy as np


def resident(field: str) -> int:
    """VmRSS or VmHWM of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def main(folder: Path) -> None:
    began = time.perf_counter()
    import speculators.models.dflash.core as dflash
    import torch
    from speculators import SpeculatorModel, SpeculatorModelConfig

    case = json.loads((folder / "case.json").read_text())
    torch.set_num_threads(case["threads"])
    config = SpeculatorModelConfig.from_pretrained(case["export"])
    config.transformer_layer_config._attn_implementation = "eager"  # the default is for GPUs
    model = SpeculatorModel.from_pretrained(case["export"], config=config, dtype=torch.float32)
    with np.load(folder / "inputs.npz") as file:
        given = {name: torch.from_numpy(x) for name, x in file.items()}
    options, _ = type(model).get_trainer_kwargs(
        loss_fn=json.dumps({"ce": 0.1, "tv": 1.8}),  # its tv is half of the sum of |p_d - p_t|
        loss_implementation="eager",
        max_anchors=case["anchors"],
        confidence_head_alpha=1.0,
        dflash_decay_gamma=4.0,
    )
    weights = [x for x in model.parameters() if x.requires_grad]
    adamw = torch.optim.AdamW(weights, lr=case["learning_rate"], weight_decay=0.0)
    step = 0

    def one() -> tuple[float, float]:
        nonlocal step
        anchors, filled = given["anchors"][step].long(), given["filled"][step]
        dflash.select_anchors = lambda *_: (anchors, filled)
        start = time.perf_counter()
        adamw.zero_grad(set_to_none=True)
        _, loss, _ = model(
            given["taps"].flatten(1)[None],
            given["tokens"].long()[None],
            given["loss_mask"].long()[None],
            given["states"][None],
            given["documents"].long()[None],
            given["positions"].long()[None],
            **options,
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        adamw.step()
        value = float(loss)
        step += 1
        return value, time.perf_counter() - start

    warm = [one() for _ in range(case["warmup"])]
    ready = time.perf_counter() - began
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    idle = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    timed = [one() for _ in range(case["steps"])]
    answer = {
        "losses": [loss for loss, _ in warm + timed],
        "seconds": [seconds for _, seconds in timed],
        "first_step_seconds": warm[0][1],
        "ready_seconds": ready,
        "idle_bytes": idle,
        "peak_bytes": resident("VmHWM"),
        "versions": {"torch": torch.__version__},
    }
    (folder / "speculators.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
