"""DSpark drafter for Qwen/Qwen3-VL-4B-Instruct (its text model), after the public recipe.

python -m dspark_jax.train --config=configs/qwen3_vl_4b.py --workdir=runs/qwen3_vl_4b \
    --config.data.prompts=prompts.jsonl
Ablations by name, also joined, as in configs/qwen3_vl_4b.py:gated+depth2: no_markov, dflash, gated,
rnn, no_confidence, block16, depthN. Features of images are added behind layers 0 to 2, before or
after which readers tap differently: no tap is among these.
"""

from ml_collections import config_dict

from dspark_jax.core.recipes import public_recipe


def get_config(variant: str = "") -> config_dict.ConfigDict:
    return public_recipe(
        "Qwen/Qwen3-VL-4B-Instruct", taps=(3, 10, 18, 25, 33), mask_token_id=151669, variant=variant
    )
