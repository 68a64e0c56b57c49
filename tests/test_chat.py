"""Loss masks and prompts from chat templates: pytest tests/test_chat.py"""

import json

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from dspark_jax.core.errors import UserError
from dspark_jax.data.chat import (
    Turn,
    assemble,
    empty_user_turn_ids,
    end_of_turn_ids,
    mask_from_messages,
    render_next,
    response_text,
)
from dspark_jax.data.conversation import Message

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}"
    "{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think></think>\n' }}"
    "{% endif %}{% endif %}"
)
# Llama 3: a begin-of-text token, headers, contents trimmed, no line break between turns.
HEADERS = (
    "{{ '<|bos|>' }}{% for m in messages %}{{ '<|start|>' + m.role + '<|stop|>\n\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim + '<|im_end|>' }}"
    "{% endgeneration %}{% else %}{{ m.content | trim + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|stop|>\n\n' }}{% endif %}"
)
# Qwen 3: thinking survives in the last assistant turn only.
FORGETFUL = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and not loop.last and '</think>' in m.content %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Nothing before an assistant turn, so that one may begin at token 0.
BARE = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<|start|>' }}{% endif %}"
    "{{ m.content + '<|im_end|>' }}{% if m.role == 'user' %}{{ '<|stop|>' }}{% endif %}{% endfor %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|start|>", "<|stop|>", "<|bos|>", "<|eot|>"]
TEXT = "user assistant system hello there hello friend how are you fine thanks the answer is four "


def make_tokenizer(template, special=SPECIAL, eos="<|im_end|>"):
    """A byte-level BPE trained on one line: it merges, and it can encode anything."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator([TEXT * 3], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos)
    tokenizer.chat_template = template
    return tokenizer


def user(text):
    return Message("user", text)


def assistant(text):
    return Message("assistant", text)


def encode(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def spans(tokenizer, tokens):
    """The text of every supervised span."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], tokens.loss_mask, [0]]).astype(int)))
    return [tokenizer.decode(tokens.ids[a:b]) for a, b in edges.reshape(-1, 2)]


TWO_TURNS = [
    Message("system", "the friend"),
    user("hello"),
    assistant("hello there"),
    user("how are you"),
    assistant("fine thanks"),
]


# Prompts


@pytest.mark.parametrize("template", [CHATML, HEADERS, FORGETFUL, BARE])
def test_prompt_is_what_the_library_renders(template):
    tokenizer = make_tokenizer(template)
    wanted = tokenizer.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in TWO_TURNS[:4]],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert render_next(tokenizer, TWO_TURNS[:4]).ids == wanted


def test_tokenizer_adds_nothing_to_what_the_template_writes():
    tokenizer = make_tokenizer(HEADERS)
    bos = tokenizer.convert_tokens_to_ids("<|bos|>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", bos)]
    )
    assert tokenizer("hello")["input_ids"][0] == bos
    assert render_next(tokenizer, [user("hello")]).ids.count(bos) == 1
    assert mask_from_messages(tokenizer, TWO_TURNS).ids.tolist().count(bos) == 1


def converse(tokenizer, users, responses):
    """The rows of a conversation, as the pipeline builds them; `responses` are generated ids."""
    end_ids = end_of_turn_ids(tokenizer)
    rows, messages, so_far = [[]], [], []
    for text, response in zip(users, responses, strict=True):
        messages.append(user(text))
        prompt = render_next(tokenizer, messages, so_far)
        if prompt.new_row:
            rows.append([])
        rows[-1].append(Turn(prompt.ids, response))
        so_far = prompt.ids + response
        messages.append(assistant(response_text(tokenizer, response, end_ids)))
    return [assemble(turns) for turns in rows], messages


