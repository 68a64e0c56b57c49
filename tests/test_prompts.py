"""Prompts from files, hub data sets and the generator: pytest tests/test_prompts.py"""

import collections
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest

from dspark_jax.core.errors import UserError
from dspark_jax.data import generator, prompts
from dspark_jax.data.conversation import Conversation, Message
from dspark_jax.data.generator import generate_prompts, split_of
from dspark_jax.data.prompts import load_prompts

# sha256 of the prompts in `test_same_prompts_in_every_process_and_on_every_platform`. A new value
# means that a seed no longer stands for the prompts that earlier runs were trained on.
GENERATED = "09ea501000e05eedeb8bed252162b797c05a3d57cdffa99b3cc2791f8b02d956"


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def user(*texts):
    return tuple(Message("user", text) for text in texts)


def texts(conversations):
    return [conversation.messages[0].content for conversation in conversations]


# Rows


@pytest.mark.parametrize(
    "row, wanted",
    [
        ({"prompt": "a"}, user("a")),
        ({"prompt": [{"role": "user", "content": "a"}]}, user("a")),
        ({"turns": ["a", "b"]}, user("a", "b")),
        (
            {"messages": [{"role": r, "content": r[0]} for r in ("user", "assistant", "user")]},
            user("u", "u"),
        ),
        (
            {"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "a"}]},
            (Message("system", "s"), *user("a")),
        ),
        (
            {"conversations": [{"from": "gpt", "value": "x"}, {"from": "human", "value": "a"}]},
            user("a"),
        ),
        # An answer that is missing is as good as one that is dropped.
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant"}]}, user("a")),
        ({"prompt": "p", "messages": [{"role": "user", "content": "m"}]}, user("m")),
        ({"prompt": "p", "messages": None, "other": 1}, user("p")),
    ],
)
def test_columns(tmp_path, row, wanted):
    path = write(tmp_path / "data.jsonl", row)
    assert load_prompts(path) == [Conversation("data-1", "data", wanted)]


@pytest.mark.parametrize(
    "row, reason",
    [
        ({"text": "a", "label": 1}, "none of the columns .*; found: label, text"),
        ({}, "found: nothing"),
        ({"prompt": None}, "found: prompt"),
        (["a"], "of type list"),
        ({"prompt": ""}, "column 'prompt' has an empty user message"),
        ({"prompt": " \n"}, "empty user message"),
        ({"prompt": []}, "holds no user message"),
        ({"prompt": 5}, "column 'prompt' is of type int"),
        ({"turns": "a"}, "column 'turns' is of type str"),
        ({"turns": ["a", 5]}, "user text is of type int"),
        ({"turns": ["a", ""]}, "empty user message"),
        ({"messages": ["a"]}, "message 1 is of type str"),
        ({"messages": [{"role": "user"}]}, "user text is null"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "no user message"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "message 1 has the role 'tool'"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "message 1 has the role"),
        (
            {"messages": [{"role": r, "content": "a"} for r in ("user", "system")]},
            "system message that is not the first",
        ),
        ({"prompt": "\ud800"}, "lone surrogate"),
    ],
)
def test_row_without_a_prompt_is_named(tmp_path, row, reason):
    path = write(tmp_path / "data.jsonl", {"prompt": "a"}, row)
    with pytest.raises(UserError, match=f"data.jsonl, row 2.*{reason}") as caught:
        load_prompts(path)
    assert "\n" not in str(caught.value)


def test_source_column_and_ids(tmp_path):
    rows = [{"prompt": "a", "source": "x"}, {"prompt": "a", "source": None}, {"prompt": "b"}]
    found = load_prompts(write(tmp_path / "data.jsonl", *rows))
    assert [c.id for c in found] == ["data-1", "data-2", "data-3"]
    assert [c.source for c in found] == ["x", "data", "data"]


# Files


def test_line_numbers_count_blank_lines(tmp_path):
    path = tmp_path / "data.jsonl"
    good = '\ufeff{"prompt": "a"}\r\n\n{"prompt": "b\u2028c"}\n'
    path.write_text(good + '\n{"prompt"\n', encoding="utf-8")
    with pytest.raises(UserError, match="data.jsonl, row 5 is not valid JSON"):
        load_prompts(str(path))
    path.write_text(good, encoding="utf-8")
    found = load_prompts(str(path))
    assert [(c.id, c.messages) for c in found] == [
        ("data-1", user("a")),
        ("data-3", user("b\u2028c")),
    ]


def test_json_array(tmp_path):
    path = tmp_path / "data.json"
    path.write_text(json.dumps([{"prompt": "a"}, {"turns": ["b"]}], indent=1))
    assert texts(load_prompts(str(path))) == ["a", "b"]
    path.write_text('[{"prompt": "a"}')
    with pytest.raises(UserError, match="data.json is not valid JSON"):
        load_prompts(str(path))


def test_parquet(tmp_path):
    path = tmp_path / "data.parquet"
    rows = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "x"}]},
        {"messages": [{"role": "user", "content": "b"}]},
        {"messages": []},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows[:2]), path)
    found = load_prompts(str(path))
    assert [(c.id, c.messages) for c in found] == [("data-1", user("a")), ("data-2", user("b"))]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    with pytest.raises(UserError, match="data.parquet, row 3, column 'messages'"):
        load_prompts(str(path))
    path.write_bytes(b"PAR1")
    with pytest.raises(UserError, match="not a readable parquet"):
        load_prompts(str(path))


