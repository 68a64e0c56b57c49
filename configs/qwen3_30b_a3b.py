"""DSpark drafter for Qwen/Qwen3-30B-A3B, a mixture of experts, after the public recipe.

python -m dspark_jax.train --config=configs/qwen3_30b_a3b.py --workdir=runs/qwen3_30b_a3b \
    --config.data.prompts=prompts.jsonl --config.mesh.tp=4
Ablations by name, also joined, as in configs/qwen3_30b_a3b.py:gated+depth2: no_markov, dflash,
gated, rnn, no_confidence, block16, depthN. Heads, experts and vocabulary go over `tp`, which has to
divide the 4 key/value heads.
"""

from ml_collections import config_dict

from dspark_jax.core.recipes import public_recipe


def get_config(variant: str = "") -> config_dict.ConfigDict:
    return public_recipe(
        "Qwen/Qwen3-30B-A3B", taps=(1, 12, 23, 34, 45), mask_token_id=151669, variant=variant
    )
