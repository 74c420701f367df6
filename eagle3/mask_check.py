"""A second derivation of the masks, which shares neither boundary nor tokenisation with the first.

A conversation is rendered up to and including an assistant turn twice: as it is, and with all that the turn's author
wrote (reasoning, answer, names and arguments of calls) replaced. What differs was written by the author; what precedes
it up to the header that all assistant turns have in common, and the end-of-turn token after it, belong to the turn.
Positions in the text become positions in the ids by decoding: no prefix is tokenised, no offsets are used. The
generation prompt is asked one thing, how it opens the block for reasoning; no render without it can tell.
"""

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from eagle3.conversations import Conversation, SkipRow
from eagle3.masking import Sample
from eagle3.templates import REASONING_FIELDS, ChatTemplate, bare, common_length, says_calls
from eagle3.terminal import UserError

EMPTY_BLOCK = re.compile(r"<([\w:]+)></\1>|\[(\w+)\]\[/\2\]")
OPENING = re.compile(r"(?:<[\w:]+>|\[\w+\])\s*$")
TAGS = re.compile(r"(?:<[^<>]*>|\[[^\[\]]*\])*")
SHORT = 8
CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
OTHER_LETTERS = str.maketrans(
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789",
    "nopqrstuvwxyzabcdefghijklmNOPQRSTUVWXYZABCDEFGHIJKLM5678901234",
)


class MaskDisagreement(UserError):
    """Two derivations of a loss mask differ."""


@dataclass(frozen=True)
class _Frame:
    """What a template prints around an assistant's texts in a first turn."""

    header: str  # common to all assistant turns
    before_reasoning: str
    between: str  # reasoning and answer
    before_answer: str  # of an answer without reasoning: an empty block, or what the target writes there
    block: bool  # whether `before_answer` is an empty block
    opened: str  # with what a server's prompt opens the block for reasoning: the one thing asked of it

    @classmethod
    def of(cls, template: ChatTemplate) -> "_Frame":
        question = {"role": "user", "content": "a"}
        said = {"role": "assistant", "content": "Answer"}
        reasoned = said | dict.fromkeys(REASONING_FIELDS, "Reasons")
        called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
        base = _render(template, [question]) or ""
        texts = [
            _render(template, [question, *messages])
            for messages in (
                [said],
                [said | {"content": "Other"}],
                [reasoned],
                [called],
                [called | dict.fromkeys(REASONING_FIELDS, "Reasons")],
                [said, question],
            )
        ]
        turns = [text[len(base) :] for text in texts if text is not None and text.startswith(base)]
        header = turns[0][: min(common_length(turns[0], turn) for turn in turns)] if turns else ""
        around = re.search(f"{re.escape(base + header)}(.*?)Reasons(.*?)Answer", texts[2] or "", re.DOTALL)
        alone = re.search(f"{re.escape(base + header)}(.*?)Answer", texts[0] or "", re.DOTALL)
        first, between = around.groups() if around else ("", "")
        before = alone[1] if alone else ""
        tag = OPENING.search(header)
        if tag and EMPTY_BLOCK.fullmatch(bare(tag[0] + before)):  # all turns have a block, be it an empty one
            header, first, before = header[: tag.start()], tag[0] + first, tag[0] + before
        empty = bare(first + between) == bare(before) if around else EMPTY_BLOCK.fullmatch(bare(before))
        prompt = _render(template, [question], generation=True) or ""
        opened = prompt.removeprefix(base + header)
        return cls(
            header, first, between, before, bool(before.strip() and empty), opened if OPENING.fullmatch(opened) else ""
        )


