"""The second derivation of masks: accepts right ones of every family, finds wrong ones."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from eagle3.conversations import Conversation, SkipRow, parse_row
from eagle3.mask_check import MaskDisagreement, check
from eagle3.masking import Masker, Sample
from eagle3.sources import Row
from eagle3.target import load_tokenizer, open_target
from eagle3.terminal import UserError
from tests import families_for_tests as families
from tests import oracle_for_tests as oracle
from tests import tokenizers_for_tests as kit
from tests.oracle_for_tests import Said

SYSTEM, ONE, TWO = (
    ("system", "Be brief."),
    ("user", "One is what, can you tell me?"),
    ("user", "And two, what would that be?"),
)


def verdict(masker: Masker, conversation: Conversation, samples: list[Sample]) -> int:
    return check(masker.tokenizer, conversation, samples, masker.end_ids, date=families.TODAY)


def edges(sample: Sample) -> list[tuple[int, int]]:
    begins = [i for i, value in enumerate(sample.mask) if value and not sample.mask[i - 1]]
    ends = [i for i in range(1, len(sample.mask) + 1) if sample.mask[i - 1] and not any(sample.mask[i : i + 1])]
    return list(zip(begins, ends, strict=True))


def unchecked(name: str, messages: list) -> int:
    """Turns whose text is rendered otherwise once they are finished: by R1 all, by gpt-oss an answer after calls."""
    count, reasoned_calls = 0, False
    for role, content in messages:
        if role != "assistant":
            continue
        if content.calls:
            reasoned_calls = reasoned_calls or bool(content.reasoning or content.text)
        count += name == "deepseek-r1" or (name == "harmony" and not content.calls and reasoned_calls)
        reasoned_calls = reasoned_calls and bool(content.calls)
    return count


@pytest.mark.parametrize("name", families.FAMILIES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_right_masks_of_every_family_are_accepted(name, data):
    masker, _ = families.two_ways(name)
    messages = data.draw(oracle.conversations(name))
    conversation = oracle.conversation(messages)
    try:
        samples = masker.samples(conversation)
    except SkipRow:
        return
    turns = sum(role == "assistant" for role, _ in messages)
    assert verdict(masker, conversation, samples) == turns - unchecked(name, messages)


def conversations_of(name: str) -> list:
    """With system turn, reasoning where the family has it, and calls where it has them."""
    reasoning = "I think of it." if name in oracle.REASONS else None
    messages = [SYSTEM, ONE, ("assistant", Said(reasoning, "It is one.", [])), TWO]
    if name in oracle.CALLS:
        messages += [("assistant", Said(None, "", [{"a": "b"}])), ("tool", "3")]
    return [*messages, ("assistant", Said(reasoning, "Two it is.", []))]


def shifted(sample: Sample, begin: int, end: int) -> list[bool]:
    return [False, *sample.mask[:-1]]


def shifted_back(sample: Sample, begin: int, end: int) -> list[bool]:
    return [*sample.mask[1:], False]


def header_included(sample: Sample, begin: int, end: int) -> list[bool]:
    return [*sample.mask[: begin - 1], True, *sample.mask[begin:]]


def whole_header_included(sample: Sample, begin: int, end: int) -> list[bool]:
    return sample.mask[: begin - 4] + [True] * 4 + sample.mask[begin:]


def first_token_missing(sample: Sample, begin: int, end: int) -> list[bool]:
    return [*sample.mask[:begin], False, *sample.mask[begin + 1 :]]


def half_missing(sample: Sample, begin: int, end: int) -> list[bool]:
    """The reasoning, where there is some."""
    middle = (begin + end) // 2
    return sample.mask[:begin] + [False] * (middle - begin) + sample.mask[middle:]


def end_token_missing(sample: Sample, begin: int, end: int) -> list[bool]:
    return [*sample.mask[: end - 1], False, *sample.mask[end:]]


def goes_on(sample: Sample, begin: int, end: int) -> list[bool] | None:
    """The newline after the end token, or the header after it."""
    return [*sample.mask[:end], True, *sample.mask[end + 1 :]] if end < len(sample.mask) else None


def turn_missing(sample: Sample, begin: int, end: int) -> list[bool]:
    return sample.mask[:begin] + [False] * (end - begin) + sample.mask[end:]


def user_too(sample: Sample, begin: int, end: int) -> list[bool]:
    """(P15)"""
    return sample.mask[: begin - 12] + [True] * 3 + sample.mask[begin - 9 :]


def user_instead(sample: Sample, begin: int, end: int) -> list[bool]:
    return sample.mask[: begin - 12] + [True] * 3 + [False] * (end - begin + 9) + sample.mask[end:]


def to_the_end(sample: Sample, begin: int, end: int) -> list[bool] | None:
    """(P26)"""
    return sample.mask[:begin] + [True] * (len(sample.mask) - begin) if end < len(sample.mask) else None


BREAKS = [shifted, shifted_back, header_included, whole_header_included, first_token_missing, half_missing]
BREAKS += [end_token_missing, goes_on, turn_missing, user_too, user_instead, to_the_end]


@pytest.mark.parametrize("name", families.FAMILIES)
@pytest.mark.parametrize("broken", BREAKS)
def test_broken_masks_are_found(name, broken):
    """(P25)"""
    masker = families.family_masker(name)
    conversation = oracle.conversation(conversations_of(name))
    samples = masker.samples(conversation)
    assert verdict(masker, conversation, samples) >= (0 if name == "deepseek-r1" else 2)
    tried = 0
    for number, sample in enumerate(samples):
        for begin, end in edges(sample):
            mask = broken(sample, begin, end)
            if mask is None:
                continue
            tried += 1
            wrong = [*samples[:number], Sample(sample.ids, mask), *samples[number + 1 :]]
            with pytest.raises(MaskDisagreement):
                verdict(masker, conversation, wrong)
    assert tried or broken in (goes_on, to_the_end)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-thinking"])
def test_a_supervised_empty_block_is_found(name):
    """(P21)"""
    masker = families.family_masker(name)
    conversation = oracle.conversation([ONE, ("assistant", Said(None, "It is one.", []))])
    [sample] = masker.samples(conversation)
    [(begin, _)] = edges(sample)
    for count in range(1, 5):
        mask = sample.mask[: begin - count] + [True] * count + sample.mask[begin:]
        with pytest.raises(MaskDisagreement, match="turn 1 begins elsewhere"):
            verdict(masker, conversation, [Sample(sample.ids, mask)])


@pytest.mark.parametrize("name", families.FAMILIES)
def test_ids_that_are_not_those_of_the_text_are_found(name):
    masker = families.family_masker(name)
    conversation = oracle.conversation(conversations_of(name))
    samples = masker.samples(conversation)
    first = samples[0]
    place = first.mask.index(True) - 8
    ids = [*first.ids[:place], first.ids[place] + 1, *first.ids[place + 1 :]]
    with pytest.raises(MaskDisagreement):
        verdict(masker, conversation, [Sample(ids, first.mask), *samples[1:]])


def test_what_the_error_says(smollm2):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    masker = Masker(tokenizer, [2])
    talk = parse_row(
        Row("a", 1, {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]})
    )
    [sample] = masker.samples(talk)
    with pytest.raises(UserError) as error:
        check(tokenizer, talk, [Sample(sample.ids, header_included(sample, *edges(sample)[0]))], [2])
    assert str(error.value) == (
        "the loss mask of assistant turn 1 begins elsewhere: supervised is '\\nYes.<|im_end|>', by a second "
        "derivation it is 'Yes.<|im_end|>'; leave the row out, and report it with the chat template"
    )
    with pytest.raises(MaskDisagreement, match="0 runs of supervised tokens for 1 assistant turns"):
        check(tokenizer, talk, [Sample(sample.ids, [False] * len(sample.ids))], [2])


def test_text_that_the_tokenizer_does_not_give_back(smollm2):
    """It has no token for some bytes of a user; the answer is compared all the same."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    masker = Masker(tokenizer, [2])
    rows = [{"role": "user", "content": "What is \U00040000?"}, {"role": "assistant", "content": "No idea."}]
    talk = parse_row(Row("a", 1, {"messages": rows}))
    [sample] = masker.samples(talk)
    assert check(tokenizer, talk, [sample], [2]) == 0
    for broken in (shifted, header_included, end_token_missing, first_token_missing, goes_on):
        with pytest.raises(MaskDisagreement):
            check(tokenizer, talk, [Sample(sample.ids, broken(sample, *edges(sample)[0]))], [2])


