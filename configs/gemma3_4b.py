"""DSpark drafter for google/gemma-3-4b-it (its text model), after the public recipe.

python -m dspark_jax.train --config=configs/gemma3_4b.py --workdir=runs/gemma3_4b \
    --config.data.prompts=prompts.jsonl
Ablations by name, also joined, as in configs/gemma3_4b.py:gated+depth2: no_markov, dflash, gated,
rnn, no_confidence, block16, depthN. Token 4 is <mask>, which no chat uses.
"""

from ml_collections import config_dict

from dspark_jax.core.recipes import public_recipe


def get_config(variant: str = "") -> config_dict.ConfigDict:
    return public_recipe(
        "google/gemma-3-4b-it", taps=(1, 9, 16, 24, 31), mask_token_id=4, variant=variant
    )
