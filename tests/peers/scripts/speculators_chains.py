"""speculators: loads EAGLE-3 exports and unrolls chains with its own forward pass."""

import exchange
import numpy as np
import speculators.models.eagle3.core as eagle3
import torch
from safetensors import safe_open
from speculators import SpeculatorModel, SpeculatorModelConfig
from transformers import PreTrainedModel

torch.set_num_threads(2)

# Of the target's tensors, those that are always loaded from it. The embedding is not among them:
# one that is not in the file is left as the memory was, unless that happens to hold a NaN.
BORROWED = {"verifier_norm.weight", "verifier_lm_head.weight"}


def config_of(directory):
    config = SpeculatorModelConfig.from_pretrained(directory)
    config.transformer_layer_config._attn_implementation = "eager"  # the default is for GPUs
    return config


def keys(directory, model):
    """Keys that the file lacks or has too many, by transformers and by the names alone."""
    _, info = PreTrainedModel.from_pretrained.__func__(
        type(model), directory, config=config_of(directory), output_loading_info=True
    )
    with safe_open(f"{directory}/model.safetensors", "pt") as file:
        stored = set(file.keys())
    wanted = set(model.state_dict()) - BORROWED
    return {
        "missing": sorted(info["missing_keys"]),
        "unexpected": sorted(info["unexpected_keys"]),
        "mismatched": sorted(map(str, info["mismatched_keys"])),
        "absent": sorted(wanted - stored),
        "surplus": sorted(stored - wanted),
    }


def unrolled(model, arrays, steps):
    """Logits [G, S, V_d] of chains that start with the token at each position of a row.

    Its trainer pairs the states of position i with the token at i + 1 (models/eagle3/data.py), one
    document at a time: a document loses its first position. That one is NaN here.
    """
    documents, rows = arrays["documents"], []
    for document in np.unique(documents):
        at = np.flatnonzero(documents == document)
        rows.append((at[:-1], at[1:]))
    states, given = (torch.from_numpy(np.concatenate(part)) for part in zip(*rows))
    seen, loss = [], eagle3.compute_metrics
    options, _ = type(model).get_trainer_kwargs(
        loss_fn="kl_div", loss_implementation="eager", ttt_steps=steps, ttt_step_loss_decay=1.0
    )

    def listen(logits, *args, **kwargs):
        seen.append(logits[0].numpy())
        return loss(logits, *args, **kwargs)

    eagle3.compute_metrics = listen
    try:
        with torch.no_grad():
            model(
                torch.from_numpy(arrays["taps"])[states].flatten(1)[None],
                torch.from_numpy(arrays["tokens"]).long()[given][None],
                torch.from_numpy(documents).long()[given][None],
                torch.ones(1, len(given), dtype=torch.bool),
                torch.from_numpy(arrays["positions"]).long()[given][None],
                torch.zeros(1, len(given), arrays["taps"].shape[-1]),
                **options,
            )
    finally:
        eagle3.compute_metrics = loss
    whole = np.full((steps, len(documents), seen[0].shape[-1]), np.nan, np.float32)
    whole[:, given.numpy()] = np.stack(seen)
    return whole


def answer(values, arrays, folder):
    found, results = {}, {}
    for name, directory in values["cases"].items():
        given = {key.split("/")[1]: x for key, x in arrays.items() if key.startswith(f"{name}/")}
        model = SpeculatorModel.from_pretrained(
            directory, config=config_of(directory), dtype=torch.float32
        ).eval()
        config = model.config.speculators_config
        steps = config.proposal_methods[0].speculative_tokens
        first = unrolled(model, given, steps)
        model.save_pretrained(folder / "saved" / name)
        found[name] = keys(directory, model) | {
            "class": type(model).__name__,
            "steps": steps,
            "layers": model.target_layer_ids,
            "saved": str(folder / "saved" / name),
        }
        results[f"{name}/logits"] = first
    return found, results


exchange.serve(answer)
