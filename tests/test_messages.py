"""The messages of a row: names of roles, tool calls, reasoning and content in every form."""

import json

import pytest
from rows_for_tests import CHAT, chat, parse, reason


def test_names_of_roles():
    """Every name is mapped, or the row is left out with it. (P08)"""
    names = {
        "system": ["system", "developer"],
        "user": ["user", "human"],
        "assistant": ["assistant", "gpt", "chatgpt", "model", "bot"],
        "tool": ["tool", "function", "observation"],
    }
    for role, given_names in names.items():
        for name in given_names:
            row = chat(("user", "q"), (name, "x"), ("assistant", "a"))
            assert parse(row).messages[1] == {"role": role, "content": "x"}
    assert reason(chat(("user", "q"), ("my-model", "a"))) == "unknown role 'my-model'"
    assert reason(chat(("user", "q"), ("tool_response", "x"), ("assistant", "a"))) == "unknown role 'tool_response'"
    assert reason({"messages": [{"from": None, "value": "q"}]}) == "message without role (keys: from, value)"
    assert parse({"messages": [{"role": "user", "from": None, "content": "q"}, CHAT["messages"][1]]}) == parse(CHAT)


CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": CALL["function"], "index": 0, "id": None}]},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]},
        {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"a": 1}}]},
        {"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"a": 1}'}]},
        {"role": "assistant", "tool_calls": json.dumps([CALL])},
        {"role": "assistant", "function_call": {"name": "f", "arguments": '{"a": 1}'}},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
        {"from": "function_call", "value": '[{"name": "f", "arguments": "{\\"a\\": 1}"}]'},
        {"from": "function_call", "value": {"name": "f", "arguments": {"a": 1}}},
    ],
)
def test_every_form_of_a_tool_call_is_the_same(message):
    """(P05)"""
    expected = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    assert parse({"messages": [{"role": "user", "content": "q"}, message]}).messages == expected


def test_a_conversation_with_tools():
    row = {
        "conversations": [
            {"from": "human", "value": "q"},
            {"from": "function_call", "value": json.dumps([{"name": n, "arguments": {}} for n in ("f", "g")])},
            {"from": "observation", "value": "42"},
            {"from": "gpt", "value": "a"},
        ],
        "tools": json.dumps([{"name": "f"}]),
    }
    result = parse(row)
    assert [message["role"] for message in result.messages] == ["user", "assistant", "tool", "assistant"]
    assert [call["function"]["name"] for call in result.messages[1]["tool_calls"]] == ["f", "g"]
    assert result.tools == [{"name": "f"}]
    for tools in ([{"name": "f"}], ['{"name": "f"}']):
        assert parse(row | {"tools": tools}) == result
    for none in (None, "", [], "[]"):
        assert parse(CHAT | {"tools": none}) == parse(CHAT)
    assert reason(CHAT | {"tools": "[{]"}) == reason(CHAT | {"tools": {"name": "f"}}) == "tools is not a list"
    with_id = {"role": "assistant", "tool_calls": [CALL | {"id": "functions.f:0"}]}
    answer = {"role": "tool", "content": "42", "tool_call_id": "functions.f:0", "name": "f\ud83d", "extra": 1}
    messages = parse({"messages": [CHAT["messages"][0], with_id, answer]}).messages
    assert messages[1]["tool_calls"][0]["id"] == "functions.f:0"
    assert messages[2] == {"role": "tool", "content": "42", "tool_call_id": "functions.f:0", "name": "f\ufffd"}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"from": "function_call", "value": "f(1)"}, "malformed function_call"),
        ({"from": "function_call", "value": ""}, "malformed function_call"),
        ({"from": "function_call", "value": None}, "malformed function_call"),
        ({"from": "function_call", "value": "[]"}, "malformed function_call"),
        ({"from": "function_call", "value": '{"name": "f"}'}, "malformed function_call"),
        ({"from": "function_call", "value": '{"name": 1, "arguments": {}}'}, "malformed function_call"),
        ({"role": "assistant", "tool_calls": ["f"]}, "malformed tool_calls"),
        ({"role": "assistant", "tool_calls": 7}, "malformed tool_calls"),
        ({"role": "assistant", "tool_calls": [{"function": None}]}, "malformed tool_calls"),
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]}, "malformed tool_calls"),
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}, "malformed tool_calls"),
        ({"role": "assistant", "content": {"a": 1}, "tool_calls": [CALL]}, "assistant content of type dict"),
        ({"role": "assistant", "content": "a", "reasoning": 7}, "assistant reasoning of type int"),
    ],
)
def test_faults_of_assistant_turns_are_named(message, expected):
    assert reason({"messages": [{"role": "user", "content": "q"}, message]}) == expected


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning(name):
    def row(reasoning):
        answer = {"role": "assistant", "content": "a", name: reasoning}
        return {"messages": [{"role": "user", "content": "q", name: "not kept"}, answer]}

    assert parse(row("so")).messages[1] == {"role": "assistant", "content": "a", "reasoning_content": "so"}
    assert parse(row(" ")) == parse(row(None)) == parse(CHAT)


@pytest.mark.parametrize("content", [7, True, {"a": 1}, "", "   ", None, 0.5])
def test_content_that_is_no_text(content):
    """(P44), (P11)"""
    assert reason(chat(("user", "q"), ("assistant", content))).startswith("assistant content ")


def test_rows_nested_too_deeply_are_skipped():
    arguments = {}
    for _ in range(5_000):
        arguments = {"a": arguments}
    answer = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": arguments}]}
    assert reason({"messages": [CHAT["messages"][0], answer]}) == "nested too deeply"
    assert reason(b'{"messages": ' + b"[" * 500_000) == "invalid JSON"