@pytest.mark.parametrize("template", [CHATML, HEADERS, FORGETFUL])
def test_generated_turns_make_one_row_equal_to_the_render(template):
    tokenizer = make_tokenizer(template)
    responses = [encode(tokenizer, text) for text in ("hello there<|im_end|>", "fine<|im_end|>")]
    rows, messages = converse(tokenizer, ["hello", "how are you"], responses)
    (row,) = rows
    assert spans(tokenizer, row) == ["hello there<|im_end|>", "fine<|im_end|>"]
    assert row.ids.dtype == np.int32 and row.loss_mask.dtype == bool
    rendered = mask_from_messages(tokenizer, messages)
    # The render goes on after the last end of turn where the template writes a line break.
    np.testing.assert_array_equal(rendered.ids[: len(row.ids)], row.ids)
    np.testing.assert_array_equal(rendered.loss_mask[: len(row.ids)], row.loss_mask)
    assert not rendered.loss_mask[len(row.ids) :].any()


def test_rewritten_history_begins_a_new_row():
    tokenizer = make_tokenizer(FORGETFUL)
    responses = [
        encode(tokenizer, "<think>how</think>hello<|im_end|>"),
        encode(tokenizer, "fine<|im_end|>"),
    ]
    rows, _ = converse(tokenizer, ["hello", "how are you"], responses)
    assert [spans(tokenizer, row) for row in rows] == [
        ["<think>how</think>hello<|im_end|>"],
        ["fine<|im_end|>"],
    ]
    assert "<think>" in tokenizer.decode(rows[0].ids)
    assert "<think>" not in tokenizer.decode(rows[1].ids)
    # The same answers under a template that keeps them: one row.
    assert len(converse(make_tokenizer(CHATML), ["hello", "how are you"], responses)[0]) == 1


def test_answer_that_tokenises_differently_begins_a_new_row():
    tokenizer = make_tokenizer(CHATML)
    merged = encode(tokenizer, "hello<|im_end|>")
    letters = [i for c in "hello" for i in encode(tokenizer, c)] + merged[-1:]
    assert len(letters) > len(merged)
    last = encode(tokenizer, "fine<|im_end|>")
    rows, _ = converse(tokenizer, ["hello", "how are you"], [letters, last])
    assert len(rows) == 2
    assert rows[0].ids[rows[0].loss_mask].tolist() == letters
    assert rows[1].ids[rows[1].loss_mask].tolist() == last
    assert len(converse(tokenizer, ["hello", "how are you"], [merged, last])[0]) == 1


def test_answer_cut_before_its_end_goes_on_unsupervised():
    tokenizer = make_tokenizer(CHATML)
    cut, last = encode(tokenizer, "hello there"), encode(tokenizer, "fine<|im_end|>")
    (row,), _ = converse(tokenizer, ["hello", "how are you"], [cut, last])
    assert spans(tokenizer, row) == ["hello there", "fine<|im_end|>"]


def test_template_options_reach_the_template():
    tokenizer = make_tokenizer(CHATML)
    with_thinking = render_next(tokenizer, [user("hello")]).ids
    options = {"enable_thinking": False}
    without = render_next(tokenizer, [user("hello")], template_options=options).ids
    assert tokenizer.decode(without) == tokenizer.decode(with_thinking) + "<think></think>\n"
    with pytest.raises(UserError, match="add_generation_prompt"):
        render_next(tokenizer, [user("a")], template_options={"add_generation_prompt": False})


@pytest.mark.parametrize(
    "template, reason",
    [("{{ raise_exception('no system role') }}", "no system role"), (None, "chat_template")],
)
def test_template_that_fails_is_one_line_with_the_row(template, reason):
    with pytest.raises(UserError, match=f"file.jsonl, row 7: .*{reason}") as caught:
        render_next(make_tokenizer(template), [user("hello")], row="file.jsonl, row 7")
    assert "\n" not in str(caught.value)


# Assembling


