"""Samples longer than the limit: cut, dropped, or split between turns, with every turn supervised once."""

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.conversations import Conversation, SkipRow
from eagle3.masking import Sample
from eagle3.prepare.overflow import fit


def talk(*lengths: tuple[str, int]) -> Conversation:
    """Messages of so many tokens; the content names the ids, each of which occurs once."""
    numbers = count(1)
    messages = [
        {"role": role, "content": " ".join(str(next(numbers)) for _ in range(length))} for role, length in lengths
    ]
    return Conversation(messages, None)


def ids_of(message: dict) -> list[int]:
    return [int(number) for number in message["content"].split()]


def one_sample(conversation: Conversation) -> list[Sample]:
    """As a template that only appends: a header of one token (0) before each message, one (0) after an answer."""
    ids, mask = [], []
    for message in conversation.messages:
        body, answer = ids_of(message), message["role"] == "assistant"
        ids += [0, *body, 0]
        mask += [False, *[answer] * len(body), False]
    return [Sample(ids, mask)]


def sample_a_turn(conversation: Conversation) -> list[Sample]:
    """As a template that rewrites history: every turn alone is supervised, what was answered before is half as long."""
    samples, prompt = [], []
    for message in conversation.messages:
        body = ids_of(message)
        if message["role"] == "assistant":
            samples.append(Sample([*prompt, 0, *body], [False] * (len(prompt) + 1) + [True] * len(body)))
            body = body[: len(body) // 2]
        prompt += [0, *body, 0]
    return samples


def supervised(samples: list[Sample]) -> list[list[int]]:
    return [sample.ids[begin:end] for sample in samples for begin, end in sample.runs()]


TALK = talk(("system", 2), ("user", 3), ("assistant", 4), ("user", 3), ("assistant", 4), ("user", 2), ("assistant", 9))


def test_what_fits_stays_as_it_is():
    [whole] = one_sample(TALK)
    for mode in ("truncate", "split", "drop"):
        fitted = fit([whole], TALK, one_sample, len(whole.ids), mode)
        assert fitted.samples == [whole] and (fitted.cut, fitted.left_out) == (0, 0)


def test_truncate_and_drop():
    [whole] = one_sample(TALK)
    fitted = fit([whole], TALK, one_sample, 20, "truncate")
    assert fitted.samples == [Sample(whole.ids[:20], whole.mask[:20])] and fitted.cut == 1
    with pytest.raises(SkipRow, match=r"^longer than 20 tokens$"):
        fit([whole], TALK, one_sample, 20, "drop")
    with pytest.raises(SkipRow, match=r"^no assistant tokens after truncation to 11$"):
        fit([whole], TALK, one_sample, 11, "truncate")  # one supervised token teaches nothing
    assert fit([whole], TALK, one_sample, 12, "truncate").samples[0].mask.count(True) == 2
    short, long = sample_a_turn(TALK)[::2]
    fitted = fit([short, long], TALK, sample_a_turn, len(short.ids), "drop")
    assert fitted.samples == [short] and (fitted.cut, fitted.left_out) == (0, 1)


def test_split_keeps_the_system_message_and_begins_at_a_user_turn():
    fitted = fit(one_sample(TALK), TALK, one_sample, 26, "split")
    first, second = fitted.samples
    system, question = [0, 1, 2, 0], [0, 17, 18, 0]
    assert first.ids == [*system, 0, 3, 4, 5, 0, 0, 6, 7, 8, 9, 0, 0, 10, 11, 12, 0, 0, 13, 14, 15, 16]
    assert second.ids == [*system, *question, 0, *range(19, 28), 0]
    assert supervised(fitted.samples) == [[6, 7, 8, 9], [13, 14, 15, 16], list(range(19, 28))]
    assert (fitted.cut, fitted.left_out) == (0, 0)
    fitted = fit(one_sample(TALK), TALK, one_sample, 14, "split")  # the last answer alone is too long
    assert supervised(fitted.samples) == [[6, 7, 8, 9], [13, 14, 15, 16], [19, 20, 21, 22, 23]]
    assert (fitted.cut, fitted.left_out) == (1, 0) and max(len(sample.ids) for sample in fitted.samples) == 14


def test_split_repeats_what_a_tool_turn_needs_without_supervising_it_again():
    tools = talk(("user", 3), ("assistant", 4), ("tool", 6), ("assistant", 5))
    fitted = fit(one_sample(tools), tools, one_sample, 20, "split")
    assert supervised(fitted.samples) == [[4, 5, 6, 7]]  # the second turn begins beyond the limit
    assert fitted.left_out == 1
    fitted = fit(one_sample(tools), tools, one_sample, 23, "split")
    assert supervised(fitted.samples) == [[4, 5, 6, 7], [14, 15, 16]] and fitted.cut == 1
    assert fitted.samples[1].ids[:21] == one_sample(tools)[0].ids[:21]


def test_rows_of_ids_are_split_after_a_turn():
    [whole] = one_sample(talk(("user", 3), ("assistant", 4), ("user", 3), ("assistant", 4)))
    fitted = fit([whole], None, one_sample, 12, "split")
    assert [sample.ids for sample in fitted.samples] == [whole.ids[:10], whole.ids[10:21]]
    assert supervised(fitted.samples) == [[4, 5, 6, 7], [11, 12, 13, 14]]


messages = st.lists(
    st.tuples(
        st.lists(st.tuples(st.just("user"), st.integers(1, 9)), min_size=1, max_size=2),
        st.lists(
            st.tuples(
                st.tuples(st.just("assistant"), st.integers(2, 9)), st.tuples(st.just("tool"), st.integers(1, 9))
            ),
            max_size=2,
        ),
        st.tuples(st.just("assistant"), st.integers(2, 9)),
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("make", [one_sample, sample_a_turn])
@settings(max_examples=300, deadline=None)
@given(rounds=messages, system=st.none() | st.integers(1, 5), limit=st.integers(4, 60))
def test_split_supervises_every_turn_once(make, rounds, system, limit):
    flat = [("system", system)] if system else []
    for users, tools, final in rounds:
        flat += [*users, *(message for pair in tools for message in pair), final]
    conversation = talk(*flat)
    turns = [ids_of(m) for m in conversation.messages if m["role"] == "assistant"]
    try:
        fitted = fit(make(conversation), conversation, make, limit, "split")
    except SkipRow:
        fitted = None
    found = supervised(fitted.samples) if fitted else []
    assert all(len(sample.ids) <= limit for sample in (fitted.samples if fitted else []))
    firsts = [turn[0] for turn in found]
    assert firsts == sorted(set(firsts))  # in order, none twice
    whole = {turn[0]: turn for turn in turns}
    assert all(turn == whole[turn[0]][: len(turn)] for turn in found)
    for place, message in enumerate(conversation.messages):
        if message["role"] != "assistant":
            continue
        start = max(i for i in range(place) if conversation.messages[i]["role"] == "user")
        lead = conversation.messages[: 1 if system else 0]
        alone = make(Conversation(lead + conversation.messages[start : place + 1], None))[-1]
        if alone.runs()[-1][1] <= limit:
            assert ids_of(message) in found
