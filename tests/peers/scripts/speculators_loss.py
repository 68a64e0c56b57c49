"""speculators: the loss of a batch, its terms and its gradients, by the model's own training pass.

Anchors are drawn at random there; here those of the request stand in their place.
"""

import exchange
import speculators.models.dflash.core as dflash
import torch
from speculators import SpeculatorModel, SpeculatorModelConfig

torch.set_num_threads(2)


def load(directory):
    config = SpeculatorModelConfig.from_pretrained(directory)
    config.transformer_layer_config._attn_implementation = "eager"  # the default is for GPUs
    return SpeculatorModel.from_pretrained(directory, config=config, dtype=torch.float32)


def candidates(mask, block):
    """The positions that it would draw anchors from."""
    drawn, valid = dflash.select_anchors(mask, mask.shape[1], block)
    return drawn[valid].tolist()


def answer(values, arrays, folder):
    found, results = {}, {}
    give = {name: torch.from_numpy(x) for name, x in arrays.items()}
    mask, filled = give["loss_mask"].long()[None], give["filled"]
    for name, case in values["cases"].items():
        model = load(case["directory"])
        options, _ = type(model).get_trainer_kwargs(
            loss_fn=case["loss_fn"],
            loss_implementation="eager",
            max_anchors=len(filled),
            confidence_head_alpha=case["confidence"],
            dflash_decay_gamma=case["decay"],
        )
        draws, dflash_draw = candidates(mask, model.block_size), dflash.select_anchors
        dflash.select_anchors = lambda *_: (give["anchors"].long(), filled)
        try:
            _, loss, metrics = model(
                give["taps"].flatten(1)[None],
                give["tokens"].long()[None],
                mask,
                give["states"][None],
                give["documents"].long()[None],
                give["positions"].long()[None],
                **options,
            )
        finally:
            dflash.select_anchors = dflash_draw
        loss.backward()
        found[name] = {"candidates": draws, "loss": float(loss)} | {
            key.removesuffix("_sum"): float(value) / float(metrics[f"{key[:-4]}_total"])
            for key, value in metrics.items()
            if key.endswith("_sum")
        }
        for key, parameter in model.named_parameters():
            if parameter.requires_grad:
                results[f"{name}/{key}"] = parameter.grad.numpy()
    return found, results


def initial(values, arrays, folder):
    """Fresh drafters of each kind of head: every parameter as it is made."""
    results = {}
    for name, directory in values["fresh"].items():
        config = SpeculatorModelConfig.from_pretrained(directory)
        config.transformer_layer_config._attn_implementation = "eager"
        torch.manual_seed(0)
        model = SpeculatorModel.registered_model_class_from_config(config)(config)
        for key, parameter in model.named_parameters():
            if parameter.requires_grad:
                results[f"fresh/{name}/{key}"] = parameter.detach().numpy()
    return results


def both(values, arrays, folder):
    found, results = answer(values, arrays, folder)
    return found, results | initial(values, arrays, folder)


exchange.serve(both)