def test_folder_glob_and_list(tmp_path):
    write(tmp_path / "b.jsonl", {"prompt": "b"})
    write(tmp_path / "a.json", {"prompt": "a"})
    (tmp_path / "notes.txt").write_text("no prompts")
    other = tmp_path / "other"
    other.mkdir()
    write(other / "b.jsonl", {"prompt": "c"})
    assert texts(load_prompts(str(tmp_path))) == ["a", "b"]
    assert texts(load_prompts(f"{tmp_path}/*")) == ["a", "b"]
    assert texts(load_prompts(f"{tmp_path}/**/b*")) == ["b", "c"]
    both = load_prompts(f"{tmp_path}/b.jsonl, {other}/b.jsonl, generator:2")
    assert texts(both)[:2] == ["b", "c"] and len(both) == 4
    assert [c.id for c in both][:2] == ["b-1", "b~2-1"]
    assert len({c.id for c in both}) == 4
    with pytest.raises(UserError, match="twice"):
        load_prompts(f"{tmp_path},{tmp_path}/b.jsonl")


@pytest.mark.parametrize(
    "spec, reason",
    [
        ("absent.jsonl", "no existing file"),
        ("some/absent.jsonl", "no existing file"),
        ("word", "no existing file"),
        ("", "no existing file"),
        ("/absent/folder", "no existing file"),
        ("{here}/*.parquet", "no .* file matches"),
        ("{here}/empty", "holds no"),
        ("{here}/notes.txt", "is none of"),
        ("{here}/void.jsonl", "holds no rows"),
        ("{here}/latin.jsonl", "cannot be read"),
        ("generator:", "generator:1000"),
        ("generator:0", "generator:1000"),
        ("generator:-3", "generator:1000"),
        ("generator:8:", "generator:1000:4"),
        ("generator:8:1", "generator:1000:4"),
        ("generator:8:x", "generator:1000:4"),
    ],
)
def test_spec_that_names_nothing(tmp_path, spec, reason):
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("a")
    (tmp_path / "void.jsonl").write_text("\n\n")
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}')
    with pytest.raises(UserError, match=reason):
        load_prompts(spec.format(here=tmp_path))


def test_limit_is_a_seeded_draw_over_all_files_in_order(tmp_path):
    for name in "ab":
        write(tmp_path / f"{name}.jsonl", *({"prompt": f"{name}{i}"} for i in range(20)))
    everything = load_prompts(str(tmp_path))
    assert len(everything) == 40
    drawn = load_prompts(str(tmp_path), limit=10, seed=1)
    positions = [everything.index(c) for c in drawn]
    assert len(drawn) == 10 and positions == sorted(set(positions))
    assert {c.source for c in drawn} == {"a", "b"}
    assert load_prompts(str(tmp_path), limit=10, seed=1) == drawn
    assert load_prompts(str(tmp_path), limit=10, seed=2) != drawn
    assert load_prompts(str(tmp_path), limit=40) == everything
    assert load_prompts(str(tmp_path), limit=99) == everything
    with pytest.raises(UserError, match="limit of 0"):
        load_prompts(str(tmp_path), limit=0)


# Hub data sets


