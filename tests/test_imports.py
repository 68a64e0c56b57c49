"""The order of the house: imports point one way, files stay short and say what they are for.
And what is imported from outside is required.

Read with the syntax tree, so that an import inside a function counts as well.
"""

import ast
import importlib.metadata
import json
import pathlib
import re
import sys
import textwrap
import tomllib
from collections.abc import Iterable, Iterator

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = "dspark_jax"
# Each folder may import from itself and from those before it; the files at the top, which are the
# commands, from every folder.
FOLDERS = [
    "core", "kernels", "models", "weights", "checks", "data", "features", "training", "scheduling",
    "decoding", "serving",
]  # fmt: skip
OUTSIDE = ["experiments", "notebooks", "configs", "tests"]  # these may import the package only
LINES = 400


def imports(path: pathlib.Path, root: pathlib.Path) -> Iterator[tuple[int, str]]:
    """Yields (line, dotted name) of everything `path` imports, relative imports made absolute."""
    here = path.relative_to(root).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def room(names: list[str], commands: list[str]) -> str | None:
    """The folder, or the command, that the dotted name below the package belongs to."""
    return names[0] if names and names[0] in [*FOLDERS, *commands] else None


def violations(root: pathlib.Path) -> list[str]:
    """Everything under `root` that breaks the order, one line each."""
    found = []
    package = root / PACKAGE
    commands = [path.stem for path in package.glob("*.py") if path.stem != "__init__"]
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        name = f"{PACKAGE}/{path.relative_to(package)}"
        text = path.read_text(encoding="utf-8")
        if len(text.splitlines()) > LINES:
            found.append(f"{name}: {len(text.splitlines())} lines, more than {LINES}")
        if not ast.get_docstring(ast.parse(text)):
            found.append(f"{name}: no docstring")
        if parts[-1] == "utils":
            found.append(f"{name}: say what it holds; nothing is called utils")
        if len(parts) > 1 and parts[0] not in FOLDERS:
            found.append(f"{name}: {parts[0]} is not a folder of the house")
            continue
        if len(parts) > 1:
            allowed = FOLDERS[: FOLDERS.index(parts[0]) + 1]
        else:
            allowed = [] if parts[0] == "__init__" else FOLDERS
        for line, imported in imports(path, root):
            names = imported.split(".")
            if names[0] in OUTSIDE:
                found.append(f"{name}:{line} imports {imported}, which is outside the package")
            target = room(names[1:], commands) if names[0] == PACKAGE else None
            if target and target not in allowed and (target,) != parts:
                found.append(f"{name}:{line} imports {imported}, which comes after it")
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        for line in definitions(path):
            found.append(f"notebooks/{path.name} defines {line}; notebooks only import")
    return found


def definitions(notebook: pathlib.Path) -> Iterator[str]:
    """Yields the functions and classes that a notebook's code cells define."""
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code":
            continue
        lines = "".join(cell["source"]).splitlines()
        if lines and lines[0].startswith("%%"):
            continue
        code = "\n".join(re.sub(r"^(\s*)[%!].*", r"\1pass", line) for line in lines)
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield node.name


def test_the_house_is_in_order():
    assert not violations(ROOT), "\n" + "\n".join(violations(ROOT))


def write(root: pathlib.Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))


GOOD = {
    "dspark_jax/__init__.py": '"""Top."""\n',
    "dspark_jax/core/config.py": '"""Config."""\nimport os\n',
    "dspark_jax/models/layers.py": '"""Layers."""\nfrom dspark_jax.core import config\n',
    "dspark_jax/training/step.py": '"""Step."""\nfrom dspark_jax.models.layers import mlp\n',
    "dspark_jax/train.py": '"""Train."""\nfrom dspark_jax.training import step\n',
    "dspark_jax/evaluate.py": '"""Evaluate."""\nimport dspark_jax.decoding.rounds\n',
    "experiments/bench.py": '"""Bench."""\nfrom dspark_jax.train import run\n',
}


def test_a_tree_in_order_passes(tmp_path):
    write(tmp_path, GOOD)
    assert violations(tmp_path) == []


NOTEBOOK = '{"cells": [{"cell_type": "code", "source": ["%pip list\\n", "def f():\\n", " pass"]}]}'


@pytest.mark.parametrize(
    "name, text, expected",
    [
        ("core/a.py", '"""A."""\nfrom dspark_jax.models.layers import x\n', "core/a.py:2 imports"),
        ("core/a.py", '"""A."""\nfrom dspark_jax import models\n', "core/a.py:2 imports"),
        ("core/a.py", '"""A."""\nfrom ..models import layers\n', "core/a.py:2 imports"),
        ("data/a.py", '"""A."""\ndef f():\n    import dspark_jax.training.step\n', "data/a.py:3"),
        ("core/a.py", '"""A."""\nimport dspark_jax.train\n', "dspark_jax.train, which comes after"),
        ("train.py", '"""A."""\nfrom dspark_jax.evaluate import run\n', "train.py:2 imports"),
        ("__init__.py", '"""A."""\nfrom dspark_jax.core import config\n', "__init__.py:2 imports"),
        ("core/a.py", '"""A."""\nfrom experiments import bench\n', "outside the package"),
        ("core/a.py", "import os\n", "no docstring"),
        ("core/a.py", '"""A."""\n' + "x = 1\n" * LINES, "401 lines"),
        ("helpers/a.py", '"""A."""\n', "not a folder of the house"),
        ("core/utils.py", '"""A."""\n', "nothing is called utils"),
        ("../notebooks/n.ipynb", NOTEBOOK, "defines f"),
    ],
)
def test_one_thing_out_of_order_is_named(tmp_path, name, text, expected):
    write(tmp_path, GOOD)
    write(tmp_path, {f"dspark_jax/{name}": text})
    found = violations(tmp_path)
    assert len(found) == 1 and expected in found[0], found


# Requirements.


def unnamed(root: pathlib.Path, requirements: Iterable[str]) -> list[str]:
    """Third-party modules that the package imports, and that come with none of `requirements`."""
    names = {canonicalize_name(Requirement(line).name) for line in requirements}
    projects = importlib.metadata.packages_distributions()
    found = set()
    for path in sorted((root / PACKAGE).rglob("*.py")):
        for line, imported in imports(path, root):
            module = imported.split(".")[0]
            if module in sys.stdlib_module_names or module == PACKAGE:
                continue
            if not names & {canonicalize_name(name) for name in projects.get(module, [module])}:
                found.add(f"{path.relative_to(root)}:{line} imports {module}")
    return sorted(found)


def test_what_is_imported_is_required():
    """What another package happens to bring today may be gone tomorrow."""
    files = "requirements.txt", "requirements-serve.txt"
    lines = [line for name in files for line in (ROOT / name).read_text().splitlines()]
    assert not unnamed(ROOT, [line for line in lines if line and not line.startswith("#")])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"].values()
    assert not unnamed(ROOT, [*project["dependencies"], *(x for group in optional for x in group)])


OUTSIDERS = """
import os.path, numpy.linalg
from dspark_jax.core import config
def f():
    from absl import flags
    import yaml
"""


def test_an_import_without_a_requirement_is_named(tmp_path):
    write(tmp_path, {"dspark_jax/core/a.py": OUTSIDERS})
    assert unnamed(tmp_path, ["numpy>=2", "absl_py", "PyYAML; python_version > '3'"]) == []
    at = "dspark_jax/core/a.py"
    assert unnamed(tmp_path, ["numpy[x]"]) == [f"{at}:5 imports absl", f"{at}:6 imports yaml"]
