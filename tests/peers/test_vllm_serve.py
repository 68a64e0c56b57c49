"""`vllm serve DIR` with drafters trained here: the same text, and the same acceptance.

DFlash, which proposes a block at once, and EAGLE-3, which drafts token by token.
"""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import harness
import numpy as np
import pytest

from dspark_jax.data.opened import open_target
from dspark_jax.data.prompts import load_prompts
from dspark_jax.decoding.evaluation import Decoding, PromptSet, read_sets, run_sets
from dspark_jax.decoding.figures import Outcome, set_result
from dspark_jax.training.checkpoint import choose_step, load_drafter, read_record

PROMPTS, NEW_TOKENS = 24, 48
COMMON = {
    "data.max_new_tokens": NEW_TOKENS,
    "data.sequence_length": 256,
    "data.validation_fraction": 0.1,
    "drafter.vocab_size": 4096,
    "train.num_steps": 300,
    "train.num_anchors": 64,
    "train.learning_rate": 2.5e-3,
    "train.validate_every": 300,
    "train.checkpoint_every": 300,
    "train.validation_rows": 1,
    "train.feature_memory_gb": 1.0,
}
# The config file and what else is changed in it.
KINDS = {
    "dflash": (
        "configs/smollm2.py",
        {
            "drafter.markov_head": "none",
            "drafter.markov_rank": 0,
            "drafter.confidence_head": False,
            "drafter.sample_from_anchor": False,
            "drafter.block_size": 5,
            "drafter.num_layers": 1,  # see test_why_one_layer
        },
    ),
    "eagle3": ("configs/smollm2.py:eagle3", {"drafter.block_size": 3}),
}
# For a small machine and exact comparison; the one command is `vllm serve DIR`.
FLAGS = ["--dtype=float32", "--max-model-len=512", "--enforce-eager", "--max-num-seqs=4"]


@dataclasses.dataclass(frozen=True)
class Served:
    """What a server answered to all prompts, and its counters afterwards."""

    outputs: list[list[int]]
    counters: dict[str, float]