def test_hub_data_set(tmp_path, monkeypatch):
    """`datasets` takes a local folder for a hub name: the loading is real, only the hub is not."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "org" / "name"
    folder.mkdir(parents=True)
    write(folder / "test.jsonl", {"prompt": "a"}, {"prompt": "b", "source": "x"})
    table = prompts._open_hub("org/name", "test")
    assert table.conversations([0, 1]) == [
        Conversation("name-test-1", "org/name", user("a")),
        Conversation("name-test-2", "x", user("b")),
    ]
    with pytest.raises(UserError, match="data set 'org/name', split 'absent': "):
        prompts._open_hub("org/name", "absent")


def test_hub_data_set_out_of_reach(monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="data set 'no-such-org/no-such-name:main', split 'train'"):
        load_prompts("no-such-org/no-such-name:main")


# Generator


def test_splits_are_disjoint_whatever_the_seed():
    train = [set(texts(generate_prompts(2000, seed, "train"))) for seed in (0, 1)]
    heldout = [set(texts(generate_prompts(2000, seed, "heldout"))) for seed in (0, 2)]
    assert all(len(found) == 2000 for found in train + heldout)
    assert not (train[0] | train[1]) & (heldout[0] | heldout[1])
    assert {split_of(text) for text in train[0]} == {"train"}


def test_families_take_turns_and_a_prefix_stays():
    found = generate_prompts(2000, 0)
    assert set(collections.Counter(c.source for c in found).values()) == {500}
    assert {c.source for c in found} == {"word_problems", "code", "questions", "rewriting"}
    assert generate_prompts(501, 0) == found[:501]
    assert generate_prompts(2000, 1) != found
    assert len({c.id for c in found}) == 2000
    assert all(len(c.messages) == 1 and c.messages[0].role == "user" for c in found)


def test_same_prompts_in_every_process_and_on_every_platform():
    code = (
        "import hashlib\n"
        "from dspark_jax.data.generator import generate_prompts as g\n"
        "found = g(400, 7, 'train') + g(400, 7, 'heldout')\n"
        "text = '\\n'.join(c.messages[0].content for c in found)\n"
        "print(hashlib.sha256(text.encode()).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=pathlib.Path(__file__).parents[1],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    here = "\n".join(t for s in ("train", "heldout") for t in texts(generate_prompts(400, 7, s)))
    assert digests == {hashlib.sha256(here.encode()).hexdigest()} == {GENERATED}


def test_every_family_has_thousands_of_short_prompts():
    found = generate_prompts(4 * 5000, 3)
    assert len(set(texts(found))) == len(found)
    assert max(map(len, texts(found))) < 200
    assert max(len(text.split()) for text in texts(found)) < 45
    shapes = collections.defaultdict(set)
    for c in found:  # the first three words, numbers and names aside
        words = re.sub(r"\d+", "0", c.messages[0].content).split()[:3]
        shapes[c.source].add(" ".join(w for w in words if w not in generator.phrases.NAMES))
    assert min(map(len, shapes.values())) >= 10
    assert not [t for t in texts(found) if re.search(r"[{}]|  |\.\.| ,|\ba [aeio]\w", t)]


def test_few_fillings_make_a_small_domain():
    names = generator.phrases.NAMES
    train = load_prompts("generator:800:3")
    heldout = load_prompts("generator:120:3", split="heldout")
    assert not set(texts(train)) & set(texts(heldout))
    assert {c.source for c in train} == {"word_problems", "code", "questions", "rewriting"}
    for found in (train, heldout):
        said = {name for name in names if re.search(rf"\b{name}\b", " ".join(texts(found)))}
        assert said == set(names[:3])
    everything = " ".join(texts(generate_prompts(800, 0)))
    assert sum(bool(re.search(rf"\b{name}\b", everything)) for name in names) > 3
    topics = [topic for group in generator.phrases.TOPIC_GROUPS[3:] for topic in group]
    asked = " ".join(texts(c for c in train if c.source == "questions"))
    assert not [topic for topic in topics if topic in asked]


def test_word_problems_come_out_whole():
    stories = texts(c for c in generate_prompts(8000, 0) if c.source == "word_problems")
    packs = [re.search(r"packs (\d+) \w+ into boxes of (\d+)", t) for t in stories]
    gives = [re.search(r"has (\d+) \w+ and gives (\d+)", t) for t in stories]
    sales = [re.search(r"costs \$(\d+). In a sale the price drops by (\d+)", t) for t in stories]
    for found, whole in (
        (packs, lambda a, b: a % b == 0),
        (gives, lambda a, b: a > b),
        (sales, lambda a, b: a * b % 100 == 0 and b < 100),
    ):
        numbers = [tuple(map(int, m.groups())) for m in found if m]
        assert len(numbers) > 20 and all(whole(a, b) for a, b in numbers)


def test_generator_refuses_what_it_cannot_give(monkeypatch):
    with pytest.raises(UserError, match="split 'test'"):
        generate_prompts(1, 0, "test")
    with pytest.raises(UserError, match="-1 prompts"):
        generate_prompts(-1, 0)
    assert generate_prompts(0, 0) == []
    # A family of 40 prompts is used up, and says so.
    few = {"few": lambda rng, words: f"prompt {rng.randrange(40)}"}
    monkeypatch.setattr(generator, "FAMILIES", few)
    monkeypatch.setattr(generator, "_MAX_TRIES", 1000)
    with pytest.raises(UserError, match="'few' has no more after"):
        generate_prompts(41, 0)
