"""Rows to messages or to token ids: chat and ShareGPT rows, prompt/response pairs, rows that are tokenised already.

What a row is follows from its columns; a column that is null counts as absent. A row that cannot be used is never
mended silently: it is skipped with a reason that can be counted.
"""

import hashlib
import json
import re
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from eagle3.sources import Row
from eagle3.terminal import UserError

ROLES = {  # the names that ShareGPT and chat rows use for the roles of chat templates
    "system": "system",
    "developer": "system",  # the same thing under its newer name; templates know the older one
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function_call": "assistant",  # of ShareGPT rows: the text is one call or a list of calls, as JSON
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
MESSAGE_COLUMNS = ("messages", "conversations", "conversation")
TOKEN_COLUMNS = (("input_ids", "loss_mask"), ("prompt_ids", "response_ids"))
# Of several the first counts. A full solution comes before the short answer that rows of mathematics also have.
PROMPT_COLUMNS = ("prompt", "instruction", "question", "query", "problem", "input")
RESPONSE_COLUMNS = ("response", "completion", "output", "solution", "answer", "chosen")
SYSTEM_COLUMNS = ("system", "system_prompt")
COLUMN_KEYS = (  # what the user may name together
    {"messages"},
    {"prompt"},
    {"prompt", "response"},
    {"prompt", "system"},
    {"prompt", "response", "system"},
    *({*pair} for pair in TOKEN_COLUMNS),
)
MOST_IDS = 1 << 31  # they are stored as int32
LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class SkipRow(Exception):
    """A row that is not used. Its text is the reason: short, and equal for equal faults."""


@dataclass(frozen=True)
class Conversation:
    """Messages for a chat template: role, content (a string), and reasoning_content, tool_calls where there are any."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    origin: str | None = None  # the dataset that a blend names in its "source" column
    form: str = field(default="", compare=False)  # how the row was read, to be said to the user

    @property
    def trailing(self) -> int:
        """Number of messages after the last assistant turn; all of them where there is none."""
        turns = (n for n, message in enumerate(reversed(self.messages)) if message["role"] == "assistant")
        return next(turns, len(self.messages))

    @property
    def digest(self) -> str:
        """Equal for conversations with equal text, so that duplicates can be kept together."""
        return _digest([self.messages, self.tools])


@dataclass(frozen=True)
class TokenRow:
    """Samples as they are trained on: token ids and loss mask, of equal length T each."""

    samples: tuple[tuple[list[int], list[bool]], ...]
    origin: str | None = None
    form: str = field(default="", compare=False)

    @property
    def digest(self) -> str:
        """Equal for rows with equal ids and masks."""
        digest = hashlib.sha256()
        for ids, mask in self.samples:
            digest.update(array("q", [len(ids), *ids]).tobytes() + bytes(mask))
        return digest.hexdigest()[:16]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def parse_columns(text: str) -> dict[str, str]:
    """The value of --columns, such as "prompt=question,response=answer", for `parse_row`."""
    columns: dict[str, str] = {}
    for pair in text.split(","):
        key, _, name = (part.strip() for part in pair.partition("="))
        if not name or key in columns:
            raise UserError(f"--columns {text}: {pair!r}, expected each key once, as prompt=NAME")
        columns[key] = name
    if {*columns} not in COLUMN_KEYS:
        known = "; ".join(", ".join(sorted(keys)) for keys in COLUMN_KEYS)
        raise UserError(f"--columns {text}: the keys {', '.join(columns)} make no row; expected one of: {known}")
    return columns


# ---------------------------------------------------------------------------------------- kinds of rows


def parse_row(
    row: Row, columns: dict[str, str] | None = None, *, answers_needed: bool = True
) -> Conversation | TokenRow:
    """The conversation or the token ids of one row. Raises SkipRow with the reason when it cannot be used as it stands.

    `columns` maps what `parse_columns` knows to names of columns; without it they are found by their usual names.
    Without `answers_needed` the row is a prompt: it needs a user turn, its assistant turns may be empty or missing.
    A row that the target answered is parsed already.
    """
    if isinstance(row.value, SkipRow):
        raise row.value
    if isinstance(row.value, TokenRow):
        return row.value
    try:
        return _parse(_object(row.value), columns, answers_needed)
    except RecursionError:
        raise SkipRow("nested too deeply") from None


def _object(value: Any) -> dict[str, Any]:
    if isinstance(value, bytes):
        if not value.strip():
            raise SkipRow("blank line")
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise SkipRow("invalid JSON") from None
    if not isinstance(value, dict):
        raise SkipRow("row is not an object")
    return value


def _parse(value: dict[str, Any], columns: dict[str, str] | None, answers_needed: bool) -> Conversation | TokenRow:
    found = _named(value, columns, answers_needed) if columns else _detected(value)
    source = value.get("source")
    origin = _valid_text(source) if isinstance(source, str) and source else None
    names = f"column{'s' * (len(found) > 1)} {', '.join(_valid_text(name) for name in found.values())}"
    if found.keys() & {"input_ids", "prompt_ids"}:
        if not answers_needed:
            raise SkipRow("token ids hold no prompt to answer")
        return TokenRow((_token_ids(value, found),), origin, f"{names} as token ids")
    messages, how = _conversation(value, found, answers_needed)
    return Conversation(messages, _tools(value.get("tools")), origin, f"{names} as {how}")


def _named(value: dict[str, Any], columns: dict[str, str], answers_needed: bool) -> dict[str, str]:
    """The columns that the user names, as far as the row has them. Only system may be null."""
    for key, name in columns.items():
        needed = answers_needed or key != "response"
        if needed and (name not in value if key == "system" else value.get(name) is None):
            raise SkipRow(f"no column {name}")
    return {key: name for key, name in columns.items() if value.get(name) is not None}


def _detected(value: dict[str, Any]) -> dict[str, str]:
    """What the row's columns are: a key of `parse_columns`, turns or input, and the column's name."""
    present = {name for name, item in value.items() if item is not None}
    if (messages := _first(MESSAGE_COLUMNS, present)) is not None:
        return {"messages": messages}
    for pair in TOKEN_COLUMNS:
        if present.issuperset(pair):
            return dict(zip(pair, pair, strict=True))
    if isinstance(value.get("turns"), list):
        return {"turns": "turns"}
    prompt = _first(PROMPT_COLUMNS, present)
    if prompt is None:
        names = ", ".join(_valid_text(str(name))[:30] for name in sorted(value, key=str)[:6])
        raise SkipRow(f"no conversation in columns {names}" if names else "row without columns")
    return {
        key: name
        for key, name in {
            "prompt": prompt,
            "input": "input" if prompt == "instruction" and "input" in present else None,
            "response": _first(RESPONSE_COLUMNS, present),
            "system": _first(SYSTEM_COLUMNS, present),
        }.items()
        if name is not None
    }


def _first(names: Iterable[str], present: set[str]) -> str | None:
    return next((name for name in names if name in present), None)


def _conversation(
    value: dict[str, Any], found: dict[str, str], answers_needed: bool
) -> tuple[list[dict[str, Any]], str]:
    """The messages of a row, and what they were read as."""
    if name := found.get("messages"):
        messages = _messages(value[name], name, answers_needed)
        shared = bool(messages) and "from" in value[name][0]
        how = "ShareGPT turns" if shared else "chat messages"
    elif answers_needed and "response" not in found:
        raise SkipRow(f"column {found.get('turns') or found['prompt']} has no answers: give --responses")
    elif name := found.get("turns"):
        if not all(isinstance(turn, str) for turn in value[name]):
            raise SkipRow(f"{name} holds other than strings")
        messages = [{"role": "user", "content": _valid_text(turn)} for turn in value[name]]
        how = "user turns"
    else:
        messages = _pair(value, found, answers_needed)
        how = "messages" if isinstance(value[found["prompt"]], list) else "one turn each"
    if not messages:
        raise SkipRow(f"{name or found['prompt']} is empty")
    if messages[0]["role"] == "assistant":
        raise SkipRow("conversation starts with the assistant")
    role = "assistant" if answers_needed else "user"
    if not any(message["role"] == role for message in messages):
        raise SkipRow(f"no {role} turn")
    return messages, how


def _pair(value: dict[str, Any], found: dict[str, str], answers_needed: bool) -> list[dict[str, Any]]:
    """System prompt, prompt and response as messages; a response of messages may repeat the prompt before it."""
    prompt = value[found["prompt"]]
    if "input" in found and isinstance(prompt, str):
        if not isinstance(value["input"], str):
            raise SkipRow(f"input of type {type(value['input']).__name__}")
        prompt = f"{prompt}\n{value['input']}" if value["input"].strip() else prompt
    messages = _side(prompt, "user", found["prompt"], answers_needed)
    if name := found.get("response"):
        messages = _with_response(messages, value[name], name, answers_needed)
    if name := found.get("system"):
        if not isinstance(value[name], str):
            raise SkipRow(f"{name} of type {type(value[name]).__name__}")
        if value[name].strip():
            if messages and messages[0]["role"] == "system":
                raise SkipRow(f"{name} beside a system message")
            messages = [{"role": "system", "content": _valid_text(value[name])}, *messages]
    return messages


def _with_response(prompt: list[dict[str, Any]], value: Any, name: str, answers_needed: bool) -> list[dict[str, Any]]:
    try:
        response = _side(value, "assistant", name, answers_needed)
    except SkipRow:
        if answers_needed:
            raise
        return prompt  # of a test set: the answer may be a number, or a list of all that are right
    if response[: len(prompt)] == prompt:
        return response
    if response and response[0]["role"] != "assistant":
        raise SkipRow(f"{name} begins with another turn than the assistant's")
    return prompt + response


def _side(value: Any, role: str, name: str, answers_needed: bool) -> list[dict[str, Any]]:
    if isinstance(value, str):
        return [_message({"role": role, "content": value}, answers_needed)]
    if isinstance(value, list):
        return _messages(value, name, answers_needed)
    raise SkipRow(f"{name} of type {type(value).__name__}")


def _token_ids(value: dict[str, Any], found: dict[str, str]) -> tuple[list[int], list[bool]]:
    """Token ids and loss mask, of equal length."""
    for name in found.values():
        if not isinstance(value[name], list):
            raise SkipRow(f"{name} is not a list")
    columns = {key: value[name] for key, name in found.items()}
    for key, name in found.items():
        if key != "loss_mask" and columns[key]:
            tokens = columns[key]
            if set(map(type, tokens)) != {int} or not 0 <= min(tokens) <= max(tokens) < MOST_IDS:
                raise SkipRow(f"{name} holds other than ids")
    if "loss_mask" not in found:
        prompt, response = columns["prompt_ids"], columns["response_ids"]
        if not response:
            raise SkipRow(f"{found['response_ids']} is empty")
        return prompt + response, [False] * len(prompt) + [True] * len(response)
    ids, mask = columns["input_ids"], columns["loss_mask"]
    if len(ids) != len(mask):
        raise SkipRow(f"{found['input_ids']} and {found['loss_mask']} differ in length")
    if not set(map(type, mask)) <= {bool, int} or not set(mask) <= {0, 1}:
        raise SkipRow(f"{found['loss_mask']} holds other than 0 and 1")
    if not any(mask):
        raise SkipRow(f"{found['loss_mask']} marks no token")
    return ids, list(map(bool, mask))


# --------------------------------------------------------------------------------------------- messages


def _messages(value: Any, name: str, answers_needed: bool) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise SkipRow(f"{name} is not a list")
    return [_message(message, answers_needed) for message in value]


def _message(message: Any, answer_needed: bool) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise SkipRow("message is not an object")
    name_key, text_key = ("from", "value") if message.get("from") is not None else ("role", "content")
    if name_key not in message:
        keys = ", ".join(_valid_text(str(key))[:30] for key in sorted(message, key=str)[:6])
        raise SkipRow(f"message without role (keys: {keys})")
    name = message[name_key]
    role = ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise SkipRow(f"unknown role {_valid_text(repr(name)[:60])}")
    content = message.get(text_key)
    if role == "assistant":
        return _assistant(message, content, name == "function_call", answer_needed)
    result = {"role": role, "content": _content(content, role)}
    if role == "tool":
        keys = ("tool_call_id", "name")
        result |= {key: _valid_text(text) for key in keys if isinstance(text := message.get(key), str)}
    return result


def _assistant(message: dict[str, Any], content: Any, content_is_call: bool, answer_needed: bool) -> dict[str, Any]:
    if content_is_call:
        calls, content = _tool_calls(content, "function_call"), ""
        if not calls:
            raise SkipRow("malformed function_call")
    else:
        calls = _tool_calls(message.get("tool_calls") or message.get("function_call"), "tool_calls")
    result = {"role": "assistant", "content": ""}
    if content is not None or (answer_needed and not calls):
        result["content"] = _content(content, "assistant")
    if answer_needed and not result["content"].strip() and not calls:
        raise SkipRow("assistant content is empty")
    reasoning = message.get("reasoning_content") or message.get("reasoning") or message.get("thinking")
    if reasoning is not None and not isinstance(reasoning, str):
        raise SkipRow(f"assistant reasoning of type {type(reasoning).__name__}")
    if reasoning and reasoning.strip():
        result["reasoning_content"] = _valid_text(reasoning)
    if calls:
        result["tool_calls"] = calls
    return result


def _content(content: Any, role: str) -> str:
    if content is None:
        raise SkipRow(f"{role} content is null")
    if isinstance(content, str):
        return _valid_text(content)
    if not isinstance(content, list):
        raise SkipRow(f"{role} content of type {type(content).__name__}")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise SkipRow(f"{role} content part of type {str(kind)[:40]}")
        texts.append(_valid_text(part["text"]))
    return "".join(texts)


def _tool_calls(calls: Any, what: str) -> list[dict[str, Any]]:
    """Tool calls in the form of chat templates and servers, their arguments as an object.

    A call may also be flat, a name with arguments, and a call or its arguments JSON text.
    """
    if not calls:
        return []
    try:
        parsed, result = _parsed(calls), []
        for call in parsed if isinstance(parsed, list) else [parsed]:
            function = call.get("function", call)
            arguments = _parsed(function["arguments"] if function is call else function.get("arguments") or {})
            if not isinstance(function["name"], str) or not isinstance(arguments, dict):
                raise TypeError
            number = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
            result.append(
                {**number, "type": "function", "function": {"name": function["name"], "arguments": arguments}}
            )
        return _valid_values(result)
    except (AttributeError, TypeError, KeyError, ValueError):
        raise SkipRow(f"malformed {what}") from None


def _tools(tools: Any) -> list[Any] | None:
    if tools is None or (isinstance(tools, str) and not tools.strip()):
        return None
    try:
        tools = _parsed(tools)
        if not isinstance(tools, list):
            raise SkipRow("tools is not a list")
        tools = [_parsed(tool) for tool in tools]
    except ValueError:
        raise SkipRow("tools is not a list") from None
    return _valid_values(tools) or None


def _parsed(value: Any) -> Any:
    """Columns of one type carry nested values as JSON text."""
    return json.loads(value) if isinstance(value, str) else value


def _valid_text(text: str) -> str:
    """Text without lone surrogates, which no tokenizer takes: U+FFFD stands for them."""
    return text if text.isascii() else LONE_SURROGATE.sub("\ufffd", text)


def _valid_values(value: Any) -> Any:
    if isinstance(value, str):
        return _valid_text(value)
    if isinstance(value, list):
        return [_valid_values(item) for item in value]
    if isinstance(value, dict):
        return {_valid_values(key): _valid_values(item) for key, item in value.items()}
    return value
