"""Texts to token ids and loss mask.

The mask covers what the target would have generated in each assistant turn: its reasoning where the template has it,
tool calls, the answer and its end-of-turn token. Not the role header, not an empty think block that the template adds
for an answer without reasoning (a server puts it into the prompt), not the newline after the end token, not a default
system prompt. The boundary is where a server's prompt ends (eagle3.templates). That needs neither offsets nor
generation markers, so it is the same for fast and slow tokenizers.
"""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby, pairwise
from typing import Any

from eagle3.conversations import Conversation, SkipRow
from eagle3.templates import ChatTemplate, Group, Turn, bare, says_calls

NEAR = 256  # characters before a boundary in which the last marker must lie
MOST_HEADS = 1000
PROVEN_AFTER = 20  # texts encoded both ways before the fast one is trusted


@dataclass(frozen=True)
class Sample:
    """Token ids and loss mask of equal length T; each run of True is one assistant turn."""

    ids: list[int]
    mask: list[bool]

    def runs(self) -> list[tuple[int, int]]:
        """Begin and end of each run of True, ascending."""
        found, start = [], 0
        for supervised, run in groupby(self.mask):
            end = start + len(list(run))
            if supervised:
                found.append((start, end))
            start = end
        return found


class Masker:
    """Turns conversations into samples with one tokenizer and its chat template."""

    def __init__(self, tokenizer: Any, end_ids: Iterable[int], *, date: str | None = None) -> None:
        """`end_ids` are the ids that end a generation; the tokenizer's own end id is added.

        `date` (ISO, as "2026-11-30") is what templates get for today, so that a later run renders the same.
        """
        self.tokenizer = tokenizer
        self.end_ids = {*end_ids} | ({tokenizer.eos_token_id} - {None})
        self._template = ChatTemplate(tokenizer, date)
        self._encode_all, self._decode = _ways(tokenizer)
        self._end_texts = {end: self._decode([end]) for end in self.end_ids}
        self._markers = _markers(tokenizer)
        self._heads: dict[str, list[int]] = {}
        self._unproven = PROVEN_AFTER

    def samples(self, conversation: Conversation) -> list[Sample]:
        """Samples of one conversation, of any length.

        One sample, unless the template renders a turn differently once others follow (most drop earlier reasoning):
        then a new sample begins, with its whole prompt as a server would render it, and only the new turn is
        supervised. Turns with nothing between them get a sample each. What follows the last assistant turn is left
        out. Raises SkipRow when no correct sample can be made.
        """
        [samples] = self.samples_of([conversation])
        if isinstance(samples, SkipRow):
            raise samples
        return samples

    def samples_of(self, conversations: list[Conversation]) -> list[list[Sample] | SkipRow]:
        """The samples of each conversation, or why there are none.

        The texts of all are encoded in one call: a call costs a tokenizer as much as some hundred tokens.
        """
        grouped: list[list[Group] | SkipRow] = []
        for conversation in conversations:
            try:
                grouped.append(self._template.groups(conversation))
            except SkipRow as skip:
                grouped.append(skip)
        groups = [group for item in grouped if not isinstance(item, SkipRow) for group in item]
        marked = iter(self._by_markers(groups))
        results: list[list[Sample] | SkipRow] = []
        for item in grouped:
            if not isinstance(item, SkipRow):
                found = [next(marked) for _ in item]
                try:
                    item = [s for group, sample in zip(item, found, strict=True) for s in self._samples(group, sample)]
                except SkipRow as skip:
                    item = skip
            results.append(item)
        return results

    def _samples(self, group: Group, found: Sample | None) -> list[Sample]:
        """The samples of one text; `found` is what _by_markers made of it."""
        sample = self._proven(group, found)
        if sum(value for value, _ in groupby(sample.mask)) == len(group):
            return [sample]
        samples, before = [], ""
        for turn in group:  # two turns touch
            alone = [Turn(before + turn.gap, turn.answer, turn.expected, turn.calls)]
            samples.append(self._proven(alone, *self._by_markers([alone])))
            before += turn.gap + turn.answer
        return samples

    def prompt_ids(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> list[int]:
        """Ids that a server feeds before the next assistant turn. Raises SkipRow where the template refuses."""
        text = self._template.render(self._template.prepared(messages), tools, generation=True)
        return self._encode([text])[0]

    def _proven(self, group: Group, found: Sample | None) -> Sample:
        """`found`, once that way has shown that it gives what the plain one gives."""
        if found is None or not self._markers or self._unproven:
            plain = self._by_prefixes(group)
            if found is not None and self._markers:
                self._unproven -= 1
                if found != plain:
                    self._markers = None
            return plain
        return found

    # ---------------------------------------------------------------- each text once, cut at added tokens

    def _by_markers(self, groups: list[Group]) -> list[Sample | None]:
        """The samples by encoding the texts between markers, in one call; None where that leaves any doubt.

        A tokenizer splits at these before it does anything else, so the ids of a prompt are those of the text before
        its last marker and those of its head, from the marker to its end ("<|im_start|>assistant" and a newline).
        """
        if not self._markers:
            return [None] * len(groups)
        cuts = [self._cut(group) for group in groups]
        encoded = iter(self._encode_all([chunk for cut in cuts if cut for chunk in cut[0]]))
        return [
            cut and self._joined(group, cut[1], [next(encoded) for _ in cut[0]])
            for group, cut in zip(groups, cuts, strict=True)
        ]

    def _cut(self, group: Group) -> tuple[list[str], list[str]] | None:
        """The text up to the first head, then from each head to the next; and the heads."""
        chunks, heads = [], []
        text = ""
        for turn in group:
            near = max(0, len(turn.gap) - NEAR)
            cut = max((match.start() for match in self._markers.finditer(turn.gap, near)), default=-1)
            if cut < 0:
                return None
            heads.append(turn.gap[cut:])
            chunks.append(text + turn.gap[:cut])
            text = heads[-1] + turn.answer
        return [*chunks, text], heads

    def _joined(self, group: Group, heads: list[str], chunks: list[list[int]]) -> Sample | None:
        first, *rest = chunks
        ids, mask = list(first), [False] * len(first)
        for turn, head, chunk in zip(group, map(self._head, heads), rest, strict=True):
            begin = len(head)
            if chunk[:begin] != head:
                return None
            stop = self._stop(chunk, begin, len(chunk))
            if stop is None or self._end_texts[chunk[stop]] not in turn.answer:
                return None
            if self._fault(turn, chunk[begin:stop]):
                return None
            ids += chunk
            mask += [False] * begin + [True] * (stop + 1 - begin) + [False] * (len(chunk) - stop - 1)
        return Sample(ids, mask)

    def _head(self, text: str) -> list[int]:
        if text not in self._heads:
            if len(self._heads) == MOST_HEADS:
                self._heads.clear()
            [self._heads[text]] = self._encode_all([text])
        return self._heads[text]

    # ----------------------------------------------------------------------------------- each prefix

    def _by_prefixes(self, group: Group) -> Sample:
        answers = ["", *(turn.answer for turn in group)]
        gaps = [*(turn.gap for turn in group), ""]
        ids, bounds = self._bounded_ids([answer + gap for answer, gap in zip(answers, gaps, strict=True)])
        mask = [False] * len(ids)
        for turn, (begin, end) in zip(group, pairwise(bounds), strict=True):
            stop = self._stop(ids, begin, end)
            if stop is None or self._end_texts[ids[stop]] not in turn.answer:
                raise SkipRow("no end-of-turn token after an answer")
            if fault := self._fault(turn, ids[begin:stop]):
                raise SkipRow(fault)
            mask[begin : stop + 1] = [True] * (stop + 1 - begin)
        return Sample(ids, mask)

    def _bounded_ids(self, pieces: list[str]) -> tuple[list[int], list[int]]:
        """Ids of the joined pieces, [T], and the positions where each of them ends."""
        whole, *parts = self._encode(["".join(pieces), *pieces[:-1]])
        bounds = [*accumulate(map(len, parts)), len(whole)]
        if [token for part in parts for token in part] != whole[: bounds[-2]]:
            # Tokenizers that mark the beginning of a text (SentencePiece) need whole prefixes.
            prefixes = self._encode(list(accumulate(pieces[:-1])))
            if any(whole[: len(prefix)] != prefix for prefix in prefixes):
                raise SkipRow("tokenizer merges across a turn boundary")
            bounds = [*map(len, prefixes), len(whole)]
        return whole, bounds

    # ------------------------------------------------------------------------------------------- both

    def _stop(self, ids: list[int], begin: int, end: int) -> int | None:
        """Position of the first end-of-turn token."""
        return next((position for position in range(begin, end) if ids[position] in self.end_ids), None)

    def _fault(self, turn: Turn, ids: list[int]) -> str | None:
        """Why the supervised ids do not say what the message says; white space, which templates change, aside."""
        decoded = self._decode(ids)
        if decoded == turn.expected and not turn.calls:
            return None
        decoded, expected = bare(decoded), bare(turn.expected)
        if not turn.calls:
            return None if decoded == expected else "supervised tokens differ from the answer's text"
        said = decoded.startswith(expected) and says_calls(decoded[len(expected) :], turn.calls)
        return None if said else "chat template changes or drops a tool call"

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return self.tokenizer(texts, add_special_tokens=False)["input_ids"]


def _ways(tokenizer: Any) -> tuple[Callable[[list[str]], list[list[int]]], Callable[[list[int]], str]]:
    """To encode texts, without the tokens that some tokenizers put around them, and to decode ids as they are.

    Past what transformers does around both, as far as it is sure to be nothing that matters here.
    """
    from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

    def encode(texts: list[str]) -> list[list[int]]:
        return tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    kind = type(tokenizer)
    if isinstance(tokenizer, PreTrainedTokenizerFast) and kind._encode_plus is PreTrainedTokenizerFast._encode_plus:
        backend = tokenizer.backend_tokenizer
        encode(["a"])  # switches off truncation and padding that its file may ask for
        if kind.decode is PreTrainedTokenizerFast.decode and kind._decode is PreTrainedTokenizerFast._decode:
            decode = partial(backend.decode, skip_special_tokens=False)
        return lambda texts: [e.ids for e in backend.encode_batch_fast(texts, add_special_tokens=False)], decode
    if isinstance(tokenizer, PreTrainedTokenizer) and kind._encode_plus is PreTrainedTokenizer._encode_plus:
        ids = _Ids(tokenizer)
        return lambda texts: [list(map(ids.__getitem__, tokenizer.tokenize(text))) for text in texts], decode
    return encode, decode


class _Ids(dict):
    """Token to id, each converted once."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __missing__(self, token: str) -> int:
        self[token] = self._tokenizer.convert_tokens_to_ids(token)
        return self[token]


def _markers(tokenizer: Any) -> re.Pattern | None:
    """The added tokens at which any text can be cut without a change of its ids; None where there are none.

    They are found in the text as it is, before the normaliser and the model see what lies between them. One is left
    out if white space around it is its own, or if another token may begin before it and end inside of it.
    """
    added = list(tokenizer.added_tokens_decoder.values())
    fast = getattr(tokenizer, "is_fast", False)
    raw = fast and _changes_nothing(tokenizer.backend_tokenizer.normalizer)
    if any(token.single_word for token in added):
        return None
    texts = [token.content for token in added]
    ends = {text[start:] for text in texts for start in range(1, len(text))}  # proper suffixes
    inside = "\0".join(text[1:] for text in texts)
    markers = [
        token.content
        for token in added
        if not (token.lstrip or token.rstrip or (token.normalized and not raw))
        and len(token.content) > 1
        and token.content == token.content.strip()
        and token.content not in inside
        and not any(token.content[:length] in ends for length in range(1, len(token.content)))
    ]
    return re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True)))) if markers else None


def _changes_nothing(normalizer: Any) -> bool:
    return normalizer is None or json.loads(normalizer.__getstate__()) == {"type": "Sequence", "normalizers": []}
