"""Prompts that the target writes: what follows its user header, what the filter drops, continuing after a kill."""

from collections import Counter
from pathlib import Path

import pytest
from responses_for_tests import MADE_BY, Failed, Scripted, encode, lines_of, user
from tokenizers_for_tests import PLAIN, fast_bytes

from eagle3.responses import self_prompts
from eagle3.responses.backends import Generated, Sampling
from eagle3.responses.self_prompts import SelfPrompts, write_prompts
from eagle3.terminal import UserError

END = 257  # <|im_end|> of fast_bytes


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "prompts.jsonl"


WRITING = Sampling(temperature=1.0, max_tokens=60, seed=3)


def write_self(backend: Scripted, count: int, path: Path, sampling: Sampling = WRITING, **changes) -> Counter:
    settings = {"fingerprint": MADE_BY, "max_seq_len": 200, "end_ids": [END]} | changes
    return write_prompts(backend, backend.tokenizer, count, path, sampling, **settings)


SAID = {
    0: " What is the sea? ",
    1: "what is the SEA",  # a duplicate after normalising
    2: "x" * 100,
    3: "Hi there",
    4: " ",
    5: "a<|im_start|>bcdefghi",
    6: "什么是熵?",
    7: "Name two rivers.",
}


def by_number(sampling: Sampling):
    """Answers that depend on the request's number, found by its seed."""
    numbers = {sampling.seed_of(number): number for number in range(10_000)}
    return lambda prompt, request: SAID.get(numbers[request.seed], f"Question {numbers[request.seed]}?")


def test_prompts_are_what_follows_the_user_header_and_passes_the_filter(path):
    tokenizer = fast_bytes(PLAIN)
    backend = Scripted(tokenizer, by_number(WRITING), shuffle=4, window=16)
    outcomes = write_self(backend, 4, path)
    assert set(backend.prompts) == {"<|im_start|>user\n"} and backend.requests[0].stop_ids == (END,)
    assert [request.max_tokens for request in backend.requests[:2]] == [60, 60]
    assert [line.get("dropped") or line["messages"][0]["content"] for line in lines_of(path)[1:]] == [
        "What is the sea?",
        "duplicate",
        "unfinished",
        "too short",
        "empty",
        "markers of the template",
        "什么是熵?",
        "Name two rivers.",
        "Question 8?",
    ]
    assert outcomes == {"prompts": 4} | dict.fromkeys(
        ("duplicate", "unfinished", "too short", "empty", "markers of the template"), 1
    )
    rows = list(SelfPrompts(path).rows())
    assert [row.number for row in rows] == [0, 6, 7, 8] and rows[0].value == {"messages": [user("What is the sea?")]}
    assert SelfPrompts(path).total() == 4 and SelfPrompts(path).identity().startswith("self ")


def test_prompts_continue_after_a_kill_with_the_same_ones(path):
    tokenizer = fast_bytes(PLAIN)
    whole = path.with_name("whole.jsonl")
    write_self(Scripted(tokenizer, by_number(WRITING), window=1), 20, whole)
    for most in range(0, 25, 4):
        path.unlink(missing_ok=True)
        with pytest.raises(KeyboardInterrupt):
            write_self(Scripted(tokenizer, by_number(WRITING), shuffle=most, most=most, window=8), 20, path)
        with open(path, "ab") as file:
            file.write(b'{"number": 9')
        write_self(Scripted(tokenizer, by_number(WRITING), shuffle=1, window=8), 20, path)
        assert lines_of(path) == lines_of(whole)
    backend = Scripted(tokenizer, by_number(WRITING))
    write_self(backend, 20, path)
    assert not backend.requests
    write_self(backend, 22, path)
    assert len(backend.requests) <= 3 and SelfPrompts(path).total() == 22  # one more by the share that passed so far
    with pytest.raises(UserError, match="seed is 3, this run has 4"):
        write_self(backend, 20, path, Sampling(temperature=1.0, max_tokens=60, seed=4))


def test_a_target_that_writes_no_prompts_is_given_up(path):
    backend = Scripted(fast_bytes(PLAIN), lambda prompt, _: "Same question?", window=50)
    with pytest.raises(UserError) as error:
        write_self(backend, 100, path)
    assert str(error.value) == (
        "--dataset self: 1 of 300 samples are prompts (duplicate: 299, prompts: 1); this target cannot write prompts "
        "this way, give a dataset"
    )


def test_a_request_for_a_prompt_that_fails_twice_ends_the_run(path):
    tries = []

    def answer(prompt, request):
        tries.append(request.seed)
        return Failed("HTTP 500: down") if request.seed == WRITING.seed_of(2) else f"Question {request.seed}?"

    with pytest.raises(UserError, match="--dataset self: HTTP 500: down; mend the cause"):
        write_self(Scripted(fast_bytes(PLAIN), answer, window=1), 5, path)
    assert tries.count(WRITING.seed_of(2)) == 2 and len(lines_of(path)) == 3


@pytest.mark.parametrize(
    ("template", "prefix", "stop_id", "stop_text"),
    [
        (PLAIN, "<|im_start|>user\n", END, ""),
        ("{% for m in messages %}[INST] {{ m['content'] }} [/INST]{% endfor %}", "[INST] ", None, "[/INST]"),
        ("{% for m in messages %}Q: {{ m['content'] }}\nA:{% endfor %}", "Q: ", None, "A:"),
        ("You help.<|im_end|>{% for m in messages %}<|im_start|>{{ m['content'] }}{% endfor %}", None, None, ""),
    ],
)
def test_the_user_turn_of_a_template(template, prefix, stop_id, stop_text):
    tokenizer = fast_bytes(template)
    turn = self_prompts.user_turn(tokenizer)
    assert tokenizer.decode(turn.prefix) == (prefix or "You help.<|im_end|><|im_start|>")
    assert (turn.stop_id, turn.stop_text) == (stop_id, stop_text)


def test_a_user_turn_that_ends_in_text_is_cut_there(path):
    tokenizer = fast_bytes("{% for m in messages %}[INST] {{ m['content'] }} [/INST]{% endfor %}")
    backend = Scripted(
        tokenizer, lambda prompt, request: Generated(encode(tokenizer, f"Ask {request.seed}? [/INST]"), "stop")
    )
    write_self(backend, 1, path)
    assert backend.requests[0].stop_text == "[/INST]"
    assert lines_of(path)[1]["messages"] == [user(f"Ask {WRITING.seed_of(0)}?")]


def test_a_template_without_the_users_text_is_refused():
    with pytest.raises(UserError, match="--dataset self: the chat template does not repeat a user's text"):
        self_prompts.user_turn(fast_bytes("Hello"))
