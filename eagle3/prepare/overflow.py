"""What becomes of samples longer than the limit: cut, split between turns, or dropped."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from eagle3.conversations import Conversation, SkipRow
from eagle3.masking import Sample

MODES = ("truncate", "split", "drop")
MINIMUM_RUN = 2  # the first token of an answer is the target's own; a draft is supervised from the second on


@dataclass(frozen=True)
class Fitted:
    """The samples of one row within the limit, and how many of its samples were cut and left out."""

    samples: list[Sample]
    cut: int = 0
    left_out: int = 0


def fit(
    samples: list[Sample],
    conversation: Conversation | None,
    make: Callable[[Conversation], list[Sample]],
    max_seq_len: int,
    mode: str,
) -> Fitted:
    """Bring the samples of one row within `max_seq_len` tokens.

    `truncate` cuts at the limit. `drop` leaves out what is longer. `split` keeps the turns that fit and begins anew for
    the others, as a client does that forgets the oldest turns: the system message, then the user turn before them;
    `make` renders that conversation. A turn that is too long even so is cut. A row that was tokens already has no
    `conversation`: its new sample begins after the last turn that fitted. Raises SkipRow when nothing is left.
    """
    if all(len(sample.ids) <= max_seq_len for sample in samples):
        kept, cut = samples, 0
    elif mode == "drop":
        kept, cut = [sample for sample in samples if len(sample.ids) <= max_seq_len], 0
        if not kept:
            raise SkipRow(f"longer than {max_seq_len} tokens")
    else:
        if mode == "split" and conversation:
            samples = list(_split_turns(conversation, make, max_seq_len))
        elif mode == "split":
            samples = [piece for sample in samples for piece in _split_ids(sample, max_seq_len)]
        kept = [Sample(sample.ids[:max_seq_len], sample.mask[:max_seq_len]) for sample in samples]
        cut = sum(len(sample.ids) > max_seq_len for sample in samples)
    taught = [sample for sample in kept if any(end - begin >= MINIMUM_RUN for begin, end in sample.runs())]
    if not taught:
        raise SkipRow(f"no assistant tokens after truncation to {max_seq_len}")
    return Fitted(taught, cut, len(samples) - len(taught))


def _split_turns(
    conversation: Conversation, make: Callable[[Conversation], list[Sample]], limit: int
) -> Iterator[Sample]:
    """Samples of turns that fit, every turn supervised once; longer than the limit where one turn alone is."""
    messages = conversation.messages
    lead = int(messages[0]["role"] == "system")
    turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    covered, start = 0, lead
    while covered < len(turns):
        number = bisect_left(turns, start)  # of the first turn in what is rendered
        begun = covered
        alone = start == _user_turn_before(messages, turns[covered], lead)
        for sample in make(replace(conversation, messages=messages[:lead] + messages[start:])):
            found = sample.runs()
            fitting = sum(end <= limit for _, end in found)
            if alone and covered == begun and covered < number + len(found):
                fitting = max(fitting, covered - number + 1)  # nothing more can be forgotten: this one is cut
            mine = found[max(0, covered - number) : fitting]
            if mine:
                yield _excerpt(sample, 0, mine, whole=fitting == len(found) and len(sample.ids) <= limit)
                covered = number + fitting
            number += len(found)
            if covered < number:  # a turn does not fit
                break
        if covered < len(turns):
            start = _user_turn_before(messages, turns[covered], lead)


def _user_turn_before(messages: list[dict[str, Any]], place: int, lead: int) -> int:
    return next((i for i in range(place - 1, lead - 1, -1) if messages[i]["role"] == "user"), lead)


def _split_ids(sample: Sample, limit: int) -> Iterator[Sample]:
    begin, mine = 0, []
    for run in sample.runs():
        if mine and run[1] - begin > limit:
            yield _excerpt(sample, begin, mine)
            begin, mine = mine[-1][1], []
        mine.append(run)
    if mine:
        yield _excerpt(sample, begin, mine)


def _excerpt(sample: Sample, begin: int, mine: list[tuple[int, int]], *, whole: bool = False) -> Sample:
    """Ids from `begin` to the last of the runs `mine`, or to the very end, with these runs supervised."""
    end = len(sample.ids) if whole else mine[-1][1]
    mask = [False] * (end - begin)
    for first, last in mine:
        mask[first - begin : last - begin] = [True] * (last - first)
    return Sample(sample.ids[begin:end], mask)
