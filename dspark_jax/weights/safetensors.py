"""Targets from Hugging Face directories: one or many safetensors files, each device its shard."""

import json
from pathlib import Path

import jax
import numpy as np
import safetensors
from flax import nnx

from dspark_jax.core.errors import UserError
from dspark_jax.core.sharding import RULES, abstract
from dspark_jax.core.trees import named, with_arrays
from dspark_jax.models import linear
from dspark_jax.models.target import Target, TargetConfig
from dspark_jax.weights import names
from dspark_jax.weights.experts import expert_tensor

# The text model in files of composite models, as it is called here and in those of text models.
_TEXT = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)


class TensorFiles:
    """The tensors of a directory by name, wherever its index says they are; read lazily.

    Of a composite model only the text model's, by the names of a text model's own files.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        index = directory / "model.safetensors.index.json"
        single = directory / "model.safetensors"
        if index.exists():
            self.files = read_json(index).get("weight_map")
            if not isinstance(self.files, dict):
                raise UserError(f"{index}: has no weight_map; download the model again")
        elif single.exists():
            with _open(single) as file:
                self.files = dict.fromkeys(file.keys(), single.name)
        else:
            raise UserError(
                f"{directory}: neither model.safetensors nor model.safetensors.index.json; "
                "is this a model directory?"
            )
        self._stored = _text_names(directory, self.files)
        self.files = {name: self.files[stored] for name, stored in self._stored.items()}
        self._open: dict[str, safetensors.safe_open] = {}

    def names(self) -> list[str]:
        """All tensor names."""
        return sorted(self.files)

    def slice(self, name: str):
        """A lazy slice of one tensor: `.get_shape()`, and `[...]` reads only what is asked."""
        if name not in self.files:
            raise UserError(f"{self.directory}: tensor {name!r} is missing")
        path = self.directory / self.files[name]
        if not path.exists():
            raise UserError(f"{self.directory}: the index names {path.name}, which is missing")
        if path.name not in self._open:
            self._open[path.name] = _open(path)
        try:
            return self._open[path.name].get_slice(self._stored[name])
        except safetensors.SafetensorError as error:
            raise UserError(f"{path}: tensor {name!r} cannot be read ({error})") from None

    def read(self, name: str) -> np.ndarray:
        """One whole tensor."""
        return self.slice(name)[...]


def _text_names(directory: Path, stored: dict[str, str]) -> dict[str, str]:
    """{name: name in the files}."""
    if not any(name.startswith(_TEXT[0][0]) or name.startswith(_TEXT[1][0]) for name in stored):
        return {name: name for name in stored}
    found: dict[str, str] = {}
    for name in stored:
        plain = next((new + name[len(old) :] for old, new in _TEXT if name.startswith(old)), name)
        if plain == name and not name.startswith("lm_head."):
            continue  # of the part that sees or hears
        if plain in found:
            raise UserError(f"{directory}: {found[plain]!r} and {name!r} are one tensor")
        found[plain] = name
    return found


def _open(path: Path):
    try:
        return safetensors.safe_open(path, framework="numpy")
    except (safetensors.SafetensorError, OSError) as error:
        raise UserError(
            f"{path}: damaged or not a safetensors file ({error}); copy or export it again"
        ) from None


def read_json(path: Path) -> dict:
    """A JSON object; a missing or damaged file is a `UserError`."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: not readable as JSON ({error}); repair it or copy it again"
        ) from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: must hold a JSON object")
    return value


def target_config(directory: Path, dtype: str) -> TargetConfig:
    """Shape of the target in `directory`."""
    path = directory / "config.json"
    return TargetConfig.from_hf(read_json(path), dtype, str(path))


def _check_mesh(config: TargetConfig, where: Path) -> None:
    """Refuses a mesh whose axes do not divide the target."""
    mesh = jax.sharding.get_mesh()
    sizes = [
        ("heads", "num_kv_heads", config.num_kv_heads),
        ("mlp", "intermediate_size", config.intermediate_size),
        ("vocab", "vocab_size", config.vocab_size),
        ("embed", "hidden_size", config.hidden_size),
    ]
    if config.experts:
        sizes.append(("experts", "num_experts", config.experts.count))
    if own := config.gemma4:
        wide = own.per_layer_width * config.num_layers
        sizes.append(("heads", "num_global_key_value_heads", own.global_kv_heads))
        sizes.append(("vocab", "vocab_size_per_layer_input", own.per_layer_vocab))
        sizes.append(("embed", "hidden_size_per_layer_input * num_hidden_layers", wide))
    for axis, field, size in sizes:
        parts = mesh.shape[RULES[axis]]
        if size % parts:
            raise UserError(
                f"{where}: {field}={size} cannot be cut into the {parts} parts of mesh axis "
                f"{RULES[axis]!r}; change --config.mesh.{RULES[axis]}"
            )


