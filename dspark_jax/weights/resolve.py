"""From the name of a target or drafter to a directory on this machine."""

import json
import re
from pathlib import Path

from dspark_jax.core.errors import UserError
from dspark_jax.weights.gguf import unpack_bundled

_BUNDLED = ("smollm2", "bundled:smollm2")
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]  # weights and tokenizer
_NOT_FILES = ["original/*", "onnx/*", "consolidated*"]  # second copies of the same weights


def is_bundled(name: str) -> bool:
    """Whether `name` means the target that comes with a pip package (see gguf.py)."""
    return name in _BUNDLED


def resolve_target(name: str) -> Path:
    """The model directory that `name` means.

    Args:
        name: "smollm2" or "bundled:smollm2"; a folder with a `config.json`; or a hub id such as
            "Qwen/Qwen3-4B" (downloaded into the hub's own cache: weights, configs, tokenizer).

    Raises:
        UserError: no such target; the line says what was tried.
    """
    if is_bundled(name):
        return unpack_bundled()
    if name.startswith("bundled:"):
        raise UserError(f"no bundled target {name!r}: the only one is 'bundled:smollm2'")
    if not name.strip():
        raise UserError("the target has no name: give 'smollm2', a model folder or a hub id")
    folder = Path(name).expanduser()
    if folder.exists():
        if not (folder / "config.json").is_file():
            raise UserError(f"target {name!r}: no config.json there; give a model folder")
        return folder
    if not _may_be_hub_id(name):
        raise UserError(f"target {name!r}: no such folder; give a model folder or a hub id")
    return _download(name, f"target {name!r}", "a local model folder or 'smollm2'")


def resolve_drafter(name: str) -> Path:
    """The directory that `name` means: a folder as it is, else the download of a hub id.

    Raises:
        UserError: neither; the line says what was tried.
    """
    folder = Path(name).expanduser()
    if folder.exists():
        return folder
    if not _may_be_hub_id(name):
        raise UserError(f"drafter {name!r}: no such folder; give a run, a folder or a hub id")
    return _download(name, f"drafter {name!r}", "a local folder")


def _may_be_hub_id(name: str) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not name.startswith("~")


def _download(name: str, what: str, instead: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        path = Path(snapshot_download(name, allow_patterns=_FILES, ignore_patterns=_NOT_FILES))
    except Exception as error:  # whatever the network, the hub or the disk answers: one line
        reason = re.split(r"\.?\s*\n|\.\s", str(error).strip())[0]  # its first sentence
        raise UserError(
            f"{what}: no such local folder, and the download from the hub failed "
            f"({type(error).__name__}: {reason}); check the name, the network and HF_TOKEN / "
            f"HF_HUB_OFFLINE, or give {instead}"
        ) from error
    missing = _missing(path)
    if missing:  # offline, the hub's cache hands out half a download without complaint
        raise UserError(
            f"{what}: {missing} is missing in {path}; the download was cut short or the model has "
            f"no safetensors: download it again online or give {instead}"
        )
    return path


def _missing(path: Path) -> str | None:
    """The first file that a complete model directory would have and `path` has not."""
    index = path / "model.safetensors.index.json"
    needed = {"config.json"}
    if index.is_file():
        needed |= set(json.loads(index.read_text())["weight_map"].values())
    elif not any(path.glob("*.safetensors")):
        needed.add("model.safetensors")
    return next((file for file in sorted(needed) if not (path / file).is_file()), None)
