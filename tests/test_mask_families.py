"""Masks of each family of chat templates: what an independent oracle says was generated, to the token."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers_for_tests import outcome

from eagle3.conversations import SkipRow
from eagle3.masking import Masker, Sample
from tests import families_for_tests as families
from tests import oracle_for_tests as oracle
from tests.oracle_for_tests import Said


def encode(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def generated(sample: Sample) -> list[tuple[list[int], list[int]]]:
    """For each run of supervised ids: all ids before it, and the run."""
    edges = [place for place in range(1, len(sample.mask)) if sample.mask[place] != sample.mask[place - 1]]
    edges += [len(sample.ids)] * (len(edges) % 2)
    return [(sample.ids[:begin], sample.ids[begin:end]) for begin, end in zip(edges[::2], edges[1::2], strict=True)]


@pytest.mark.parametrize("name", families.FAMILIES)
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_what_the_target_wrote_is_supervised_to_the_token(name, data):
    fast, plain = families.two_ways(name)
    messages = data.draw(oracle.conversations(name))
    conversation = oracle.conversation(messages)
    expected = []
    for prompt, written in oracle.written(name, messages):
        before, whole = encode(fast.tokenizer, prompt), encode(fast.tokenizer, prompt + written)
        expected.append((before, whole[len(before) :]) if whole[: len(before)] == before else None)
    samples = outcome(fast, conversation)
    assert samples == outcome(plain, conversation)
    if None in expected:
        assert samples == "tokenizer merges across a turn boundary"
        return
    assert isinstance(samples, list), samples
    assert [run for sample in samples for run in generated(sample)] == expected
    for sample in samples:
        after = len(sample.mask) - sample.mask[::-1].index(True)
        assert fast.tokenizer.decode(sample.ids[after:]).strip() == ""


EXACT = {
    "llama3": [
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
        "Today Date: 30 Nov 2026\n\nBe brief.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nOne?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[1<|eot_id|>]<|start_header_id|>user<|end_header_id|>\n\n"
        "Two?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n[2<|eot_id|>]"
    ],
    "gemma": [
        "<bos><start_of_turn>user\nBe brief.\n\nOne?<end_of_turn>\n<start_of_turn>model\n[1<end_of_turn>]\n"
        "<start_of_turn>user\nTwo?<end_of_turn>\n<start_of_turn>model\n[2<end_of_turn>]\n"
    ],
    "qwen3": [
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n<think>\n\n"
        "</think>\n\n[1<|im_end|>]\n",
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n1<|im_end|>"
        "\n<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n[2<|im_end|>]\n",
    ],
    "deepseek-v3": [
        "<｜begin▁of▁sentence｜>Be brief.<｜User｜>One?<｜Assistant｜>[1<｜end▁of▁sentence｜>]<｜User｜>Two?"
        "<｜Assistant｜>[2<｜end▁of▁sentence｜>]"
    ],
    "harmony": [
        "FACTS<|start|>developer<|message|># Instructions\n\nBe brief.<|end|><|start|>user<|message|>One?<|end|>"
        "<|start|>assistant[<|channel|>final<|message|>1<|return|>]",
        "FACTS<|start|>developer<|message|># Instructions\n\nBe brief.<|end|><|start|>user<|message|>One?<|end|>"
        "<|start|>assistant<|channel|>final<|message|>1<|end|><|start|>user<|message|>Two?<|end|>"
        "<|start|>assistant[<|channel|>final<|message|>2<|return|>]",
    ],
}
REASONED = {
    "qwen3": [
        "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n[<think>\nR1\n</think>\n\n1<|im_end|>]\n",
        "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n1<|im_end|>\n<|im_start|>user\nTwo?<|im_end|>\n"
        "<|im_start|>assistant\n[<think>\nR2\n</think>\n\n2<|im_end|>]\n",
    ],
    "qwen3-thinking": [
        "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n<think>\n[R1\n</think>\n\n1<|im_end|>]\n",
        "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n1<|im_end|>\n<|im_start|>user\nTwo?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n[R2\n</think>\n\n2<|im_end|>]\n",
    ],
    "deepseek-r1": [
        "<｜begin▁of▁sentence｜><｜User｜>One?<｜Assistant｜><think>\n[R1</think>1<｜end▁of▁sentence｜>]",
        "<｜begin▁of▁sentence｜><｜User｜>One?<｜Assistant｜>1<｜end▁of▁sentence｜><｜User｜>Two?<｜Assistant｜><think>\n"
        "[R2</think>2<｜end▁of▁sentence｜>]",
    ],
    "harmony": [
        "FACTS<|start|>user<|message|>One?<|end|><|start|>assistant"
        "[<|channel|>analysis<|message|>R1<|end|><|start|>assistant<|channel|>final<|message|>1<|return|>]",
        "FACTS<|start|>user<|message|>One?<|end|><|start|>assistant<|channel|>final<|message|>1<|end|>"
        "<|start|>user<|message|>Two?<|end|><|start|>assistant"
        "[<|channel|>analysis<|message|>R2<|end|><|start|>assistant<|channel|>final<|message|>2<|return|>]",
    ],
}
CALLED = {
    "llama3": [
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
        "Today Date: 30 Nov 2026\n\n<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nAdd.<|eot_id|>"
        '<|start_header_id|>assistant<|end_header_id|>\n\n[{"name": "add", "parameters": {"a": "é"}}<|eot_id|>]'
        "<|start_header_id|>ipython<|end_header_id|>\n\n3<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
        "[It is 3.<|eot_id|>]"
    ],
    "qwen3": [
        "<|im_start|>user\nAdd.<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n[<tool_call>\n"
        '{"name": "add", "arguments": {"a": "é"}}\n</tool_call><|im_end|>]\n',
        '<|im_start|>user\nAdd.<|im_end|>\n<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {"a": "é"}}'
        "\n</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n[It is 3.<|im_end|>]\n",
    ],
    "harmony": [
        "FACTS<|start|>user<|message|>Add.<|end|><|start|>assistant"
        '[ to=functions.add<|channel|>commentary json<|message|>{"a": "é"}<|call|>]'
        '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"3"<|end|>'
        "<|start|>assistant[<|channel|>final<|message|>It is 3.<|return|>]"
    ],
}
SYSTEM, ONE, TWO = ("system", "Be brief."), ("user", "One?"), ("user", "Two?")
TALKS = [
    *((name, [SYSTEM, ONE, Said(None, "1", []), TWO, Said(None, "2", [])], texts) for name, texts in EXACT.items()),
    *((name, [ONE, Said("R1", "1", []), TWO, Said("R2", "2", [])], texts) for name, texts in REASONED.items()),
    *(
        (name, [("user", "Add."), Said(None, "", [{"a": "é"}]), ("tool", "3"), Said(None, "It is 3.", [])], texts)
        for name, texts in CALLED.items()
    ),
]


@pytest.mark.parametrize(("name", "turns", "texts"), TALKS, ids=[f"{name}-{len(turns)}" for name, turns, _ in TALKS])
def test_exact_texts(name, turns, texts):
    """The oracle is wrong as easily as the masker: here both are literal. What is supervised stands in brackets."""
    masker = families.family_masker(name)
    messages = [("assistant", turn) if isinstance(turn, Said) else turn for turn in turns]
    shown = []
    for sample in masker.samples(oracle.conversation(messages)):
        text, end = "", 0
        for before, run in generated(sample):
            text += f"{masker.tokenizer.decode(before[end:])}[{masker.tokenizer.decode(run)}]"
            end = len(before) + len(run)
        shown.append(text + masker.tokenizer.decode(sample.ids[end:]))
    facts = (
        "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
        "Knowledge cutoff: 2024-06\nCurrent date: 2026-11-30\n\nReasoning: medium\n\n# Valid channels: analysis, "
        "commentary, final. Channel must be included for every message.<|end|>"
    )
    assert shown == [text.replace("FACTS", facts) for text in texts]


def test_a_block_without_reasoning_inside_of_the_content_is_the_templates():
    """(P21)"""
    masker = families.family_masker("qwen3")
    talk = oracle.conversation([ONE, ("assistant", Said(None, "<think>\n\n</think>\n\n1", []))])
    assert masker.samples(talk) == masker.samples(oracle.conversation([ONE, ("assistant", Said(None, "1", []))]))


@pytest.mark.parametrize("form", ["field", "tagged"])
def test_reasoning_of_earlier_rounds_is_not_in_the_ids(form):
    """(P20)"""
    masker = families.family_masker("qwen3")
    reasons = ("R1", "R2") if form == "field" else ("\nR1\n", "\nR2\n")
    turns = [ONE, ("assistant", Said(reasons[0], "A1", [], form)), TWO, ("assistant", Said(reasons[1], "A2", [], form))]
    samples = masker.samples(oracle.conversation(turns))
    runs = [masker.tokenizer.decode(run) for sample in samples for _, run in generated(sample)]
    assert runs == ["<think>\nR1\n</think>\n\nA1<|im_end|>", "<think>\nR2\n</think>\n\nA2<|im_end|>"]
    assert "R1" not in masker.tokenizer.decode(samples[1].ids)


@pytest.mark.parametrize(
    ("name", "turns", "reason"),
    [
        ("gemma", [ONE, TWO, Said(None, "1", [])], "refuses: Conversation roles must alternate"),
        ("gemma", [ONE, Said("R", "1", [])], "supervised tokens differ from the answer's text"),
        ("llama3", [ONE, Said(None, "", [{"a": 1}, {"a": 2}])], "refuses: This model only supports single tool-calls"),
        ("llama3", [ONE, Said(None, "I add.", [{"a": 1}])], "chat template changes or drops a tool call"),
        ("harmony", [ONE, Said(None, "", [{"a": 1}, {"a": 2}])], "chat template changes or drops a tool call"),
        ("harmony", [ONE, Said(None, "", [{"a": 1}, {"a": 1}])], "chat template changes or drops a tool call"),
        ("harmony", [ONE, Said("R", "I add.", [{"a": 1}])], "refuses: Cannot pass both content and thinking"),
        ("harmony", [ONE, Said(None, "a<|return|>b", [])], "supervised tokens differ from the answer's text"),
        ("harmony", [ONE, Said(None, "<|channel|>final<|message|>b", [])], "refuses: You have passed a message"),
        ("deepseek-r1", [ONE, Said(None, "1", [])], "the generation prompt is not how the turn begins"),
        ("deepseek-v3", [ONE, Said(None, "", [{"a": 1}])], "chat template changes or drops a tool call"),
        ("qwen3", [ONE, Said(None, "\n\nBetween <think> and </think>.", [])], "supervised tokens differ"),
    ],
)
def test_what_a_family_cannot_say_exactly_is_skipped_with_the_reason(name, turns, reason):
    messages = [("assistant", turn) if isinstance(turn, Said) else turn for turn in turns]
    with pytest.raises(SkipRow, match=reason):
        families.family_masker(name).samples(oracle.conversation(messages))


@pytest.mark.parametrize(("name", "today"), [("llama3", "Today Date: 01 Feb 2027"), ("harmony", "date: 2027-02-01")])
def test_the_date_of_the_run_is_what_templates_get_for_today(name, today):
    tokenizer = families.family(name)
    ends = tokenizer.convert_tokens_to_ids(families.FAMILIES[name].ends)
    talk = oracle.conversation([ONE, ("assistant", Said(None, "1", []))])
    [dated] = Masker(tokenizer, ends, date="2027-02-01").samples(talk)
    assert today in tokenizer.decode(dated.ids)
    [undated] = Masker(tokenizer, ends).samples(talk)
    assert today not in tokenizer.decode(undated.ids)
    assert (
        Masker(tokenizer, ends, date="2027-02-01").prompt_ids(talk.messages[:1], None)
        == dated.ids[: dated.mask.index(True)]
    )


@pytest.mark.parametrize("name", families.FAMILIES)
def test_the_token_for_the_beginning_comes_from_the_template_alone(name):
    masker = families.family_masker(name)
    bos = masker.tokenizer.bos_token_id
    [sample] = masker.samples(
        oracle.conversation([ONE, ("assistant", Said("R" if name == "deepseek-r1" else None, "1", []))])
    )
    assert sample.ids.count(bos) == (bos is not None) and (bos is None or sample.ids[0] == bos)
