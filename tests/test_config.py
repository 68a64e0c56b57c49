"""Config files and the command line: every field has a name, a default and can be overridden.

pytest tests/test_config.py
"""

import dataclasses
import importlib.util
import pathlib
import typing

import pytest
from absl import flags
from ml_collections import config_flags

from dspark_jax.core.config import (
    DataConfig,
    DrafterConfig,
    RunConfig,
    default_config,
    from_mapping,
    to_mapping,
)

# Of ml_collections, which loads a config file the old way.
pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")

CONFIGS = pathlib.Path(__file__).resolve().parent.parent / "configs"
REQUIRED = {"target", "data.prompts", "drafter.target_layer_ids", "drafter.mask_token_id"}


def fields(cls: type = RunConfig, prefix: str = "") -> set[str]:
    """The dotted names of all fields."""
    hints, found = typing.get_type_hints(cls), set()
    for field in dataclasses.fields(cls):
        name = prefix + field.name
        group = dataclasses.is_dataclass(hints[field.name])
        found |= fields(hints[field.name], f"{name}.") if group else {name}
    return found


def flat(values: dict, prefix: str = "") -> dict:
    """{"loss.kl": 0.0} of nested values."""
    found = {}
    for name, value in values.items():
        inner = isinstance(value, dict)
        found |= flat(value, f"{prefix}{name}.") if inner else {prefix + name: value}
    return found


def test_the_start_of_a_config_file_has_every_default():
    """And nothing where there is no default: taps and mask id are never guessed."""
    config = default_config()
    assert set(flat(config.to_dict())) == fields() - REQUIRED
    config.target, config.data.prompts = "some/target", "generator:8"
    config.drafter.update(target_layer_ids=(0, 2), mask_token_id=5)
    run = from_mapping(RunConfig, config.to_dict())
    assert run == RunConfig("some/target", DataConfig("generator:8"), DrafterConfig((0, 2), 5))
    config.loss.kl = 0.5
    assert default_config().loss.kl == 0.0  # each has its own


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.py")), ids=lambda path: path.stem)
def test_config_files_have_every_field(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config().to_dict()
    assert set(flat(config)) == fields()
    assert fields() == set(flat(to_mapping(from_mapping(RunConfig, config))))


def on_the_command_line(*overrides: str) -> dict:
    """The fields that a command would see."""
    arguments = ["train", f"--config={CONFIGS / 'smollm2.py'}", *overrides]
    values = flags.FlagValues()
    holder = config_flags.DEFINE_config_file(
        "config", lock_config=True, flag_values=values, sys_argv=arguments
    )
    values(arguments)
    return holder.value.to_dict()


OTHER = {
    bool: lambda value: not value,
    int: lambda value: value + 1,
    float: lambda value: value + 0.5,
    str: lambda value: value + "x",
    tuple: lambda value: value[1:],
}


def test_every_field_can_be_overridden():
    before = flat(on_the_command_line())
    wanted = {name: OTHER[type(value)](value) for name, value in before.items()}
    wanted = {"semantics": "paper"} | wanted | {"semantics": "paper"}  # first: it sets some others
    found = flat(on_the_command_line(*(f"--config.{name}={wanted[name]}" for name in wanted)))
    assert found == wanted and set(found) == fields()


def test_an_override_reaches_the_run():
    overrides = ("--config.loss.kl=0.25", "--config.drafter.vocab_size=0", "--config.loss.ce=2")
    run = from_mapping(RunConfig, on_the_command_line(*overrides))
    assert (run.loss.kl, run.loss.ce, run.drafter.vocab_size) == (0.25, 2.0, 0)
