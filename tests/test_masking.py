"""Masks: exactly the answers and their end tokens, whatever the template and the tokenizer do."""

from itertools import groupby

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from eagle3.conversations import Conversation, SkipRow, parse_row
from eagle3.masking import Masker, Sample
from eagle3.sources import Row
from eagle3.target import load_tokenizer, open_target
from tests import tokenizers_for_tests as kit


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def answer(text: str, **fields) -> dict:
    return {"role": "assistant", "content": text, **fields}


def conversation(*messages: dict) -> Conversation:
    return parse_row(Row("test", 1, {"messages": list(messages)}))


def spans(tokenizer, sample: Sample) -> list[str]:
    """Decoded runs of supervised tokens."""
    runs = groupby(zip(sample.mask, sample.ids, strict=True), key=lambda pair: pair[0])
    return [tokenizer.decode([token for _, token in run]) for supervised, run in runs if supervised]


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    return AutoTokenizer.from_pretrained(smollm2)


@pytest.fixture(scope="module")
def masker(tokenizer):
    return Masker(tokenizer, [2])


@pytest.fixture(scope="module")
def make(smollm2):
    return kit.maskers_of(smollm2)


def test_exact_ids_and_mask_with_a_default_system_prompt(tokenizer, masker):
    [sample] = masker.samples(conversation(user("Hi"), answer("Hello there!"), user("Bye"), answer("See you.")))
    text = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        "Hello there!<|im_end|>",
        "\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n",
        "See you.<|im_end|>",
        "\n",
    )
    parts = [tokenizer.encode(part, add_special_tokens=False) for part in text]
    assert sample.ids == [token for part in parts for token in part]
    assert sample.mask == [n % 2 == 1 for n, part in enumerate(parts) for _ in part]
    assert parts[1] == [19556, 665, 17, 2]  # literally, so that a change of the tokenizer is seen too
    assert parts[4] == [198]


def test_a_system_turn_replaces_the_default_one(tokenizer, masker):
    [sample] = masker.samples(conversation({"role": "system", "content": "Be brief."}, user("Hi"), answer("Yo.")))
    assert tokenizer.decode(sample.ids).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user")
    assert spans(tokenizer, sample) == ["Yo.<|im_end|>"]


def test_messages_after_the_last_answer_are_left_out(tokenizer, masker):
    whole = masker.samples(conversation(user("Hi"), answer("Yo."), user("One"), user("Two")))
    assert whole == masker.samples(conversation(user("Hi"), answer("Yo.")))


def test_two_answers_in_a_row_stay_two_runs(tokenizer, masker):
    [sample] = masker.samples(conversation(user("Hi"), answer("One."), answer("Two.")))
    assert spans(tokenizer, sample) == ["One.<|im_end|>", "Two.<|im_end|>"]


def test_answers_that_touch_are_split(make):
    masker = make(kit.NO_HEADERS)
    samples = masker.samples(conversation(user("Hi "), answer("One."), answer("Two.")))
    assert [spans(masker.tokenizer, sample) for sample in samples] == [["One.<|im_end|>"], ["Two.<|im_end|>"]]
    assert samples[1].ids[: len(samples[0].ids)] == samples[0].ids


def test_history_that_loses_its_reasoning_gives_one_sample_a_turn(make):
    masker = make(kit.STRIPS_REASONING)
    talk = conversation(user("1"), answer("<think>R1</think>A1"), user("2"), answer("<think>R2</think>A2"))
    samples = masker.samples(talk)
    texts = [masker.tokenizer.decode(sample.ids) for sample in samples]
    assert [spans(masker.tokenizer, sample) for sample in samples] == [
        ["<think>R1</think>A1<|im_end|>"],
        ["<think>R2</think>A2<|im_end|>"],
    ]
    assert "R1" not in texts[1] and "A1<|im_end|>" in texts[1]


def test_history_that_stays_gives_one_sample(make):
    masker = make(kit.STRIPS_REASONING)
    [sample] = masker.samples(conversation(user("1"), answer("A1"), user("2"), answer("<think>R2</think>A2")))
    assert spans(masker.tokenizer, sample) == ["A1<|im_end|>", "<think>R2</think>A2<|im_end|>"]


