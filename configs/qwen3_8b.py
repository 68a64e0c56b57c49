"""DSpark drafter for Qwen/Qwen3-8B, after the public recipe.

python -m dspark_jax.train --config=configs/qwen3_8b.py --workdir=runs/qwen3_8b \
    --config.data.prompts=prompts.jsonl
Ablations by name, also joined, as in configs/qwen3_8b.py:gated+depth2: no_markov, dflash, gated,
rnn, no_confidence, block16, depthN.
"""

from ml_collections import config_dict

from dspark_jax.core.recipes import public_recipe


def get_config(variant: str = "") -> config_dict.ConfigDict:
    return public_recipe(
        "Qwen/Qwen3-8B", taps=(1, 9, 17, 25, 33), mask_token_id=151669, variant=variant
    )
