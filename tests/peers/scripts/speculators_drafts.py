"""speculators: loads exports, drafts blocks with its own forward pass, saves and loads again."""

import exchange
import numpy as np
import speculators.models.dflash.core as dflash
import speculators.models.dspark.core as dspark
import torch
from safetensors import safe_open
from speculators import SpeculatorModel, SpeculatorModelConfig
from transformers import PreTrainedModel

torch.set_num_threads(2)

# What a drafter borrows from its target: never in a file, always loaded from the target.
BORROWED = {"embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight"}


def config_of(directory):
    config = SpeculatorModelConfig.from_pretrained(directory)
    config.transformer_layer_config._attn_implementation = "eager"  # the default is for GPUs
    return config


def load(directory):
    return SpeculatorModel.from_pretrained(
        directory, config=config_of(directory), dtype=torch.float32
    ).eval()


def keys(directory, model):
    """Keys that the file lacks or has too many, by transformers and by the names alone."""
    _, info = PreTrainedModel.from_pretrained.__func__(
        type(model), directory, config=config_of(directory), output_loading_info=True
    )
    with safe_open(f"{directory}/model.safetensors", "pt") as file:
        stored = set(file.keys())
    wanted = set(model.state_dict()) - BORROWED
    if not model.use_draft_vocab:
        wanted.discard("lm_head.weight")
    return {
        "missing": sorted(info["missing_keys"]),
        "unexpected": sorted(info["unexpected_keys"]),
        "mismatched": sorted(map(str, info["mismatched_keys"])),
        "absent": sorted(wanted - stored),
        "surplus": sorted(stored - wanted),
    }


def draft(model, arrays):
    """Logits [A, G, V_d] and confidence logits [A, G] of every block, by the model's forward.

    The forward returns a loss; what it is computed from is picked up where the loss is called.
    Anchors are drawn among the positions of the loss mask; as many as there are, they are all.
    """
    seen = {}

    def listen(module):
        loss = module.compute_metrics

        def compute(*args, **kwargs):
            seen["args"] = args
            return loss(*args, **kwargs)

        module.compute_metrics = compute
        return lambda: setattr(module, "compute_metrics", loss)

    anchors = arrays["anchors"]
    tokens = torch.from_numpy(arrays["tokens"]).long()[None]
    taps = torch.from_numpy(arrays["taps"])
    mask = torch.zeros(tokens.shape)
    mask[0, anchors] = 1
    options, _ = type(model).get_trainer_kwargs(
        loss_fn="kl_div", loss_implementation="eager", max_anchors=len(anchors)
    )
    module = dflash if type(model).__name__ == "DFlashDraftModel" else dspark
    restore = listen(module)
    try:
        with torch.no_grad():
            model(
                taps.flatten(1)[None],
                tokens,
                mask,
                torch.zeros(1, tokens.shape[1], taps.shape[-1]),
                torch.from_numpy(arrays["documents"]).long()[None],
                torch.from_numpy(arrays["positions"]).long()[None],
                **options,
            )
    finally:
        restore()
    shape = (len(anchors), model.block_size)
    logits, _, third, *_ = seen["args"]
    answer = {"logits": logits.reshape(*shape, -1).numpy()}
    if module is dspark and third is not None:
        answer["confidence"] = third.reshape(shape).numpy()
    return answer


def answer(values, arrays, folder):
    found, results = {}, {}
    for name, directory in values["cases"].items():
        given = {key.split("/")[1]: x for key, x in arrays.items() if key.startswith(f"{name}/")}
        model = load(directory)
        first = draft(model, given)
        model.save_pretrained(folder / "saved" / name)
        again = load(folder / "saved" / name)
        second = draft(again, given)
        found[name] = keys(directory, model) | {
            "class": type(model).__name__,
            "saved": str(folder / "saved" / name),
            "reloaded": all(np.array_equal(first[key], second[key]) for key in first),
            "draft_ids": (torch.arange(len(model.d2t)) + model.d2t).tolist()
            if model.use_draft_vocab
            else None,
        }
        results |= {f"{name}/{key}": x for key, x in first.items()}
    return found, results


exchange.serve(answer)