@pytest.mark.parametrize("text", ["Plain answer.", "  with spaces before and after ", "<b>tag</b>", "t"])
@pytest.mark.parametrize("template", [kit.ADDS_EMPTY_THINK, kit.OPENS_REASONING])
def test_an_empty_think_block_of_the_template_is_not_supervised(template, text):
    tokenizer = kit.fast_bytes(template)
    [sample] = Masker(tokenizer, [257]).samples(conversation(user("1"), answer(text)))
    assert spans(tokenizer, sample) == [f"{text}<|im_end|>"]
    assert tokenizer.decode(sample.ids).count("</think>") == 1


@pytest.mark.parametrize("inline", [True, False])
def test_reasoning_that_the_template_drops_is_supervised_after_the_opened_block(make, inline):
    masker = make(kit.OPENS_REASONING)
    if inline:
        turns = answer("<think>R1</think>think"), answer("<think>\nR2\n</think>\n\nend")
    else:
        turns = answer("think", reasoning_content="R1"), answer("\n\nend", reasoning_content="\nR2\n")
    samples = masker.samples(conversation(user("1"), turns[0], user("2"), turns[1]))
    assert [masker.tokenizer.decode(sample.ids) for sample in samples] == [
        "<|im_start|>user\n1<|im_end|><|im_start|>assistant\n<think>R1</think>think<|im_end|>",
        "<|im_start|>user\n1<|im_end|><|im_start|>assistant\n<think></think>think<|im_end|>"
        "<|im_start|>user\n2<|im_end|><|im_start|>assistant\n<think>\nR2\n</think>\n\nend<|im_end|>",
    ]
    assert [spans(masker.tokenizer, sample) for sample in samples] == [
        ["R1</think>think<|im_end|>"],
        ["\nR2\n</think>\n\nend<|im_end|>"],
    ]


@pytest.mark.parametrize("reasoning", ["R", "\nR"])
def test_an_opened_block_that_ends_in_a_newline(make, reasoning):
    masker = make(kit.OPENS_WITH_NEWLINE)
    [sample] = masker.samples(conversation(user("1"), answer(f"<think>{reasoning}\n</think>\n\nA")))
    assert spans(masker.tokenizer, sample) == ["R\n</think>\n\nA<|im_end|>"]
    assert "assistant\n<think>\nR\n" in masker.tokenizer.decode(sample.ids)


def test_tool_calls_are_supervised_and_their_results_are_not(make):
    masker = make(kit.WITH_TOOLS)
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    result = {"role": "tool", "content": "42"}
    [sample] = masker.samples(conversation(user("1"), answer("", tool_calls=[call]), result, answer("It is 42.")))
    called, said = spans(masker.tokenizer, sample)
    assert "add" in called and called.endswith("</tool_call><|im_end|>") and said == "It is 42.<|im_end|>"
    parsed = call | {"function": {"name": "add", "arguments": {"a": 1}}}
    talk = conversation(user("1"), answer("", tool_calls=[parsed]), result, answer("It is 42."))
    assert masker.samples(talk) == [sample]
    with pytest.raises(SkipRow, match="chat template changes or drops a tool call"):
        make(kit.PLAIN).samples(conversation(user("1"), answer("Let me see.", tool_calls=[call])))


