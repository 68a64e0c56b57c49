"""DSpark drafter for google/gemma-4-12B-it (its text model), after the public recipe.

python -m dspark_jax.train --config=configs/gemma4_12b.py --workdir=runs/gemma4_12b \
    --config.data.prompts=prompts.jsonl
Ablations by name, also joined, as in configs/gemma4_12b.py:gated+depth2: no_markov, dflash, gated,
rnn, no_confidence, block16, depthN. The taps are those of the released drafter; token 4 is <mask>.
"""

from ml_collections import config_dict

from dspark_jax.core.recipes import public_recipe


def get_config(variant: str = "") -> config_dict.ConfigDict:
    return public_recipe(
        "google/gemma-4-12B-it", taps=(5, 17, 29, 41, 46), mask_token_id=4, variant=variant
    )
