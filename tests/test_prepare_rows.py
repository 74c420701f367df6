"""Stage 01's rows: bad ones named, duplicates and excluded ones left out, long ones fitted, masks confirmed."""

import datetime
import json
import sys

import pytest
from prepare_for_tests import content, manifest, prepare_here, write_chats

from eagle3.artifacts import Index, load_tensors, sample_path
from eagle3.exclusion import load_exclusion
from eagle3.masking import Masker, Sample
from eagle3.prepare import stage
from eagle3.prepare.show import show
from eagle3.target import load_tokenizer, open_target
from eagle3.terminal import UserError
from eagle3.training.packing import hold_out
from tests import tokenizers_for_tests as kit


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    return load_tokenizer(open_target(str(smollm2)), trust_remote_code=False)


@pytest.fixture
def run(smollm2, tokenizer, tmp_path):
    """Run stage 01 in this process; returns the totals (None when there was nothing to do)."""

    def run(dataset, out="out", tokenizer=tokenizer, **options):
        return prepare_here(smollm2, dataset, tmp_path / out, tokenizer=tokenizer, **options)

    return run


def test_bad_rows_are_counted_and_their_neighbours_kept(run, tmp_path):
    """Each is named with its file, line and reason in skipped.jsonl as well (P09, P17, P41)."""
    good = write_chats(tmp_path / "good.jsonl", 3).read_text().splitlines()
    long = json.dumps({"messages": [{"role": "user", "content": "w " * 600}, {"role": "assistant", "content": "ok"}]})
    trailing = json.loads(good[2])
    trailing["conversations"].append({"from": "human", "value": "left out"})
    rows = [good[0], "{bad json", '{"messages": []}', good[1], "{worse json", long, json.dumps(trailing), good[0]]
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text("\n".join(rows))
    totals = run(mixed)
    reasons = {
        2: "invalid JSON",
        3: "messages is empty",
        5: "invalid JSON",
        6: "no assistant tokens after truncation to 512",
        8: "duplicate of an earlier row",
    }
    assert totals.skipped == {
        "invalid JSON": (2, "mixed.jsonl:2"),
        "messages is empty": (1, "mixed.jsonl:3"),
        "no assistant tokens after truncation to 512": (1, "mixed.jsonl:6"),
        "duplicate of an earlier row": (1, "mixed.jsonl:8"),
    }
    assert (totals.samples, totals.trimmed) == (3, 1)
    assert manifest(tmp_path / "out")["skipped"] == {reason: count for reason, (count, _) in totals.skipped.items()}
    records = Index(tmp_path / "out").read()
    assert {record["row"]: record["reason"] for record in records if record["status"] == "skipped"} == reasons
    lines = [json.loads(line) for line in (tmp_path / "out" / "skipped.jsonl").read_text().splitlines()]
    assert lines == [{"file": "mixed.jsonl", "line": row, "reason": reason} for row, reason in reasons.items()]
    run(tmp_path / "good.jsonl", "clean")
    assert content(tmp_path / "out") == content(tmp_path / "clean") | {
        "token_freq_by_source.pt": content(tmp_path / "out")["token_freq_by_source.pt"]
    }


def test_duplicates_are_left_out_or_kept_together(run, tmp_path):
    """No text is on both sides of stage 04's split (P42)."""
    rows = write_chats(tmp_path / "rows.jsonl", 5).read_text().splitlines()
    path = tmp_path / "doubled.jsonl"
    path.write_text("\n".join([rows[0]] * 3 + rows[1:4] + [rows[0]] * 3 + rows[4:]))
    totals = run(path)
    assert totals.samples == 5 and totals.skipped == {"duplicate of an earlier row": (5, "doubled.jsonl:2")}
    run(tmp_path / "rows.jsonl", "rows")
    assert [r["conversation"] for r in Index(tmp_path / "out").samples().values()] == [
        r["conversation"] for r in Index(tmp_path / "rows").samples().values()
    ]
    assert run(path, "kept", keep_duplicates=True).samples == 10
    for seed in range(20):
        train, held = hold_out(list(Index(tmp_path / "kept").samples().values()), 0.2, seed)
        assert held and not {r["conversation"] for r in train} & {r["conversation"] for r in held}


def test_excluded_prompts_are_never_trained_on(run, tmp_path):
    path = write_chats(tmp_path / "chats.jsonl", 6)
    tests = tmp_path / "tests.jsonl"
    tests.write_text('{"prompt": "say  2!"}\n{"turns": ["Something else", "SAY 4"]}\n')
    totals = run(path, exclusion=load_exclusion([tests]))
    assert totals.samples == 4 and totals.skipped == {"a prompt of --exclude": (2, "chats.jsonl:3")}
    with pytest.raises(UserError, match=r"exclude is '[0-9a-f]+', this run has None"):
        run(path)
    ids = tmp_path / "ids.jsonl"
    ids.write_text('{"input_ids": [5, 6, 7, 2], "loss_mask": [0, 1, 1, 1]}\n')
    with pytest.raises(UserError, match="--exclude cannot find prompts in rows that are tokens already"):
        run(ids, "ids", exclusion=load_exclusion([tests]))


