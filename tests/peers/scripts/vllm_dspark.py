"""vLLM: what its config classes make of a DSpark export, and what its model class computes.

DSpark itself runs only on vLLM's GPU runner, which looks at the same config objects and holds the
same model class. Both are built here as the engine builds them, up to the point where the engine
refuses the CPU.
"""

import os
import tempfile

import exchange
import torch
from safetensors.torch import load_file
from vllm.config import CacheConfig, DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkForCausalLM
from vllm.transformers_utils.config import maybe_override_with_speculators
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config

torch.set_num_threads(2)


def configure(directory, given=None):
    """The target's and the drafter's config from the export alone, as `vllm serve DIRECTORY`.

    `given` is of a flat export: target, method and number of proposals, as `vllm serve TARGET
    --speculative-config` is told them.
    """
    if given:
        model, method, proposals = given
        tokenizer = model
        speculative = {"model": directory, "method": method, "num_speculative_tokens": proposals}
    else:
        model, tokenizer, speculative = maybe_override_with_speculators(directory, None, False)
    args = EngineArgs(
        model=model,
        tokenizer=tokenizer,
        speculative_config=speculative,
        dtype="float32",
        max_model_len=64,
        enforce_eager=True,
    )
    target = args.create_model_config()
    plain = VllmConfig(
        model_config=target,
        cache_config=CacheConfig(block_size=16),
        device_config=DeviceConfig("cpu"),
    )
    drafter = args.create_speculative_config(target, plain.parallel_config)
    return model, plain, drafter


def refusal(directory):
    """What the engine says to DSpark on the CPU."""
    try:
        EngineArgs(
            model=directory, dtype="float32", max_model_len=64, enforce_eager=True
        ).create_engine_config()
    except ValueError as error:
        return str(error)
    return None


def accepted(directory, given):
    """What the config classes make of a flat export, or say against it."""
    try:
        _, _, speculative = configure(directory, given)
        drafter = speculative.draft_model_config
        found = ModelRegistry.resolve_model_cls(drafter.architectures, drafter)[0].__name__
    except Exception as error:  # whatever it says is the answer
        return {"refusal": f"{type(error).__name__}: {error}"}
    taps = get_eagle3_aux_layers_from_config(speculative)
    return {"method": speculative.method, "class": found, "taps": list(taps or ())}


def answer_one(directory, arrays, given=None):
    name, config, speculative = configure(directory, given)
    config.speculative_config = speculative
    hf = speculative.draft_model_config.hf_config
    found = {
        "target": name,
        "method": speculative.method,
        "proposals": speculative.num_speculative_tokens,
        "class": ModelRegistry.resolve_model_cls(
            speculative.draft_model_config.architectures, speculative.draft_model_config
        )[0].__name__,
        "taps": list(get_eagle3_aux_layers_from_config(speculative)),
        "target_layer_ids": list(hf.target_layer_ids),
        **{
            key: getattr(hf, key, None)  # a flat config need not have all
            for key in (
                "mask_token_id",
                "block_size",
                "sample_from_anchor",
                "dspark_bonus_anchor",
                "enable_confidence_head",
                "confidence_head_with_markov",
                "markov_rank",
                "draft_vocab_size",
                "vocab_size",
                "num_hidden_layers",
            )
        },
    }
    tensors = load_file(f"{directory}/model.safetensors")
    with set_current_vllm_config(config):
        model = Qwen3DSparkForCausalLM(vllm_config=config)
        for parameter in model.parameters():  # so that what is never written shows
            parameter.data = torch.full_like(
                parameter, torch.nan if parameter.is_floating_point() else -1
            )
        model.load_weights(iter(tensors.items()))
    unwritten = [
        key
        for key, x in model.named_parameters()
        if (x.isnan().any() if x.is_floating_point() else (x == -1).any())
    ]
    # Parameters that hold an array of the file: fused ones hold several, row after row.
    pieces = {key: x.detach() for key, x in model.named_parameters()}
    taken = {key: holds(pieces, x) for key, x in tensors.items() if key != "t2d"}
    found |= {"unwritten": unwritten, "not_taken": [key for key, at in taken.items() if not at]}
    for module in (model.lm_head, model.model.markov_head.markov_w2, model.model.confidence_head):
        if module is not None:  # picks the CPU's kernel, which the loader does for an engine
            layer = getattr(module, "proj", module)
            layer.quant_method.process_weights_after_loading(layer)
    answer = {}
    with torch.no_grad(), set_current_vllm_config(config):
        prev, hidden = torch.from_numpy(arrays["prev"]).long(), torch.from_numpy(arrays["hidden"])
        embed = model.markov_embed(prev)
        answer["bias"] = model.markov_bias(embed)
        if model.model.confidence_head is not None:
            answer["confidence"] = model.compute_confidence(hidden, embed)
        if model.draft_id_to_target_id is not None:  # else the LM head is the target's
            answer["base"] = model.compute_draft_logits(hidden)
            answer["draft_ids"] = model.map_draft_to_target(torch.arange(hf.draft_vocab_size))
    return found, {key: x.numpy() for key, x in answer.items()}


def holds(parameters, array):
    """Names of parameters with these rows somewhere."""
    names = []
    for name, parameter in parameters.items():
        if parameter.shape[1:] != array.shape[1:] or len(parameter) < len(array):
            continue
        starts = range(len(parameter) - len(array) + 1)
        if any(torch.equal(parameter[at : at + len(array)], array) for at in starts):
            names.append(name)
    return names


def answer(values, arrays, folder):
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    first = next(iter(values["cases"].values()))
    with set_current_vllm_config(configure(first)[1]):
        port = tempfile.mktemp(dir=folder)
        init_distributed_environment(1, 0, f"file://{port}", 0, "gloo")
        initialize_model_parallel(1, 1)
    found, results = {}, {}
    for name, directory in values["cases"].items():
        given = {key.split("/")[1]: x for key, x in arrays.items() if key.startswith(f"{name}/")}
        found[name], one = answer_one(directory, given, values["flat"].get(name))
        results |= {f"{name}/{key}": x for key, x in one.items()}
    found["refusal"] = refusal(first)
    for name, (directory, *told) in values["others"].items():
        found[name] = accepted(directory, told)
    return found, results


exchange.serve(answer)
