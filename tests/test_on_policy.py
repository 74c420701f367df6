"""Stage 01 with answers by the target: prompts of any data, or its own, become samples of the ids it generated."""

import json
from pathlib import Path

import pytest
from prepare_for_tests import manifest, prepare_here
from responses_for_tests import Failed, Scripted

from eagle3 import artifacts
from eagle3.artifacts import Index, load_tensors, sample_path
from eagle3.exclusion import load_exclusion
from eagle3.prepare import on_policy
from eagle3.prepare.on_policy import EngineChoice, answered
from eagle3.prepare.stage import Options, prepare
from eagle3.responses.backends import Sampling
from eagle3.sources import open_datasets
from eagle3.target import load_tokenizer, open_target
from eagle3.terminal import UserError

CHOICE = EngineChoice(None, 4, "float32", 1, 0.9)


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    return load_tokenizer(open_target(str(smollm2)), trust_remote_code=False)


@pytest.fixture
def run(smollm2, tokenizer, tmp_path, monkeypatch):
    """Answer with a scripted backend and prepare; returns the totals and the requests that were made."""

    def run(dataset, answer, out="out", sampling=None, **options):
        backend = Scripted(tokenizer, answer)
        monkeypatch.setattr(on_policy, "open_backend", lambda *_, **__: backend)
        target, directory = open_target(str(smollm2)), tmp_path / out
        options = Options(**{"max_seq_len": 512} | options)
        source = dataset and open_datasets([str(dataset)])
        with artifacts.directory_lock(directory):
            rows, _ = answered(
                target, tokenizer, source, directory, options, sampling or Sampling(max_tokens=50), CHOICE
            )
            options = Options(max_samples=options.max_samples, max_seq_len=512)
            return prepare(target, tokenizer, rows, directory, options), backend.requests

    return run


def texts(tokenizer, directory: Path) -> list[tuple[str, str]]:
    """Whole text and supervised text of each sample."""
    samples = [load_tensors(sample_path(directory, index)) for index in Index(directory).samples()]
    return [(tokenizer.decode(s["input_ids"]), tokenizer.decode(s["input_ids"][s["loss_mask"]])) for s in samples]


def test_recorded_answers_are_replaced_and_unusable_rows_named(run, tokenizer, tmp_path):
    rows = [
        {"prompt": "One?", "response": "recorded"},
        {"messages": "none"},
        {"turns": ["Two?", "And more?"]},
        {"prompt": "A test question."},
        {"prompt": "Fails?"},
        {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]},
        {"prompt": "Four?", "source": "blend"},
    ]
    path, tests = tmp_path / "rows.jsonl", tmp_path / "tests.txt"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tests.write_text("a test question\n")

    def answer(prompt, request):
        return Failed("HTTP 400: no") if "Fails" in prompt else f"I say {prompt.count('assistant')}."

    totals, _ = run(path, answer, exclusion=load_exclusion([tests]))
    whole = texts(tokenizer, tmp_path / "out")
    assert [said for _, said in whole] == [
        "I say 2.<|im_end|>",  # the system message has the word once
        "I say 2.<|im_end|>I say 3.<|im_end|>",
        "I say 2.<|im_end|>",
    ]
    assert "recorded" not in whole[0][0] and "And more?" in whole[1][0]
    skipped = [json.loads(line) for line in (tmp_path / "out" / "skipped.jsonl").read_text().splitlines()]
    assert [(line["line"], line["reason"]) for line in skipped if line["line"] != 6] == [
        (2, "messages is not a list"),
        (4, "a prompt of --exclude"),
        (5, "not answered: HTTP 400: no"),
    ]
    assert "token" in next(line["reason"] for line in skipped if line["line"] == 6)
    records = Index(tmp_path / "out").samples().values()
    assert [(r["row"], r["dataset"]) for r in records] == [(1, "rows.jsonl"), (3, "rows.jsonl"), (7, "blend")]
    assert totals.samples == 3 and manifest(tmp_path / "out")["complete"]