def test_rows_that_are_tokens_already(run, tmp_path):
    good = {"input_ids": [5, 6, 7, 2, 8, 9, 2], "loss_mask": [0, 1, 1, 1, 0, 1, 1]}
    bad = [
        good | {"input_ids": [5, 6, 7, 2, 8, 49152, 2]},
        good | {"loss_mask": [0, 1, 1, 1, 1, 1, 1]},
        good | {"loss_mask": [1, 1, 1, 1, 0, 1, 1]},
    ]
    path = tmp_path / "ids.jsonl"
    pair = {"prompt_ids": [5, 6], "response_ids": [7, 8, 2]}
    path.write_text("".join(json.dumps(row) + "\n" for row in [*bad, good, pair]))
    totals = run(path)
    assert totals.skipped == {
        "token ids outside the target's vocabulary": (1, "ids.jsonl:1"),
        "loss_mask goes on after an end-of-turn token": (1, "ids.jsonl:2"),
        "loss_mask begins at the first token": (1, "ids.jsonl:3"),
    }
    assert totals.samples == 2
    first, second = (load_tensors(sample_path(tmp_path / "out", index)) for index in range(2))
    assert first["input_ids"].tolist() == good["input_ids"] and first["loss_mask"].int().tolist() == good["loss_mask"]
    assert second["input_ids"].tolist() == [5, 6, 7, 8, 2] and second["loss_mask"].tolist() == [False] * 2 + [True] * 3


def test_long_conversations_are_cut_split_or_dropped(run, tokenizer, tmp_path):
    turns = [
        message
        for n in range(4)
        for message in ({"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": f"answer {n} " * 10})
    ]
    short = {"messages": turns[:2]}
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"messages": turns}) + "\n" + json.dumps(short) + "\n")

    def answers(out):
        samples = [load_tensors(sample_path(tmp_path / out, index)) for index in Index(tmp_path / out).samples()]
        assert all(len(sample["input_ids"]) <= 120 for sample in samples)
        return [tokenizer.decode(sample["input_ids"][sample["loss_mask"]]) for sample in samples]

    said = [f"{'answer ' + str(n) + ' '}" * 10 + "<|im_end|>" for n in range(4)]
    totals = run(path, "truncate", max_seq_len=120)
    assert totals.samples == 2 and totals.cut == 1 and answers("truncate")[0].startswith(said[0] + said[1])
    totals = run(path, "split", max_seq_len=120, overflow="split")
    assert "".join(answers("split")[:-1]) == "".join(said) and totals.cut == 0 and totals.samples > 2
    totals = run(path, "drop", max_seq_len=120, overflow="drop")
    assert totals.samples == 1 and totals.skipped == {"longer than 120 tokens": (1, "long.jsonl:1")}
    with pytest.raises(UserError, match="overflow is 'drop', this run has 'split'"):
        run(path, "drop", max_seq_len=120, overflow="split")


def test_a_run_that_skips_most_rows_stops(run, tmp_path, monkeypatch):
    """Such as data rendered for another family's markers (P18)."""
    monkeypatch.setattr(stage, "JUDGED_FROM", 10)
    rows = write_chats(tmp_path / "chats.jsonl", 8).read_text().splitlines()
    foreign = [
        json.dumps(
            {"messages": [{"role": "user", "content": f"{n}"}, {"role": "assistant", "content": "a<|im_end|>b"}]}
        )
        for n in range(12)
    ]
    path = tmp_path / "foreign.jsonl"
    path.write_text("\n".join([*rows[:4], *foreign, *rows[4:]]))
    with pytest.raises(UserError, match=r"6 of 10 rows cannot be used, more than --max-skipped 0\.5: 6 × superv"):
        run(path)
    assert len((tmp_path / "out" / "skipped.jsonl").read_text().splitlines()) == 6
    assert run(path, max_skipped=0.8).samples == 8


def test_a_mask_that_a_second_derivation_does_not_confirm_stops_the_run(run, tmp_path, monkeypatch):
    real = Masker.samples_of

    def shifted(self, conversations):
        return [
            [Sample(sample.ids, [*sample.mask[1:], False]) for sample in samples]
            for samples in real(self, conversations)
        ]

    path = write_chats(tmp_path / "chats.jsonl", 3)
    assert run(path, "right").checked == 3
    monkeypatch.setattr(Masker, "samples_of", shifted)
    with pytest.raises(UserError, match=r"^chats\.jsonl:1: "):
        run(path)


def test_today_is_the_first_runs_today(run, smollm2, tmp_path, monkeypatch):
    """A resumed run renders as it began, although its template prints the date."""
    dated = load_tokenizer(open_target(str(smollm2)), trust_remote_code=False)
    dated.chat_template = "{{ strftime_now('%d %b %Y') }} " + kit.PLAIN
    path = write_chats(tmp_path / "chats.jsonl", 4)

    class Day(datetime.date):
        @classmethod
        def today(cls):
            return cls(2026, 2, 3)

    monkeypatch.setattr(stage, "date", Day)
    run(path, tokenizer=dated, max_samples=2)
    monkeypatch.undo()
    run(path, tokenizer=dated)
    texts = [dated.decode(load_tensors(sample_path(tmp_path / "out", index))["input_ids"]) for index in range(4)]
    assert all(text.startswith("03 Feb 2026 <|im_start|>") for text in texts)


def test_samples_are_shown_with_what_is_supervised(run, tokenizer, tmp_path, monkeypatch):
    path = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "red \x1b[31m"}, {"role": "assistant", "content": "I see."}]
    path.write_text(json.dumps({"messages": turns}) + "\n" + json.dumps({"messages": turns[1:] * 2}) + "\n")
    run(path)
    [text] = show(tmp_path / "out", tokenizer, 3, 49152)
    head, body = text.split("\n", 1)
    assert head.startswith("--- sample 0, chats.jsonl:1: ") and head.endswith("4 supervised (in «»)")
    assert body.endswith("<|im_start|>user\nred ␛[31m<|im_end|>\n<|im_start|>assistant\n«I see.<|im_end|>»\n")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert "\033[1;32mI see.<|im_end|>\033[0m" in next(show(tmp_path / "out", tokenizer, 3, 49152))
    monkeypatch.setenv("NO_COLOR", "1")
    assert "«I see.<|im_end|>»" in next(show(tmp_path / "out", tokenizer, 3, 49152))
