"""The quickstart notebook: its shape, and all of it run headlessly on a tiny target.

python -m pytest tests/test_notebook.py
"""

import json
import os
import pathlib

import nbformat
import pytest
from nbclient import NotebookClient
from tiny import make_target, write_prompts

from dspark_jax.core.errors import UserError
from dspark_jax.core.versions import check_versions, jax_versions, misfit, pins

ROOT = pathlib.Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "notebooks" / "quickstart.ipynb"


@pytest.fixture
def notebook():
    return nbformat.read(NOTEBOOK, as_version=4)


def code(notebook) -> dict[str, str]:
    return {cell.id: cell.source for cell in notebook.cells if cell.cell_type == "code"}


def test_outputs_are_stripped(notebook):
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None, cell.id


def test_parameters_come_first_and_the_install_moves_no_jax(notebook):
    names = list(code(notebook))
    assert names[0] == "parameters"
    assert names.index("locate") < names.index("install") < names.index("versions")
    install = code(notebook)["install"]
    assert "--no-deps" in install.splitlines()[1]  # else it compiles llama.cpp
    assert "{keep}" in install and "keep = " in code(notebook)["locate"]
    # jax is imported only after the versions have been compared.
    before = "\n".join(source for name, source in code(notebook).items() if name != "versions")
    assert "import jax\n" not in before
    versions = code(notebook)["versions"]
    assert versions.index("check_versions(before)") < versions.index("import jax")


def test_versions_that_were_moved_stop_with_advice():
    now = jax_versions()
    assert check_versions(now) == now and now["jax"] and now["jaxlib"]
    assert f"jax=={now['jax']}" in pins(now)
    with pytest.raises(UserError, match=f"moved jax from 0.0.1 to {now['jax']}.*restart"):
        check_versions(now | {"jax": "0.0.1"})
    with pytest.raises(UserError, match="moved jax-cuda13-plugin from 0.0.1 to nowhere"):
        check_versions(now | {"jax-cuda13-plugin": "0.0.1"})


ASKS = [
    "jaxlib<=0.10.2,>=0.10.1",
    'jaxlib==0.10.1; extra == "ci"',
    'libtpu==0.0.42.*; extra == "tpu"',
    'jax_cuda13_plugin[with-cuda]<=0.10.2,>=0.10.2; extra == "cuda13"',
    "numpy>=2.0",
]


@pytest.mark.parametrize(
    "parts, problem",
    [
        ({"jaxlib": "0.10.2"}, None),
        ({"jaxlib": "0.10.1", "libtpu": "0.0.42.1"}, None),
        ({"jaxlib": "0.10.2", "jax-cuda13-plugin": "0.10.2"}, None),
        ({"jaxlib": "0.10.3"}, "jaxlib"),
        ({"jaxlib": "0.10.2", "libtpu": "0.0.41"}, "libtpu"),
        ({"jaxlib": "0.10.2", "jax-cuda13-plugin": "0.10.1"}, "jax-cuda13-plugin"),
    ],
)
def test_parts_that_do_not_fit_are_named(parts, problem):
    found = misfit("jax", ASKS, {"jax": "0.10.2", **parts})
    if problem is None:
        assert found is None
    else:
        assert f"asks for {problem}" in found and f"{parts[problem]} is installed" in found


def test_it_runs_from_top_to_bottom(notebook, tmp_path):
    target = make_target(tmp_path / "target")
    prompts = write_prompts(tmp_path / "prompts.jsonl", 12)
    overrides = {
        "target": str(target),
        "data.prompts": str(prompts),
        "data.max_prompt_tokens": 64,
        "data.max_new_tokens": 16,
        "data.generation_batch": 4,
        "data.sequence_length": 96,
        "data.validation_fraction": 0.3,
        "drafter.target_layer_ids": (0, 2),
        "drafter.mask_token_id": 270,
        "drafter.block_size": 3,
        "drafter.num_layers": 1,
        "drafter.markov_rank": 8,
        "drafter.vocab_size": 0,
        "drafter.init": "normal",
        "train.num_steps": 4,
        "train.num_anchors": 8,
        "train.log_every": 2,
        "train.validate_every": 4,
        "train.checkpoint_every": 4,
        "train.loss_chunk": 64,
    }
    values = {
        "WORKDIR": str(tmp_path / "run"),
        "OVERRIDES": overrides,
        "PROMPT": "sun 3?",
        "TASKS": str(prompts),
        "MAX_NEW_TOKENS": 12,
    }
    cells = [cell for cell in notebook.cells if "install" not in cell.metadata.get("tags", ())]
    at = next(i for i, cell in enumerate(cells) if "parameters" in cell.metadata.get("tags", ()))
    given = "\n".join(f"{name} = {value!r}" for name, value in values.items())
    cells.insert(at + 1, nbformat.v4.new_code_cell(given))
    notebook.cells = cells
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    client = NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": NOTEBOOK.parent}}
    )
    client.execute(env=environment)

    outputs = {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
    text = {
        name: "".join(output.get("text", "") for output in found) for name, found in outputs.items()
    }
    assert "jaxlib" in text["versions"] and "CpuDevice" in text["versions"]
    assert "expected accepted length" in text["train"]
    assert "same text as plain" in text["decode"] and "accepted length" in text["decode"]
    assert "tokens per round" in text["measure"]
    for name in ("curve", "acceptance"):
        pictures = [o for o in outputs[name] if "image/png" in o.get("data", {})]
        assert len(pictures) == 1, name
    report = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert report["greedy_equal"] == report["greedy_compared"] > 0
