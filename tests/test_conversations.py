"""Rows to messages and token ids: every shape that real files have, and every fault named instead of mended."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rows_for_tests import CHAT, SHARED, chat, parse, reason

from eagle3.conversations import Conversation, SkipRow, TokenRow, parse_columns
from eagle3.terminal import UserError


def test_both_formats_give_the_same_messages():
    assert parse(CHAT) == parse(SHARED) == parse(json.dumps(CHAT).encode())
    assert parse(CHAT).messages == [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    names = {"conversations": [{"from": "system", "value": "s"}, {"from": "user", "value": "q"}]}
    for name in ("gpt", "chatgpt", "assistant"):
        row = {"conversations": [*names["conversations"], {"from": name, "value": "a"}]}
        assert [message["role"] for message in parse(row).messages] == ["system", "user", "assistant"]


def test_text_parts_are_joined():
    """(P10), (P11)"""
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "world"}]
    assert parse(chat(("user", parts), ("assistant", "a"))) == parse(chat(("user", "Hello world"), ("assistant", "a")))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b" \n", "blank line"),
        (b"{bad json", "invalid JSON"),
        (b"\xff\xfe{}", "invalid JSON"),
        (b"[" * 100_000, "invalid JSON"),
        ([CHAT], "row is not an object"),
        ({}, "row without columns"),
        ({"messages": None}, "no conversation in columns messages"),
        ({"text": "q", "label": "a", "prompt": None}, "no conversation in columns label, prompt, text"),
        ({"messages": [{"speaker": "user", "text": "q"}]}, r"message without role \(keys: speaker, text\)"),
        ({"messages": "text"}, "messages is not a list"),
        ({"conversations": {}}, "conversations is not a list"),
        ({"messages": []}, "messages is empty"),
        ({"messages": ["text"]}, "message is not an object"),
        ({"messages": [{"role": "user"}]}, "user content is null"),
        (chat(("user", "q"), ("my-model", "a")), "unknown role 'my-model'"),
        (chat(("user", "q"), (None, "a")), "unknown role None"),
        (chat(("user", "q"), (["x"], "a")), r"unknown role \['x'\]"),
        (chat(("user", "q")), "no assistant turn"),
        (chat(("assistant", "a"), ("user", "q"), ("assistant", "b")), "conversation starts with the assistant"),
        (chat(("user", "q"), ("assistant", None)), "assistant content is null"),
        (chat(("user", "q"), ("assistant", "")), "assistant content is empty"),
        (chat(("user", "q"), ("assistant", " \n")), "assistant content is empty"),
        (chat(("user", "q"), ("assistant", 7)), "assistant content of type int"),
        (chat(("user", True), ("assistant", "a")), "user content of type bool"),
        (chat(("user", {"a": 1}), ("assistant", "a")), "user content of type dict"),
        (chat(("user", [{"type": "image_url"}]), ("assistant", "a")), "user content part of type image_url"),
        (chat(("user", ["text"]), ("assistant", "a")), "user content part of type str"),
        (chat(("user", "q"), ("assistant", "a")) | {"tools": "no list"}, "tools is not a list"),
        ({"messages": [{"role": "assistant", "content": "a", "tool_calls": [{"x": 1}]}]}, "malformed tool_calls"),
    ],
)
def test_faults_are_named(value, reason):
    with pytest.raises(SkipRow, match=f"^{reason}$"):
        parse(value)


def test_surrogates():
    """(P12)"""
    row = chat(("user", "\ud83d\ude00 ok"), ("assistant", "bad \ud83d")) | {"source": "blend\ud83d"}
    assert parse(json.dumps(row).encode()).origin == "blend\ufffd"
    assert [message["content"] for message in parse(json.dumps(row).encode()).messages] == ["😀 ok", "bad \ufffd"]
    with pytest.raises(SkipRow) as skip:
        parse(rb'{"messages": [{"role": "\ud83d", "content": "q"}]}')
    str(skip.value).encode()


def test_tool_calls_as_text_and_as_objects_are_equal():
    def row(arguments):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        return {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [call]}]}

    assert parse(row('{"a": 1}')) == parse(row({"a": 1}))
    assert parse(row({"a": 1})).messages[1]["content"] == ""


def test_digest_follows_the_text_and_trailing_counts_what_no_answer_follows():
    assert parse(CHAT).digest == parse(SHARED).digest
    assert parse(CHAT).digest != parse(chat(("user", "q"), ("assistant", "b"))).digest
    assert parse(chat(("user", "q"), ("assistant", "a"), ("user", "x"), ("user", "y"))).trailing == 2
    assert parse(CHAT).trailing == 0


# ------------------------------------------------------------------------------------------ kinds of rows


TEXT = st.text(min_size=1).filter(str.strip)


@given(TEXT, TEXT, st.none() | TEXT)
def test_the_same_conversation_in_every_kind_of_row(question, answer, system):
    turns = [("user", question), ("assistant", answer)]
    expected = parse(chat(*([("system", system)] if system else []), *turns))
    pair = {"prompt": question, "response": answer}
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    shared = [{"from": names[message["role"]], "value": message["content"]} for message in expected.messages]
    before, after = expected.messages[:-1], expected.messages[-1:]
    rows = [
        {"conversations": shared},
        {"messages": shared},
        {"conversation": expected.messages},
        pair | {"system": system},
        {"instruction": question, "input": "", "output": answer, "system_prompt": system},
        {"prompt": before, "completion": after},
        {"prompt": before, "chosen": expected.messages, "rejected": []},
        {"prompt": before, "answer": answer},
        *([] if system else [{"prompt": question, "chosen": expected.messages}]),
    ]
    for row in rows:
        for answers_needed in (True, False):
            for value in (row, json.dumps(row).encode()):
                result = parse(value, answers_needed=answers_needed)
                assert result == expected and result.digest == expected.digest, row


@pytest.mark.parametrize(
    ("row", "form"),
    [
        (CHAT, "column messages as chat messages"),
        (SHARED, "column conversations as ShareGPT turns"),
        (CHAT | SHARED | {"prompt": "p", "response": "r"}, "column messages as chat messages"),
        (SHARED | {"messages": None, "conversation": []}, "column conversations as ShareGPT turns"),
        ({"instruction": "q", "output": "a"}, "columns instruction, output as one turn each"),
        ({"instruction": "q", "input": None, "output": "a"}, "columns instruction, output as one turn each"),
        ({"instruction": "q", "input": " ", "output": "a"}, "columns instruction, input, output as one turn each"),
        ({"question": "q", "answer": "a"}, "columns question, answer as one turn each"),
        ({"query": "q", "response": "a"}, "columns query, response as one turn each"),
        ({"input": "q", "output": "a"}, "columns input, output as one turn each"),
        ({"problem": "q", "answer": "short", "solution": "a"}, "columns problem, solution as one turn each"),
        ({"prompt": "q", "chosen": "a", "turns": 1}, "columns prompt, chosen as one turn each"),
        ({"prompt": CHAT["messages"][:1], "completion": "a"}, "columns prompt, completion as messages"),
    ],
)
def test_the_kind_follows_from_the_columns(row, form):
    result = parse(row)
    assert result.messages == parse(CHAT).messages and result.form == form
    assert result == parse(CHAT)  # how it was read is no part of what it says


def test_input_follows_the_instruction():
    row = {"instruction": "Translate", "input": "house", "output": "maison"}
    assert parse(row) == parse(chat(("user", "Translate\nhouse"), ("assistant", "maison")))
    assert reason(row | {"input": 7}) == "input of type int"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"prompt": "q"}, "column prompt has no answers: give --responses"),
        ({"prompt": "q", "response": None}, "column prompt has no answers: give --responses"),
        ({"turns": ["q"]}, "column turns has no answers: give --responses"),
        ({"prompt": 7, "response": "a"}, "prompt of type int"),
        ({"prompt": "q", "response": 7}, "response of type int"),
        ({"prompt": "q", "response": {"role": "assistant"}}, "response of type dict"),
        ({"prompt": "q", "response": " "}, "assistant content is empty"),
        ({"prompt": "q", "response": ["a"]}, "message is not an object"),
        ({"prompt": "q", "response": []}, "no assistant turn"),
        ({"prompt": [], "response": "a"}, "conversation starts with the assistant"),
        (
            {"prompt": "q", "chosen": chat(("user", "x"))["messages"]},
            "chosen begins with another turn than the assistant's",
        ),
        ({"prompt": "q", "response": "a", "system": ["s"]}, "system of type list"),
        (
            {"prompt": chat(("system", "s"), ("user", "q"))["messages"], "response": "a", "system_prompt": "t"},
            "system_prompt beside a system message",
        ),
    ],
)
def test_faults_of_pairs_are_named(value, expected):
    assert reason(value) == expected


def test_trailing_user_turns_are_kept_as_they_are():
    """(P41)"""
    conversation = parse(chat(("user", "a"), ("assistant", "b"), ("user", "c"), ("user", "d")))
    assert [message["role"] for message in conversation.messages] == ["user", "assistant", "user", "user"]
    assert conversation.trailing == 2


# --------------------------------------------------------------------------------------- prompts to answer


def test_prompts_need_no_answers():
    user = [{"role": "user", "content": "q"}]
    for row in (
        {"messages": user},
        {"conversations": [{"from": "human", "value": "q"}]},
        {"prompt": "q"},
        {"prompt": user},
        {"turns": ["q"]},
        {"question": "q", "answer": 3, "choices": ["x"]},  # of a test set
        {"question": "q", "answer": ["right", "correct"]},
    ):
        conversation = parse(row, answers_needed=False)
        assert conversation == Conversation(user, None) and conversation.trailing == 1
    assert parse({"turns": ["q", "r"]}, answers_needed=False).messages == [*user, {"role": "user", "content": "r"}]
    assert parse({"turns": ["q"]}, answers_needed=False).form == "column turns as user turns"
    for empty in ("", " ", None):
        row = chat(("user", "q"), ("assistant", empty), ("user", "r"))
        assert parse(row, answers_needed=False).messages[1] == {"role": "assistant", "content": empty or ""}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (chat(("system", "s")), "no user turn"),
        (chat(("assistant", "a"), ("user", "q")), "conversation starts with the assistant"),
        (chat(("user", "q"), ("assistant", 7)), "assistant content of type int"),
        (chat(("user", None)), "user content is null"),
        ({"turns": []}, "turns is empty"),
        ({"turns": [{"content": "q"}]}, "turns holds other than strings"),
        ({"prompt_ids": [1], "response_ids": [2]}, "token ids hold no prompt to answer"),
    ],
)
def test_faults_of_prompts_are_named(value, expected):
    assert reason(value, answers_needed=False) == expected


# ---------------------------------------------------------------------------------------------- token rows


def test_token_rows():
    row = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, True, False], "source": "math"}
    result = parse(row)
    assert result == TokenRow((([5, 6, 7, 8], [False, True, True, False]),), "math")
    assert [type(marked) for marked in result.samples[0][1]] == [bool] * 4
    assert result.form == "columns input_ids, loss_mask as token ids"
    pair = parse({"prompt_ids": [5], "response_ids": [6, 7]})
    assert (
        pair.samples == (([5, 6, 7], [False, True, True]),)
        and pair.form == "columns prompt_ids, response_ids as token ids"
    )
    assert pair.digest == parse({"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}).digest
    assert pair.digest != parse({"input_ids": [5, 6, 7], "loss_mask": [1, 1, 1]}).digest
    assert len(pair.digest) == 16 and int(pair.digest, 16)
    assert parse({"prompt_ids": [], "response_ids": [6]}).samples == (([6], [True]),)


@pytest.mark.parametrize(
    ("ids", "mask", "expected"),
    [
        ([1, 2], [1], "input_ids and loss_mask differ in length"),
        ([1, -2], [1, 1], "input_ids holds other than ids"),
        ([1, 2.0], [1, 1], "input_ids holds other than ids"),
        ([1, True], [1, 1], "input_ids holds other than ids"),
        ([1, "2"], [1, 1], "input_ids holds other than ids"),
        ("12", [1, 1], "input_ids is not a list"),
        ([1, 2], "11", "loss_mask is not a list"),
        ([1, 2], [1, 2], "loss_mask holds other than 0 and 1"),
        ([1, 2], [1, 1.0], "loss_mask holds other than 0 and 1"),
        ([1, 2], [1, None], "loss_mask holds other than 0 and 1"),
        ([1, 2], [0, 0], "loss_mask marks no token"),
        ([], [], "loss_mask marks no token"),
        ([1], None, "no conversation in columns input_ids, loss_mask"),
    ],
)
def test_faults_of_token_rows_are_named(ids, mask, expected):
    assert reason({"input_ids": ids, "loss_mask": mask}) == expected


def test_faults_of_prompt_and_response_ids_are_named():
    assert reason({"prompt_ids": [1], "response_ids": []}) == "response_ids is empty"
    assert reason({"prompt_ids": [-1], "response_ids": [1]}) == "prompt_ids holds other than ids"
    assert reason({"prompt_ids": [1], "response_ids": {}}) == "response_ids is not a list"


# ------------------------------------------------------------------------------------------- named columns


def test_columns_that_the_user_names():
    row = {"messages": "notes", "q": "q", "a": "a", "s": None, "ids": [1, 2], "mask": [0, 1]}
    assert parse(row, parse_columns("prompt=q,response=a")) == parse(CHAT)
    assert parse(row, parse_columns("prompt=q, response=a, system=s")) == parse(CHAT)
    assert parse(row | {"s": "S"}, parse_columns("prompt=q,response=a,system=s")).messages[0]["content"] == "S"
    assert parse(row, parse_columns("input_ids=ids,loss_mask=mask")).samples == (([1, 2], [False, True]),)
    assert parse(row, parse_columns("prompt_ids=ids,response_ids=ids")).samples[0][0] == [1, 2, 1, 2]
    result = parse({"chats": CHAT["messages"]} | SHARED, parse_columns("messages=chats"))
    assert result == parse(CHAT) and result.form == "column chats as chat messages"
    prompts = parse_columns("prompt=q")
    assert parse(row, prompts, answers_needed=False).messages == CHAT["messages"][:1]
    assert reason(row, prompts) == "column q has no answers: give --responses"


def test_rows_without_a_named_column_are_skipped():
    columns = {"prompt": "q", "response": "a", "system": "s"}
    whole = {"q": "q", "a": "a", "s": "s"} | CHAT
    for name in columns.values():
        assert reason({key: item for key, item in whole.items() if key != name}, columns) == f"no column {name}"
    assert reason(whole | {"a": None}, columns) == "no column a"
    assert len(parse(whole | {"a": None}, columns, answers_needed=False).messages) == 2
    assert reason(CHAT, {"messages": "chat"}) == "no column chat"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("question", "'question', expected each key once, as prompt=NAME"),
        ("prompt=", "'prompt=', expected each key once"),
        ("prompt=a,prompt=b", "'prompt=b', expected each key once"),
        ("answer=a", "the keys answer make no row; expected one of: messages; prompt; prompt, response; "),
        ("response=a", "the keys response make no row"),
        ("prompt=a,messages=b", "the keys prompt, messages make no row"),
        ("input_ids=a", "the keys input_ids make no row"),
        ("input_ids=a,response_ids=b", "the keys input_ids, response_ids make no row"),
        ("", "'', expected each key once"),
    ],
)
def test_columns_that_make_no_row_are_refused(text, message):
    with pytest.raises(UserError) as error:
        parse_columns(text)
    assert str(error.value).startswith(f"--columns {text}: {message}")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["from", "value", "role", "content", "name", "arguments", "tool_calls", "type", "text"]),
            inner,
        )
    ),
    max_leaves=8,
)


@given(
    st.dictionaries(
        st.sampled_from(
            [
                "messages",
                "conversations",
                "prompt",
                "response",
                "system",
                "tools",
                "turns",
                "source",
                "input_ids",
                "loss_mask",
            ]
        ),
        json_values | st.lists(st.dictionaries(st.just("role"), st.sampled_from(["user", "assistant"]), min_size=1)),
    ),
    st.booleans(),
)
def test_any_row_is_parsed_or_skipped(value, answers_needed):
    try:
        result = parse(json.dumps(value).encode(), answers_needed=answers_needed)
    except SkipRow as skip:
        str(skip).encode()
        return
    assert len(result.digest) == 16
    if isinstance(result, Conversation):
        json.dumps(result.messages, ensure_ascii=False).encode()
        assert all(isinstance(message["content"], str) for message in result.messages)
