"""Messages to token ids and loss mask.

The mask covers what the target would have generated in each assistant turn: the answer and its end-of-turn token. Not
the role header, not an empty think block that the template adds for an answer without reasoning (a server puts it into
the prompt), not the newline after the end token, not a default system prompt. The boundary is where a server's prompt
ends: the render up to the turn with the generation prompt. That needs neither offsets nor generation markers, so it is
the same for fast and slow tokenizers.
"""

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import Any

from eagle3.conversations import Conversation, SkipRow

EMPTY_THINK = re.compile(r"\s*(?:<think>\s*)?</think>(\s*)")  # the opening tag may end the generation prompt
PLACEHOLDER = "(the answer's text)"  # shows what a template puts after an answer
MINIMUM_RUN = 2  # the first token of an answer is the target's own; a draft is supervised from the second on


@dataclass(frozen=True)
class Sample:
    """Token ids and loss mask of equal length T; each run of True is one assistant turn."""

    ids: list[int]
    mask: list[bool]


@dataclass(frozen=True)
class Turn:
    """One assistant turn as a server sees it: the prompt's text, and the text from there to the end of the turn."""

    prompt: str
    answer: str
    expected: str  # what the message says, which must be what the supervised tokens decode to
    calls: tuple[str, ...]  # names of the functions it calls

    @property
    def text(self) -> str:
        return self.prompt + self.answer