def check(
    tokenizer: Any,
    conversation: Conversation,
    samples: list[Sample],
    end_ids: Iterable[int],
    *,
    date: str | None = None,
) -> int:
    """Compare the masks of a conversation's uncut samples with a second derivation.

    `end_ids` and `date` are those of the Masker. Returns the number of turns that were checked from the first to the
    last token: of a turn whose reasoning the template drops once it is finished, and of a text that the tokenizer does
    not give back, only the texts and the end are compared. Raises MaskDisagreement.
    """
    template = ChatTemplate(tokenizer, date)
    messages = template.prepared(conversation.messages)
    frame = _Frame.of(template)
    ends = {end: _decode(tokenizer, [end]) for end in {*end_ids} | ({tokenizer.eos_token_id} - {None})}
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    runs = [(sample, begin, end) for sample in samples for begin, end in sample.runs()]
    if len(runs) != len(turns) or any(len(sample.ids) != len(sample.mask) for sample in samples):
        raise MaskDisagreement(
            f"{len(runs)} runs of supervised tokens for {len(turns)} assistant turns: the masker fails for this chat "
            "template; leave the row out, and report it with the template"
        )
    full = 0
    for number, (index, (sample, begin, end)) in enumerate(zip(turns, runs, strict=True), 1):
        turn = _Turn(tokenizer, sample, begin, end, number, ends)
        text = template.render(messages[: index + 1], conversation.tools, generation=False)
        other = _render(template, [*messages[:index], _other(messages[index])], conversation.tools)
        if not any(sample.mask[end:]):
            turn.require_ids(text)
        if not turn.decoded.startswith(text):  # some tokenizers compose characters
            text, other = unicodedata.normalize("NFC", text), other and unicodedata.normalize("NFC", other)
        if other is None or other == text or not turn.decoded.startswith(text):
            turn.require_texts(messages[index], frame)
            turn.require_history(messages[:index], _render(template, messages[:index], conversation.tools) or "")
        else:
            turn.require_positions(messages[index], frame, text, other)
            full += 1
    return full


class _Turn:
    """One run of supervised ids, [begin, end), as text."""

    def __init__(self, tokenizer: Any, sample: Sample, begin: int, end: int, number: int, ends: dict[int, str]) -> None:
        self._tokenizer, self._ids, self._number, self._ends = tokenizer, sample.ids, number, ends
        self.decoded = _decode(tokenizer, sample.ids)
        self.before, self.through = (_decode(tokenizer, sample.ids[:place]) for place in (begin, end))
        self.supervised = self.through[len(self.before) :]
        ids = sample.ids[begin:end]
        if not (self.decoded.startswith(self.before) and self.decoded.startswith(self.through)):
            raise self._differs("a run of whole characters", "begins or ends inside of a character")
        if ids[-1] not in ends:
            raise self._differs(" or ".join(sorted(ends.values())), "does not end in an end-of-turn token")
        if not ends.keys().isdisjoint(ids[:-1]):
            raise self._differs(f"...{ends[ids[-1]]}", "goes beyond an end-of-turn token")
        self._ending = ends[ids[-1]]

    def _differs(self, expected: str, what: str) -> MaskDisagreement:
        return MaskDisagreement(
            f"the loss mask of assistant turn {self._number} {what}: supervised is {_shown(self.supervised)}, by a "
            f"second derivation it is {_shown(expected)}; leave the row out, and report it with the chat template"
        )

    def require_ids(self, text: str) -> None:
        """The sample's ids are those of this text; or of their own, where the turn follows a prompt rewritten since."""
        encoded = _encode(self._tokenizer, text)
        again, composed = _decode(self._tokenizer, encoded), unicodedata.normalize("NFC", text)
        if self._ids == encoded or again not in (text, composed):
            return  # a text that the tokenizer does not give back cannot be compared any further
        if self.decoded == again or self._ids != _encode(self._tokenizer, self.decoded):
            raise self._differs(text[-40:], "belongs to ids that are not those of the text")

    def require_positions(self, message: dict[str, Any], frame: _Frame, text: str, other: str) -> None:
        """The run begins and ends where `text` and `other`, with the author's texts replaced, say."""
        first = common_length(text, other)
        after = len(text) - min(common_length(text[::-1], other[::-1]), len(text) - first)
        found = [(place, spelled) for spelled in self._ends.values() if (place := text.find(spelled, after)) >= 0]
        place, ending = min(found, default=(after, ""))
        stop = place + len(ending)
        starts = _starts(text, first, message, frame)
        if len(self.before) not in starts:
            raise self._differs(text[min(starts) : stop], "begins elsewhere")
        if len(self.through) != stop:
            raise self._differs(text[len(self.before) : stop], "ends elsewhere")

    def require_texts(self, message: dict[str, Any], frame: _Frame) -> None:
        """The run is the author's texts in the template's frame, and nothing but tags lies between header and run."""
        reasoning, content, calls = _reasoning(message), message["content"], message.get("tool_calls", ())
        said = bare(self.supervised.removesuffix(self._ending))
        if reasoning:
            inside = "reasoning_content" not in message
            content = content.partition("</think>")[2] if inside else content
            opening = "" if frame.opened else frame.before_reasoning if frame.between else "<think>"
            heads = [f"{opening}{reasoning}"]
            if not calls:
                heads = [f"{heads[0]}{between}{content}" for between in ("</think>", frame.between)]
                heads += [message["content"]] if inside and not frame.opened else []
        else:
            heads = [content, *([] if frame.block or calls else [frame.before_answer + content])]
        named = tuple((call["function"]["name"], call["function"].get("arguments")) for call in calls)
        if calls:
            fits = any(said.startswith(bare(head)) for head in heads) and says_calls(said, named)
        else:
            fits = said in map(bare, heads)
        header, lead = frame.header, self.supervised[: len(self.supervised) - len(self.supervised.lstrip())]
        if header.strip():
            _, found, gap = self.before.rpartition(header)
            author = reasoning or content
            own = author[: len(author) - len(author.lstrip())]
            fits = fits and bool(found and TAGS.fullmatch(bare(gap))) and own.endswith(lead)
        if not fits:
            raise self._differs(f"{heads[0]}{self._ending}", "is not what the message says")

    def require_history(self, messages: list[dict[str, Any]], text: str) -> None:
        """What the earlier messages say is in the ids, as far as it is in their render; short texts are by chance."""
        rendered, given = bare(text), bare(self.before)
        for message in messages:
            content = bare(message["content"])
            if len(content) <= SHORT or content not in rendered or content in given:
                continue
            if content in bare(self._again(message["content"])):
                raise self._differs(content, "follows ids without an earlier message")

    def _again(self, text: str) -> str:
        """What the tokenizer gives back of a text."""
        return _decode(self._tokenizer, _encode(self._tokenizer, text))


