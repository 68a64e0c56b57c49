"""Every config file with every variant, and that drafters are what the variants' names say.

pytest tests/test_recipes.py
"""

import importlib.util
import math
import pathlib

import jax
import pytest
from flax import nnx

from dspark_jax.core.config import RunConfig, from_mapping
from dspark_jax.core.errors import UserError
from dspark_jax.core.recipes import VARIANTS
from dspark_jax.core.sharding import make_mesh
from dspark_jax.core.trees import named
from dspark_jax.models.drafter import DrafterShape
from dspark_jax.models.drafters import new_drafter
from dspark_jax.models.target_config import TargetConfig

CONFIGS = pathlib.Path(__file__).resolve().parent.parent / "configs"
OWN = {"smollm2": ("demo", "notebook", "eagle3")}  # others have those of the public recipe
DEPTHS = tuple(f"depth{n}" for n in range(1, 6))
ALL = tuple(name for name in VARIANTS if name != "depthN") + DEPTHS

QWEN3_4B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 9728,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}


def get_config(stem: str):
    spec = importlib.util.spec_from_file_location(stem, CONFIGS / f"{stem}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config


@pytest.mark.parametrize("stem", sorted(path.stem for path in CONFIGS.glob("*.py")))
def test_every_variant_builds_and_is_another_run(stem):
    """And an unknown one ends in one line that names those there are."""
    make, names = get_config(stem), OWN.get(stem, ALL)
    plain = from_mapping(RunConfig, make().to_dict())
    runs = {name: from_mapping(RunConfig, make(name).to_dict()) for name in names}
    alike = {name for name, run in runs.items() if run == plain}
    assert alike == {f"depth{plain.drafter.num_layers}"} & set(names)
    for run in runs.values():  # variants are of the drafter: never of what it is trained for
        assert run.target == plain.target
        assert run.drafter.target_layer_ids == plain.drafter.target_layer_ids
    with pytest.raises(UserError, match="gatd.*(eagle3)"):
        make("gatd")


def test_variants_join():
    run = from_mapping(RunConfig, get_config("qwen3_4b")("gated+depth2+block16").to_dict())
    drafter = run.drafter
    assert (drafter.markov_head, drafter.num_layers, drafter.block_size) == ("gated", 2, 16)


def parameters(variant: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the drafter of Qwen3-4B; nothing is computed."""
    run = from_mapping(RunConfig, get_config("qwen3_4b")(variant).to_dict())
    target = TargetConfig.from_hf(QWEN3_4B, "bfloat16", "the test")
    shape = DrafterShape.of(run.drafter, target)
    with jax.set_mesh(make_mesh(1, 1)):
        drafter = jax.eval_shape(lambda: new_drafter(shape, rngs=nnx.Rngs(0)))
        return {name: x.shape for name, x in named(drafter).items()}


def test_drafters_are_what_their_names_say():
    public = parameters("")
    layers = {name.split(".")[1] for name in public if name.startswith("layers.")}
    assert layers == set("01234")
    assert public["fc"] == (2560, 5 * 2560)
    assert public["markov.w1"] == public["markov.w2"] == (151936, 256)
    # The five layers of the target's size, fc, the Markov head, norms and the confidence head.
    each = 2560 * 128 * (32 + 8 + 8 + 32) + 3 * 2560 * 9728 + 2 * 128 + 2 * 2560
    rest = 5 * 2560**2 + 2 * 2560 + 2 * 151936 * 256 + (2560 + 256) + 1
    assert sum(map(math.prod, public.values())) == 5 * each + rest

    without = parameters("no_markov")
    assert set(public) - set(without) == {"markov.w1", "markov.w2"}
    assert not set(without) - set(public)
    # Its confidence head has no Markov row to see.
    changed = {name for name in without if without[name] != public[name]}
    assert changed == {name for name in without if name.startswith("confidence") and
                       public[name][-1] == 2560 + 256}  # fmt: skip
    assert changed

    bare = parameters("no_confidence")
    assert {n for n in public if n not in bare} == {n for n in public if "confidence" in n}
    assert all(bare[name] == public[name] for name in bare)

    gated, rnn = parameters("gated"), parameters("rnn")
    assert set(gated) - set(public) == {"markov.gate", "markov.gate_bias"}
    assert gated["markov.gate"] == (256, 2560 + 256)
    assert set(rnn) - set(public) == {"markov.joint", "markov.joint_bias"}
    assert rnn["markov.joint"] == (3 * 256, 2 * 256 + 2560)

    assert parameters("block16") == public  # slots are positions: no weights of their own
    shallow = parameters("depth1")
    assert {n for n in public if n not in shallow} == {
        n for n in public if n.startswith("layers.") and not n.startswith("layers.0.")
    }
    assert not {n for n in parameters("dflash") if n.startswith(("markov", "confidence"))}