words = st.text(alphabet="ab E1é你\n .'🙂<", max_size=12)
TEMPLATES = [name for name, value in vars(kit).items() if name.isupper() and isinstance(value, str) and "{%" in value]


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=15, deadline=None)
@given(turns=st.lists(st.tuples(words, words.filter(str.strip), st.none() | words), min_size=1, max_size=3))
def test_right_masks_of_odd_templates_are_accepted(name, turns):
    tokenizer = kit.fast_bytes(getattr(kit, name))
    masker = Masker(tokenizer, [257])
    messages = []
    for question, text, reasoning in turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": text}]
        if reasoning:
            messages[-1]["reasoning_content"] = reasoning
    conversation = parse_row(Row("a", 1, {"messages": messages}))
    try:
        samples = masker.samples(conversation)
    except SkipRow:
        return
    assert 0 <= verdict(masker, conversation, samples) <= len(turns)


def test_a_tokenizer_that_marks_the_beginning_of_a_text():
    tokenizer = kit.marks_beginning()
    masker = Masker(tokenizer, [])
    rows = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b c")) * 2]
    conversation = parse_row(Row("a", 1, {"messages": rows}))
    samples = masker.samples(conversation)
    assert verdict(masker, conversation, samples) == 2
    [sample] = samples
    for broken in (shifted, header_included, end_token_missing):
        with pytest.raises(MaskDisagreement):
            verdict(masker, conversation, [Sample(sample.ids, broken(sample, *edges(sample)[0]))])


