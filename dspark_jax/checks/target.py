"""Is this the target that the drafter was trained with? And does its data agree?

Another quantisation, fine-tune, tokenizer or chat template still decodes correctly; only the
accepted length falls, so identity is compared and not shape (fingerprint.py).
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dspark_jax.checks.facts import (
    REFUSE,
    WARN,
    DataFacts,
    DrafterFacts,
    Finding,
    TargetFacts,
)
from dspark_jax.core.errors import UserError
from dspark_jax.models.rope_config import ropes_from_hf
from dspark_jax.models.target_config import text_config
from dspark_jax.weights.fingerprint import Fingerprint, fingerprint, read_template
from dspark_jax.weights.importing import RECORD
from dspark_jax.weights.safetensors import TensorFiles, read_json

_CONFIG = "config.json"
_PARTS = {
    "config": ("target config", "has another config.json: another model, or edited"),
    "tokenizer": ("tokenizer", "has another tokenizer.json: the same ids mean other texts"),
    "weights": ("target weights", "has other weights: a fine-tune, a cast or a quantisation"),
}
# Names of a recipe's drafter options -> where config.json has the same.
_RECIPE = {
    "block_size": "block_size",
    "mask_token_id": "mask_token_id",
    "num_layers": "num_hidden_layers",
    "markov_rank": "markov_rank",
    "confidence_head": "enable_confidence_head",
    "sample_from_anchor": "sample_from_anchor",
}
_EAGLE3_RECIPE = {"block_size": "ttt_length", "num_layers": "num_hidden_layers"}


def read_target(directory: Path, name: str, identity: Fingerprint | None = None) -> TargetFacts:
    """The facts of a target.

    Args:
      identity: its fingerprint, if that is known already.

    Raises:
      UserError: no usable config.json.
    """
    whole = read_json(directory / "config.json")
    config = text_config(whole)
    for field in ("vocab_size", "hidden_size", "num_hidden_layers"):
        if type(config.get(field)) is not int:
            raise UserError(
                f"target {directory}: config.json has no {field}; is this a model's config?"
            )
    rope, files = None, None
    rows, dtype, problems = config["vocab_size"], "", []
    try:
        rope, _ = ropes_from_hf(config, "config.json")
    except UserError as error:
        problems.append(_unknown("target's RoPE", "config.json", str(error)))
    try:
        files = TensorFiles(directory)
        embed = files.slice("model.embed_tokens.weight")
        rows, dtype = embed.get_shape()[0], embed.get_dtype()
        if dtype not in ("F32", "F16", "BF16"):
            raise UserError(f"the embedding is {dtype}")
        identity = identity or fingerprint(directory, name)
    except UserError as error:
        problems.append(_unknown("target's identity", "weights", str(error)))
    tokens, count, roles, template = read_tokenizer(directory, whole)
    return TargetFacts(
        directory=directory,
        name=name,
        config=config,
        rope=rope,
        roles=roles,
        tokens=tokens,
        token_count=count,
        template=template,
        embed_rows=rows,
        embed_dtype=dtype,
        files=files,
        fingerprint=identity,
        problems=tuple(problems),
    )


def read_tokenizer(
    directory: Path, config: dict[str, Any]
) -> tuple[dict[int, str], int, dict[int, str], str]:
    """Added tokens, number of ids, special roles and chat template, from the files as they are."""
    described = _json_or_empty(directory / "tokenizer.json")
    model = (described.get("model") or {}).get("vocab") or {}
    added = {token["id"]: token["content"] for token in described.get("added_tokens") or []}
    ids = {text: id_ for id_, text in added.items()}
    if isinstance(model, dict):
        ids = model | ids
    count = max(ids.values(), default=-1) + 1
    generation = _json_or_empty(directory / "generation_config.json")
    named = _json_or_empty(directory / "tokenizer_config.json")
    roles: dict[int, str] = {}
    for role in ("bos", "pad", "eos"):  # one id of several roles is named by the last
        for source in (config, generation):
            value = source.get(f"{role}_token_id")
            many = value if isinstance(value, list) else [value]
            roles |= {id_: role for id_ in many if type(id_) is int}
        text = named.get(f"{role}_token")
        text = text.get("content") if isinstance(text, dict) else text
        if text in ids:
            roles[ids[text]] = role
    return added, count, roles, read_template(directory)


def same_file(a: Path, b: Path) -> bool:
    """Whether two files hold the same bytes."""
    return hashlib.sha256(a.read_bytes()).digest() == hashlib.sha256(b.read_bytes()).digest()


def check_record(drafter: DrafterFacts, target: TargetFacts) -> Iterator[Finding]:
    """The fingerprint that the export kept, against the target's."""
    quantised = target.config.get("quantization_config")
    made_with = _made_with(drafter.record)
    if made_with is None:
        why = "has no fingerprint of its target, so whether this is the one cannot be told"
        remedy = "compare name and revision by hand; measure the accepted length once"
        yield Finding(WARN, "target identity", RECORD, why, remedy)
        if quantised:
            why = f"the target is quantised ({quantised.get('quant_method', 'by a way unknown')})"
            remedy = "measure the accepted length; train on the answers of the target served"
            yield Finding(WARN, "target weights", "target's config.json", why, remedy)
    elif target.fingerprint is not None:
        for part in made_with.differences(target.fingerprint):
            what, why = _PARTS[part]
            why = f"made with {made_with.name!r}; {target.name!r} {why}"
            remedy = "serve the target trained with, or prepare and train again"
            yield Finding(REFUSE, what, RECORD, why, remedy)
        yield from check_template(made_with, target.fingerprint, RECORD)


