"""One conversation in the making: the prompt of each assistant turn, the ids that came, the message they become."""

import json
import re
import unicodedata
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from eagle3.conversations import Conversation, SkipRow
from eagle3.masking import Masker
from eagle3.responses.backends import Generated
from eagle3.sources import Row

PLACEHOLDER = "(answer 7f3a)"  # stands for an answer's text where a template's treatment of it is looked at
CUT = "cut by length"
MINIMUM_RUN = 2  # the first token of an answer is the target's own; a draft is supervised from the second on
CALL = re.compile(  # how answers begin a tool call: Hermes and Qwen, Kimi, DeepSeek, Mistral, Llama 3, gpt-oss
    r"<tool_calls?>|<function=|<\|tool_calls?(?:_section)?_begin\|>|<｜tool▁calls?▁begin｜>|\[TOOL_CALLS\]|<\|python_tag\|>"
    r"|<\|start\|>assistant to=|<\|channel\|>commentary to="
)
HARMONY = re.compile(r"<\|channel\|>(\w+).*?<\|message\|>(.*?)(?=<\|(?:end|return|call|start|channel)\|>|$)", re.DOTALL)


def message_of(text: str, opened: bool) -> tuple[dict[str, str], str | None]:
    """The assistant message that a server would make of an answer, and why the conversation cannot go on after it.

    `text` is without the token that ended it; `opened` says that the prompt ends inside the reasoning.
    """
    reasoning, content, unclosed = "", text, False
    if text.startswith("<|channel|>"):  # harmony
        parts = HARMONY.findall(text)
        reasoning = "".join(part for channel, part in parts if channel == "analysis")
        content = "".join(part for channel, part in parts if channel != "analysis")
        unclosed = not any(channel == "final" for channel, _ in parts)
    elif opened or text.lstrip().startswith("<think>"):
        reasoning, closed, content = text.partition("</think>")
        reasoning = reasoning if opened else reasoning.lstrip().removeprefix("<think>")
        unclosed = not closed
    message = {"role": "assistant", "content": content}
    if reasoning.strip():
        message["reasoning_content"] = reasoning
    if CALL.search(text if unclosed else content) or CALL.match(text) or _is_call(content):
        return message, "answer calls a tool that the row does not"
    if unclosed:
        return message, "reasoning without an end"
    return message, None if content.strip() else "empty answer"


def _is_call(content: str) -> bool:
    """Llama 3 calls a function by an object alone."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and "name" in value and bool({"parameters", "arguments"} & value.keys())


def special_tokens(tokenizer: Any) -> frozenset[str]:
    """What a server leaves out of the text that it gives."""
    added = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    return frozenset({*tokenizer.all_special_tokens, *added})


def plan(messages: list[dict[str, Any]]) -> list[dict[str, Any] | None]:
    """What happens in turn: a message to take over, None where the target answers, or a recorded call to answer too.

    The target answers where the row has an answer, and a last user turn or tool result. A row without any answer has
    user turns to be answered one by one.
    """
    recorded = any(message["role"] == "assistant" for message in messages)
    steps: list[dict[str, Any] | None] = []
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            steps.append(message)
            if message["role"] != "system" and (place + 1 == len(messages) or not recorded):
                steps.append(None)
        else:
            steps.append(message if message.get("tool_calls") else None)
    return steps


@dataclass
class Talk:
    """A conversation of one row. `next_prompt` and `take` alternate until there is no prompt any more."""

    order: int  # of the row in the input, from 0
    draw: int
    row: Row
    conversation: Conversation
    masker: Masker
    tokenizer: Any
    special: frozenset[str]  # special_tokens of the tokenizer
    max_seq_len: int
    prompt: list[int] = field(default_factory=list)  # token ids of the turn to be answered
    messages: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, list]] = field(default_factory=list)  # input_ids, and runs [begin, end)
    stopped: str | None = None  # why it ended before its last turn, or within it
    turn: int = 0
    retried: bool = False

    def __post_init__(self) -> None:
        self._steps = deque(plan(self.conversation.messages))
        self._fresh: int | None = None  # place in messages of an answer that no prompt has repeated yet

    def next_prompt(self) -> list[int] | None:
        """Token ids that a server would be given for the next assistant turn; None when the conversation is over."""
        while self._steps and not self.stopped:
            step = self._steps[0]
            if step is not None and step["role"] != "assistant":
                self.messages.append(step)
                self._steps.popleft()
                continue
            try:
                prompt = self.masker.prompt_ids(self.messages, self.conversation.tools)
                self._check_history(prompt)
            except SkipRow as skip:
                self.stopped = str(skip)
                break
            if len(prompt) + MINIMUM_RUN > self.max_seq_len:
                self.stopped = f"no room for an answer within {self.max_seq_len} tokens"
                break
            self.prompt = prompt
            return prompt
        return None

    def take(self, generated: Generated) -> None:
        """Store the answer to the last prompt, and go on to the next turn."""
        step = self._steps.popleft()
        self.turn += 1
        if len(generated.ids) >= MINIMUM_RUN:
            self._store(generated.ids)
        ended = generated.reason == "stop"
        text = self._decode(generated.ids[:-1] if ended else generated.ids)
        opened = self._decode(self.prompt[-8:]).rstrip().endswith("<think>")
        message, stopped = message_of(text, opened)
        if not ended:
            stopped = CUT
        elif step is not None:  # the row's own call, whose result is recorded, whatever the target did
            message, stopped = step, None
        elif not stopped and any(token in message["content"] for token in self.special):
            stopped = "special token within an answer"
        self.stopped = stopped
        if message["content"] or message is step:
            self._fresh = len(self.messages) if step is None else None
            self.messages.append(message)

    def _store(self, ids: list[int]) -> None:
        """One sample as long as each prompt begins with all ids before it; runs never touch."""
        begin, end = len(self.prompt), len(self.prompt) + len(ids)
        last = self.samples[-1] if self.samples else None
        if last and begin > len(last["input_ids"]) and self.prompt[: len(last["input_ids"])] == last["input_ids"]:
            last["input_ids"] = self.prompt + ids
            last["runs"].append([begin, end])
        else:
            self.samples.append({"input_ids": self.prompt + ids, "runs": [[begin, end]]})

    def _check_history(self, prompt: list[int]) -> None:
        """The newest answer stands in `prompt` as it was written. Raises SkipRow otherwise."""
        if self._fresh is None:
            return
        place, self._fresh = self._fresh, None
        answer = self.messages[place]
        messages = [*self.messages]
        messages[place] = answer | {"content": PLACEHOLDER}
        marked = self._decode(self.masker.prompt_ids(messages, self.conversation.tools))
        if _bare(marked).replace(_bare(PLACEHOLDER), _bare(answer["content"])) != _bare(self._decode(prompt)):
            raise SkipRow("chat template changes an answer in the history")

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def record(self) -> dict[str, Any]:
        """Its line in the journal."""
        line = self.place() | {"origin": self.conversation.origin, "samples": self.samples, "stopped": self.stopped}
        if self.conversation.tools:
            line["tools"] = self.conversation.tools
        return line | {"messages": self.messages}

    def place(self) -> dict[str, Any]:
        return {"order": self.order, "draw": self.draw, "source": self.row.source, "row": self.row.number}


def _bare(text: str) -> str:
    """Text without white space, which templates strip and add, in the composed form that tokenizers normalise to."""
    return "".join(unicodedata.normalize("NFC", text).split())
