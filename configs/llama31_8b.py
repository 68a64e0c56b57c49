"""DSpark drafter for meta-llama/Llama-3.1-8B-Instruct, after the public recipe.

python -m dspark_jax.train --config=configs/llama31_8b.py --workdir=runs/llama31_8b \
    --config.data.prompts=prompts.jsonl
Ablations by name, also joined, as in configs/llama31_8b.py:gated+depth2: no_markov, dflash, gated,
rnn, no_confidence, block16, depthN.
"""

from ml_collections import config_dict

from dspark_jax.core.recipes import public_recipe


def get_config(variant: str = "") -> config_dict.ConfigDict:
    return public_recipe(
        "meta-llama/Llama-3.1-8B-Instruct",
        taps=(1, 8, 15, 22, 29),
        mask_token_id=128002,
        variant=variant,
    )