def _check_no_extra(files: TensorFiles, used: set[str], config: TargetConfig) -> None:
    """Refuses tensors that the model would not use: a bias, a scale, more layers.

    A second copy of a tied head, the RoPE buffers of old Llama files and keys of layers that see
    another one's are harmless.
    """
    known = used | ({"lm_head.weight"} if config.tie_embeddings else set())
    for layer in range(config.num_layers):  # files may hold what layers that borrow never use
        if config.kv_source(layer) != layer:
            parts = ("k_proj", "v_proj", "k_norm")
            known |= {f"model.layers.{layer}.self_attn.{part}.weight" for part in parts}
    extra = [n for n in files.names() if n not in known and "rotary_emb." not in n]
    if extra:
        raise UserError(
            f"{files.directory}: tensor {extra[0]!r} has no place in the model that config.json "
            f"describes ({len(extra)} such tensors)"
        )


def load_target(directory: Path, dtype: str, weights: str = "") -> Target:
    """Loads a target onto the current mesh; each device reads only the bytes of its shards.

    Args:
      directory: config.json plus model.safetensors or an index and its shards.
      dtype: the parameters' dtype; the file's values are converted to it by value.
      weights: "int8" keeps the matrices of attention and MLP as int8, rounded from the file's own
        values, with a scale for each output channel (models/linear.py); "" = in `dtype`.

    Raises:
      UserError: missing or damaged files, wrong family, missing, extra or misshapen tensors, a
        mesh that does not divide the target, experts as int8.
    """
    config = target_config(directory, dtype)
    _check_mesh(config, directory)
    if weights and config.experts:
        raise UserError(f"{directory}: target_weights={weights!r}: mixtures of experts have none")

    def build(key: jax.Array) -> Target:
        target = Target(config, rngs=nnx.Rngs(key))
        if weights:
            linear.with_int8(target.layers)
        return target

    template = abstract(build, jax.random.key(0))
    files = TensorFiles(directory)
    arrays, used, wanted_arrays = {}, set(), named(template)
    for ours, wanted in wanted_arrays.items():
        matrix = ours.removesuffix("_scale") if weights else ours  # of an int8 matrix: the file's
        full = wanted_arrays[matrix].shape
        theirs, rows = names.to_file(names.TARGET, matrix)
        if ".experts." in ours:
            lazy = expert_tensor(files, theirs, wanted.shape[0])
            used |= lazy.names
        else:
            lazy = files.slice(theirs)
            used.add(theirs)
        if lazy.get_dtype() not in ("F32", "F16", "BF16"):
            raise UserError(
                f"{directory}: tensor {theirs!r} has dtype {lazy.get_dtype()}; only unquantised "
                "weights (F32, F16, BF16) are supported"
            )
        shape = tuple(lazy.get_shape())
        expected = names.file_shape(full, rows)
        if shape != expected:
            raise UserError(
                f"{directory}: tensor {theirs!r} has shape {list(shape)}, config.json implies "
                f"{list(expected)}"
            )

        def read(index, lazy=lazy, rows=rows, wanted=wanted):
            part = lazy[names.file_slices(index, wanted.shape, rows)]
            return (
                np.ascontiguousarray(part).reshape(_cut(index, wanted.shape)).astype(wanted.dtype)
            )

        def read_int8(
            index, lazy=lazy, full=full, wanted=wanted, matrix=matrix, scale=matrix != ours
        ):
            lead = linear.ROWS[matrix.rsplit(".", 1)[-1]]
            whole = (
                *index[:lead],
                *[slice(None)] * (len(full) - lead),
            )  # a scale is of all columns
            rows, _ = names.file_slices(whole, full, lead)
            values, scales = linear.quantise_rows(lazy[rows])
            if not scale:
                values = values.reshape(*_cut(whole, full)[:lead], *full[lead:])
                return np.ascontiguousarray(values[(*[slice(None)] * lead, *index[lead:])])
            return scales.reshape(_cut(index, wanted.shape))

        if wanted_arrays[matrix].dtype == np.int8:
            read = read_int8
        arrays[ours] = jax.make_array_from_callback(wanted.shape, wanted.sharding, read)
    _check_no_extra(files, used, config)
    return with_arrays(template, arrays)


def _cut(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of array[index]."""
    return tuple(len(range(*i.indices(n))) for i, n in zip(index, shape, strict=True))
