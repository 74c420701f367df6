"""Stage 01 end to end on the embedded target's tokenizer: artifacts, resuming, refusals."""

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from prepare_for_tests import content, manifest, prepare_here, write_chats, write_folder
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from eagle3 import artifacts, token_counts
from eagle3.artifacts import Index, load_tensors, sample_path
from eagle3.masking import Masker
from eagle3.prepare import stage, workers
from eagle3.target import load_tokenizer, open_target
from eagle3.terminal import UserError
from eagle3.vocab_map import write_vocab_map
from tests import tokenizers_for_tests as kit


@pytest.fixture(scope="module")
def target(smollm2):
    return open_target(str(smollm2))


@pytest.fixture(scope="module")
def tokenizer(target):
    return load_tokenizer(target, trust_remote_code=False)


@pytest.fixture
def run(target, tokenizer, tmp_path):
    """Run stage 01 in this process; returns the totals (None when there was nothing to do)."""

    def run(dataset, out="out", target=target, tokenizer=tokenizer, **options):
        return prepare_here(target, dataset, tmp_path / out, tokenizer=tokenizer, **options)

    return run


def test_artifacts(run, target, tokenizer, chats, tmp_path):
    totals = run(chats)
    out = tmp_path / "out"
    records = Index(out).read()
    assert [record["index"] for record in records] == list(range(12)) == [record["row"] - 1 for record in records]
    counts = torch.zeros(target.vocab_size, dtype=torch.int64)
    for record in records:
        path = sample_path(out, record["index"])
        sample = load_tensors(path)
        assert sample.keys() == {"input_ids", "loss_mask"}
        assert sample["input_ids"].dtype == torch.int32 and sample["loss_mask"].dtype == torch.bool
        assert sample["input_ids"].shape == sample["loss_mask"].shape == (record["tokens"],)
        assert record["supervised"] == sample["loss_mask"].sum() and record["bytes"] == path.stat().st_size
        assert record["status"] == "done" and record["source"] == "chats.jsonl"
        counts += torch.bincount(sample["input_ids"][sample["loss_mask"]], minlength=target.vocab_size)
    assert torch.equal(load_tensors(out / "token_freq.pt"), counts)
    ids = counts.nonzero().flatten()
    assert torch.equal(load_tensors(out / "token_freq_by_source.pt")["chats.jsonl"], torch.stack([ids, counts[ids]]))
    assert counts[2] == 18  # one end token for each answer of the fixture
    facts = manifest(out)
    assert facts["complete"] and facts["exhausted"] and facts["samples"] == totals.samples == 12
    assert facts["tokens"] == totals.tokens == sum(record["tokens"] for record in records)
    assert facts["supervised"] == totals.supervised == counts.sum()
    assert facts["vocab_size"] == facts["tokenizer_size"] == 49152 and facts["end_ids"] == [2]
    assert set(facts["forced_ids"]) >= {0, 1, 2} and facts["forced_ids"] == sorted(facts["forced_ids"])
    made_by = {"target", "tokenizer", "dataset", "columns", "max_seq_len", "overflow", "keep_duplicates", "exclude"}
    assert facts["fingerprint"].keys() == made_by
    first = load_tensors(sample_path(out, 0))
    assert tokenizer.decode(first["input_ids"][first["loss_mask"]]) == (
        "1 plus 1 is 2, which is an even number.<|im_end|>Doubled, that makes 4.<|im_end|>"
    )
    assert sorted(path.name for path in out.glob("*.pt")) == ["token_freq.pt", "token_freq_by_source.pt"]


def test_added_tokens_are_forced(smollm2):
    tokenizer = kit.with_think_tags(smollm2)
    forced = stage.forced_ids(tokenizer, [2, 60_000])
    assert {2, *tokenizer.convert_tokens_to_ids(["<think>", "</think>"])} < set(forced)
    assert max(forced) < len(tokenizer)


def test_markers_that_are_ordinary_tokens_are_forced():
    """A tokenizer may have think and role tokens in its vocabulary without saying that they are added or special."""
    words = {"x": 0, "<think>": 1, "</think>": 2, "[INST]": 3, "<div>": 4, "[0]": 5, "<|user|>": 6, "</s>": 90}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "x")), eos_token="</s>")
    tokenizer.chat_template = "[INST] <|user|>{{ messages[0]['content'] }}[/INST]<think>{{ reasoning }}</think>"
    assert stage.forced_ids(tokenizer, [90, 95]) == [1, 2, 3, 6, 90]
    assert stage.tokenizer_size(tokenizer) == 91 > len(tokenizer)  # its ids have a gap
    tokenizer.chat_template = {"default": "<think>", "tool_use": "[INST]"}
    assert stage.forced_ids(tokenizer, [90]) == [1, 3, 90]