class Masker:
    """Turns conversations into samples with one tokenizer and its chat template."""

    def __init__(self, tokenizer: Any, end_ids: Iterable[int]) -> None:
        """`end_ids` are the ids that end a generation; the tokenizer's own end id is added."""
        self.tokenizer = tokenizer
        self.end_ids = {*end_ids} | ({tokenizer.eos_token_id} - {None})
        try:
            prompt = self._render([{"role": "user", "content": "a"}], None, generation=True)
        except SkipRow:
            prompt = ""
        self.opens_reasoning = prompt.rstrip().endswith("<think>")

    def samples(self, conversation: Conversation, max_seq_len: int) -> list[Sample]:
        """Samples of one conversation, at most `max_seq_len` tokens each.

        One sample, unless the template renders a turn differently once others follow (most drop earlier reasoning):
        then a new sample begins, with its whole prompt as a server would render it, and only the new turn is
        supervised. Turns with nothing between them get a sample each. What follows the last assistant turn is left
        out. Raises SkipRow when no correct sample can be made.
        """
        messages = self._prepared(conversation.messages)
        turns = [
            self._turn(messages, index, conversation.tools)
            for index, message in enumerate(messages)
            if message["role"] == "assistant"
        ]
        groups: list[list[Turn]] = []
        for turn in turns:
            if groups and turn.prompt.startswith(groups[-1][-1].text):
                groups[-1].append(turn)
            else:
                groups.append([turn])
        samples = []
        for group in groups:
            sample = self._tokenize(group)
            touching = len(_run_lengths(sample.mask)) < len(group)
            samples += [self._tokenize([turn]) for turn in group] if touching else [sample]
        samples = [Sample(sample.ids[:max_seq_len], sample.mask[:max_seq_len]) for sample in samples]
        samples = [sample for sample in samples if max(_run_lengths(sample.mask), default=0) >= MINIMUM_RUN]
        if not samples:
            raise SkipRow(f"no assistant tokens after truncation to {max_seq_len}")
        return samples

    def _prepared(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Messages with reasoning as a field of its own, where the generation prompt opens it.

        Templates of that family print a think block of their own before the content, so an inline one would be doubled.
        """
        if not self.opens_reasoning:
            return messages
        prepared = []
        for message in messages:
            if message["role"] == "assistant" and "reasoning_content" not in message:
                before, closed, content = message["content"].partition("</think>")
                opened = before.lstrip().startswith("<think>")
                # a server's answer as it is has no opening tag: the prompt ends in it
                if closed and (opened or "<think>" not in before):
                    reasoning = before.lstrip().removeprefix("<think>") if opened else before
                    message = message | {
                        "reasoning_content": reasoning if reasoning.strip() else "",
                        "content": content,
                    }
                    if not content.strip() and "tool_calls" not in message:
                        raise SkipRow("assistant content is empty after its reasoning")
            prepared.append(message)
        return prepared

    def _turn(self, messages: list[dict[str, Any]], index: int, tools: list[Any] | None) -> Turn:
        message = messages[index]
        content, reasoning = message["content"], message.get("reasoning_content", "")
        calls = tuple(call["function"]["name"] for call in message.get("tool_calls", ()))
        prompt = self._render(messages[:index], tools, generation=True)
        through = self._render(messages[: index + 1], tools, generation=False)
        if not reasoning:
            expected = content
        elif self.opens_reasoning:
            expected = f"{reasoning}</think>{content}"
        else:
            expected = f"<think>{reasoning}</think>{content}"
        answer = through[len(prompt) :] if through.startswith(prompt) else None
        dropped = reasoning and not _bare(answer or "").startswith(_bare(expected))
        if self.opens_reasoning and (answer is None or dropped):
            # Such a template drops the reasoning of a finished turn, and of the calls before it, although the target
            # generates it: the turn follows the prompt as the server gave it.
            marked = self._render([*messages[:index], message | {"content": PLACEHOLDER}], tools, generation=False)
            before, _, tail = marked.rpartition(PLACEHOLDER)
            if _bare(before + content + tail) != _bare(through):
                raise SkipRow("chat template changes an answer's text")
            start, tag, opened = prompt.rpartition(
                "<think>"
            )  # `opened`: white space, the reasoning's own start as well
            if reasoning:
                return Turn(prompt, expected.removeprefix(opened) + tail, expected, calls)
            block = before.rpartition("<think>")[2]
            if _bare(block) == "</think>":
                return Turn(start + tag + block, content + tail, expected, calls)
        if answer is None:
            raise SkipRow("chat template: the generation prompt is not how the turn begins")
        added = None if reasoning or _bare(content).startswith("<think>") else EMPTY_THINK.match(answer)
        if added:
            # The white space after the block is the template's, unless it is exactly what the answer begins with.
            leading = content[: len(content) - len(content.lstrip())]
            cut = added.start(1) if added[1] == leading else added.end()
            prompt, answer = prompt + answer[:cut], answer[cut:]
        return Turn(prompt, answer, expected, calls)

    def _render(self, messages: list[dict[str, Any]], tools: list[Any] | None, *, generation: bool) -> str:
        try:
            # remote code has other defaults for both
            return self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=generation
            )
        except Exception as error:  # templates raise whatever their author or Jinja likes
            line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise SkipRow(f"chat template refuses: {line[:120]}") from error

    def _tokenize(self, turns: list[Turn]) -> Sample:
        """One sample of turns whose texts continue each other."""
        pieces, start = [], 0
        for turn in turns:
            pieces += [turn.prompt[start:], turn.answer]
            start = len(turn.text)
        ids, bounds = self._bounded_ids(pieces)
        mask = [False] * len(ids)
        for turn, (begin, end) in zip(turns, list(pairwise(bounds))[1::2], strict=True):
            stop = next((position for position in range(begin, end) if ids[position] in self.end_ids), None)
            if stop is None:
                raise SkipRow("no end-of-turn token after an answer")
            self._check(turn, ids[begin:stop])
            mask[begin : stop + 1] = [True] * (stop + 1 - begin)
        return Sample(ids, mask)

    def _bounded_ids(self, pieces: list[str]) -> tuple[list[int], list[int]]:
        """Ids of the joined pieces, [T], and the positions where pieces begin and the last one ends."""
        whole, *parts = self._encode(["".join(pieces), *pieces[:-1]])
        bounds = [0, *accumulate(map(len, parts)), len(whole)]
        if [token for part in parts for token in part] != whole[: bounds[-2]]:
            # Tokenizers that mark the beginning of a text (SentencePiece) need whole prefixes.
            prefixes = self._encode(list(accumulate(pieces[:-1])))
            if any(whole[: len(prefix)] != prefix for prefix in prefixes):
                raise SkipRow("tokenizer merges across a turn boundary")
            bounds = [0, *map(len, prefixes), len(whole)]
        return whole, bounds

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return self.tokenizer(texts, add_special_tokens=False)["input_ids"]

    def _check(self, turn: Turn, ids: list[int]) -> None:
        """The supervised ids say what the message says, except for white space, which templates strip and add."""
        decoded = _bare(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
        expected = _bare(turn.expected)
        if turn.calls:
            if not decoded.startswith(expected) or any(_bare(name) not in decoded for name in turn.calls):
                raise SkipRow("chat template changes or drops a tool call")
        elif decoded != expected:
            raise SkipRow("supervised tokens differ from the answer's text")


def _bare(text: str) -> str:
    """Text without white space, in the composed form that some tokenizers normalise to."""
    return "".join(unicodedata.normalize("NFC", text).split())


def _run_lengths(mask: list[bool]) -> list[int]:
    return [len(list(run)) for value, run in groupby(mask) if value]