def test_reasoning_before_a_tool_call_and_before_the_answer(make):
    masker = make(kit.OPENS_REASONING)
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    talk = conversation(
        user("1"),
        answer(None, reasoning_content="R1", tool_calls=[call]),
        {"role": "tool", "content": "42"},
        answer("d", reasoning_content="R2"),
    )
    samples = masker.samples(talk)
    runs = [run for sample in samples for run in spans(masker.tokenizer, sample)]
    assert [run.partition("<calls>")[0] for run in runs] == ["R1</think>", "R2</think>d<|im_end|>"]
    assert "<think>R1</think><calls>" in masker.tokenizer.decode(samples[-1].ids)  # as the server's prompt has it


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (kit.REJECTS_SYSTEM, [{"role": "system", "content": "s"}, user("a"), answer("b")], "refuses: no system turn"),
        (kit.IGNORES_GENERATION_PROMPT, [user("a"), answer("b")], "supervised tokens differ from the answer's text"),
        (kit.DROPS_WORDS, [user("a"), answer("one two three four five")], "supervised tokens differ"),
        (
            kit.OPENS_REASONING.replace("{{ m['content'] }}", "{{ m['content'] | truncate(22) }}"),
            [user("a"), answer("<think>R</think>one two three four five six seven")],
            "chat template changes an answer's text",
        ),
        (kit.OPENS_WITH_NEWLINE, [user("a"), answer("b")], "is not how the turn begins"),
        (kit.PLAIN, [user("a"), answer("b<|im_end|>c")], "supervised tokens differ"),
        (kit.PLAIN, [user("a"), answer("no token for \U00040000")], "supervised tokens differ"),
        (kit.PLAIN, [user("a"), answer("b", reasoning_content="because")], "supervised tokens differ"),
        (kit.PLAIN.replace("<|im_end|>", ""), [user("a"), answer("b")], "no end-of-turn token"),
        (
            kit.PLAIN.replace(">assistant", ">bot"),
            [user("a"), answer("b")],
            "is not how the turn",
        ),
        (kit.SPACE_BEFORE_ANSWER, [user("a"), answer("word")], "tokenizer merges across a turn boundary"),
    ],
)
def test_rows_without_a_correct_mask_are_skipped_with_a_reason(make, template, messages, reason):
    with pytest.raises(SkipRow, match=reason):
        make(template).samples(conversation(*messages))


def test_white_space_that_a_template_strips_is_tolerated(make):
    masker = make(kit.STRIPS_CONTENT)
    [sample] = masker.samples(conversation(user("a"), answer("\n b \n")))
    assert spans(masker.tokenizer, sample) == ["b<|im_end|>"]


def test_a_tokenizer_that_marks_the_beginning_of_a_text():
    tokenizer = kit.marks_beginning()
    [sample] = Masker(tokenizer, []).samples(conversation(user("a"), answer("b c"), user("d"), answer("e")))
    assert sample.ids == tokenizer("[INST] a [/INST] b c</s>[INST] d [/INST] e</s>")["input_ids"]
    assert [run.strip() for run in spans(tokenizer, sample)] == ["b c</s>", "e</s>"]


def test_a_slow_tokenizer_of_remote_code_gives_the_masks_of_a_fast_one(tmp_path):
    target = open_target(str(kit.write_slow_target(tmp_path / "target", kit.OPENS_REASONING)))
    slow, fast = load_tokenizer(target, trust_remote_code=True), kit.fast_bytes(kit.OPENS_REASONING)
    assert not slow.is_fast
    reasoned = answer("<think>c</think>d")
    talk = conversation({"role": "system", "content": "s"}, user("héllo 😀"), answer("日本 é́ ok"), user("b"), reasoned)
    samples = Masker(slow, target.end_ids).samples(talk)
    assert samples == Masker(fast, [257]).samples(talk)
    assert [spans(fast, sample) for sample in samples] == [["日本 é́ ok<|im_end|>", "c</think>d<|im_end|>"]]


text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40).filter(
    lambda value: value.strip() and value == value.lstrip() and "<" not in value
)