def check_template(made_with: Fingerprint, found: Fingerprint, where: str) -> Iterator[Finding]:
    """Another chat template than `where` was made with, if both were recorded."""
    if made_with.other_template(found):
        why = (
            f"made with {made_with.name!r}; {found.name!r} has another chat template: its answers "
        )
        why += "begin in contexts not trained on"
        remedy = "use the template it was made with, or prepare and train again"
        yield Finding(WARN, "chat template", where, why, remedy)


def check_recipe(drafter: DrafterFacts, target: TargetFacts) -> Iterator[Finding]:
    """What was trained, by the recipe kept in the export, against what engines are told."""
    recipe = recipe_of(drafter)
    trained = recipe.get("target_layer_ids")
    for name, taps in drafter.taps.items():
        if isinstance(trained, list) and taps != trained:
            off = {ours - theirs for ours, theirs in zip(taps, trained, strict=False)}
            by_one = len(taps) == len(trained) and off in ({-1}, {1})
            why = f"means layers {taps} (from 0), trained with {trained}"
            what = "layer id offset" if by_one else "layer ids"
            remedy = "aux_hidden_state_layer_ids counts from 1, target_layer_ids from 0"
            yield Finding(REFUSE, what, f"{_CONFIG}: {name}", why, remedy)
    for option, name in (_EAGLE3_RECIPE if drafter.kind == "eagle3" else _RECIPE).items():
        said = drafter.anchor_first if name == "sample_from_anchor" else drafter.said[name]
        if option in recipe and said not in (None, recipe[option]):
            why = f"{said}, trained with {recipe[option]}"
            remedy = "config.json was changed after the export: restore it"
            yield Finding(REFUSE, "recipe", f"{_CONFIG}: {name}", why, remedy)


def check_verifier(drafter: DrafterFacts, target: TargetFacts) -> Iterator[Finding]:
    """The target that `vllm serve DRAFTER` would load by itself."""
    if drafter.layout != "speculators":
        return
    where = "speculators_config.verifier"
    verifier = drafter.file.value.get("speculators_config") or {}
    verifier = verifier.get("verifier") if isinstance(verifier, dict) else None
    verifier = verifier if isinstance(verifier, dict) else {}
    name = verifier.get("name_or_path")
    if not isinstance(name, str) or not name:
        why = "name_or_path is missing, so engines do not know what to serve"
        yield Finding(REFUSE, "verifier", where, why, "write the target's folder or hub id")
    elif Path(name).expanduser().is_absolute():
        yield from _verifier_folder(Path(name).expanduser(), target, where)
    classes, theirs = verifier.get("architectures"), target.config.get("architectures")
    if classes and theirs and classes != theirs:
        why = f"architectures {classes}, the target's are {theirs}"
        yield Finding(REFUSE, "verifier", where, why, "use its own target")


