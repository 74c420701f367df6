"""The draft vocabulary: what is in it, in which form, and what is refused."""

import runpy
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3 import artifacts
from eagle3.artifacts import load_tensors
from eagle3.terminal import UserError
from eagle3.vocab_map import build_vocab_map, write_vocab_map

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture
def prepared(tmp_path):
    """Write a finished stage-01 directory of counts; ids from 90 on are padding."""

    def write(counts=None, forced=(0, 2, 89), complete=True, vocab_size=100, tokenizer_size=90):
        if counts is None:
            counts = torch.zeros(vocab_size, dtype=torch.int64)
            counts[[5, 6, 7, 80]] = torch.tensor([10, 30, 10, 50])
        directory = tmp_path / "prepared"
        artifacts.save_tensors(directory / "token_freq.pt", counts)
        facts = {"vocab_size": vocab_size, "tokenizer_size": tokenizer_size, "forced_ids": list(forced)}
        facts["supervised"] = int(counts.sum())
        artifacts.write_manifest(directory, "01", {"target": "t", "tokenizer": "k"}, **facts, complete=complete)
        return directory

    return write


def targets(d2t: torch.Tensor) -> list[int]:
    return (torch.arange(len(d2t)) + d2t).tolist()


def test_forced_ids_then_frequent_ones_then_the_lowest(prepared, tmp_path):
    out = tmp_path / "map"
    for size, expected, filled in (
        (3, [0, 2, 89], 0),  # the end token is in, though it never occurs
        (5, [0, 2, 6, 80, 89], 0),
        (6, [0, 2, 5, 6, 80, 89], 0),  # a tie: the lower id
        (9, [0, 1, 2, 3, 5, 6, 7, 80, 89], 2),
    ):
        result = write_vocab_map(prepared(), out, size)
        saved = load_tensors(out / "vocab_map.pt")
        assert saved.keys() == {"d2t", "t2d"} and saved["d2t"].dtype == torch.int64 and saved["t2d"].dtype == torch.bool
        assert targets(saved["d2t"]) == expected == saved["t2d"].nonzero().flatten().tolist()
        assert saved["t2d"].shape == (100,)
        manifest = artifacts.read_manifest(out, "03")
        assert manifest["fingerprint"]["draft_vocab_size"] == size == result.size
        assert (manifest["forced"], manifest["filled"]) == (3, filled)
    assert manifest["coverage"] == 1.0
    assert write_vocab_map(prepared(), out, 5).coverage == 0.8


def test_padding_of_the_embedding_comes_last(prepared, tmp_path):
    counts = torch.zeros(100, dtype=torch.int64)
    counts[[7, 95]] = torch.tensor([1, 100])  # no tokenizer gives 95
    assert targets(write_vocab_map(prepared(counts), tmp_path / "map", 4).d2t) == [0, 2, 7, 89]
    assert targets(write_vocab_map(prepared(counts), tmp_path / "map", 90).d2t) == list(range(90))
    assert targets(write_vocab_map(prepared(counts), tmp_path / "map", 92).d2t) == list(range(92))


@pytest.mark.parametrize("size", [100, 32000])
def test_full_vocabulary(prepared, tmp_path, size):
    result = write_vocab_map(prepared(), tmp_path / "map", size)
    assert result.full and result.size == 100 and not result.d2t.any() and result.t2d.all()
    assert result.coverage == 1.0 and result.filled == 0
    assert artifacts.read_manifest(tmp_path / "map", "03")["fingerprint"]["draft_vocab_size"] == 100


def test_the_fingerprint_follows_the_counts(prepared, tmp_path):
    def fingerprint(counts=None):
        write_vocab_map(prepared(counts), tmp_path / "map", 20)
        return artifacts.read_manifest(tmp_path / "map", "03")["fingerprint"]

    first = fingerprint()
    assert first["target"] == "t" and first["tokenizer"] == "k" and fingerprint() == first
    assert fingerprint(torch.ones(100, dtype=torch.int64))["token_freq"] != first["token_freq"]


def test_refusals(prepared, tmp_path):
    with pytest.raises(UserError, match=r"^3 ids must be in .*--draft-vocab-size is 2; give at least 3"):
        write_vocab_map(prepared(), tmp_path / "map", 2)
    with pytest.raises(UserError, match=r"token_freq\.pt is torch\.int64 \(99,\), expected torch\.int64 \(100,\)"):
        write_vocab_map(prepared(torch.ones(99, dtype=torch.int64)), tmp_path / "map", 20)
    with pytest.raises(UserError, match="is not finished; run the command of stage 01 again"):
        write_vocab_map(prepared(complete=False), tmp_path / "map", 20)
    with pytest.raises(UserError, match="holds artifacts of stage 01"):
        write_vocab_map(prepared(), prepared(), 20)
    with pytest.raises(UserError, match=r"none: no such directory; expected the output of stage 01"):
        write_vocab_map(tmp_path / "none", tmp_path / "map", 20)
    assert not (tmp_path / "map" / "manifest.json").exists()


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_map_is_consistent(data):
    vocab_size = data.draw(st.integers(1, 60))
    tokenizer_size = data.draw(st.integers(1, vocab_size))
    real = st.integers(0, tokenizer_size - 1)
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for token, count in data.draw(st.dictionaries(real, st.integers(1, 4), min_size=1)).items():
        counts[token] = count
    forced = sorted(data.draw(st.sets(real)))
    size = data.draw(st.integers(max(1, len(forced)), 70))
    result = build_vocab_map(counts, forced, tokenizer_size, size)
    chosen = targets(result.d2t)
    assert len(chosen) == min(size, vocab_size) == result.t2d.sum()
    assert chosen == sorted(set(chosen)) == result.t2d.nonzero().flatten().tolist()
    assert set(forced) <= set(chosen)
    assert len(chosen) > tokenizer_size or chosen[-1] < tokenizer_size
    left_out = counts[~result.t2d].max().item() if not result.full else 0
    free = [counts[token].item() for token in chosen if token not in forced]
    assert all(count >= left_out for count in free)
    assert result.coverage == pytest.approx(counts[result.t2d].sum().item() / counts.sum().item())
    again = build_vocab_map(counts, forced, tokenizer_size, size)
    assert torch.equal(again.d2t, result.d2t) and torch.equal(again.t2d, result.t2d)


def test_the_command_line(run_script, prepared, tmp_path, monkeypatch, capsys):
    arguments = ["--prepared-dir", str(prepared()), "--output-dir", str(tmp_path / "map")]
    result = run_script("03_build_vocab_map.py", *arguments, "--draft-vocab-size", 9, cwd=tmp_path)
    for words in ("9 of 100 ids", "100.00%", "3 end, special and added tokens", "2 ids that never occur"):
        assert words in result.stdout
    script = runpy.run_path(str(REPOSITORY / "03_build_vocab_map.py"))  # running it under another name does nothing
    monkeypatch.setattr("sys.argv", ["03_build_vocab_map.py", *arguments])
    script["main"]()
    assert "full vocabulary of 100 ids, no map needed" in capsys.readouterr().out