def test_every_end_id_of_a_list_is_forced(run, smollm2, tmp_path):
    model = Path(shutil.copytree(smollm2, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors")))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 40_000]}))
    run(write_chats(tmp_path / "chats.jsonl", 3), target=open_target(str(model)))
    facts = manifest(tmp_path / "out")
    assert facts["end_ids"] == [2, 40_000] and {2, 40_000} < set(facts["forced_ids"])
    assert load_tensors(tmp_path / "out" / "token_freq.pt")[40_000] == 0
    result = write_vocab_map(tmp_path / "out", tmp_path / "map", len(facts["forced_ids"]) + 3)
    assert result.t2d[[2, 40_000]].all() and result.filled == 0  # fewer than the used ones
    assert 0 < result.coverage < 1


def test_samples_of_one_conversation_share_its_name(run, target, smollm2, tmp_path):
    padded = dataclasses.replace(target, config=target.config | {"vocab_size": 49280})
    reasoning = {"target": padded, "tokenizer": kit.with_think_tags(smollm2)}
    reasoning["tokenizer"].chat_template = kit.STRIPS_REASONING
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "<think>R</think>A"}]
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"messages": turns * 3}) + "\n" + json.dumps({"messages": turns}) + "\n")
    run(path, **reasoning)
    records = Index(tmp_path / "out").read()
    assert [record["row"] for record in records] == [1, 1, 1, 2]
    assert len({record["conversation"] for record in records[:3]}) == 1
    assert len({record["conversation"] for record in records}) == 2
    assert load_tensors(tmp_path / "out" / "token_freq.pt").shape == (49280,)
    assert manifest(tmp_path / "out")["tokenizer_size"] == 49154
    # a limit may cut a conversation; a larger one continues inside it
    run(path, "cut", max_samples=2, **reasoning)
    assert manifest(tmp_path / "cut")["samples"] == 2
    run(path, "cut", max_samples=4, **reasoning)
    assert content(tmp_path / "cut") == content(tmp_path / "out")