def check_tokenizer(drafter: DrafterFacts, target: TargetFacts) -> Iterator[Finding]:
    """A tokenizer or chat template in the drafter's own folder."""
    own, theirs = (folder / "tokenizer.json" for folder in (drafter.folder, target.directory))
    remedy = "serve the target trained with; engines take the target's, never the drafter's"
    if own.is_file() and theirs.is_file() and not same_file(own, theirs):
        why = "not the target's: the same ids mean other texts"
        yield Finding(REFUSE, "tokenizer", "tokenizer.json", why, remedy)
    template = read_template(drafter.folder)
    if template and template != target.template:
        why = "not the target's: answers would be drafted in contexts it was not trained on"
        yield Finding(WARN, "chat template", "chat template", why, remedy)


def check_data(drafter: DrafterFacts, target: TargetFacts, data: DataFacts) -> Iterator[Finding]:
    """What the training data say: of the mask token, of the target, of the chat template."""
    mask = drafter.said["mask_token_id"]
    if mask is not None and mask < len(data.counts) and data.counts[mask]:
        why = f"{mask} occurs {data.counts[mask]} times in {data.directory}"
        remedy = "train with an id that the target never uses"
        yield Finding(REFUSE, "mask id", f"{_CONFIG}: mask_token_id", why, remedy)
    if target.fingerprint is not None:
        for part in data.made_by.differences(target.fingerprint):
            what, why = _PARTS[part]
            why = f"answers are by {data.made_by.name!r}; {target.name!r} {why}"
            yield Finding(REFUSE, what, str(data.directory), why, "prepare with this target")
    if target.fingerprint is not None:
        yield from check_template(data.made_by, target.fingerprint, str(data.directory))
    if data.documents and data.opened == 0:
        why = f"none of {data.documents} documents begins as the template begins a conversation"
        remedy = "if they have no system message of their own, the template has changed"
        yield Finding(WARN, "chat template", str(data.directory), why, remedy)


def _verifier_folder(folder: Path, target: TargetFacts, where: str) -> Iterator[Finding]:
    if not (folder / "config.json").is_file():
        why = f"{folder} is not here"
        yield Finding(REFUSE, "verifier", where, why, "write where the target is, or its hub id")
    elif folder.resolve() != target.directory.resolve() and target.fingerprint is not None:
        try:
            found = fingerprint(folder, str(folder), target.fingerprint.target_weights)
            parts = found.differences(target.fingerprint)
        except UserError as error:
            parts = [str(error)]
        if parts:
            why = f"{folder} is what engines load; it is another target ({', '.join(parts)})"
            yield Finding(REFUSE, "verifier", where, why, f"write {target.directory.resolve()}")


def _made_with(record: dict[str, Any] | None) -> Fingerprint | None:
    try:
        return Fingerprint(**record["target"]) if record else None
    except (KeyError, TypeError):  # of another writer
        return None


def recipe_of(drafter: DrafterFacts) -> dict[str, Any]:
    """The drafter's part of the recipe that the export kept; empty if it kept none."""
    config = (drafter.record or {}).get("config")
    recipe = config.get("drafter") if isinstance(config, dict) else None
    return recipe if isinstance(recipe, dict) else {}


def _json_or_empty(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except UserError:  # a tokenizer that cannot be read is only less to compare with
        return {}


def _unknown(what: str, where: str, why: str) -> Finding:
    remedy = "nothing that depends on it was checked; compare by hand"
    return Finding(WARN, what, f"target's {where}", why, remedy)