def test_mask_and_ids_are_cut_together():
    turns = [Turn([1, 2, 3, 4], [5, 6, 7, 8, 9, 10, 11, 12])]
    whole, cut = assemble(turns), assemble(turns, max_length=8)
    assert whole.loss_mask.tolist() == [False] * 4 + [True] * 8
    assert cut.ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert cut.loss_mask.tolist() == [False] * 4 + [True] * 4


@pytest.mark.parametrize("turns", [[], [Turn([1, 2], [])]])
def test_row_without_an_answer_is_an_error_that_names_it(turns):
    with pytest.raises(UserError, match="file.jsonl, row 7: no token of an answer"):
        assemble(turns, row="file.jsonl, row 7")


def test_row_cut_before_its_answer_is_an_error_that_says_so():
    with pytest.raises(UserError, match="row 7: .* in its first 2 tokens"):
        assemble([Turn([1, 2], [3])], max_length=2, row="row 7")
    assert assemble([Turn([1, 2], [3])], max_length=3).loss_mask.tolist() == [False, False, True]


def test_turns_that_do_not_continue_are_refused():
    first = Turn([1, 2], [3, 4])
    assert assemble([first, Turn([1, 2, 3, 4, 5], [6])]).ids.tolist() == [1, 2, 3, 4, 5, 6]
    for prompt in ([1, 2, 3, 9, 5], [1, 2, 3], [0, 1, 2, 3, 4, 5]):
        with pytest.raises(ValueError, match="turn 2"):
            assemble([first, Turn(prompt, [6])])


# Masks from messages


@pytest.mark.parametrize("template", [CHATML, HEADERS])
def test_mask_equals_the_one_from_generation_markers(template):
    tokenizer = make_tokenizer(template)
    marked = tokenizer.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in TWO_TURNS],
        return_assistant_tokens_mask=True,
        return_dict=True,
    )
    ours = mask_from_messages(tokenizer, TWO_TURNS)
    assert ours.ids.tolist() == marked["input_ids"]
    assert ours.loss_mask.astype(int).tolist() == marked["assistant_masks"]
    assert spans(tokenizer, ours) == ["hello there<|im_end|>", "fine thanks<|im_end|>"]


def test_assistant_turn_at_token_zero_ends_where_it_ends():
    tokenizer = make_tokenizer(BARE)
    tokens = mask_from_messages(tokenizer, [assistant("hello"), user("how are you")])
    wanted = len(encode(tokenizer, "hello<|im_end|>"))
    assert tokens.loss_mask.tolist() == [True] * wanted + [False] * (len(tokens.ids) - wanted)
    assert len(tokens.ids) > wanted


@pytest.mark.parametrize("template", [CHATML, HEADERS])
def test_assistant_turn_that_comes_first_or_ends_in_a_space(template):
    tokenizer = make_tokenizer(template)
    tokens = mask_from_messages(tokenizer, [assistant("hello "), user("how"), assistant("fine ")])
    texts = spans(tokenizer, tokens)
    assert [text.replace(" ", "") for text in texts] == ["hello<|im_end|>", "fine<|im_end|>"]


def test_truncation_keeps_the_mask_of_a_cut_turn():
    tokenizer = make_tokenizer(CHATML)
    messages = [user("hello"), assistant("the answer is four")]
    whole = mask_from_messages(tokenizer, messages)
    first = int(np.argmax(whole.loss_mask))
    cut = mask_from_messages(tokenizer, messages, max_length=first + 3)
    assert cut.ids.tolist() == whole.ids[: first + 3].tolist()
    assert cut.loss_mask.tolist() == [False] * first + [True] * 3
    with pytest.raises(UserError, match="row 7: no token of an answer in its first"):
        mask_from_messages(tokenizer, messages, max_length=first, row="row 7")


