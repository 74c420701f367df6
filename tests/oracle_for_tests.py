"""Random conversations, and by hand what a target of each family would have been given and would have generated.

Shares nothing with the templates of families_for_tests.py and nothing with the masker.
"""

import json
from typing import Any, NamedTuple

from hypothesis import strategies as st

from eagle3.conversations import Conversation, parse_row
from eagle3.sources import Row


class Said(NamedTuple):
    """An assistant turn; `form` says whether its reasoning is a field or inside of the content, tagged or raw."""

    reasoning: str | None
    text: str
    calls: list[dict[str, Any]]  # arguments of each call of the function `add`
    form: str = "field"


words_said = st.text(alphabet="ab E1é你\n .'\t🙂<", max_size=12) | st.sampled_from(["the sum", "\n\nthe", "even\n"])
said = words_said.filter(str.strip)
arguments = st.dictionaries(said, words_said | st.integers(-9, 99) | st.booleans() | st.none(), max_size=2)
REASONS = ["qwen3", "qwen3-thinking", "deepseek-r1", "harmony"]
CALLS = ["llama3", "qwen3", "qwen3-thinking", "harmony"]


@st.composite
def conversations(draw, name: str) -> list[tuple[str, Any]]:
    """Roles and contents that the family's template takes."""
    messages: list[tuple[str, Any]] = []
    if system := draw(st.none() | said):
        messages.append(("system", system))
    for _ in range(draw(st.integers(1, 3))):
        messages.append(("user", draw(said)))
        for _ in range(draw(st.integers(0, 2)) if name in CALLS else 0):
            reasoning = draw(st.none() | said) if name in REASONS else None
            text = "" if name == "llama3" or (name == "harmony" and reasoning) else draw(words_said)
            number = 1 if name in ("llama3", "harmony") else 2
            calls = draw(st.lists(arguments, min_size=1, max_size=number))
            messages.append(("assistant", Said(reasoning, text if text.strip() else "", calls)))
            messages += [("tool", draw(words_said)) for _ in calls]
        reasoning = draw(said if name == "deepseek-r1" else st.none() | said) if name in REASONS else None
        form = draw(st.sampled_from(["field", "tagged", "raw"])) if reasoning else "field"
        messages.append(("assistant", Said(reasoning, draw(said), [], form)))
    return messages


def conversation(messages: list[tuple[str, Any]]) -> Conversation:
    """The same as a row, parsed."""
    rows: list[dict[str, Any]] = []
    for role, content in messages:
        if role != "assistant":
            rows.append({"role": role, "content": content})
            continue
        row: dict[str, Any] = {"role": role, "content": content.text}
        if content.reasoning and content.form == "field":
            row["reasoning_content"] = content.reasoning
        elif content.reasoning:
            row["content"] = f"{'<think>' if content.form == 'tagged' else ''}{content.reasoning}</think>{content.text}"
        if content.calls:
            functions = [{"name": "add", "arguments": one} for one in content.calls]
            row["tool_calls"] = [{"id": "1", "type": "function", "function": function} for function in functions]
        rows.append(row)
    return parse_row(Row("test", 1, {"messages": rows}))


def written(name: str, messages: list[tuple[str, Any]]) -> list[tuple[str, str]]:
    """What a target of the family would have been given, and would have generated, at each assistant turn."""
    prompt, generated = ORACLES[name]
    return [
        (prompt(messages[:place], content), generated(content))
        for place, (role, content) in enumerate(messages)
        if role == "assistant"
    ]


def _system(messages: list[tuple[str, Any]]) -> tuple[str, list[tuple[str, Any]]]:
    return (messages[0][1], messages[1:]) if messages[0][0] == "system" else ("", messages)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _llama3_prompt(before: list, turn: Said) -> str:
    system, messages = _system(before)
    header = "<|start_header_id|>{}<|end_header_id|>\n\n".format
    text = f"<|begin_of_text|>{header('system')}Cutting Knowledge Date: December 2023\nToday Date: 30 Nov 2026\n\n"
    text += f"{system.strip()}<|eot_id|>"
    for role, content in messages:
        if role == "assistant":
            text += header(role) + _llama3_generated(content)
        elif role == "tool":
            text += f"{header('ipython')}{content}<|eot_id|>"
        else:
            text += f"{header(role)}{content.strip()}<|eot_id|>"
    return text + header("assistant")


def _llama3_generated(turn: Said) -> str:
    if turn.calls:
        return f'{{"name": "add", "parameters": {_json(turn.calls[0])}}}<|eot_id|>'
    return f"{turn.text.strip()}<|eot_id|>"


def _gemma_prompt(before: list, turn: Said) -> str:
    system, messages = _system(before)
    text = "<bos>"
    for number, (role, content) in enumerate(messages):
        if role == "assistant":
            text += f"<start_of_turn>model\n{content.text.strip()}<end_of_turn>\n"
        else:
            first = f"{system}\n\n" if system and number == 0 else ""
            text += f"<start_of_turn>user\n{first}{content.strip()}<end_of_turn>\n"
    return f"{text}<start_of_turn>model\n"