@pytest.fixture(scope="module")
def kimi(tiny_kimi) -> Masker:
    target = open_target(str(tiny_kimi))
    return Masker(load_tokenizer(target, trust_remote_code=True), target.end_ids)


def test_kimi(kimi):
    """Its template drops the reasoning of finished turns: the whole of such a turn is compared as texts (P38, P39)."""
    call = {"id": "functions.add:0", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    rows = [
        {"role": "user", "content": "What is 1 plus 2?"},
        {"role": "assistant", "content": "", "reasoning_content": "I add.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "functions.add:0", "content": "3"},
        {"role": "assistant", "content": "It makes 3.", "reasoning_content": "So it is."},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "Yes."},
    ]
    conversation = parse_row(Row("a", 1, {"messages": rows}))
    samples = kimi.samples(conversation)
    assert verdict(kimi, conversation, samples) == 2
    for broken in BREAKS:
        for number, sample in enumerate(samples):
            for begin, end in edges(sample):
                mask = broken(sample, begin, end)
                if mask is not None:
                    wrong = [*samples[:number], Sample(sample.ids, mask), *samples[number + 1 :]]
                    with pytest.raises(MaskDisagreement):
                        verdict(kimi, conversation, wrong)


def test_the_same_text_in_other_ids_is_found():
    """As a tokenizer gives it that merges across a boundary which a server does not have."""
    masker = families.family_masker("llama3")
    conversation = oracle.conversation([("user", "the sum of two"), ("assistant", Said(None, "the sum", []))])
    [sample] = masker.samples(conversation)
    begin = edges(sample)[0][0]
    for first in (0, begin):  # in a word of the user, in one of the answer
        place = sample.ids.index(masker.tokenizer.convert_tokens_to_ids("he"), first)
        letters = masker.tokenizer.convert_tokens_to_ids(list("he"))
        ids = sample.ids[:place] + letters + sample.ids[place + 1 :]
        mask = sample.mask[:place] + [sample.mask[place]] * len(letters) + sample.mask[place + 1 :]
        with pytest.raises(MaskDisagreement, match="belongs to ids that are not those of the text"):
            verdict(masker, conversation, [Sample(ids, mask)])