@settings(max_examples=150, deadline=None)
@given(
    turns=st.lists(st.tuples(text, text), min_size=1, max_size=5),
    system=st.none() | text,
)
def test_decoded_spans_are_the_answers(tokenizer, masker, turns, system):
    # this tokenizer has no token for some bytes; such rows are skipped
    assume(all(tokenizer.decode(tokenizer.encode(reply)) == reply for _, reply in turns))
    messages = [message for question, reply in turns for message in (user(question), answer(reply))]
    talk = conversation(*([{"role": "system", "content": system}] if system else []), *messages)
    [whole] = masker.samples(talk)
    assert spans(tokenizer, whole) == [f"{reply}<|im_end|>" for _, reply in turns]
    rendered = tokenizer.apply_chat_template(talk.messages, tokenize=False, add_generation_prompt=False)
    assert whole.ids == tokenizer(rendered, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("template", [kit.STRIPS_REASONING, kit.ADDS_EMPTY_THINK, kit.OPENS_REASONING, kit.NO_HEADERS])
@settings(max_examples=50, deadline=None)
@given(turns=st.lists(st.tuples(text, text, st.none() | text), min_size=1, max_size=4))
def test_every_answer_is_supervised_once_whatever_the_template_does_to_history(template, turns):
    tokenizer = kit.fast_bytes(template)
    messages, expected = [], []
    for question, reply, reasoning in turns:
        reasoned = f"<think>{reasoning}</think>{reply}" if reasoning and template != kit.ADDS_EMPTY_THINK else reply
        messages += [user(question), answer(reasoned)]
        expected.append(reasoned.removeprefix("<think>" if template == kit.OPENS_REASONING else "") + "<|im_end|>")
    samples = Masker(tokenizer, [257]).samples(conversation(*messages))
    assert [span for sample in samples for span in spans(tokenizer, sample)] == expected


@pytest.mark.parametrize(
    "content", [[{"type": "text", "text": "Hello "}, {"type": "text", "text": "world"}], "Hello world"]
)
def test_parts_of_a_content_are_one_text(make, content):
    """(P10, P11)"""
    for template in (kit.CONCATENATES, kit.PLAIN):
        masker = make(template)
        [sample] = masker.samples(conversation(user("Say it."), {"role": "assistant", "content": content}))
        assert spans(masker.tokenizer, sample) == ["Hello world<|im_end|>"]
        assert masker.tokenizer.decode(sample.ids).endswith("assistant\nHello world<|im_end|>\n")


def test_sharegpt_and_chat_rows_have_the_same_ids(masker):
    """(P01)"""
    turns = [
        ("human", "user", "Hi"),
        ("gpt", "assistant", "Hello."),
        ("human", "user", "Bye"),
        ("gpt", "assistant", "Ciao."),
    ]
    shared = parse_row(Row("test", 1, {"conversations": [{"from": name, "value": text} for name, _, text in turns]}))
    assert masker.samples(shared) == masker.samples(conversation(*({"role": r, "content": t} for _, r, t in turns)))


def test_only_the_answer_is_supervised_when_users_follow_each_other(tokenizer, masker):
    """(P41)"""
    [sample] = masker.samples(conversation(user("a"), answer("b"), user("c"), user("d")))
    assert spans(tokenizer, sample) == ["b<|im_end|>"] and tokenizer.decode(sample.ids).endswith("b<|im_end|>\n")
    [sample] = masker.samples(conversation(user("a"), user("c"), answer("b")))
    assert spans(tokenizer, sample) == ["b<|im_end|>"]


def test_broken_offsets_do_not_matter(tokenizer, masker, monkeypatch):
    """(P13)"""
    talk = conversation(user("😀 日本"), answer("é́ 日本 😀 done"))
    whole = masker.samples(talk)
    real = type(tokenizer).__call__

    def broken(self, *arguments, **settings):
        encoding = real(self, *arguments, **settings)
        if "offset_mapping" in encoding:
            encoding["offset_mapping"] = [(start, start) for start, _ in encoding["offset_mapping"]]
        return encoding

    monkeypatch.setattr(type(tokenizer), "__call__", broken)
    fresh = Masker(tokenizer, [2])
    assert fresh.samples(talk) == whole and spans(tokenizer, whole[0]) == ["é́ 日本 😀 done<|im_end|>"]


def test_generation_markers_say_the_same(make):
    """Where transformers places them right; it fails for a span that ends on token 0 or on white space (P15)."""
    masker = make(kit.GENERATION_MARKERS)
    talk = conversation(user("1"), answer("One two."), user("2"), answer("Three."))
    [sample] = masker.samples(talk)
    marked = masker.tokenizer.apply_chat_template(talk.messages, return_assistant_tokens_mask=True)
    assert (sample.ids, sample.mask) == (marked["input_ids"], list(map(bool, marked["assistant_masks"])))


def test_no_user_text_is_supervised_whatever_the_answer_is(make):
    """(P15)"""
    masker = make(kit.GENERATION_MARKERS)
    for text in ("A", " A ", "A\n", "\nA"):
        [sample] = masker.samples(conversation(user("user message"), answer(text), user("user message"), answer("B")))
        assert spans(masker.tokenizer, sample) == [f"{text}<|im_end|>", "B<|im_end|>"]


def test_a_template_of_another_family_gives_no_empty_mask(tokenizer):
    """(P18)"""
    foreign = "{% for m in messages %}<start>{{ m['role'] }}\n{{ m['content'] }}<stop>{% endfor %}"
    foreign += "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
    other = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    other.chat_template = foreign
    with pytest.raises(SkipRow, match="no end-of-turn token after an answer"):
        Masker(other, [2]).samples(conversation(user("a"), answer("b")))


def test_the_end_token_is_supervised_and_the_newline_after_it_is_not(tokenizer, masker):
    """Nor are end tokens of other turns, nor the header (P25, P26)."""
    [sample] = masker.samples(
        conversation({"role": "system", "content": "s"}, user("a"), answer("b"), user("c"), answer("d"))
    )
    ends = [place for place, token in enumerate(sample.ids) if token == 2]
    assert [sample.mask[place] for place in ends] == [False, False, True, False, True]
    assert [sample.mask[place + 1] for place in ends] == [False] * 5
    first = sample.mask.index(True)
    assert tokenizer.decode(sample.ids[:first]).endswith("<|im_start|>assistant\n")
    assert tokenizer.decode(sample.ids[first]) == "b"


def test_blocks_and_arguments_of_another_form(make):
    masker = make(kit.OTHER_BLOCK)
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": ["x", True]}}}
    talk = conversation(
        user("1"),
        answer("", reasoning_content="R", tool_calls=[call]),
        {"role": "tool", "content": "3"},
        answer("It is 3."),
        user("2"),
        answer("Two.", thinking="ignored by the row's parser", reasoning="Why"),
    )
    [sample] = masker.samples(talk)
    assert spans(masker.tokenizer, sample) == [
        "[THINK]R[/THINK]<call=add><arg=a>1</arg><arg=b>['x', True]</arg></call><|im_end|>",
        "It is 3.<|im_end|>",
        "[THINK]Why[/THINK]Two.<|im_end|>",
    ]
    assert "assistant\n[THINK][/THINK]It is 3." in masker.tokenizer.decode(sample.ids)


def test_templates_by_name_are_chosen_as_transformers_does(tokenizer):
    named = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    named.chat_template = {
        "default": kit.PLAIN,
        "tool_use": kit.WITH_TOOLS.replace("<|im_start|>", "<|im_start|>with "),
    }
    masker = Masker(named, [2])
    rows = {"messages": [user("a"), answer("b")]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    [plain] = masker.samples(parse_row(Row("test", 1, rows)))
    [used] = masker.samples(parse_row(Row("test", 1, rows | {"tools": tools})))
    assert tokenizer.decode(plain.ids) == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    assert tokenizer.decode(used.ids).startswith("<|im_start|>with user") and spans(named, used) == ["b<|im_end|>"]


def test_prompt_ids_are_what_precedes_the_answer(make, tokenizer, masker):
    talk = conversation(user("Hi"), answer("Hello."), user("Bye"), answer("Ciao."))
    [sample] = masker.samples(talk)
    prompt = masker.prompt_ids(talk.messages[:3], None)
    assert sample.ids[: len(prompt)] == prompt and not any(sample.mask[len(prompt) - 3 : len(prompt)])
    assert sample.mask[len(prompt)] and tokenizer.decode(prompt).endswith("Bye<|im_end|>\n<|im_start|>assistant\n")
    with pytest.raises(SkipRow, match="chat template refuses: no system turn"):
        make(kit.REJECTS_SYSTEM).prompt_ids([{"role": "system", "content": "s"}], None)
