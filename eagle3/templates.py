"""Messages to texts: what a server feeds before each assistant turn, and what the target generates from there on.

The boundary is where a server's prompt ends: the render of the messages before the turn with the generation prompt.
Where a template rewrites history (most drop earlier reasoning), the turn follows the prompt as the server gave it.
"""

import json
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes

from eagle3.conversations import Conversation, SkipRow

EMPTY_THINK = re.compile(r"\s*(?:<think>\s*)?</think>\s*")  # the opening tag may end the generation prompt
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")  # templates read one of them
SWITCHES = ("enable_thinking", "thinking")  # variables with which a server asks for an answer without reasoning
PLAIN_FIELDS = {"role", "content", *REASONING_FIELDS}
NOT_TEXT = PLAIN_FIELDS | set(
    "tool_calls tool_call_id name type function arguments text system user assistant tool developer".split()
)  # names of fields and roles, which templates look for too
MARKUP = r"<[/|｜\w]|\[/?[A-Z]"  # templates look for such in a message's text
SLOT = re.compile(r"Zq(\d+)qZ")  # stands for a text, to see what a template puts around it
MARKER = re.compile(r"<[^<>\s]+>|\[/?[A-Z][A-Z_]*\]")  # in a chat template: <think>, <|im_end|>, [TOOL_CALLS]
MOST_SHAPES = 1000
NO_BEGINNING = "chat template: the generation prompt is not how the turn begins"


@dataclass(frozen=True)
class Turn:
    """One assistant turn of a text: what is between the turn before and it, and what the target generates."""

    gap: str  # before the first turn: the whole prompt
    answer: str  # to the end of the turn as rendered; what follows the end-of-turn token is not generated
    expected: str  # what the message says, which must be what the supervised tokens decode to
    calls: tuple[tuple[str, Any], ...]  # names and arguments of the functions it calls


Group = list[Turn]  # turns whose texts continue each other: one text, one sample
Parts = list[str | int]  # literals, and numbers of the texts between them