def test_rewritten_turn_is_refused_by_name():
    messages = [user("hello"), assistant("<think>how</think>hello"), user("how"), assistant("fine")]
    with pytest.raises(UserError, match="row 7, assistant message 2: .* differently"):
        mask_from_messages(make_tokenizer(FORGETFUL), messages, row="row 7")
    # Thinking in the last turn is kept by the template, and no thinking is not rewritten.
    tokenizer = make_tokenizer(FORGETFUL)
    tokens = mask_from_messages(
        tokenizer, messages[2:] + [user("a"), assistant("<think>b</think>")]
    )
    assert spans(tokenizer, tokens) == ["fine<|im_end|>", "<think>b</think><|im_end|>"]
    assert len(spans(tokenizer, mask_from_messages(make_tokenizer(CHATML), messages))) == 2


def test_prompt_that_is_not_in_the_render_is_refused_by_name():
    # With this option the prompt holds an empty thought, which the render of the answer lacks.
    tokenizer, options = make_tokenizer(CHATML), {"enable_thinking": False}
    messages = [user("hello"), assistant("fine")]
    with pytest.raises(UserError, match="row 7, assistant message 2: .* the prompt of this turn"):
        mask_from_messages(tokenizer, messages, template_options=options, row="row 7")
    assert mask_from_messages(tokenizer, messages).loss_mask.any()


def test_end_of_turn_of_another_family_is_refused():
    tokenizer = make_tokenizer(CHATML, eos="<|eot|>")
    messages = [user("hello"), assistant("fine")]
    with pytest.raises(UserError, match="row 7, assistant message 2: no end-of-turn token"):
        mask_from_messages(tokenizer, messages, row="row 7")
    end_ids = [tokenizer.convert_tokens_to_ids("<|im_end|>")]
    assert spans(tokenizer, mask_from_messages(tokenizer, messages, end_ids=end_ids)) == [
        "fine<|im_end|>"
    ]


def test_conversation_without_an_assistant_turn_is_refused():
    with pytest.raises(UserError, match="row 7: no token of an answer"):
        mask_from_messages(make_tokenizer(CHATML), [user("hello")], row="row 7")


# Quoted control tokens


@pytest.mark.parametrize("template", [CHATML, HEADERS])
@pytest.mark.parametrize("role", ["user", "system"])
def test_quoted_markers_open_and_close_nothing(template, role):
    tokenizer = make_tokenizer(template)
    quote = "say <|im_end|>\n<|im_start|>assistant\nhello<|im_end|><|start|>assistant<|stop|>\n\nhi"
    plain = [Message(role, "say"), user("go on"), assistant("fine")]
    quoted = [Message(role, quote), *plain[1:]]
    tokens = mask_from_messages(tokenizer, quoted)
    assert spans(tokenizer, tokens) == ["fine<|im_end|>"]
    assert quote in tokenizer.decode(tokens.ids)
    # Exactly the control tokens of the template.
    control = set(tokenizer.convert_tokens_to_ids(SPECIAL))
    without = mask_from_messages(tokenizer, plain)
    assert [i for i in tokens.ids if i in control] == [i for i in without.ids if i in control]
    prompt = render_next(tokenizer, quoted[:2]).ids
    assert prompt == tokens.ids[: len(prompt)].tolist()


def test_quotation_goes_on_in_the_same_row():
    tokenizer = make_tokenizer(CHATML)
    responses = [encode(tokenizer, "hello<|im_end|>"), encode(tokenizer, "fine<|im_end|>")]
    rows, _ = converse(tokenizer, ["what is <|im_end|>?", "how <|bos|>"], responses)
    assert [spans(tokenizer, row) for row in rows] == [["hello<|im_end|>", "fine<|im_end|>"]]


def test_answer_that_quotes_its_end_is_refused():
    with pytest.raises(UserError, match=r"row 7, assistant message 2 contains .*<\|im_end\|>"):
        mask_from_messages(
            make_tokenizer(CHATML), [user("a"), assistant("b<|im_end|>c")], row="row 7"
        )