def test_nothing_usable_is_an_error_with_the_reasons(run, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"messages": []}\n{bad\n')
    for _ in range(2):  # the second run resumes and says the same
        with pytest.raises(UserError, match=r"1 × messages is empty, first bad\.jsonl:1; 1 × invalid JSON"):
            run(path)
    assert not manifest(tmp_path / "out")["complete"]
    with pytest.raises(UserError, match=r"after truncation to 30.* give a larger --max-seq-len"):
        run(write_chats(tmp_path / "short.jsonl", 2), "short", max_seq_len=30)
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(UserError, match="no rows"):
        run(tmp_path / "empty.jsonl", "empty")


# --------------------------------------------------------------------------------------------- resuming


class Killed(BaseException):
    pass


@pytest.fixture
def masked(monkeypatch):
    """Counts the conversations that are masked, which come one by one; dies at one number of them."""
    real, calls = Masker.samples_of, SimpleNamespace(count=0, kill_at=None)

    def samples_of(self, conversations):
        calls.count += len(conversations)
        if calls.kill_at is not None and calls.count > calls.kill_at:
            raise Killed
        return real(self, conversations)

    monkeypatch.setattr(workers, "BATCH", 1)
    monkeypatch.setattr(Masker, "samples_of", samples_of)
    return calls


@pytest.fixture
def killed_after(masked):
    """Make masking die after so many conversations."""

    def kill(count):
        masked.count, masked.kill_at = 0, count

        def revive():
            masked.kill_at = None

        return revive

    return kill


@pytest.mark.parametrize("copies", [3, 1_000])
def test_resume_after_a_kill(run, killed_after, masked, tmp_path, monkeypatch, copies):
    monkeypatch.setattr(stage, "CHECKPOINT_EVERY", copies)
    monkeypatch.setattr(token_counts, "MERGE_EVERY", 100)
    chats = write_folder(tmp_path / "chats", [15, 1, 24])
    run(chats, "unbroken")
    for count in (17, 0, 5):  # three kills, one of them at once
        revive = killed_after(count)
        with pytest.raises(Killed):
            run(chats)
        revive()
        assert not manifest(tmp_path / "out")["complete"]
    masked.count = 0
    totals = run(chats)
    assert masked.count < 30  # finished rows are not tokenised again
    assert content(tmp_path / "out") == content(tmp_path / "unbroken")
    assert totals.samples == manifest(tmp_path / "out")["samples"] == 40
    assert totals.supervised == manifest(tmp_path / "unbroken")["supervised"]
    assert Index(tmp_path / "out").samples() == Index(tmp_path / "unbroken").samples()


def test_counts_ahead_of_an_index_that_lost_its_end(run, killed_after, tmp_path, monkeypatch):
    monkeypatch.setattr(stage, "CHECKPOINT_EVERY", 3)
    chats = write_chats(tmp_path / "chats.jsonl", 12)
    run(chats, "unbroken", max_samples=6)
    revive = killed_after(10)
    with pytest.raises(Killed):
        run(chats)
    revive()
    index = Index(tmp_path / "out").path
    index.write_bytes(b"".join(index.read_bytes().splitlines(keepends=True)[:2]))
    run(chats, max_samples=6)
    assert content(tmp_path / "out") == content(tmp_path / "unbroken")


def test_nothing_is_recorded_after_a_sample_that_could_not_be_written(run, tmp_path, monkeypatch):
    chats = write_chats(tmp_path / "chats.jsonl", 12)
    real = stage._sync_and_name

    def full_disk(temporary, path):
        if path.endswith("/00000004.pt"):
            raise UserError("disk full")
        return real(temporary, path)

    monkeypatch.setattr(stage, "MOST_PENDING", 2)
    monkeypatch.setattr(stage, "_sync_and_name", full_disk)
    with pytest.raises(UserError, match="disk full"):
        run(chats)
    assert list(Index(tmp_path / "out").samples()) == [0, 1, 2, 3]
    monkeypatch.setattr(stage, "_sync_and_name", real)
    run(chats)
    run(chats, "unbroken")
    assert content(tmp_path / "out") == content(tmp_path / "unbroken")


def test_resume_from_a_torn_index(run, tmp_path):
    chats = write_chats(tmp_path / "chats.jsonl", 12)
    chats.write_text("{bad\n" + chats.read_text())
    run(chats, "unbroken")
    out = tmp_path / "out"
    for kept in range(13):
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(tmp_path / "unbroken", out)
        facts = manifest(out)
        # as a killed run leaves it
        artifacts.write_manifest(out, "01", facts["fingerprint"], date=facts["date"], complete=False)
        (out / "token_freq.pt").unlink()
        lines = Index(out).path.read_bytes().splitlines(keepends=True)
        Index(out).path.write_bytes(b"".join(lines[:kept]) + lines[kept][:20])
        totals = run(chats)
        assert totals.skipped == {"invalid JSON": (1, "chats.jsonl:1")} and totals.samples == 12
        assert content(out) == content(tmp_path / "unbroken")


@pytest.mark.parametrize("damaged", [[4], [0, 5, 6, 11]])
def test_missing_and_damaged_samples_are_made_again(run, tmp_path, capsys, damaged):
    chats = write_chats(tmp_path / "chats.jsonl", 12)
    run(chats)
    out, before = tmp_path / "out", content(tmp_path / "out")
    capsys.readouterr()
    assert run(chats) is None
    [line] = capsys.readouterr().out.splitlines()
    assert "is finished: 12 samples" in line and "nothing to do" in line
    for number, index in enumerate(damaged):
        path = sample_path(out, index)
        path.unlink() if number % 2 else path.write_bytes(path.read_bytes()[:-100])
    totals = run(chats)
    assert totals.samples == 12 and manifest(out)["complete"]
    assert content(out) == before
    assert run(chats) is None


def test_a_blend_is_counted_by_what_its_rows_are_from(run, tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": "an answer"}]} | extra
        for n, extra in enumerate([{"source": "math"}, {"source": "code"}, {"source": 3}, {}, {"source": "math"}])
    ]
    path = tmp_path / "blend.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(path)
    names = [record["dataset"] for record in Index(tmp_path / "out").read()]
    assert names == ["math", "code", "blend.jsonl", "blend.jsonl", "math"]
    assert list(load_tensors(tmp_path / "out" / "token_freq_by_source.pt")) == ["blend.jsonl", "code", "math"]


def test_counts_by_source(run, target, tmp_path):
    out = tmp_path / "out"
    chats = write_folder(tmp_path / "chats", [1, 3, 2])
    run(chats)
    by_source = load_tensors(out / "token_freq_by_source.pt")
    assert list(by_source) == ["a.jsonl", "b.jsonl", "c.jsonl"]
    expected = {source: torch.zeros(target.vocab_size, dtype=torch.int64) for source in by_source}
    for record in Index(out).read():
        sample = load_tensors(sample_path(out, record["index"]))
        ids = sample["input_ids"][sample["loss_mask"]]
        expected[record["source"]] += torch.bincount(ids, minlength=target.vocab_size)
    for source, (ids, counts) in by_source.items():
        assert torch.equal(ids, expected[source].nonzero().flatten()) and torch.equal(counts, expected[source][ids])
    assert torch.equal(sum(expected.values()), load_tensors(out / "token_freq.pt"))
    before = content(out)
    sample_path(out, 0).unlink()  # all of the first file: it is now the last that is counted
    (out / "token_freq.pt").unlink()
    run(chats)
    assert content(out) == before


def another_source_total(by_source):
    return by_source | {"b.jsonl": by_source["b.jsonl"] + torch.tensor([[0], [1]])}


DAMAGES = {
    "missing": None,  # as in a directory that an earlier program prepared
    "list": lambda by_source: list(by_source.values()),
    "dense": lambda by_source: {source: pairs[1] for source, pairs in by_source.items()},
    "int32": lambda by_source: {source: pairs.int() for source, pairs in by_source.items()},
    "outside": lambda by_source: by_source | {"c.jsonl": torch.tensor([[49152], [1]])},
    "negative id": lambda by_source: by_source | {"c.jsonl": torch.tensor([[-1], [1]])},
    "negative": lambda by_source: {source: pairs * torch.tensor([[1], [-1]]) for source, pairs in by_source.items()},
    "unordered": lambda by_source: {source: pairs.flip(1) for source, pairs in by_source.items()},
    "other total": another_source_total,
    "source missing": lambda by_source: {"a.jsonl": by_source["a.jsonl"]},
}


def test_damaged_counts_by_source_are_refused_by_03_and_counted_again(run, tmp_path):
    chats, out = write_folder(tmp_path / "chats", [3, 2]), tmp_path / "out"
    run(chats)
    before, path = content(out), out / "token_freq_by_source.pt"
    whole = {source: pairs.clone() for source, pairs in load_tensors(path).items()}
    for name, damage in DAMAGES.items():
        path.unlink()
        if damage:
            artifacts.save_tensors(path, damage(whole))
        remedy = "(run the command of|delete it and rerun) stage 01"
        with pytest.raises(
            UserError, match=rf"{path} (is missing|is damaged|does not add up to token_freq\.pt).*{remedy}"
        ):
            write_vocab_map(out, tmp_path / "map", 64)
        if name in ("missing", "list", "other total"):
            # with a damaged copy of an interrupted run as well
            artifacts.save_tensors(out / "token_freq.partial.pt", {"samples": torch.tensor(2), "by_source": [name]})
            assert run(chats).samples == 5 and content(out) == before, name
            assert run(chats) is None
    run(chats)
    (out / "token_freq.pt").unlink()
    assert run(chats).samples == 5 and content(out) == before


def test_several_datasets_are_mixed_and_resumed(run, killed_after, tmp_path):
    one, two = write_folder(tmp_path / "one", [20, 4]), write_chats(tmp_path / "two.jsonl", 12)
    mixed = [f"{one}:0.75", f"{two}:0.25"]
    run(mixed, "whole", shuffle=3, max_samples=16)
    sources = [record["source"] for record in Index(tmp_path / "whole").samples().values()]
    assert sum(source.startswith("one/") for source in sources) == 12 and sources.count("two.jsonl") == 4
    revive = killed_after(7)
    with pytest.raises(Killed):
        run(mixed, shuffle=3, max_samples=16)
    revive()
    run(mixed, shuffle=3, max_samples=16)
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    with pytest.raises(UserError, match="dataset is"):
        run(mixed, shuffle=4, max_samples=16)


def test_more_and_fewer_samples(run, tmp_path):
    chats = write_chats(tmp_path / "chats.jsonl", 12)
    run(chats, "all")
    assert run(chats, max_samples=4).samples == 4
    assert run(chats, max_samples=4) is None
    assert not manifest(tmp_path / "out")["exhausted"]
    sample_path(tmp_path / "out", 1).unlink()
    assert run(chats, max_samples=4).samples == 4
    assert run(chats, max_samples=9).samples == 9
    with pytest.raises(UserError, match=r"has 9 samples already, more than --max-samples 4"):
        run(chats, max_samples=4)
    assert run(chats).samples == 12
    assert content(tmp_path / "out") == content(tmp_path / "all")
    assert run(chats, max_samples=50) is None  # there are no more rows


def test_an_artifact_of_something_else_is_refused(run, smollm2, tmp_path):
    """Length, tokenizer, chat template, data, order and every other choice (P31)."""
    chats = write_chats(tmp_path / "chats.jsonl", 3)
    run(chats, max_samples=2)
    for choice, named in (
        ({"max_seq_len": 256}, r"max_seq_len is 512, this run has 256; .*--output-dir"),
        ({"overflow": "drop"}, "overflow is 'truncate', this run has 'drop'"),
        ({"columns": {"messages": "m"}}, "columns is None, this run has {'messages': 'm'}"),
        ({"keep_duplicates": True}, "keep_duplicates is False, this run has True"),
        ({"shuffle": 1}, r"dataset is .*'shuffle': None.*, this run has .*'shuffle': 1"),
    ):
        with pytest.raises(UserError, match=named):
            run(chats, **choice)
    other = shutil.copytree(smollm2, tmp_path / "other", ignore=shutil.ignore_patterns("*.safetensors"))
    kit.with_think_tags(smollm2).save_pretrained(other)
    edited = shutil.copytree(smollm2, tmp_path / "edited", ignore=shutil.ignore_patterns("*.safetensors"))
    template = edited / "chat_template.jinja"
    template.write_text(template.read_text().replace("AI assistant", "aid"))
    for target in (other, edited):
        with pytest.raises(UserError, match=r"tokenizer is '[0-9a-f]{16}', this run has '[0-9a-f]{16}'"):
            run(chats, target=open_target(str(target)))
    with open(chats, "a") as file:
        file.write("{}\n")
    with pytest.raises(UserError, match=r"dataset is \[\{.*sha256.*, this run has \[\{.*sha256"):
        run(chats)
    (tmp_path / "out" / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"index\.jsonl but no manifest\.json"):
        run(chats)
    with artifacts.directory_lock(tmp_path / "locked"), pytest.raises(UserError, match="is in use by"):
        run(chats, "locked")


def test_only_the_default_length_is_lowered_to_the_targets_positions(run, target, tmp_path, capsys):
    chats = write_chats(tmp_path / "chats.jsonl", 1)
    with pytest.raises(UserError, match=r"--max-seq-len 8193: the target takes 8192 positions .*; give at most 8192"):
        run(chats, max_seq_len=8193)
    run(chats, max_seq_len=None)
    assert manifest(tmp_path / "out")["fingerprint"]["max_seq_len"] == 2048
    assert "samples have at most" not in capsys.readouterr().out
    small = dataclasses.replace(target, config=target.config | {"max_position_embeddings": 1024})
    run(chats, "small", max_seq_len=None, target=small)
    assert "samples have at most 1024 tokens instead of 2048: the target takes no more" in capsys.readouterr().out
    assert manifest(tmp_path / "small")["fingerprint"]["max_seq_len"] == 1024


def test_a_hub_dataset_without_the_hub(run, tmp_path, monkeypatch):
    import datasets

    rows = [
        {"conversations": [{"from": "human", "value": f"q{n}"}, {"from": "gpt", "value": f"a{n}"}], "source": "x"}
        for n in range(20)
    ]
    from datasets.packaged_modules.json.json import Json

    class Builder(Json):
        __module__ = Json.__module__

        def __init__(self):
            pass

        def as_streaming_dataset(self, split):
            return iter(rows)

    monkeypatch.setattr(datasets, "load_dataset_builder", lambda name, config, revision: Builder())
    assert run("mlabonne/open-perfectblend", max_samples=10).samples == 10
    assert manifest(tmp_path / "out")["fingerprint"]["dataset"][0]["name"] == "mlabonne/open-perfectblend"
    assert [record["row"] for record in Index(tmp_path / "out").read()] == list(range(1, 11))
    assert run("mlabonne/open-perfectblend", max_samples=12).samples == 12
    rows[:] = rows[:5]
    with pytest.raises(UserError, match="the dataset has fewer rows than before"):
        run("mlabonne/open-perfectblend", max_samples=15)