def test_more_samples_later_and_nothing_twice(run, tokenizer, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Say {n}"}) + "\n" for n in range(9)))
    totals, requests = run(path, lambda prompt, _: "Yes.", max_samples=4)
    assert totals.samples == 4 == len(requests)
    assert run(path, lambda prompt, _: "Yes.", max_samples=4) == (None, [])
    totals, requests = run(path, lambda prompt, _: "No.", max_samples=6)
    assert totals.samples == 6 and len(requests) == 2
    totals, requests = run(path, lambda prompt, _: "No.")
    assert totals.samples == 9 and len(requests) == 3
    assert [said for _, said in texts(tokenizer, tmp_path / "out")] == ["Yes.<|im_end|>"] * 4 + ["No.<|im_end|>"] * 5
    with pytest.raises(UserError, match=r"answers\.jsonl: max_tokens is 50, this run has 60"):
        run(path, lambda prompt, _: "", sampling=Sampling(max_tokens=60))


def test_several_answers_a_prompt_are_samples_of_one_conversation(run, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Say"}\n{"prompt": "Tell"}\n')
    sampling = Sampling(temperature=1.0, max_tokens=50, samples_per_prompt=3)
    totals, requests = run(path, lambda prompt, request: f"It is {request.seed}.", sampling=sampling)
    records = list(Index(tmp_path / "out").samples().values())
    assert totals.samples == len(requests) == 6 and [r["row"] for r in records] == [1, 1, 1, 2, 2, 2]
    assert len({record["conversation"] for record in records}) == 2


def test_the_target_writes_the_prompts_too(run, tokenizer, tmp_path):
    def answer(prompt, request):
        if prompt.endswith("<|im_start|>user\n"):
            return f"What is number {request.seed}?"
        return "A number."

    sampling = Sampling(temperature=0.5, max_tokens=50)
    totals, requests = run(None, answer, sampling=sampling, max_samples=5)
    assert totals.samples == 5 and len(requests) >= 10
    assert [r.temperature for r in requests][:5] == [1.0] * 5 and requests[-1].temperature == 0.5
    for whole, said in texts(tokenizer, tmp_path / "out"):
        assert "user\nWhat is number" in whole and said == "A number.<|im_end|>"
    assert run(None, answer, sampling=sampling, max_samples=5) == (None, [])
    assert run(None, answer, sampling=sampling, max_samples=7)[0].samples == 7


def test_what_would_be_refused_in_the_end_is_refused_before_the_work(run, smollm2, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "One?", "response": "recorded"}\n')
    prepare_here(smollm2, path, tmp_path / "recorded")
    with pytest.raises(UserError, match=r"recorded holds samples of recorded answers; give another --output-dir"):
        run(path, lambda *_: pytest.fail("the target answered"), "recorded")
    run(path, lambda *_: "Yes.")
    with pytest.raises(UserError, match="overflow is 'truncate', this run has 'drop'"):
        run(path, lambda *_: pytest.fail("the target answered"), overflow="drop")


def test_prompts_of_another_seed_are_refused(run, tmp_path):
    def killed(prompt, request):
        if not prompt.endswith("<|im_start|>user\n"):
            raise KeyboardInterrupt  # all prompts are written, no answer is
        return f"What is number {request.seed}?"

    with pytest.raises(KeyboardInterrupt):
        run(None, killed, max_samples=3)
    (tmp_path / "out" / "answers.jsonl").unlink()
    with pytest.raises(UserError, match=r"prompts\.jsonl: seed is 0, this run has 1"):
        run(None, killed, sampling=Sampling(max_tokens=50, seed=1), max_samples=3)


@pytest.mark.slow
def test_the_script_answers_with_a_real_engine(run_script, tiny_target, tmp_path):
    """A random target hardly ever ends: its answers are cut, and kept as far as they go."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Say {n}"}) + "\n" for n in range(4)))
    out = tmp_path / "out"
    command = ["01_prepare_dataset.py", "--model-path", tiny_target, "--output-dir", out, "--dataset", prompts]
    command += ["--responses", "target", "--dtype", "float32", "--max-new-tokens", 12, "--max-seq-len", 128]
    first = run_script(*command)
    lines = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]
    answers = {line["row"]: line for line in lines if "order" in line}
    for record in Index(out).samples().values():
        sample, [stored] = load_tensors(sample_path(out, record["index"])), answers[record["row"]]["samples"]
        assert sample["input_ids"].tolist() == stored["input_ids"] and int(sample["loss_mask"].sum()) == 12
    assert len(Index(out).samples()) == 4 and "4 turns of 4 conversations, 48 tokens" in first.stdout
    assert "recorded answers" not in first.stdout and not list(out.rglob("*.tmp"))
    again = run_script(*command)
    assert "nothing to do" in again.stdout and "loading" not in again.stdout