def command(name: str, *arguments: str) -> str:
    line = [sys.executable, "-m", f"dspark_jax.{name}", *arguments]
    done = subprocess.run(line, capture_output=True, text=True, cwd=harness.ROOT, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with prompts, which both drafters are trained on."""
    made = tmp_path_factory.mktemp("served")
    lines = [
        json.dumps({"id": one.id, "turns": [one.messages[0].content]})
        for one in load_prompts(f"generator:{PROMPTS}:4")
    ]
    (made / "prompts.jsonl").write_text("\n".join(lines))
    return made


@pytest.fixture(scope="module", params=KINDS)
def run(folder, request) -> Path:
    """A run with a trained drafter, with its export in `export` below it."""
    config, changes = KINDS[request.param]
    changes = COMMON | changes | {"data.prompts": folder / "prompts.jsonl"}
    if request.param != "dflash" and (folder / "dflash/data").is_dir():
        changes["data.path"] = folder / "dflash/data"  # the answers to the same prompts
    made = folder / request.param
    flags = [f"--config.{name}={value}" for name, value in changes.items()]
    command("train", f"--config={config}", f"--workdir={made}", *flags)
    command(
        "convert", f"--workdir={made}", "--to=speculators", f"--out={made}/export", "--step=latest"
    )
    return made


@pytest.fixture(scope="module")
def prompts(folder):
    """Those that the drafter was trained on: after a minute, only there every position counts."""
    target = open_target("smollm2", "float32")
    sets = read_sets(
        target,
        str(folder / "prompts.jsonl"),
        split="",
        per_set=PROMPTS,
        max_prompt_tokens=256,
        seed=0,
    )
    return tuple(prompt for one in sets for prompt in one.prompts)


@pytest.fixture(scope="module")
def evaluated(run, prompts) -> list[Outcome]:
    """What our own evaluation makes of the prompts."""
    record = read_record(run)
    drafter = load_drafter(record, run, choose_step(run, "latest"))
    how = Decoding(max_new_tokens=NEW_TOKENS, batch_size=12, plain=False)
    sets = [PromptSet("all", prompts, ())]
    target = open_target("smollm2", "float32")
    outcomes = run_sets(target, drafter, sets, how).outcomes["all"]
    order = {prompt.id: at for at, prompt in enumerate(prompts)}
    return sorted(outcomes, key=lambda outcome: order[outcome.id])


def served(directory: Path, prompts, log: Path) -> Served:
    """One server's greedy answers, one prompt after the other."""
    vllm = str(harness.HERE / "scripts/vllm_cli.py")
    address = harness.server(
        "vllm", [vllm, "serve", str(directory), *FLAGS], log, VLLM_CPU_KVCACHE_SPACE="1"
    )
    with address as address:
        name = harness.get(f"{address}/v1/models")["data"][0]["id"]
        outputs = []
        for prompt in prompts:
            body = {
                "model": name,
                "prompt": list(prompt.ids),
                "max_tokens": NEW_TOKENS,
                "temperature": 0,
                "return_token_ids": True,
            }
            answer = harness.get(f"{address}/v1/completions", body)
            outputs.append(answer["choices"][0]["token_ids"])
        return Served(outputs, harness.metrics(address))


@pytest.fixture(scope="module")
def speculative(run, prompts) -> Served:
    """With the export, by the one command."""
    return served(run / "export", prompts, run / "speculative.log")


@pytest.fixture(scope="module")
def plain(folder, prompts) -> Served:
    """With the target alone."""
    target = open_target("smollm2", "float32")
    return served(target.directory, prompts, folder / "plain.log")


def counted(counters: dict[str, float], name: str) -> dict[str, float]:
    """Counters "vllm:spec_decode_NAME_total" by their label `position`, "" without."""
    found = {}
    for key, value in counters.items():
        if key.startswith(f"vllm:spec_decode_{name}_total"):
            _, _, position = key.partition('position="')
            found[position.partition('"')[0]] = value
    return found


def acceptance(counters: dict[str, float]) -> tuple[float, list[float]]:
    """Drafts that vLLM verified, and the share of them accepted up to each position."""
    drafts = counted(counters, "num_drafts")[""]
    accepted = counted(counters, "num_accepted_tokens_per_pos")
    return drafts, [accepted[str(k)] / drafts for k in range(len(accepted))]


def intervals(outcomes: list[Outcome]) -> np.ndarray:
    """95 % bootstrap interval [P, 2], over prompts, of the share of rounds each slot survived."""
    rounds = np.array([outcome.rounds for outcome in outcomes])
    survived = np.stack([outcome.survived for outcome in outcomes])
    draws = np.random.default_rng(0).integers(0, len(outcomes), (2000, len(outcomes)))
    shares = survived[draws].sum(1) / rounds[draws].sum(1)[:, None]
    return np.percentile(shares, [2.5, 97.5], axis=0).T


def test_the_drafter_is_worth_serving(evaluated):
    """Rounds that always fail would agree as well."""
    assert set_result(evaluated).accepted_length > 1.5


def test_speculation_does_not_change_the_text(speculative, plain):
    assert speculative.outputs == plain.outputs
    assert counted(plain.counters, "num_drafts") == {}
    assert min(map(len, plain.outputs)) > 0


def test_it_is_the_text_that_our_target_writes(evaluated, plain, say):
    mine = [outcome.output for outcome in evaluated]
    same = sum(a == b for a, b in zip(mine, plain.outputs, strict=True))
    say(f"vLLM, plain: {same} of {len(mine)} greedy outputs are ours")
    assert same >= len(mine) - 1  # two programs may round a tie to different sides


def test_acceptance_is_what_our_evaluation_says(run, evaluated, speculative, say):
    result = set_result(evaluated)
    drafts, survival = acceptance(speculative.counters)
    length = 1 + sum(survival)
    wanted = intervals(evaluated)
    low, high = result.accepted_length_ci95
    say(
        f"vLLM, {run.name}: accepted length {length:.3f} in {drafts:.0f} drafts; by our evaluation "
        f"{result.accepted_length:.3f} ({low:.3f} to {high:.3f}) in {result.rounds} rounds"
    )
    for slot, (theirs, mine, bounds) in enumerate(zip(survival, result.survival, wanted), 1):
        say(f"  up to slot {slot}: {theirs:.3f}; {mine:.3f} ({bounds[0]:.3f} to {bounds[1]:.3f})")
    assert low <= length <= high
    assert len(survival) == len(wanted)
    for theirs, (low, high) in zip(survival, wanted, strict=True):
        assert low <= theirs <= high
    # The last round of an answer, cut off, counts there and not here: one in each answer.
    assert abs(drafts - result.rounds) <= len(evaluated) * 1.5


def test_why_one_layer(tmp_path):
    """On CPUs vLLM 0.32 norms the context keys of every draft layer with the weights of the first.

    It norms all layers with one call of a kernel whose weights are one row for each layer
    (vllm/model_executor/models/qwen3_dflash.py, `_normalize_context_k`). The kernel for GPUs takes
    the row of the layer; the one for CPUs always the first (csrc/cpu/layernorm.cpp,
    `rms_norm_impl`, which indexes `weight` by the feature alone). A deeper drafter drafts worse
    there than it is, at the same text. Should this fail, the tests above can serve a deeper one.
    """
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((2, 5, 3, 64), np.float32)  # [L, T, K, H]
    weights = np.float32([[1.0], [3.0]]) * np.ones((2, 64), np.float32)
    eps = 1e-6
    _, answer = harness.ask(
        "vllm", "vllm_norms", tmp_path, {"eps": eps}, {"keys": keys, "weights": weights}
    )
    normed = keys / np.sqrt(np.mean(keys**2, axis=-1, keepdims=True) + eps)
    right = normed * weights[:, None, None]
    np.testing.assert_allclose(answer["out"][0], right[0], atol=1e-5)
    np.testing.assert_allclose(answer["out"][1], normed[1], atol=1e-5)  # not right[1]
