"""The driver and its journal: draws, limits, failures, and continuing after a kill at any line."""

import json
from pathlib import Path

import pytest
from responses_for_tests import MADE_BY, Failed, Scripted, assistant, lines_of, numbers, of_user, rows_of, user, write
from tokenizers_for_tests import PLAIN, STRIPS_REASONING, fast_bytes

from eagle3.conversations import TokenRow
from eagle3.responses.backends import Generated, Sampling
from eagle3.responses.journal import Answers, Journal
from eagle3.responses.writer import is_written
from eagle3.terminal import UserError

END = 257  # <|im_end|> of fast_bytes


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "answers.jsonl"


def test_several_draws_have_seeds_of_their_own_and_equal_ones_count_once(path):
    tokenizer = fast_bytes(PLAIN)
    sampling = Sampling(temperature=1.0, samples_per_prompt=3, max_tokens=50)
    backend = Scripted(tokenizer, lambda prompt, request: "odd" if request.seed % 2 else "even", shuffle=1)
    write(backend, rows_of([user("A")], [user("B")]), path, sampling)
    seeds = {request.seed for request in backend.requests}
    assert len(seeds) == 6 and all(request.temperature == 1.0 for request in backend.requests)
    expected = [
        list(dict.fromkeys("odd" if sampling.seed_of(order, draw, 0) % 2 else "even" for draw in range(3)))
        for order in range(2)
    ]
    rows = list(Answers(path).rows())
    said = [[tokenizer.decode(ids[mask.index(True) :]) for ids, mask in row.value.samples] for row in rows]
    assert said == [[f"{text}<|im_end|>" for text in texts] for texts in expected]
    with pytest.raises(UserError, match="3 answers a prompt at temperature 0 would all be the same"):
        Sampling(samples_per_prompt=3)


def test_no_more_rows_are_begun_than_the_samples_need(path):
    tokenizer = fast_bytes(PLAIN)
    many = rows_of(*[[user(f"{n:02d}")] for n in range(50)])
    backend = Scripted(tokenizer, lambda prompt, _: "One." if "03" not in prompt else "", window=8)
    drawn = []
    write(backend, (drawn.append(pair) or pair for pair in many), path, max_samples=5)
    assert len(backend.requests) == 6 == len(drawn)  # row 03 gave none
    assert lines_of(path)[-1] == {"finished": {"exhausted": False}}
    assert numbers(path) == [1, 2, 3, 5, 6]
    settings = {"sampling": Sampling(max_tokens=200), "max_seq_len": 2000}
    assert is_written(path, MADE_BY, **settings, max_samples=5)
    assert not is_written(path, MADE_BY, **settings, max_samples=6)
    write(backend, many, path, max_samples=7)
    assert len(backend.requests) == 8 and numbers(path) == [1, 2, 3, 5, 6, 7, 8]
    write(backend, many, path)
    assert len(backend.requests) == 50 and len(numbers(path)) == 49
    assert is_written(path, MADE_BY, **settings, max_samples=None) and backend.widest <= 8


def test_answers_end_where_a_row_is_not_settled(path):
    """A row that finished before one that was given up must not take its place."""
    tokenizer = fast_bytes(STRIPS_REASONING)

    class InOrder(Scripted):
        def finished(self):  # the third row first, then the first one
            wanted = min(self._in_flight, key=lambda key: [2, 0, 1].index(key[0]))
            others = {key: self._in_flight.pop(key) for key in [*self._in_flight] if key != wanted}
            done = super().finished()
            self._in_flight |= others
            return done

    rows = rows_of([user("a"), user("b"), user("c"), user("d")], [user("e")], [user("f")])
    with pytest.raises(UserError, match="is missing or empty"):
        Answers(path)
    backend = InOrder(tokenizer, lambda prompt, _: "<think>Hm.</think>One.")
    write(backend, rows, path, max_samples=4)
    assert [line["order"] for line in lines_of(path)[1:-1]] == [2, 0]
    assert lines_of(path)[-1] == {"finished": {"exhausted": False}}  # although no row was left to begin
    assert numbers(path) == [1]
    write(backend, rows, path)
    assert numbers(path) == [1, 2, 3] and len(backend.requests) == 6


# ---------------------------------------------------------------------------------- failures and resuming


def test_a_failing_row_is_tried_once_more_then_counted(path, capsys):
    tokenizer = fast_bytes(PLAIN)
    tries = {}

    def answer(prompt, _):
        tries[prompt] = tries.get(prompt, 0) + 1
        bad = "bad" in prompt or ("shaky" in prompt and tries[prompt] == 1)
        return Failed("HTTP 400: no") if bad else "One."

    rows = rows_of([user("bad")], [user("shaky")], [user("good")])
    tally = write(Scripted(tokenizer, answer), rows, path)
    assert tries[of_user("bad")] == tries[of_user("shaky")] == 2
    assert tally.failed == {"HTTP 400: no": 1} and tally.lines()["failed, HTTP 400: no"] == "1"
    assert "warning: test:1 failed twice: HTTP 400: no" in capsys.readouterr().err
    failed = next(line for line in lines_of(path) if "failed" in line)
    assert failed == {"order": 0, "draw": 0, "source": "test", "row": 1, "failed": "HTTP 400: no"}
    assert numbers(path) == [2, 3]
    again = Scripted(tokenizer, answer)
    assert write(again, rows, path).failed == {"HTTP 400: no": 1} and not again.requests  # settled by a whole run