def _starts(text: str, first: int, message: dict[str, Any], frame: _Frame) -> set[int]:
    """Where a turn may begin whose author's first character is at `first`."""
    if not frame.header.strip():
        begin = len(text[:first].removesuffix(frame.header))
        return {begin, first}  # white space is part of the author's first token, or not
    begin = text.rfind(frame.header, 0, first) + len(frame.header)
    if _reasoning(message):
        return {begin + len(frame.opened) if text.startswith(frame.opened, begin) else begin}
    return {begin + len(frame.before_answer) if frame.block and text.startswith(frame.before_answer, begin) else begin}


def _reasoning(message: dict[str, Any]) -> str:
    """Reasoning of a field, or inside of the content; "" for none or a blank one."""
    if "reasoning_content" in message:
        return message["reasoning_content"]
    inside, closed, _ = message["content"].partition("</think>")
    tagged = inside.lstrip().startswith("<think>")
    reasoning = inside.lstrip().removeprefix("<think>") if tagged else inside
    return reasoning if closed and reasoning.strip() and (tagged or "<think>" not in inside) else ""


def _other(message: dict[str, Any]) -> dict[str, Any]:
    """The message with all that its author wrote replaced, so that no first or last character is the same."""
    content = message["content"]
    if _reasoning(message) and "reasoning_content" not in message:
        inside, _, after = content.partition("</think>")
        tag = "<think>" if inside.lstrip().startswith("<think>") else ""
        inside = inside.lstrip().removeprefix(tag)
        other = {"content": f"{tag}{_unlike(inside)}</think>{_unlike(after)}"}
    else:
        other = {"content": _unlike(content)}
    if message.get("reasoning_content"):
        other |= dict.fromkeys(REASONING_FIELDS, _unlike(message["reasoning_content"]))
    if message.get("tool_calls"):
        other["tool_calls"] = [_other_call(call) for call in message["tool_calls"]]
    return message | other


def _other_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"] | {"name": call["function"]["name"].translate(OTHER_LETTERS), "arguments": {"q": "z"}}
    other = {"id": call["id"].translate(OTHER_LETTERS)} if isinstance(call.get("id"), str) else {}
    return call | {"function": function} | other


def _unlike(text: str) -> str:
    bare_text = text.strip()
    if not bare_text:
        return text
    return f"{'Q' if bare_text[0] != 'Q' else 'Z'}uite unlik{'e' if bare_text[-1] != 'e' else 'y'}"


def _render(
    template: ChatTemplate, messages: list[dict[str, Any]], tools: list[Any] | None = None, *, generation: bool = False
) -> str | None:
    try:
        return template.render(messages, tools, generation=generation)
    except SkipRow:
        return None


def _encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _decode(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 70 else f"{text[:40]} ... {text[-25:]}")
