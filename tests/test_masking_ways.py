"""The fast ways of masking give what the plain one gives, and are left where that is in doubt."""

from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from eagle3.conversations import Conversation, SkipRow, parse_row
from eagle3.masking import Masker, Sample
from eagle3.sources import Row
from tests import tokenizers_for_tests as kit


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def answer(text: str) -> dict:
    return {"role": "assistant", "content": text}


def conversation(*messages: dict) -> Conversation:
    return parse_row(Row("test", 1, {"messages": list(messages)}))


def spans(tokenizer, sample: Sample) -> list[str]:
    """Decoded runs of supervised tokens."""
    runs = groupby(zip(sample.mask, sample.ids, strict=True), key=lambda pair: pair[0])
    return [tokenizer.decode([token for _, token in run]) for supervised, run in runs if supervised]


@pytest.fixture(scope="module")
def make(smollm2):
    return kit.maskers_of(smollm2)


TEMPLATES = [name for name, value in vars(kit).items() if name.isupper() and isinstance(value, str) and "{%" in value]
odd = st.text(alphabet="ab \n<é🙂", max_size=8) | st.sampled_from(
    [
        "<think>R</think>A",
        "R</think>A",
        "<think>\n\n</think>\n\nA",
        "</think>",
        "/no_think",
        "a<|im_end|>b",
        "Zq0qZ",
        "[THINK]",
    ]
)
messages_of_any_kind = st.lists(
    st.tuples(st.just("user"), odd, st.none() | odd, st.booleans())
    | st.tuples(st.just("assistant"), odd.filter(str.strip), st.none() | odd, st.booleans()),
    min_size=1,
    max_size=5,
)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=30, deadline=None)
@given(turns=messages_of_any_kind, system=st.none() | odd)
def test_the_fast_ways_give_what_the_plain_ones_give(make, name, turns, system):
    messages = [{"role": "system", "content": system}] if system else []
    messages.append(user("q"))
    for role, content, reasoning, calling in turns:
        messages.append({"role": role, "content": content})
        if role == "assistant" and reasoning:
            messages[-1]["reasoning_content"] = reasoning
        if role == "assistant" and calling:
            function = {"name": "f", "arguments": {"a": content}}
            messages[-1]["tool_calls"] = [{"id": "1", "type": "function", "function": function}]
    talk = conversation(*messages, answer("end"))
    fast, plain = make(getattr(kit, name)), make(getattr(kit, name))
    fast._unproven, plain._markers, plain._template._watched = 0, None, None
    # the second time with what the first one has learnt
    assert kit.outcome(fast, talk) == kit.outcome(fast, talk) == kit.outcome(plain, talk)


def test_a_known_shape_is_rendered_once_and_encoded_once(make, monkeypatch):
    masker = make(kit.PLAIN)
    masker._unproven = 0
    masker.samples(conversation(user("a"), answer("b"), user("c"), answer("d")))
    renders, texts = [], []
    real = type(masker.tokenizer).apply_chat_template
    monkeypatch.setattr(
        type(masker.tokenizer), "apply_chat_template", lambda *a, **k: renders.append(1) or real(*a, **k)
    )
    encode = masker._encode_all
    masker._encode_all = lambda chunks: texts.extend(chunks) or encode(chunks)
    [sample] = masker.samples(conversation(user("One?"), answer("First."), user("Two?"), answer("Second.")))
    assert spans(masker.tokenizer, sample) == ["First.<|im_end|>", "Second.<|im_end|>"]
    assert len(renders) == 1 and "".join(texts) == masker.tokenizer.decode(sample.ids)


def test_conversations_masked_together_are_those_masked_alone(make):
    talks = [conversation(user(f"q{n}"), answer(f"a{n}")) for n in range(30)]
    talks[7] = conversation(user("a"), answer("b<|im_end|>c"))  # no exact sample
    talks[9] = conversation(user("a"), answer("<think>R</think>A"), user("b"), answer("<think>S</think>B"))
    for template in (kit.PLAIN, kit.STRIPS_REASONING, kit.NO_HEADERS):
        alone = [kit.outcome(make(template), talk) for talk in talks]
        together = [item if isinstance(item, list) else str(item) for item in make(template).samples_of(talks)]
        assert together == alone and isinstance(together[7], str)


def test_truncation_and_padding_of_a_tokenizer_file_are_switched_off(smollm2):
    tokenizer = kit.with_think_tags(smollm2)
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=64)
    masker = Masker(tokenizer, [2])
    masker._unproven = 0
    talks = [conversation(user("One two three four?"), answer("Five.")), conversation(user("a"), answer("b c d e"))]
    found = masker.samples_of(talks)
    assert masker._markers and found == [Masker(kit.with_think_tags(smollm2), [2]).samples(talk) for talk in talks]


def test_what_a_user_writes_may_change_the_prompt(make):
    """One render of the whole does not show it, so texts that a template looks for are not taken on trust."""
    masker = make(kit.SWITCHED_BY_THE_USER)
    masker._unproven = 0
    masker.samples(conversation(user("a"), answer("b"), user("c"), answer("d")))
    with pytest.raises(SkipRow, match="is not how the turn begins"):
        masker.samples(conversation(user("a"), answer("b"), user("c /no_think"), answer("d")))


def test_white_space_may_change_what_is_rendered_before_other_turns(make):
    masker = make(kit.TRIMS_THE_LAST)
    masker._unproven = 0
    assert len(masker.samples(conversation(user("a"), answer("b"), user("c"), answer("d")))) == 1
    assert len(masker.samples(conversation(user("a"), answer("b "), user("c"), answer("d")))) == 2


def test_an_end_token_of_the_next_turn_does_not_end_the_answer(make):
    masker = make(kit.ENDS_WITH_THE_NEXT)
    masker._unproven = 0
    with pytest.raises(SkipRow, match="no end-of-turn token after an answer"):
        masker.samples(conversation(user("a"), answer("b"), user("c"), answer("d")))


def test_a_tokenizer_that_is_not_cut_at_its_markers_is_found_out(make):
    """The first texts are encoded both ways; one difference ends the fast way."""
    masker = make(kit.PLAIN)
    encode = masker._encode_all
    masker._encode_all = lambda texts: encode([text.replace("user", "USER") for text in texts])
    talk = conversation(user("a"), answer("b"))
    assert masker.samples(talk) == make(kit.PLAIN).samples(talk)
    assert masker._markers is None


@pytest.mark.parametrize(
    "added",
    [
        [AddedToken("<go>", normalized=False, lstrip=True)],  # the space before it is its own
        [AddedToken("<go>", normalized=False), AddedToken("b<go", normalized=False)],  # begins before it, ends inside
        [AddedToken("<go>", normalized=False), AddedToken("b<go>", normalized=False)],
        [AddedToken("<go>", normalized=False), AddedToken("go", normalized=False, single_word=True)],
    ],
)
def test_texts_are_cut_only_at_tokens_that_stand_for_themselves(added):
    tokenizer = kit.fast_bytes(kit.PLAIN.replace("<|im_start|>", "<go>").replace("\n<", "<"))
    tokenizer.add_tokens(added)
    fast, plain = Masker(tokenizer, [257]), Masker(tokenizer, [257])
    fast._unproven, plain._markers = 0, None
    talk = conversation(user("a"), answer("yes"), user("ab"), answer("no"), user("a "), answer("go b"))
    assert kit.outcome(fast, talk) == kit.outcome(plain, talk)
    assert "<go>" not in (fast._markers.pattern.split("|") if fast._markers else [])