class ChatTemplate:
    """A tokenizer's chat template, and what it does to conversations."""

    def __init__(self, tokenizer: Any, date: str | None = None) -> None:
        """`date` (ISO) is what a template gets for today."""
        self.tokenizer = tokenizer
        source = getattr(tokenizer, "chat_template", None) or ""
        sources = list(source.values()) if isinstance(source, dict) else [source]
        self._variables = {}
        if date and any("strftime_now" in text for text in sources):
            self._variables["strftime_now"] = datetime.fromisoformat(date).strftime
        watched = _looked_for(sources)
        self._looks_for_reasoning = "</think>" in (watched or ())
        self._reads_reasoning = any(re.search(rf"[.'\"](?:{'|'.join(REASONING_FIELDS)})\b", text) for text in sources)
        self._watched = None if watched is None else re.compile("|".join([MARKUP, *map(re.escape, watched)]))
        self._switches = [name for name in SWITCHES if any(re.search(rf"\b{name}\b", text) for text in sources)]
        self._shapes: dict[tuple, list[tuple[int, list[tuple[Parts, Parts, Parts]]]] | None] = {}
        self._frames: dict[tuple[bool, bool], list[str] | None] = {}
        self._opening = ""  # what the generation prompt adds
        try:
            history, prompt = (self.render([_user("a")], None, generation=generation) for generation in (False, True))
            self._opening = prompt[len(history) :] if prompt.startswith(history) else ""
        except SkipRow:
            prompt = ""
        self._opens_reasoning = prompt.rstrip().endswith("<think>")

    def render(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, *, generation: bool, **variables: Any
    ) -> str:
        """The text of prepared messages. Raises SkipRow where the template refuses them."""
        variables |= self._variables
        try:
            # remote code has other defaults for both
            return self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=generation, **variables
            )
        except Exception as error:  # templates raise whatever their author or Jinja likes
            line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise SkipRow(f"chat template refuses: {line[:120]}") from error

    def prepared(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Messages with their reasoning under each name that templates read.

        Reasoning inside of the content becomes a field where the generation prompt opens it (such a template prints a
        block of its own before the content) or where the template knows reasoning as a field alone.
        """
        apart = not self._looks_for_reasoning and (self._opens_reasoning or self._reads_reasoning)
        result = []
        for message in messages:
            if message["role"] == "assistant":
                if apart and "reasoning_content" not in message:
                    reasoning, content = self._parts(message)
                    if content is not message["content"]:
                        message = (
                            message | {"content": content} | ({"reasoning_content": reasoning} if reasoning else {})
                        )
                if message.get("reasoning_content"):
                    message = message | dict.fromkeys(REASONING_FIELDS, message["reasoning_content"])
            result.append(message)
        return result

    def groups(self, conversation: Conversation) -> list[Group]:
        """The texts of a conversation up to its last assistant turn; raises SkipRow where there is no exact one.

        More than one where the template renders a turn differently once others follow: a new text begins there.
        """
        messages = self.prepared(conversation.messages)
        last = max(index for index, message in enumerate(messages) if message["role"] == "assistant")
        messages = messages[: last + 1]
        known = None if conversation.tools else self._from_shape(messages)
        return known or [group for _, group in self._rendered(messages, conversation.tools)]

    # ------------------------------------------------------------------------- one render a prompt and a turn

    def _rendered(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> Iterator[tuple[int, Group]]:
        """Each group with the index of its last message."""
        group: Group = []
        text, end = "", -1
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt, turn = self._turn(messages, index, tools)
            if group and not prompt.startswith(text):
                yield end, group
                group, text = [], ""
            group.append(Turn(prompt[len(text) :], turn.answer, turn.expected, turn.calls))
            text, end = prompt + turn.answer, index
        yield end, group

    def _turn(self, messages: list[dict[str, Any]], index: int, tools: list[Any] | None) -> tuple[str, Turn]:
        """The prompt of a turn, and the turn."""
        message, before = messages[index], messages[:index]
        reasoning, content = self._parts(message)
        calls = tuple(
            (call["function"]["name"], call["function"].get("arguments")) for call in message.get("tool_calls", ())
        )
        prompt = self.render(before, tools, generation=True)
        through = self.render([*before, message], tools, generation=False)
        if not reasoning:
            expected = content
        elif self._opens_reasoning:
            expected = f"{reasoning}</think>{content}"
        else:
            expected = f"<think>{reasoning}</think>{content}"
        answer = through[len(prompt) :] if through.startswith(prompt) else None
        dropped = reasoning and not bare(answer or "").startswith(bare(expected))
        if self._opens_reasoning and (answer is None or dropped):
            # Such a template drops the reasoning of a finished turn, and of the calls before it, although the target
            # generates it: the turn follows the prompt as the server gave it.
            marked = self.render([*before, message | {"content": _slot(0)}], tools, generation=False)
            head, _, tail = marked.rpartition(_slot(0))
            if bare(head + content + tail) != bare(through):
                raise SkipRow("chat template changes an answer's text")
            start, tag, opened = prompt.rpartition(
                "<think>"
            )  # `opened`: white space, the reasoning's own start as well
            if reasoning:
                return prompt, Turn("", expected.removeprefix(opened) + tail, expected, calls)
            block = head.rpartition("<think>")[2]
            if bare(block) == "</think>":
                return start + tag + block, Turn("", content + tail, expected, calls)
        if answer is None:
            answer = self._own_text(before, message, tools, prompt, through)
        if reasoning and "reasoning_content" not in message and bare(answer).startswith(bare(message["content"])):
            expected = message["content"]
        if not reasoning and (block := self._empty_block(before, tools, prompt, answer)):
            if bare(content).startswith(bare(answer[:block])):  # the message has that block itself
                expected = content.partition("</think>")[2]
            prompt, answer = prompt + answer[:block], answer[block:]
        framed = self._framed(reasoning, content, bool(calls))
        if framed and bare(answer).startswith(bare(framed)):
            expected = framed
        return prompt, Turn("", answer, expected, calls)

    def _parts(self, message: dict[str, Any]) -> tuple[str, str]:
        """Reasoning and content, also where the content carries both; then white space stays as it is."""
        content = message["content"]
        if "reasoning_content" in message:
            return message["reasoning_content"], content
        if not (self._opens_reasoning or self._reads_reasoning or self._looks_for_reasoning):
            return "", content
        before, closed, after = content.partition("</think>")
        opened = before.lstrip().startswith("<think>")
        # a server's answer as it is has no opening tag where the prompt ends in it
        if not closed or ("<think>" in before and not opened):
            return "", content
        reasoning = before.lstrip().removeprefix("<think>") if opened else before
        apart = self._opens_reasoning or not self._looks_for_reasoning
        if apart and not after.strip() and not message.get("tool_calls"):
            raise SkipRow("assistant content is empty after its reasoning")
        if reasoning.strip():
            return reasoning, after
        return "", after if apart else content

    def _own_text(
        self, before: list[dict], message: dict[str, Any], tools: list[Any] | None, prompt: str, through: str
    ) -> str:
        """The turn's text where the history before it is rendered differently than in its prompt."""
        if not message["content"].strip() and not message.get("reasoning_content"):
            raise SkipRow(NO_BEGINNING)
        marked = self.render([*before, _marked(message)], tools, generation=False)
        start = through.rfind(self._opening, 0, common_length(through, marked)) if self._opening else -1
        if start < 0 or not prompt.endswith(self._opening):
            raise SkipRow(NO_BEGINNING)
        return through[start + len(self._opening) :]

    def _empty_block(self, before: list[dict], tools: list[Any] | None, prompt: str, answer: str) -> int:
        """Length of the empty block for reasoning that a template puts before an answer without; a prompt has it."""
        if self._switches:  # the prompt of a server that was asked for no reasoning
            closed = self.render(before, tools, generation=True, **dict.fromkeys(self._switches, False))
            if closed.startswith(prompt) and answer.startswith(closed[len(prompt) :]) and len(closed) > len(prompt):
                return len(closed) - len(prompt)
        alone, around = self._frame(False, True), self._frame(True, True)
        if not alone or not answer.startswith(alone[0]):
            return 0
        empty = bare("".join(around)) == bare(alone[0]) if around else EMPTY_THINK.fullmatch(alone[0])
        return len(alone[0]) if empty else 0

    def _framed(self, reasoning: str, content: str, calls: bool) -> str | None:
        """Reasoning and content with what the template puts before and between them for the target to generate."""
        literals = self._frame(bool(reasoning), bool(content.strip()), calls)
        if (
            literals is None or not self._opening
        ):  # without a generation prompt the role's header would count as written
            return None
        texts = ([reasoning] if reasoning else []) + ([content] if content.strip() else [])
        return "".join(literal + text for literal, text in zip(literals, texts, strict=True))

    def _frame(self, reasoning: bool, content: bool, calls: bool = False) -> list[str] | None:
        """The literals before reasoning and before content in a first turn, None where they are not printed so."""
        key = reasoning, content, calls
        if key not in self._frames:
            message = {"role": "assistant", "content": _slot(1) if content else ""}
            if reasoning:
                message |= dict.fromkeys(REASONING_FIELDS, _slot(0))
            if calls:
                function = {"name": "f", "arguments": {}}
                message["tool_calls"] = [{"id": "functions.f:0", "type": "function", "function": function}]
            try:
                prompt = self.render([_user("a")], None, generation=True)
                through = self.render([_user("a"), message], None, generation=False)
            except SkipRow:
                prompt, through = "", ""
            pieces = SLOT.split(through[len(prompt) :]) if prompt and through.startswith(prompt) else []
            wanted = [str(slot) for slot, present in enumerate((reasoning, content)) if present]
            self._frames[key] = pieces[:-1:2] if pieces[1::2] == wanted else None
        return self._frames[key]

    # -------------------------------------------------------------------------------- one render a text

    def _from_shape(self, messages: list[dict[str, Any]]) -> list[Group] | None:
        """The groups put together from what the template prints between texts; None where that is in doubt.

        A shape is the roles and whether there is reasoning. Its literals come from messages that consist of slots,
        rendered prompt by prompt and turn by turn, and hold for these messages if one render of each text is equal.
        """
        if self._watched is None:
            return None
        texts, shape = [], []
        for message in messages:
            if not message.keys() <= PLAIN_FIELDS:
                return None
            reasoning = message.get("reasoning_content", "")
            texts += [message["content"], reasoning]
            shape.append((message["role"], bool(reasoning)))
        # a template may look at these, and do something else in a prompt than in the render of the whole
        if any(text != text.strip() or self._watched.search(text) for text in texts) or not all(texts[::2]):
            return None
        key = tuple(shape)
        if key not in self._shapes:
            if len(self._shapes) == MOST_SHAPES:
                self._shapes.clear()
            self._shapes[key] = self._shape(messages)
        groups = []
        for end, turns in self._shapes[key] or ():
            group = [
                Turn(*("".join([texts[part] if type(part) is int else part for part in parts]) for parts in turn), ())
                for turn in turns
            ]
            if "".join([turn.gap + turn.answer for turn in group]) != self.render(
                messages[: end + 1], None, generation=False
            ):
                return None
            groups.append(group)
        return groups

    def _shape(self, messages: list[dict[str, Any]]) -> list[tuple[int, list[tuple[Parts, Parts, Parts]]]] | None:
        marked = [_marked(message, 2 * index) for index, message in enumerate(messages)]
        try:
            groups = list(self._rendered(marked, None))
            for end, group in groups:
                rendered = self.render(marked[: end + 1], None, generation=False)
                if "".join(turn.gap + turn.answer for turn in group) != rendered:
                    return None
        except SkipRow:
            return None
        return [
            (end, [(_split(turn.gap), _split(turn.answer), _split(turn.expected)) for turn in group])
            for end, group in groups
        ]


def bare(text: str) -> str:
    """Text without white space, in the composed form that some tokenizers normalise to."""
    return "".join(unicodedata.normalize("NFC", text).split())


def common_length(one: str, other: str) -> int:
    """Length of what two texts begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (first, second) in pairs if first != second), min(len(one), len(other)))


def says_calls(text: str, calls: tuple[tuple[str, Any], ...]) -> bool:
    """Whether a text without white space names these calls in this order, each with its arguments."""
    for name, arguments in calls:
        _, found, text = text.partition(bare(name))
        if not found:
            return False
        for form in {json.dumps(arguments), json.dumps(arguments, ensure_ascii=False)}:
            if bare(form) in text:
                text = text.partition(bare(form))[2]
                break
        else:  # not as JSON: each name and value for itself
            if not all(any(bare(form) in text for form in forms) for forms in _leaves(arguments)):
                return False
    return True


def _leaves(value: Any) -> Iterator[set[str]]:
    """The keys and values of nested arguments, each in the forms that templates print."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield {str(key), json.dumps(key)}
            yield from _leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    else:
        yield {str(value), json.dumps(value), json.dumps(value, ensure_ascii=False)}


def _looked_for(sources: list[str]) -> set[str] | None:
    """The texts that templates look for in messages; None where that cannot be told."""
    if not any(sources):
        return None
    found = set()
    for source in sources:
        plain = re.sub(r"\{%-?\s*(?:end)?generation\s*-?%\}", "", source)  # a tag of transformers' own
        try:
            tree = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)
        except jinja2.TemplateError:
            return None
        looking = []
        for node in tree.find_all((nodes.Compare, nodes.Call, nodes.Filter)):
            if isinstance(node, nodes.Compare):
                looking += [node] if any(operand.op in ("in", "notin") for operand in node.ops) else []
            elif isinstance(node, nodes.Filter) or isinstance(node.node, nodes.Getattr | nodes.Getitem):
                looking += node.args
        constants = [
            c for node in looking for c in ([node] if isinstance(node, nodes.Const) else node.find_all(nodes.Const))
        ]
        found |= {constant.value for constant in constants if isinstance(constant.value, str)}
    return {text for text in found if len(text.strip()) > 1 and text not in NOT_TEXT}


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _slot(number: int) -> str:
    return f"Zq{number}qZ"


def _marked(message: dict[str, Any], number: int = 0) -> dict[str, Any]:
    """The message with slots for its content (`number`) and its reasoning (the next number)."""
    marks = {"content": _slot(number)} if message["content"].strip() else {}
    if message.get("reasoning_content"):
        marks |= dict.fromkeys(REASONING_FIELDS, _slot(number + 1))
    return message | marks


def _split(text: str) -> Parts:
    return [int(piece) if place % 2 else piece for place, piece in enumerate(SLOT.split(text))]