def _qwen3_calls(turn: Said, text: str) -> str:
    calls = [f'<tool_call>\n{{"name": "add", "arguments": {_json(one)}}}\n</tool_call>' for one in turn.calls]
    return "\n".join([*([text] if text or not calls else []), *calls])


def _qwen3_history(before: list) -> str:
    text, query = "", max(place for place, (role, _) in enumerate(before) if role == "user")
    for place, (role, content) in enumerate(before):
        if role == "assistant":
            text += "<|im_start|>assistant\n"
            answer = content.text.lstrip("\n") if content.form != "field" else content.text
            if place > query and content.reasoning:
                text += f"<think>\n{content.reasoning.strip(chr(10))}\n</think>\n\n"
                answer = answer.lstrip("\n")
            text += f"{_qwen3_calls(content, answer)}<|im_end|>\n"
        elif role == "tool":
            text += "" if before[place - 1][0] == "tool" else "<|im_start|>user"
            text += f"\n<tool_response>\n{content}\n</tool_response>"
            text += "" if place + 1 < len(before) and before[place + 1][0] == "tool" else "<|im_end|>\n"
        else:
            text += f"<|im_start|>{role}\n{content}<|im_end|>\n"
    return f"{text}<|im_start|>assistant\n"


def _qwen3_prompt(before: list, turn: Said) -> str:
    """Without reasoning as a server that was asked for none."""
    return _qwen3_history(before) + ("" if turn.reasoning else "<think>\n\n</think>\n\n")


def _qwen3_thinking_prompt(before: list, turn: Said) -> str:
    return _qwen3_history(before) + ("<think>\n" if turn.reasoning else "<think>\n\n</think>\n\n")


def _qwen3_thinking_generated(turn: Said) -> str:
    reasoning = turn.reasoning.strip("\n") + "\n</think>\n\n" if turn.reasoning else ""
    return reasoning + _qwen3_calls(turn, turn.text.lstrip("\n")) + "<|im_end|>"


def _qwen3_generated(turn: Said) -> str:
    return ("<think>\n" if turn.reasoning else "") + _qwen3_thinking_generated(turn)


def _deepseek_prompt(before: list, turn: Said) -> str:
    system, messages = _system(before)
    text = f"<｜begin▁of▁sentence｜>{system}"
    for role, content in messages:
        end = "<｜end▁of▁sentence｜>"
        text += f"<｜Assistant｜>{content.text}{end}" if role == "assistant" else f"<｜User｜>{content}"
    return f"{text}<｜Assistant｜>"


def _harmony_prompt(before: list, turn: Said) -> str:
    system, messages = _system(before)
    text = (
        "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
        "Knowledge cutoff: 2024-06\nCurrent date: 2026-11-30\n\nReasoning: medium\n\n# Valid channels: "
        "analysis, commentary, final. Channel must be included for every message.<|end|>"
    )
    if system:
        text += f"<|start|>developer<|message|># Instructions\n\n{system}<|end|>"
    for place, (role, content) in enumerate(messages):
        if role == "user":
            text += f"<|start|>user<|message|>{content}<|end|>"
        elif role == "tool":
            text += f"<|start|>functions.add to=assistant<|channel|>commentary<|message|>{_json(content)}<|end|>"
        elif content.calls:
            answered = any(who == "assistant" and not what.calls for who, what in messages[place:])
            kept = Said(None, "", content.calls) if answered else content
            text += f"<|start|>assistant{_harmony_generated(kept)}"
        else:
            text += f"<|start|>assistant<|channel|>final<|message|>{content.text}<|end|>"
    return f"{text}<|start|>assistant"


def _harmony_generated(turn: Said) -> str:
    reasoning = turn.reasoning or (turn.text if turn.calls else "")
    text = f"<|channel|>analysis<|message|>{reasoning}<|end|><|start|>assistant" if reasoning else ""
    if turn.calls:
        return f"{text} to=functions.add<|channel|>commentary json<|message|>{_json(turn.calls[0])}<|call|>"
    return f"{text}<|channel|>final<|message|>{turn.text}<|return|>"


ORACLES = {
    "llama3": (_llama3_prompt, _llama3_generated),
    "gemma": (_gemma_prompt, lambda turn: f"{turn.text.strip()}<end_of_turn>"),
    "qwen3": (_qwen3_prompt, _qwen3_generated),
    "qwen3-thinking": (_qwen3_thinking_prompt, _qwen3_thinking_generated),
    "deepseek-v3": (_deepseek_prompt, lambda turn: f"{turn.text}<｜end▁of▁sentence｜>"),
    "deepseek-r1": (
        lambda before, turn: f"{_deepseek_prompt(before, turn)}<think>\n",
        lambda turn: f"{turn.reasoning}</think>{turn.text}<｜end▁of▁sentence｜>".removeprefix("\n"),
    ),
    "harmony": (_harmony_prompt, _harmony_generated),
}
