"""Responses, the data set, packing and batches: pytest tests/test_data.py"""

import collections
import dataclasses
import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_targets import CHATML, LETTERS, write_talker

from dspark_jax.core.config import DataConfig, DrafterConfig, RunConfig
from dspark_jax.core.errors import UserError
from dspark_jax.core.sharding import make_mesh, place
from dspark_jax.data.batches import batch_rows, pack, split
from dspark_jax.data.dataset import Row, load_dataset, save_dataset
from dspark_jax.data.opened import open_target, open_tokenizer
from dspark_jax.decoding import responses
from dspark_jax.decoding.plain import generate_plain
from dspark_jax.decoding.responses import Request, prepare_dataset, request_seed, respond
from dspark_jax.decoding.sampling import Purpose, SamplingParams, purpose_key, sample
from dspark_jax.decoding.verify import Reason
from dspark_jax.weights.fingerprint import Fingerprint

# Rows and batches


def document(name, size, supervised=None, seed=0):
    """Random ids from 1; supervised from the middle on unless positions are given."""
    rng = np.random.default_rng((seed, size))
    mask = np.zeros(size, bool)
    mask[size // 2 if supervised is None else supervised] = True
    if supervised is None:
        mask[size // 2 :] = True
    return Row(name, "test", rng.integers(1, 99, size).astype(np.int32), mask)


def documents_of(packed):
    """name -> (ids, mask), cut out of the packed rows by their document numbers."""
    found = {}
    for row, names in enumerate(packed.names):
        for number, name in enumerate(names, start=1):
            (there,) = np.nonzero(packed.documents[row] == number)
            assert (np.diff(there) == 1).all()
            np.testing.assert_array_equal(packed.positions[row, there], np.arange(len(there)))
            assert name not in found
            found[name] = (packed.tokens[row, there], packed.loss_mask[row, there])
        assert packed.documents[row].max() == len(names)
    return found


def test_packing_loses_nothing():
    rows = [document(f"d{i}", size) for i, size in enumerate([20, 7, 31, 32, 5, 11, 13, 9, 4, 28])]
    packed = pack(rows, 32)
    assert (packed.dropped, packed.truncated) == (0, 0)
    found = documents_of(packed)
    assert set(found) == {row.id for row in rows}
    for row in rows:
        np.testing.assert_array_equal(found[row.id][0], row.ids)
        np.testing.assert_array_equal(found[row.id][1], row.loss_mask)
    padding = packed.documents == 0
    assert not packed.tokens[padding].any() and not packed.loss_mask[padding].any()
    assert packed.padding == pytest.approx(1 - 160 / packed.tokens.size)
    assert len(packed) == 6  # 160 tokens: five rows of 32, and first-fit needs one more
    again = pack(rows[::-1], 32)  # the order in which they come does not matter
    assert again.names == packed.names
    np.testing.assert_array_equal(again.tokens, packed.tokens)


def test_rows_are_in_no_order_of_length():
    """By a hash of the ids: both halves hold long documents and short ones, and new ids another
    order."""

    def sizes(prefix):
        rows = [document(f"{prefix}{i}", 30 if i < 30 else 17) for i in range(60)]
        return [int((row > 0).sum()) for row in pack(rows, 32).documents]

    lengths = sizes("a")
    assert sorted(lengths) == [17] * 30 + [30] * 30
    assert all(5 < half.count(30) < 25 for half in (lengths[:30], lengths[30:]))
    assert sizes("b") != lengths


def test_documents_are_cut_or_dropped_and_counted():
    rows = [
        document("long", 50),  # 7 of its supervised tokens are within 32
        document("cut off", 70),  # supervised from 35 on: nothing is left
        document("one token", 20, [19]),
        document("apart", 20, [10, 12]),  # two, but no anchor has a supervised next token
        document("at the cut", 40, [31, 32]),
        document("just", 20, [3, 4]),
    ]
    packed = pack(rows, 32)
    assert (packed.dropped, packed.truncated) == (4, 3)
    found = documents_of(packed)
    assert set(found) == {"long", "just"}
    np.testing.assert_array_equal(found["long"][0], rows[0].ids[:32])
    np.testing.assert_array_equal(found["long"][1], rows[0].loss_mask[:32])
    with pytest.raises(UserError, match="no document has two adjacent supervised tokens within 4"):
        pack(rows, 4)


@pytest.mark.parametrize(("num_rows", "batch_size"), [(12, 4), (10, 4), (7, 16), (1, 3)])
def test_every_row_once_per_epoch(num_rows, batch_size):
    """Batches that straddle epochs, or hold several, included; any step by itself."""
    steps = -(-2 * num_rows // batch_size)
    order = {"num_rows": num_rows, "batch_size": batch_size, "seed": 3}
    drawn = [batch_rows(step, **order) for step in range(steps)]
    assert {len(rows) for rows in drawn} == {batch_size}
    joined = np.concatenate(drawn)[: 2 * num_rows].reshape(2, num_rows)
    for epoch in joined:
        np.testing.assert_array_equal(np.sort(epoch), np.arange(num_rows))
    for step in reversed(range(steps)):
        np.testing.assert_array_equal(batch_rows(step, **order), drawn[step])
    if num_rows > 6:
        assert (joined[0] != joined[1]).any()
        other = np.concatenate([batch_rows(s, **order | {"seed": 4}) for s in range(steps)])
        assert (other[: 2 * num_rows] != joined.ravel()).any()


def test_split_keeps_conversations_together():
    rows = [document(f"file-{i}#a#{s}.1", 10) for i in range(400) for s in range(3)]
    train, validation = split(rows, 0.25)
    assert len(train) + len(validation) == len(rows)
    names = [{row.id.rsplit("#", 1)[0] for row in part} for part in (train, validation)]
    assert not names[0] & names[1]
    assert 70 <= len(names[1]) <= 130
    shuffled = split(rows[::-1], 0.25)[1]
    assert {row.id for row in shuffled} == {row.id for row in validation}
    more = {row.id for row in split(rows, 0.5)[1]}
    assert {row.id for row in validation} < more  # a larger share only adds
    for fraction in (0.0, 1.0):
        with pytest.raises(UserError, match="validation_fraction"):
            split(rows, fraction)


# The data set on disk


def test_dataset_comes_back_as_it_was(tmp_path):
    rows = [document(f"d{i}#0.1", size) for i, size in enumerate([20, 7, 31])]
    made_by = Fingerprint("tiny", "1", "2", "3")
    folder = save_dataset(tmp_path, rows, made_by, dropped=2)
    assert folder == tmp_path / "dataset"
    assert [path.name for path in tmp_path.iterdir()] == ["dataset"]
    for loaded in (load_dataset(tmp_path), load_dataset(tmp_path, made_by)):
        assert [(r.id, r.source) for r in loaded] == [(r.id, r.source) for r in rows]
        for old, new in zip(rows, loaded):
            assert (new.ids.dtype, new.loss_mask.dtype) == (np.int32, bool)
            np.testing.assert_array_equal(new.ids, old.ids)
            np.testing.assert_array_equal(new.loss_mask, old.loss_mask)
    record = json.loads((folder / "dspark_jax.json").read_text())
    assert record["target"] == dataclasses.asdict(made_by)
    assert (record["rows"], record["tokens"], record["dropped_prompts"]) == (3, 58, 2)
    assert record["supervised_tokens"] == sum(int(row.loss_mask.sum()) for row in rows)
    save_dataset(tmp_path, rows[:1], made_by, dropped=0)
    assert len(load_dataset(tmp_path)) == 1
    with pytest.raises(UserError, match=r"made with target 'tiny'.*another weights") as caught:
        load_dataset(tmp_path, dataclasses.replace(made_by, weights="9"))
    assert str(tmp_path) in str(caught.value)


def arrow(folder):
    (path,) = folder.glob("*.arrow")
    return path


DAMAGE = {
    "absent": (lambda d: shutil.rmtree(d), "run python -m dspark_jax.prepare"),
    "arrow cut": (lambda d: os.truncate(arrow(d), arrow(d).stat().st_size // 2), "damaged"),
    "arrow gone": (lambda d: arrow(d).unlink(), "damaged"),
    "state gone": (lambda d: (d / "state.json").unlink(), "damaged"),
    "record gone": (lambda d: (d / "dspark_jax.json").unlink(), "no such file"),
    "record cut": (lambda d: os.truncate(d / "dspark_jax.json", 9), "not readable"),
    "record empty": (lambda d: (d / "dspark_jax.json").write_text("{}"), "damaged"),
    "another record": (
        lambda d: (d / "dspark_jax.json").write_text(
            (d / "dspark_jax.json").read_text().replace('"rows": 3', '"rows": 4')
        ),
        "damaged.*3 rows of 4",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_dataset(tmp_path, name):
    made_by = Fingerprint("tiny", "1", "2", "3")
    folder = save_dataset(tmp_path, [document(f"d{i}", 9) for i in range(3)], made_by, dropped=0)
    damage, message = DAMAGE[name]
    damage(folder)
    with pytest.raises(UserError, match=message) as caught:
        load_dataset(tmp_path, made_by)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


# Responses


PROMPTS = [
    ["tell me of the sea"],
    ["and of the hills"],
    ["what is the third of nine", "and a half of that"],
    ["name a tree", "and another"],
    ["why is the night dark", "say more", "and once more"],
    ["count to ten in steps of one"],
    ["who are you"],
]
MAX_NEW = 16


@pytest.fixture(autouse=True)
def mesh():
    with jax.set_mesh(make_mesh()):
        yield


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    with jax.set_mesh(make_mesh()):
        return open_target(str(write_talker(tmp_path_factory.mktemp("talker"))), "float32")


@pytest.fixture(scope="module")
def prompts_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "chat.jsonl"
    with path.open("w") as file:
        for users in PROMPTS:
            messages = [{"role": "system", "content": "be kind"}]
            for text in users:
                messages.append({"role": "user", "content": text})
                messages.append({"role": "assistant", "content": "never seen"})
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def run_config(prompts, **data):
    options = {"temperature": 1.0, "max_new_tokens": MAX_NEW, "generation_batch": 4} | data
    return RunConfig(
        target="tiny",
        data=DataConfig(prompts=str(prompts), **options),
        drafter=DrafterConfig(target_layer_ids=(0,), mask_token_id=258),
        seed=5,
        target_dtype="float32",
    )


@pytest.fixture(scope="module")
def prepared(target, prompts_file, tmp_path_factory):
    """An uninterrupted run: its folder."""
    directory = tmp_path_factory.mktemp("prepared")
    with jax.set_mesh(make_mesh()):
        prepare_dataset(run_config(prompts_file), target, directory)
    return directory


@pytest.fixture
def generated(monkeypatch):
    """The requests that the target really answers."""
    answered = []
    real = responses.respond

    def counting(target, requests, **options):
        for batch in real(target, requests, **options):
            answered.extend(request.key for request, _ in batch)
            yield batch

    monkeypatch.setattr(responses, "respond", counting)
    return answered


def log_lines(directory):
    return [json.loads(line) for line in (directory / "responses.jsonl").open()]


def contents(directory):
    return [
        (row.id, row.source, row.ids.tobytes(), row.loss_mask.tobytes())
        for row in load_dataset(directory)
    ]


def test_rows_hold_what_the_target_saw_and_said(target, prepared):
    """Every turn rendered, answered and masked; a conversation goes on only after an answer that
    ended by itself, with that answer as its history."""
    log = {(line["id"], line["turn"]): line for line in log_lines(prepared)}
    assert len(log) == len(log_lines(prepared))
    rows = {row.id: row for row in load_dataset(prepared, target.fingerprint)}
    (stop,) = target.stop_ids
    letters = set(target.tokenizer.convert_tokens_to_ids(list(LETTERS)))
    joined = 0
    for number, users in enumerate(PROMPTS, start=1):
        name = f"chat:{number}" if f"chat:{number}#0.1" in rows else f"chat-{number}"
        text, ids, mask = "<|im_start|>system\nbe kind<|im_end|>\n", [], []
        for turn, user in enumerate(users):
            text += f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
            line = log[name, turn]
            prompt = target.tokenizer(text)["input_ids"]
            assert line["prompt"] == prompt
            answer = line["response"]
            assert set(answer[:-1]) <= letters and 1 <= len(answer) <= MAX_NEW
            mask += [False] * (len(prompt) - len(ids)) + [True] * len(answer)
            ids = prompt + answer
            joined += turn
            if answer[-1] != stop:
                assert len(answer) == MAX_NEW and (name, turn + 1) not in log
                break
            text += target.tokenizer.decode(answer) + "\n"
        row = rows.pop(f"{name}#0.{len(users)}")
        np.testing.assert_array_equal(row.ids, ids)
        np.testing.assert_array_equal(row.loss_mask, mask)
    assert not rows
    assert joined >= 2  # the seed gives conversations of two turns and of three
    assert {line["response"][-1] == stop for line in log.values()} == {True, False}


@pytest.mark.parametrize("killed_in_line", [0, 4, -1])
def test_a_killed_run_goes_on(target, prompts_file, prepared, tmp_path, generated, killed_in_line):
    """Torn anywhere: the same data set, byte by byte, and nothing is generated twice."""
    lines = (prepared / "responses.jsonl").read_bytes().splitlines(keepends=True)
    killed_in_line %= len(lines)
    torn = lines[killed_in_line]
    kept = b"".join(lines[:killed_in_line])
    (tmp_path / "responses.jsonl").write_bytes(kept + torn[: len(torn) // 2])
    shutil.copy(prepared / "recipe.json", tmp_path)
    prepare_dataset(run_config(prompts_file), target, tmp_path)
    assert len(generated) == len(lines) - killed_in_line
    assert (tmp_path / "responses.jsonl").read_bytes().startswith(kept)
    done = [(line["id"], line["sample"], line["turn"]) for line in log_lines(tmp_path)]
    assert len(done) == len(set(done)) == len(lines)
    assert contents(tmp_path) == contents(prepared)
    files = [arrow(directory / "dataset").read_bytes() for directory in (tmp_path, prepared)]
    assert files[0] == files[1]
    generated.clear()
    prepare_dataset(run_config(prompts_file), target, tmp_path)  # finished: nothing to do
    assert generated == [] and contents(tmp_path) == contents(prepared)


def logged_again(target, lines, **options):
    """The responses to the prompts of a log, generated anew: id -> response."""
    requests = [
        Request(x["id"], 0, x["turn"], tuple(x["prompt"]), request_seed(5, x["id"], 0, x["turn"]))
        for x in lines
    ]
    batches = respond(target, requests, temperature=1.0, top_p=1.0, batch=3, **options)
    return {request.id: response for batch in batches for request, response in batch}


def test_responses_do_not_depend_on_their_batch(target, prepared):
    """Written in batches of four; in batches of three they are the same."""
    lines = [line for line in log_lines(prepared) if line["turn"] == 0]
    again = logged_again(target, lines[::-1], max_new=MAX_NEW)
    assert again == {line["id"]: line["response"] for line in lines}


def test_responses_do_not_depend_on_the_mesh(target, prepared):
    """Two devices, and a batch that they do not divide; the first tokens are enough."""
    lines = log_lines(prepared)[:3]
    with jax.set_mesh(make_mesh(2, 1)):
        sharded = open_target(str(target.directory), "float32")
        again = logged_again(sharded, lines, max_new=4)
    assert again == {line["id"]: line["response"][:4] for line in lines}


def test_samples_of_a_prompt_differ(target, prompts_file, tmp_path, prepared):
    prepare_dataset(run_config(prompts_file, samples=2), target, tmp_path)
    by_conversation = collections.defaultdict(set)
    for line in log_lines(tmp_path):
        if line["turn"] == 0:
            by_conversation[line["id"]].add(tuple(line["response"]))
    assert {len(found) for found in by_conversation.values()} == {2}
    assert set(contents(prepared)) < set(contents(tmp_path))


def test_a_template_that_rewrites_history_gets_rows_of_their_own(tmp_path, prompts_file):
    """Without its answers, a later prompt does not continue the row: each turn is one."""
    forgetful = CHATML.replace(" + m.content", " + (m.content if m.role != 'assistant' else '')")
    target = open_target(str(write_talker(tmp_path / "model", forgetful)), "float32")
    prepare_dataset(run_config(prompts_file), target, tmp_path / "data")
    rows = load_dataset(tmp_path / "data")
    lines = log_lines(tmp_path / "data")
    assert len(rows) == len(lines) > len(PROMPTS)
    expected = sorted((*line["prompt"], *line["response"]) for line in lines)
    assert sorted(tuple(row.ids) for row in rows) == expected
    assert len({row.id for row in rows}) == len(rows)
    for row in rows:  # one span each, at the end
        first = int(np.argmax(row.loss_mask))
        assert first > 0 and row.loss_mask[first:].all() and not row.loss_mask[:first].any()


def test_another_recipe_is_refused(target, prompts_file, prepared, tmp_path):
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    config = run_config(prompts_file)
    for changes, field in (
        ({"seed": 6}, "seed"),
        ({"data": dataclasses.replace(config.data, temperature=0.5)}, "data.temperature"),
        ({"data": dataclasses.replace(config.data, max_new_tokens=99)}, "data.max_new_tokens"),
    ):
        with pytest.raises(UserError, match=f"another {field}: use another folder") as caught:
            prepare_dataset(dataclasses.replace(config, **changes), target, tmp_path)
        assert str(tmp_path) in str(caught.value)
    other = dataclasses.replace(
        target, fingerprint=dataclasses.replace(target.fingerprint, weights="x")
    )
    with pytest.raises(UserError, match=r"another target\.weights"):
        prepare_dataset(config, other, tmp_path)
    # what changes no row is no other recipe
    data = dataclasses.replace(config.data, generation_batch=1, sequence_length=64, path="x")
    prepare_dataset(dataclasses.replace(config, data=data), target, tmp_path)
    assert contents(tmp_path) == contents(prepared)


def test_changed_prompts_are_not_mixed_with_old_answers(
    target, prompts_file, prepared, tmp_path, generated
):
    """The file has the same name and as many lines, but line 1 asks something else."""
    changed = tmp_path / "chat.jsonl"
    lines = prompts_file.read_text().splitlines(keepends=True)
    changed.write_text("".join([lines[0].replace("sea", "sun"), *lines[1:]]))
    recipe = (prepared / "recipe.json").read_text()
    (tmp_path / "recipe.json").write_text(recipe.replace(str(prompts_file), str(changed)))
    shutil.copy(prepared / "responses.jsonl", tmp_path)
    with pytest.raises(UserError, match="chat.*1 was answered with another prompt"):
        prepare_dataset(run_config(changed), target, tmp_path)
    assert generated == [] and not (tmp_path / "dataset").exists()


def test_damaged_records_are_named(target, prompts_file, prepared, tmp_path):
    shutil.copy(prepared / "recipe.json", tmp_path)
    lines = (prepared / "responses.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "responses.jsonl").write_text(lines[0] + lines[1][:20] + "\n" + lines[2])
    with pytest.raises(UserError, match="responses.jsonl line 2 is damaged"):
        prepare_dataset(run_config(prompts_file), target, tmp_path)
    os.truncate(tmp_path / "recipe.json", 10)
    with pytest.raises(UserError, match="recipe.json: not readable"):
        prepare_dataset(run_config(prompts_file), target, tmp_path)


def test_long_prompts_are_dropped_and_counted(target, prompts_file, prepared, tmp_path):
    """A later turn that is too long ends its conversation; the turns before it stay."""
    first_turns = [line for line in log_lines(prepared) if line["turn"] == 0]
    limit = max(len(line["prompt"]) for line in first_turns) - 1
    prepare_dataset(run_config(prompts_file, max_prompt_tokens=limit), target, tmp_path)
    lines = log_lines(tmp_path)
    assert max(len(line["prompt"]) for line in lines) <= limit
    record = json.loads((tmp_path / "dataset" / "dspark_jax.json").read_text())
    assert record["dropped_prompts"] >= 2
    assert record["rows"] == len(PROMPTS) - 1
    with pytest.raises(UserError, match="no prompt is at most 3 tokens"):
        prepare_dataset(run_config(prompts_file, max_prompt_tokens=3), target, tmp_path / "none")


def test_magpie_prompts_are_the_targets_own(target, tmp_path, generated, monkeypatch):
    """The target continues an open user turn; an empty prompt is left out, a long one dropped."""
    monkeypatch.setattr(responses, "PROMPT_BUCKET", 64)  # prompts and answers compile once
    config = run_config("magpie:4", max_prompt_tokens=64, max_new_tokens=64)
    prepare_dataset(config, target, tmp_path)
    written = [line for line in log_lines(tmp_path) if line["turn"] == -1]
    assert len(written) == 4
    opening = target.tokenizer("<|im_start|>user\n")["input_ids"]
    assert {tuple(line["prompt"]) for line in written} == {tuple(opening)}
    expected = {}
    for line in written:
        text = target.tokenizer.decode(line["response"]).removesuffix("<|im_end|>")
        prompt = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        prompt = target.tokenizer(prompt)["input_ids"]
        if text and len(prompt) <= 64:
            expected[line["id"]] = prompt
    answered = {line["id"]: line["prompt"] for line in log_lines(tmp_path) if line["turn"] == 0}
    assert answered == expected and expected
    assert len(load_dataset(tmp_path)) == len(expected)
    generated.clear()
    prepare_dataset(config, target, tmp_path)
    assert generated == []
    for bad in ("magpie:0", "magpie:many"):
        with pytest.raises(UserError, match="magpie:N with a positive N"):
            prepare_dataset(run_config(bad), target, tmp_path / bad)


@pytest.mark.slow
def test_magpie_on_the_bundled_target(bundled_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(responses, "PROMPT_BUCKET", 64)  # prompts and answers compile once
    target = open_target("smollm2", "float32")
    config = run_config(
        "magpie:2", generation_batch=2, max_prompt_tokens=64, max_new_tokens=64, top_p=1.0
    )
    prepare_dataset(config, target, tmp_path)
    record = json.loads((tmp_path / "dataset" / "dspark_jax.json").read_text())
    assert record["rows"] >= 1 and record["rows"] + record["dropped_prompts"] == 2
    for row in load_dataset(tmp_path, target.fingerprint):
        text = target.tokenizer.decode(row.ids)
        assert text.count("<|im_start|>user") == text.count("<|im_start|>assistant") == 1
        question = text.split("<|im_start|>user\n")[1].split("<|im_end|>")[0]
        assert len(question.split()) >= 3


def test_what_the_target_cannot_run_is_named(target, tmp_path):
    options = {"temperature": 1.0, "top_p": 1.0, "max_new": MAX_NEW, "batch": 4}
    with pytest.raises(UserError, match="chat:1: token 264 has no row.*264 rows"):
        list(respond(target, [Request("chat:1", 0, 0, (1, 264), 1)], **options))
    shutil.copytree(target.directory, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"][3] = np.nan
    save_file(tensors, tmp_path / "model.safetensors")
    broken = open_target(str(tmp_path), "float32")
    with pytest.raises(UserError, match="chat:2: the target gave NaN or infinite logits"):
        list(respond(broken, [Request("chat:2", 0, 0, (1, 2, 3), 1)], **options))


@pytest.mark.parametrize("fault", ["no template", "no tokenizer", "damaged"])
def test_tokenizer_that_cannot_chat(target, tmp_path, fault):
    shutil.copytree(target.directory, tmp_path, dirs_exist_ok=True)
    if fault == "no template":
        (tmp_path / "chat_template.jinja").unlink()
        message = "no chat template"
    else:
        message = "no usable tokenizer"
        (tmp_path / "tokenizer.json").unlink()
        if fault == "damaged":
            (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=message) as caught:
        open_tokenizer(tmp_path)
    assert str(caught.value).startswith(str(tmp_path)) and "\n" not in str(caught.value)


# Decoding without a drafter


@jax.jit
def _all_logits(model, tokens):
    return model.head.logits(model(tokens).hidden)


def decode_slowly(target, prompt, limit, params, row):
    """One token per run of the whole sequence, without a cache."""
    ids = list(prompt)
    one = jax.tree.map(lambda x: x[row : row + 1], params)
    while len(ids) - len(prompt) < limit:
        padded = np.zeros((1, 64), np.int32)
        padded[0, : len(ids)] = ids
        logits = jnp.asarray(np.asarray(_all_logits(target.model, padded))[:, len(ids) - 1])
        keys = purpose_key(one.seed, jnp.asarray([len(ids)]), Purpose.TARGET)
        ids.append(int(sample(logits, one, keys)[0][0]))
        if ids[-1] in target.stop_ids:
            break
    return ids[len(prompt) :]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_plain_decoding_equals_a_loop_without_cache(target, temperature):
    texts = ["ab", "a longer prompt here", "unused", "yz"]
    prompts = [target.tokenizer(text)["input_ids"] for text in texts]
    limits = np.asarray([MAX_NEW, 7, 0, 1], np.int32)
    lengths = np.asarray(list(map(len, prompts)), np.int32)
    padded = np.full((4, 64), 259, np.int32)  # padding is never looked at
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = prompt
    seeds = [request_seed(1, row) for row in range(4)]
    params = SamplingParams.make(4, temperature, seeds=seeds)
    stop_ids = jnp.asarray(target.stop_ids, jnp.int32)
    result = generate_plain(
        target.model,
        place(padded, "batch", None),
        place(lengths, "batch"),
        jax.tree.map(lambda x: place(x, "batch"), params),
        stop_ids,
        place(limits, "batch"),
        max_new=MAX_NEW,
    )
    tokens, count, reason = jax.device_get((result.tokens, result.count, result.reason))
    ended = set()
    for row, prompt in enumerate(prompts):
        expected = decode_slowly(target, prompt, limits[row], params, row)
        assert tokens[row, : count[row]].tolist() == expected, texts[row]
        assert not tokens[row, count[row] :].any()
        stopped = bool(expected) and expected[-1] in target.stop_ids
        assert reason[row] == (Reason.STOP if stopped else Reason.LENGTH)
        assert stopped or count[row] == limits[row]
        ended.add(stopped)
    assert count[2] == 0
    if temperature:
        assert ended == {True, False}


def test_padding_rows_produce_nothing(target):
    """Three requests in batches of four: three answers, the same as of one by one."""
    options = {"temperature": 1.0, "top_p": 1.0, "max_new": MAX_NEW}
    requests = [Request(f"r{i}", 0, 0, tuple(range(70, 110 + i)), i) for i in range(3)]
    batches = list(respond(target, requests, batch=4, **options))
    assert [[request.id for request, _ in batch] for batch in batches] == [["r0", "r1", "r2"]]
    alone = [list(respond(target, [request], batch=3, **options)) for request in requests]
    assert [batch for one in alone for batch in one[0]] == batches[0]
