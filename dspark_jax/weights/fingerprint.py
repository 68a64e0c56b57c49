"""Which target a drafter belongs to: a short record checked wherever the two meet.

A drafter of another fine-tune or quantisation still decodes correctly (verification repairs it);
only its acceptance falls. So identity is compared, not shape.
"""

import dataclasses
import hashlib
import json
from pathlib import Path

import numpy as np

from dspark_jax.core.errors import UserError
from dspark_jax.weights.safetensors import TensorFiles, read_json

# Fields of config.json that do not change the function computed.
_IGNORED = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """Hashes of a target's configuration, tokenizer, a sample of its weights and chat template.

    The template is what a user may well edit: the model stays the same, but its answers are given
    in contexts that a drafter has not seen. "" where it was not recorded, as in older files.
    """

    name: str
    config: str
    tokenizer: str
    weights: str
    template: str = ""

    def differences(self, other: "Fingerprint") -> list[str]:
        """The parts that make it another model; the name is only a label."""
        return [
            part
            for part in ("config", "tokenizer", "weights")
            if getattr(self, part) != getattr(other, part)
        ]

    @property
    def target_weights(self) -> str:
        """What the matrices were made when the target was loaded: int8, or "" for nothing."""
        return self.weights.partition("-")[2]

    def other_template(self, other: "Fingerprint") -> bool:
        """Whether both recorded their chat templates, and these differ."""
        return bool(self.template and other.template) and self.template != other.template


def fingerprint(directory: Path, name: str, weights: str = "") -> Fingerprint:
    """Fingerprint of the target in `directory`, called `name`.

    Weights: 64 evenly spaced embedding rows and the final norm, by value in float32, so a
    re-sharded or re-named copy is the same target and a cast or fine-tuned one is not. Nor is one
    whose matrices were made int8 (`weights`) when it was loaded.
    """
    config = read_json(directory / "config.json")
    kept = {key: value for key, value in config.items() if key not in _IGNORED}
    files = TensorFiles(directory)
    embed = files.slice("model.embed_tokens.weight")
    rows = np.linspace(0, embed.get_shape()[0] - 1, 64).astype(int)
    digest = hashlib.sha256()
    for row in rows:
        digest.update(np.asarray(embed[int(row) : int(row) + 1], np.float32).tobytes())
    digest.update(np.asarray(files.read("model.norm.weight"), np.float32).tobytes())
    tokenizer = directory / "tokenizer.json"
    return Fingerprint(
        name=name,
        config=_hash(json.dumps(kept, sort_keys=True).encode()),
        tokenizer=_hash(tokenizer.read_bytes()) if tokenizer.exists() else "",
        weights=digest.hexdigest()[:16] + (f"-{weights}" if weights else ""),
        template=_hash(read_template(directory).encode()),
    )


def read_template(directory: Path) -> str:
    """The chat template of a folder; "" if it has none, all of them if several."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    try:
        value = read_json(directory / "tokenizer_config.json").get("chat_template") or ""
    except UserError:  # a tokenizer that cannot be read is only less to compare with
        return ""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def check_same_target(wanted: Fingerprint, found: Fingerprint, what: str) -> None:
    """Refuses a target that is not the one `what` was made with.

    Raises:
      UserError: naming the parts that differ.
    """
    if parts := wanted.differences(found):
        raise UserError(
            f"{what} was made with target {wanted.name!r}, but target {found.name!r} has another "
            f"{' and '.join(parts)}: use the same target, or prepare and train again"
        )


def arrays_hash(arrays: dict[str, np.ndarray]) -> str:
    """A hash of named arrays, bit for bit."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(arrays[name]).tobytes())
    return digest.hexdigest()[:16]


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