def test_too_many_failures_stop_the_run_and_are_tried_again(path):
    tokenizer = fast_bytes(PLAIN)
    rows = rows_of(*[[user(f"{n:02d}")] for n in range(60)])
    down = Scripted(tokenizer, lambda prompt, _: "One." if "user\n0" in prompt else Failed("refused"), window=1)
    with pytest.raises(UserError) as error:
        write(down, rows, path)
    assert str(error.value) == (
        "10 of 20 rows failed (refused: 10), more than 20%; mend the cause, then the same command tries them again"
    )
    with pytest.raises(UserError, match="is not finished; run the same command"):
        Answers(path)
    up = Scripted(tokenizer, lambda prompt, _: "One.")
    assert write(up, rows, path).failed == {} and len(up.requests) == 50
    assert numbers(path) == list(range(1, 61))


def test_an_answer_without_its_end_token_is_a_failure(path):
    backend = Scripted(fast_bytes(PLAIN), lambda prompt, _: Generated([65, 66], "stop"))
    assert write(backend, rows_of([user("A")]), path).failed == {"answer without its end-of-turn token": 1}


def test_every_end_id_is_asked_for(path):
    backend = Scripted(fast_bytes(PLAIN), lambda prompt, _: [65, 66, 10])
    write(backend, rows_of([user("A")]), path, end_ids=[END, 10])
    assert backend.requests[0].stop_ids == (10, END)
    assert lines_of(path)[1]["messages"][-1] == assistant("AB")


def content(answers: Answers) -> list:
    return [(row.number, row.value.samples) for row in answers.rows() if isinstance(row.value, TokenRow)]


def test_a_run_killed_anywhere_continues_to_the_same_answers(path):
    tokenizer = fast_bytes(PLAIN)
    rows = rows_of(*[[user(f"{n}"), user("more")][: 1 + n % 2] for n in range(6)])

    def answer(prompt, request):
        return f"{len(prompt)} {request.seed}"

    sampling = Sampling(temperature=0.7, max_tokens=90, samples_per_prompt=2, seed=5)
    whole = path.with_name("whole.jsonl")
    everything = Scripted(tokenizer, answer)
    tally = write(everything, rows, whole, sampling)
    for most in range(len(everything.requests)):
        path.unlink(missing_ok=True)
        with pytest.raises(KeyboardInterrupt):
            write(Scripted(tokenizer, answer, shuffle=most, most=most), rows, path, sampling)
        done = lines_of(path)[1:]
        size = path.stat().st_size
        with open(path, "ab") as file:  # the line that the kill tore
            file.write(b'{"order": 5, "draw": 0, "samples": [{"input_ids": [1, 2')
        rest = Scripted(tokenizer, answer, shuffle=most + 1)
        resumed = write(rest, rows, path, sampling)
        assert path.read_bytes()[:size].count(b"\n") == len(done) + 1
        assert content(Answers(path)) == content(Answers(whole))
        assert len(rest.requests) == len(everything.requests) - sum(1 + line["order"] % 2 for line in done)
        assert (resumed.conversations, resumed.turns, resumed.tokens) == (12, tally.turns, tally.tokens)


def test_a_torn_first_line_is_begun_anew(path):
    path.write_bytes(b'{"finger')
    write(Scripted(fast_bytes(PLAIN), lambda prompt, _: "One."), rows_of([user("A")]), path)
    assert numbers(path) == [1]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"sampling": Sampling(temperature=0.5, max_tokens=200)}, "temperature is 0.0, this run has 0.5"),
        ({"fingerprint": MADE_BY | {"target": "other"}}, "target is 't', this run has 'other'"),
        ({"max_seq_len": 100}, "max_seq_len is 2000, this run has 100"),
    ],
)
def test_another_run_is_refused_by_name(change, line, path):
    backend = Scripted(fast_bytes(PLAIN), lambda prompt, _: "One.")
    write(backend, rows_of([user("A")]), path)
    before = path.read_bytes()
    with pytest.raises(UserError, match=f"answers.jsonl: {line}; give another --output-dir, or delete this file"):
        write(backend, rows_of([user("A")]), path, **change)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("number", "text", "message"),
    [
        (2, "{nonsense", "line 2 is damaged (Expecting property name"),
        (2, "[1]", "line 2 is damaged (a list, expected an object); delete that line, then the same command writes"),
        (1, '{"order": 0}', "line 1 does not say what made the file; delete the file"),
    ],
)
def test_damage_is_named_by_line(number, text, message, path):
    backend = Scripted(fast_bytes(PLAIN), lambda prompt, _: "One.")
    write(backend, rows_of([user("A")], [user("B")]), path)
    lines = path.read_text().splitlines()
    lines[number - 1] = text
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError) as error:
        write(backend, rows_of([user("A")], [user("B")]), path)
    assert message in str(error.value)


def test_the_end_of_the_last_whole_line_is_found_from_the_end(path, monkeypatch):
    long = json.dumps({"order": 0, "draw": 0, "source": "s" * (3 << 20), "row": 1, "failed": "x"})
    path.write_text(json.dumps({"fingerprint": MADE_BY}) + "\n" + long + "\n" + long[: 2 << 20])
    with Journal(path).appending(MADE_BY) as index:
        index.add(order=1)
    assert [record.get("order") for _, record in Journal(path).read()] == [None, 0, 1]


def test_identity_tells_what_made_the_answers(path):
    backend = Scripted(fast_bytes(PLAIN), lambda prompt, _: "One.")
    write(backend, rows_of([user("A")]), path)
    other = path.with_name("other.jsonl")
    write(backend, rows_of([user("A")]), other, Sampling(max_tokens=199))
    assert Answers(path).identity() != Answers(other).identity()
    assert Answers(path).identity().startswith("on-policy answers ")
