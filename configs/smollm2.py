"""DSpark drafter for the bundled SmolLM2-135M-Instruct; runs on a laptop.

python -m dspark_jax.train --config=configs/smollm2.py --workdir=runs/smollm2
"""

from ml_collections import config_dict

from dspark_jax.core.config import default_config
from dspark_jax.core.errors import UserError
from dspark_jax.core.recipes import eagle3


def get_config(variant: str = "") -> config_dict.ConfigDict:
    c = default_config()
    c.seed = 0
    c.target = "smollm2"
    c.target_dtype = "float32"
    c.mesh.update(fsdp=1, tp=1)
    c.data.update(
        prompts="generator:2000",
        limit=0,
        path="",
        temperature=0.0,
        top_p=1.0,
        samples=1,
        max_prompt_tokens=256,
        max_new_tokens=192,
        generation_batch=64,
        sequence_length=1024,
        validation_fraction=0.04,
    )
    c.drafter.update(
        target_layer_ids=(1, 8, 15, 22, 27),
        mask_token_id=3,
        block_size=7,
        num_layers=3,
        markov_head="vanilla",
        markov_rank=64,
        vocab_size=12288,
        confidence_head=True,
        sample_from_anchor=True,
        init="target",
        dtype="float32",
    )
    c.loss.update(ce=1.0, l1=0.9, confidence=0.3, decay=2.5)
    c.train.update(
        global_batch_size=1,
        accumulation=1,
        num_anchors=96,
        num_steps=1800,
        num_epochs=4,
        learning_rate=1.6e-3,
        warmup_fraction=0.05,
        weight_decay=0.0,
        clip_norm=1.0,
        log_every=10,
        validate_every=250,
        checkpoint_every=250,
        keep_checkpoints=2,
        validation_rows=16,
        loss_chunk=256,
        feature_memory_gb=10.0,
    )
    if variant == "demo":
        # What a quarter of an hour on two cores allows. Short blocks: verifying 5 tokens costs
        # little more than one step of this target, and every slot reads a Markov matrix [V_d, R].
        c.data.update(
            prompts="generator:960:3",
            temperature=0.4,
            max_new_tokens=64,
            generation_batch=64,
            sequence_length=512,
        )
        c.drafter.update(block_size=4, num_layers=2, markov_rank=32)
        c.train.update(
            num_anchors=64,
            num_steps=700,
            validate_every=175,
            checkpoint_every=175,
            validation_rows=8,
            learning_rate=2.5e-3,
            feature_memory_gb=2.0,
        )
        c.evaluate.update(
            max_new_tokens=64, batch_size=1, prompts_per_set=4, prompts="generator:16:3"
        )
    elif variant == "notebook":
        # A few minutes on two cores: enough to see every step, not a good drafter.
        c.data.update(
            prompts="generator:128",
            max_new_tokens=64,
            generation_batch=32,
            sequence_length=256,
            validation_fraction=0.1,
        )
        c.drafter.update(block_size=4, num_layers=2, markov_rank=32, vocab_size=4096)
        c.train.update(
            num_anchors=64,
            num_steps=150,
            validate_every=50,
            checkpoint_every=50,
            validation_rows=4,
            feature_memory_gb=1.0,
        )
    elif variant == "eagle3":
        eagle3(c)
    elif variant:
        raise UserError(f"unknown variant {variant!r}: there are demo, notebook and eagle3")
    return c