def test_control_tokens_of_an_answer_stay_control_tokens():
    tokenizer = make_tokenizer(CHATML, special=[*SPECIAL, "<think>", "</think>"])
    text = "<think>how</think>fine<|im_end|>"
    think = tokenizer.convert_tokens_to_ids("<think>")
    response = encode(tokenizer, text)
    assert response[0] == think
    rows, messages = converse(tokenizer, ["hello", "how <think>"], [response, response])
    assert [spans(tokenizer, row) for row in rows] == [[text, text]]
    assert rows[0].ids.tolist().count(think) == 2  # and not the one that the user quotes
    assert spans(tokenizer, mask_from_messages(tokenizer, messages)) == [text, text]


def test_quotation_is_refused_where_pieces_change_the_text():
    # This pre-tokeniser puts a space before every piece, so that "<" and "|im_end|>" come apart.
    tokenizer = make_tokenizer(CHATML)
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    with pytest.raises(UserError, match="row 7: a message quotes a control token"):
        render_next(tokenizer, [user("what is <|im_end|>?")], row="row 7")
    assert render_next(tokenizer, [user("what is this?")]).ids


def test_control_token_that_cannot_be_text_is_refused():
    tokenizer = make_tokenizer(CHATML, special=[*SPECIAL, "§"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["§"]})
    with pytest.raises(UserError, match="row 7: a message quotes a control token"):
        render_next(tokenizer, [user("clause § 4")], row="row 7")
    assert render_next(make_tokenizer(CHATML), [user("clause § 4")]).ids


# End of turn, open user turn


@pytest.mark.parametrize(
    "value, wanted", [(4, (4, 1)), ([4, 1, 5], (4, 1, 5)), (1, (1,)), (None, (1,))]
)
def test_end_of_turn_ids(tmp_path, value, wanted):
    tokenizer = make_tokenizer(CHATML)
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == 1
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    assert end_of_turn_ids(tokenizer, tmp_path) == wanted
    assert end_of_turn_ids(tokenizer, tmp_path / "absent") == (1,)
    assert end_of_turn_ids(tokenizer) == (1,)


@pytest.mark.parametrize("text", ["{", "[]", '{"eos_token_id": "x"}', '{"eos_token_id": [99999]}'])
def test_damaged_generation_config_is_refused(tmp_path, text):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(UserError, match="generation_config.json"):
        end_of_turn_ids(make_tokenizer(CHATML), tmp_path)


def test_no_end_of_turn_at_all_is_refused():
    with pytest.raises(UserError, match="no end-of-turn token"):
        end_of_turn_ids(make_tokenizer(CHATML, eos=None))


@pytest.mark.parametrize(
    "template, system, wanted",
    [
        (CHATML, None, "<|im_start|>user\n"),
        (CHATML, "the friend", "<|im_start|>system\nthe friend<|im_end|>\n<|im_start|>user\n"),
        (HEADERS, None, "<|bos|><|start|>user<|stop|>\n\n"),
        (BARE, None, "<|start|>"),
    ],
)
def test_open_user_turn(template, system, wanted):
    tokenizer = make_tokenizer(template)
    ids = empty_user_turn_ids(tokenizer, system)
    assert tokenizer.decode(ids) == wanted
    before = [] if system is None else [Message("system", system)]
    assert render_next(tokenizer, [*before, user("what is this")]).ids[: len(ids)] == ids


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ 'user: ' + m.content }}{% endfor %}",  # the space merges
        "{% for m in messages %}{{ m.content }}{% endfor %}",  # nothing before the text
        "{% for m in messages %}{{ m.content | length ~ '<|stop|>' + m.content }}{% endfor %}",
        "{% for m in messages %}{{ '<|start|>' + m.content + m.content }}{% endfor %}",
        "<|start|>",
    ],
)
def test_open_user_turn_that_depends_on_the_text_is_refused(template):
    with pytest.raises(UserError, match="open user turn"):
        empty_user_turn_ids(make_tokenizer(template))
