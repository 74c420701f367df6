"""On-policy answers without an engine: turns, samples, the journal, and what a server's faults do."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from responses_for_tests import MADE_BY, Scripted, assistant, encode, lines_of, numbers, of_user, rows_of, user, write
from tokenizers_for_tests import (
    OPENS_REASONING,
    OPENS_WITH_NEWLINE,
    PLAIN,
    REJECTS_SYSTEM,
    STRIPS_CONTENT,
    STRIPS_REASONING,
    fast_bytes,
)

from eagle3.responses.backends import Sampling
from eagle3.responses.journal import Answers
from eagle3.responses.turns import message_of, plan
from eagle3.target import load_tokenizer, open_target

END = 257  # <|im_end|> of fast_bytes
CALLED = [{"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
RESULT = {"role": "tool", "content": "3", "tool_call_id": "1"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "answers.jsonl"


def decoded(tokenizer, line: dict) -> list[list[str]]:
    """For each sample the texts of its parts, unsupervised and supervised in turn."""
    samples = []
    for sample in line["samples"]:
        bounds = [0, *(place for run in sample["runs"] for place in run)]
        if bounds[-1] < len(sample["input_ids"]):
            bounds.append(len(sample["input_ids"]))
        parts = [sample["input_ids"][a:b] for a, b in pairwise(bounds)]
        samples.append([tokenizer.decode(part) for part in parts])
    return samples


# ------------------------------------------------------------------------------------------------ turns


def test_turns_are_answered_in_order_and_share_a_sample(path):
    tokenizer = fast_bytes(PLAIN)
    backend = Scripted(tokenizer, lambda prompt, _: {"A": "One.", "B": "Two."}[prompt.split("user\n")[-1][0]])
    system = {"role": "system", "content": "Be brief."}
    tally = write(backend, rows_of([system, user("A"), user("B")], origin="blend"), path)
    first = f"<|im_start|>system\nBe brief.<|im_end|>\n{of_user('A')}"
    assert backend.prompts == [first, f"{first}One.<|im_end|>\n{of_user('B')}"]
    made_by, line, finished = lines_of(path)
    assert made_by["fingerprint"] == MADE_BY | {
        "max_seq_len": 2000,
        "temperature": 0.0,
        "top_p": 1.0,
        "max_tokens": 200,
        "samples_per_prompt": 1,
        "seed": 0,
    }
    assert finished == {"finished": {"exhausted": True}}
    assert decoded(tokenizer, line) == [[first, "One.<|im_end|>", f"\n{of_user('B')}", "Two.<|im_end|>"]]
    assert line["messages"] == [system, user("A"), assistant("One."), user("B"), assistant("Two.")]
    assert {key: line[key] for key in ("source", "row", "order", "draw", "origin", "stopped")} == {
        "source": "test",
        "row": 1,
        "order": 0,
        "draw": 0,
        "origin": "blend",
        "stopped": None,
    }
    assert (tally.conversations, tally.samples, tally.turns, tally.tokens) == (1, 1, 2, 10)
    [row] = Answers(path).rows()
    [(ids, mask)] = row.value.samples
    assert ids == line["samples"][0]["input_ids"] and len(mask) == len(ids)
    [[one, two]] = [sample["runs"] for sample in line["samples"]]
    assert [place for place, value in enumerate(mask) if value] == [*range(*one), *range(*two)]
    assert (row.source, row.number, row.value.origin) == ("test", 1, "blend")


def test_recorded_answers_are_replaced_and_a_last_user_turn_is_answered(path):
    tokenizer = fast_bytes(PLAIN)
    backend = Scripted(tokenizer, lambda prompt, _: "New.")
    write(backend, rows_of([user("A"), user("again"), assistant("Old."), user("B")]), path)
    [line] = lines_of(path)[1:-1]
    assert [message["content"] for message in line["messages"]] == ["A", "again", "New.", "B", "New."]
    assert "Old" not in "".join(backend.prompts)


def test_ids_are_kept_as_generated_and_a_history_that_tokenises_otherwise_begins_a_sample(smollm2, path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    odd = [encode(tokenizer, letter)[0] for letter in "Hello"]  # which the tokenizer would write as one token
    assert encode(tokenizer, "Hello") != odd
    end = tokenizer.eos_token_id
    backend = Scripted(tokenizer, lambda prompt, _: [*odd, end] if prompt.count("<|im_start|>user") == 1 else "Bye")
    write(backend, rows_of([user("A"), user("B")]), path)
    [line] = lines_of(path)[1:-1]
    first, second = line["samples"]
    assert first["input_ids"][slice(*first["runs"][0])] == [*odd, end] and len(first["runs"]) == 1
    assert second["input_ids"][slice(*second["runs"][0])] == [*encode(tokenizer, "Bye"), end]
    assert "Hello" in tokenizer.decode(second["input_ids"][: second["runs"][0][0]])


def test_reasoning_that_leaves_the_history_begins_a_sample_each_turn(path):
    tokenizer = fast_bytes(OPENS_REASONING)
    backend = Scripted(tokenizer, lambda prompt, _: "Hm.</think>One." if "B" not in prompt else "So.</think>Two.")
    write(backend, rows_of([user("A"), user("B")]), path)
    [line] = lines_of(path)[1:-1]
    prompt = "<|im_start|>user\nA<|im_end|><|im_start|>assistant\n<think>"
    after = f"{prompt}</think>One.<|im_end|><|im_start|>user\nB<|im_end|><|im_start|>assistant\n<think>"
    assert decoded(tokenizer, line) == [[prompt, "Hm.</think>One.<|im_end|>"], [after, "So.</think>Two.<|im_end|>"]]
    assert line["messages"][1] == assistant("One.", reasoning_content="Hm.")


@pytest.mark.parametrize("template", [STRIPS_REASONING, OPENS_WITH_NEWLINE])
def test_the_next_prompt_has_the_answer_without_its_reasoning(template, path):
    said = "Hm.</think>\n\nOne." if template == OPENS_WITH_NEWLINE else "<think>Hm.</think>\n\nOne."
    backend = Scripted(fast_bytes(template), lambda prompt, _: said)
    write(backend, rows_of([user("A"), user("B")]), path)
    [line] = lines_of(path)[1:-1]
    assert line["stopped"] is None and len(line["samples"]) == 2
    assert "One.<|im_end|>" in backend.prompts[1] and "Hm." not in backend.prompts[1]


def test_a_cut_answer_is_the_last_turn(path):
    tokenizer = fast_bytes(PLAIN)
    backend = Scripted(tokenizer, lambda prompt, _: "x" * 50)
    tally = write(backend, rows_of([user("A"), user("B")]), path, Sampling(max_tokens=20))
    [line] = lines_of(path)[1:-1]
    assert decoded(tokenizer, line) == [[of_user("A"), "x" * 20]] and line["stopped"] == "cut by length"
    assert line["messages"] == [user("A"), assistant("x" * 20)]
    assert tally.stopped == {"cut by length": 1} and "ended early, cut by length" in tally.lines()
    assert len(backend.requests) == 1


def test_no_sample_is_longer_than_asked_for(path):
    tokenizer = fast_bytes(PLAIN)
    length = len(encode(tokenizer, of_user("A")))
    backend = Scripted(tokenizer, lambda prompt, _: "x" * 10)
    rows = rows_of([user("A")], [user("A" * 11)], [user("A" * 9)])
    write(backend, rows, path, max_seq_len=length + 10)
    first, long, tight = sorted(lines_of(path)[1:-1], key=lambda line: line["order"])
    assert len(first["samples"][0]["input_ids"]) == length + 10 and first["stopped"] == "cut by length"
    assert long["samples"] == [] and long["stopped"] == f"no room for an answer within {length + 10} tokens"
    assert [len(sample["input_ids"]) for sample in tight["samples"]] == [length + 10]
    assert [request.max_tokens for request in backend.requests if len(request.prompt) == length] == [10]
    assert numbers(path) == [1, 3]
    backend = Scripted(tokenizer, lambda prompt, _: "x", max_model_len=length)  # a server that takes less
    write(backend, rows, path.with_name("other"), max_seq_len=length + 10)
    assert not backend.requests


def test_turns_with_nothing_between_them_get_a_sample_each(path):
    tokenizer = fast_bytes(
        "{% for m in messages %}{{ m['content'] }}{% if m['role'] != 'user' %}<|im_end|>{% endif %}{% endfor %}"
    )
    backend = Scripted(tokenizer, lambda prompt, _: "One.")
    write(backend, rows_of([user("A"), assistant("x"), assistant("y")]), path)
    [line] = lines_of(path)[1:-1]
    assert decoded(tokenizer, line) == [["A", "One.<|im_end|>"], ["AOne.<|im_end|>", "One.<|im_end|>"]]


def test_tool_rows_keep_their_calls_and_results(path):
    tokenizer = fast_bytes(
        PLAIN.replace("<|im_end|>\n{% endfor %}", "{% if m.tool_calls %}<call>{% endif %}<|im_end|>\n{% endfor %}")
    )
    backend = Scripted(tokenizer, lambda prompt, _: "My own call" if "tool" not in prompt else "It is 3.")
    call = assistant("", tool_calls=CALLED)
    write(backend, rows_of([user("A"), call, RESULT, assistant("Old.")], tools=TOOLS), path)
    [line] = lines_of(path)[1:-1]
    before, after = decoded(tokenizer, line)
    assert before == [of_user("A"), "My own call<|im_end|>"]
    assert after[1] == "It is 3.<|im_end|>"
    assert "assistant\n<call><|im_end|>\n<|im_start|>tool\n3<|im_end|>" in after[0] and "My own" not in after[0]
    assert line["messages"] == [user("A"), call, RESULT, assistant("It is 3.")] and line["tools"] == TOOLS
    assert line["stopped"] is None


@pytest.mark.parametrize(
    "call",
    [
        '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>',
        "Let me see.[TOOL_CALLS]add{}",
        '{"name": "add", "parameters": {"a": 1}}',
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0",
        "<｜tool▁calls▁begin｜>",
    ],
)
def test_a_call_that_the_row_does_not_have_is_the_last_turn(call, path):
    backend = Scripted(fast_bytes(PLAIN), lambda prompt, _: call)
    write(backend, rows_of([user("A"), user("B")], tools=TOOLS), path)
    [line] = lines_of(path)[1:-1]
    assert line["stopped"] == "answer calls a tool that the row does not" and len(line["samples"]) == 1
    assert line["messages"][-1] == assistant(call)


@pytest.mark.parametrize(
    ("template", "said", "reason", "samples"),
    [
        (PLAIN, "", "empty answer", 0),
        (PLAIN, " \n", "empty answer", 1),
        (OPENS_REASONING, "It never ends", "reasoning without an end", 1),
        (PLAIN, "a<|im_start|>b", "special token within an answer", 1),
        (STRIPS_CONTENT.replace("| trim", "| upper"), "low", "chat template changes an answer in the history", 1),
    ],
)
def test_what_a_server_could_not_continue_ends_the_row_after_that_turn(template, said, reason, samples, path):
    backend = Scripted(fast_bytes(template), lambda prompt, _: said)
    tally = write(backend, rows_of([user("A"), user("B")]), path)
    [line] = lines_of(path)[1:-1]
    assert line["stopped"] == reason and len(line["samples"]) == samples and len(backend.requests) == 1
    assert tally.stopped == {reason: 1}


def test_white_space_that_the_template_strips_does_not_end_a_row(path):
    backend = Scripted(fast_bytes(STRIPS_CONTENT), lambda prompt, _: " said ")
    write(backend, rows_of([user("A"), user("B")]), path)
    [line] = lines_of(path)[1:-1]
    assert line["stopped"] is None and len(line["samples"]) == 2


def test_a_row_that_the_template_refuses_has_no_samples(path):
    backend = Scripted(fast_bytes(REJECTS_SYSTEM), lambda prompt, _: "One.")
    rows = rows_of([{"role": "system", "content": "S"}, user("A")], [user("A")])
    write(backend, rows, path)
    refused, line = sorted(lines_of(path)[1:-1], key=lambda line: line["order"])
    assert refused["samples"] == [] and refused["stopped"] == "chat template refuses: no system turn"
    assert numbers(path) == [2] and line["samples"]


def test_kimis_reasoning_is_a_field_and_leaves_later_prompts(tiny_kimi, path):
    target = open_target(str(tiny_kimi))
    tokenizer = load_tokenizer(target, trust_remote_code=True)
    said = {1: "Think.</think>Four.", 2: "So.</think> Eight."}
    # <|im_end|> ends its turns, which is not the tokenizer's end token
    backend = Scripted(tokenizer, lambda prompt, _: encode(tokenizer, f"{said[prompt.count('<|im_user|>')]}<|im_end|>"))
    write(backend, rows_of([user("2 plus 2?"), user("Doubled?")]), path, end_ids=target.end_ids)
    [line] = lines_of(path)[1:-1]
    assert line["messages"][1::2] == [
        assistant("Four.", reasoning_content="Think."),
        assistant(" Eight.", reasoning_content="So."),
    ]
    assert "Four." in backend.prompts[1] and "Think." not in backend.prompts[1]
    assert backend.prompts[1].endswith("<think>") and backend.requests[0].stop_ids == target.end_ids
    first, second = decoded(tokenizer, line)
    assert first == [backend.prompts[0], "Think.</think>Four.<|im_end|>"]
    assert second == [backend.prompts[1], "So.</think> Eight.<|im_end|>"]


def test_harmony_channels_become_reasoning_and_content():
    text = (
        "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>commentary<|message|>First.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Done."
    )
    assert message_of(text, False) == (assistant("First.Done.", reasoning_content="Think."), None)
    assert message_of("<|channel|>final<|message|>Done.", False) == (assistant("Done."), None)
    assert message_of("<|channel|>analysis<|message|>Think.", False)[1] == "reasoning without an end"
    thought = "<|channel|>analysis<|message|>T<|end|><|start|>assistant"
    for call in (
        f"{thought}<|channel|>commentary to=functions.add <|constrain|>json<|message|>{{}}",
        f"{thought} to=functions.add<|channel|>commentary json<|message|>{{}}",
    ):
        assert message_of(call, False)[1] == "answer calls a tool that the row does not"


def test_where_the_target_answers():
    system, call = {"role": "system", "content": "s"}, assistant("", tool_calls=CALLED)
    assert plan([system, user("a"), user("b")]) == [system, user("a"), None, user("b"), None]
    assert plan([user("a"), assistant("x")]) == [user("a"), None]
    assert plan([user("a"), call, RESULT]) == [user("a"), call, RESULT, None]
    assert plan([user("a"), user("b"), assistant("x"), user("c")]) == [user("a"), user("b"), None, user("c"), None]


texts = st.text(alphabet="ab \n<é", min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_samples_are_exactly_prompts_and_answers(tmp_path_factory, data):
    """Whatever is said: each supervised run is an answer's ids after its prompt's, and all answers are there."""
    tokenizer = fast_bytes(data.draw(st.sampled_from([PLAIN, STRIPS_CONTENT, STRIPS_REASONING, OPENS_REASONING])))
    rows = data.draw(st.lists(st.lists(texts.map(user), min_size=1, max_size=3), min_size=1, max_size=4))
    said = data.draw(st.lists(texts, min_size=12, max_size=12))
    given_ids = {}

    def answer(prompt, request):
        ids = [*encode(tokenizer, said[len(given_ids) % 12]), END]
        given_ids[tuple(request.prompt), len(given_ids)] = ids
        return ids

    path = tmp_path_factory.mktemp("random") / "answers.jsonl"
    write(Scripted(tokenizer, answer, shuffle=data.draw(st.integers(0, 9))), rows_of(*rows), path)
    found = []
    for row in Answers(path).rows():
        for ids, mask in row.value.samples:
            assert len(ids) == len(mask) and any(mask)
            starts = [n for n in range(1, len(ids)) if mask[n] and not mask[n - 1]]
            for start in starts:
                end = next((n for n in range(start, len(ids)) if not mask[n]), len(ids))
                found.append((tuple(ids[:start]), ids[start:end]))
    assert sorted(found) == sorted((prompt, ids) for (prompt, _), ids in given_ids.items())
