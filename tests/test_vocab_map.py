"""The draft vocabulary: what is in it, in which form, and what is refused."""

import runpy
import shutil
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib import image
from matplotlib.figure import Figure

from eagle3 import artifacts, coverage
from eagle3.artifacts import load_tensors
from eagle3.target import open_target
from eagle3.terminal import UserError
from eagle3.training.inputs import open_inputs
from eagle3.vocab_map import build_vocab_map, write_vocab_map
from tests.states_for_tests import write_states

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture
def prepared(tmp_path):
    """Write a finished stage-01 directory of counts; ids from 90 on are padding."""

    def write(counts=None, forced=(0, 2, 89), complete=True, vocab_size=100, tokenizer_size=90, by_source=None):
        if counts is None:
            counts = torch.zeros(vocab_size, dtype=torch.int64)
            counts[[5, 6, 7, 80]] = torch.tensor([10, 30, 10, 50])
        directory = tmp_path / "prepared"
        artifacts.save_tensors(directory / "token_freq.pt", counts)
        artifacts.save_tensors(directory / "token_freq_by_source.pt", by_source or {"chats": pairs(counts)})
        facts = {"vocab_size": vocab_size, "tokenizer_size": tokenizer_size, "forced_ids": list(forced)}
        facts["supervised"] = int(counts.sum())
        artifacts.write_manifest(directory, "01", {"target": "t", "tokenizer": "k"}, **facts, complete=complete)
        return directory

    return write


def pairs(counts: torch.Tensor) -> torch.Tensor:
    """Ids that occur and how often, int64 [2, P], of counts [V]."""
    ids = counts.nonzero().flatten()
    return torch.stack([ids, counts[ids]])


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


def test_forced_tokens_of_the_user(prepared, tmp_path):
    def fingerprint(*force_tokens):
        write_vocab_map(prepared(), tmp_path / "map", 5, force_tokens)
        return artifacts.read_manifest(tmp_path / "map", "03")["fingerprint"]

    result = write_vocab_map(prepared(), tmp_path / "map", 6, [88, 3, 88, 2])
    assert targets(result.d2t) == [0, 2, 3, 80, 88, 89] and (result.forced, result.filled) == (5, 0)
    assert artifacts.read_manifest(tmp_path / "map", "03")["force_tokens"] == [2, 3, 88]
    assert fingerprint(88) != fingerprint() == fingerprint(2)  # 2 is forced by stage 01 already
    for tokens, named in (([90], "90"), ([3, -1, 100], "-1 100")):  # from 90 on there is padding
        with pytest.raises(
            UserError, match=f"^--force-tokens {named}: the tokenizer has ids from 0 to 89; give ids of"
        ):
            write_vocab_map(prepared(), tmp_path / "map", 20, tokens)
    with pytest.raises(UserError, match=r"^5 ids must be in .*--force-tokens\), --draft-vocab-size is 4; .* least 5"):
        write_vocab_map(prepared(), tmp_path / "map", 4, [3, 88])
    assert fingerprint() == artifacts.read_manifest(tmp_path / "map", "03")["fingerprint"]  # refusals replaced nothing


def test_refusals(prepared, tmp_path):
    with pytest.raises(UserError, match=r"^3 ids must be in .*--draft-vocab-size is 2; give at least 3"):
        write_vocab_map(prepared(), tmp_path / "map", 2)
    with pytest.raises(UserError, match=r"token_freq\.pt is torch\.int64 \(99,\), expected torch\.int64 \(100,\)"):
        write_vocab_map(prepared(torch.ones(99, dtype=torch.int64)), tmp_path / "map", 20)
    with pytest.raises(UserError, match="is not finished; run the command of stage 01 again"):
        write_vocab_map(prepared(complete=False), tmp_path / "map", 20)
    directory = prepared(torch.ones(100, dtype=torch.int64))
    shutil.copy(directory / "token_freq.pt", tmp_path / "other.pt")  # counts of as many tokens, by another tokenizer
    counts = torch.zeros(100, dtype=torch.int64)
    counts[7] = 100
    prepared(counts)
    shutil.copy(tmp_path / "other.pt", directory / "token_freq.pt")
    with pytest.raises(
        UserError, match=r"by_source\.pt does not add up to token_freq\.pt; delete it and rerun stage 01"
    ):
        write_vocab_map(directory, tmp_path / "map", 20)
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
    by_source = {}
    for name in data.draw(st.sets(st.sampled_from("abcdefghijkl"), min_size=1)):
        by_source[name] = torch.zeros(vocab_size, dtype=torch.int64)
        for token, count in data.draw(st.dictionaries(real, st.integers(1, 4), min_size=1)).items():
            by_source[name][token] = count
    counts = sum(by_source.values())
    forced = sorted(data.draw(st.sets(real)))
    size = data.draw(st.integers(max(1, len(forced)), 70))

    def build(size):
        with mock.patch.object(coverage, "SIZES", (4, 8, 16, 32, 64)):
            sparse = {name: pairs(counts) for name, counts in by_source.items()}
            return build_vocab_map(counts, forced, tokenizer_size, size, sparse)

    result = build(size)
    chosen = targets(result.d2t)
    assert len(chosen) == min(size, vocab_size) == result.t2d.sum()
    # d2t and t2d say the same, in the same order
    assert chosen == sorted(set(chosen)) == result.t2d.nonzero().flatten().tolist()
    assert set(forced) <= set(chosen)
    assert len(chosen) > tokenizer_size or chosen[-1] < tokenizer_size
    free = [token for token in chosen if token not in forced]
    left_out = [token for token in range(tokenizer_size) if not result.t2d[token]]
    # the most frequent ones, of two as frequent the lower one
    assert not free or not left_out or max((-counts[t], t) for t in free) < min((-counts[t], t) for t in left_out)
    assert result.coverage == pytest.approx(counts[result.t2d].sum().item() / counts.sum().item())
    again = build(size)
    assert torch.equal(again.d2t, result.d2t) and torch.equal(again.t2d, result.t2d) and again.by_size == result.by_size

    table = result.by_size
    assert table.sizes == sorted(s for s in {4, 8, 16, 32, 64, len(chosen)} if len(forced) <= s < vocab_size)
    total, *sources = table.rows
    assert total.tokens == counts.sum() == sum(row.tokens for row in sources)
    for index, other in enumerate(table.sizes):
        inside = build(other).t2d
        assert total.shares[index] == pytest.approx(build(other).coverage)
        for row in sources:
            if row.name in by_source:
                assert row.shares[index] == pytest.approx((by_source[row.name][inside].sum() / row.tokens).item())
    for row in table.rows:
        assert row.shares == sorted(row.shares) and 0 <= min(row.shares, default=0) <= max(row.shares, default=1) <= 1
    named = [(-row.tokens, row.name) for row in sources if row.name in by_source]
    assert named == sorted((-counts.sum().item(), name) for name, counts in by_source.items())[: coverage.SHOWN]
    assert [row.name for row in sources[len(named) :]] == [f"{len(by_source) - 8} others"] * (len(by_source) > 8)


# ------------------------------------------------------------------------------------------- known mistakes


def test_a_map_of_another_size_is_replaced_or_refused(prepared, tiny_target, tmp_path):
    write_vocab_map(prepared(), tmp_path / "map", 64)
    small = (tmp_path / "map" / "vocab_map.pt").read_bytes()
    assert write_vocab_map(prepared(), tmp_path / "map", 80).size == 80
    vocab = load_tensors(tmp_path / "map" / "vocab_map.pt")
    assert len(vocab["d2t"]) == vocab["t2d"].sum() == 80
    # a map of 64 under a manifest that says 80
    write_states(tmp_path, tiny_target, count=1)
    path = tmp_path / "vocab_map" / "manifest.json"
    path.write_text(path.read_text().replace('"draft_vocab_size": 64', '"draft_vocab_size": 80'))
    with pytest.raises(UserError, match=r"d2t has 64 ids, t2d marks 64 of 49152; the manifest .* say 80, 80 of 49152"):
        open_inputs(open_target(str(tiny_target)), tmp_path / "hidden_states", tmp_path / "vocab_map")
    assert len(small) < (tmp_path / "map" / "vocab_map.pt").stat().st_size


def test_a_larger_target_vocabulary_makes_another_map(prepared, tmp_path):
    counts = torch.zeros(512, dtype=torch.int64)
    counts[[3, 499]] = 5
    for vocab_size in (512, 520):  # the tokenizer has 500 ids in both
        counts = torch.cat([counts, counts.new_zeros(vocab_size - len(counts))])
        directory = prepared(counts, vocab_size=vocab_size, tokenizer_size=500)
        vocab = write_vocab_map(directory, tmp_path / "map", 500)
        assert len(vocab.t2d) == vocab_size and not vocab.t2d[500:].any() and vocab.t2d[:500].all()
        assert write_vocab_map(directory, tmp_path / "map", 64).t2d[500:].sum() == 0
    artifacts.save_tensors(directory / "token_freq.pt", counts[:512])
    with pytest.raises(UserError, match=r"token_freq\.pt is torch\.int64 \(512,\), expected torch\.int64 \(520,\)"):
        write_vocab_map(directory, tmp_path / "map", 64)


@pytest.mark.parametrize("change", ["twice", "outside"])
def test_two_draft_ids_of_one_target_id_never_reach_the_export(tiny_target, tmp_path, change):
    write_states(tmp_path, tiny_target, count=1)
    path = tmp_path / "vocab_map" / "vocab_map.pt"
    vocab = {name: tensor.clone() for name, tensor in load_tensors(path).items()}
    vocab["d2t"][5] = vocab["d2t"][4] - 1 if change == "twice" else 49152
    artifacts.save_tensors(path, vocab)
    with pytest.raises(
        UserError, match="d2t and t2d disagree, or the ids do not ascend within 0 to 49151; rerun stage 03"
    ):
        open_inputs(open_target(str(tiny_target)), tmp_path / "hidden_states", tmp_path / "vocab_map")


def test_other_sizes_take_seconds_and_stage_01_alone(prepared, tmp_path):
    """The size of Kimi-K2.5's vocabulary, a billion counted tokens, ten files with all ids."""
    vocab_size = 163_840
    torch.manual_seed(0)
    share = 1 / torch.arange(3, vocab_size + 3, dtype=torch.float64)  # [V]
    counts = (share * 1.01e9 / share.sum()).long()
    by_source = {f"{n}.parquet": pairs(counts // 10 + (counts % 10 > n)) for n in range(10)}
    assert counts.sum() > 1e9
    directory = prepared(
        counts, range(163_584, 163_840), vocab_size=vocab_size, tokenizer_size=vocab_size, by_source=by_source
    )
    for size in (8_000, 32_000, 64_000):
        started = time.monotonic()
        result = write_vocab_map(directory, tmp_path / "map", size)
        assert time.monotonic() - started < 10  # measured: 0.5 s the first time, then 0.2 s
        assert result.size == size and result.by_size.rows[0].tokens == counts.sum()
    started = time.monotonic()
    build_vocab_map(counts, list(range(163_584, 163_840)), vocab_size, 32_000, by_source)
    assert time.monotonic() - started < 5  # measured: 0.03 s


# ------------------------------------------------------------------------------------------------ coverage


@pytest.mark.filterwarnings("error")
def test_the_table_and_the_figure(prepared, tmp_path, monkeypatch):
    figures, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k)))
    counts = torch.zeros(20_000, dtype=torch.int64)
    counts[:10_000] = 1
    by_source = {"_a $x_$ é\n.jsonl": pairs(counts[:9000]), "b" * 40: pairs(counts)}
    by_source["b" * 40] = by_source["b" * 40][:, 9000:]
    directory = prepared(counts, (), vocab_size=20_000, tokenizer_size=20_000, by_source=by_source)
    result = write_vocab_map(directory, tmp_path / "map", 5000)
    assert result.by_size.lines() == [
        "ids in the draft vocabulary       tokens   4,096  5,000*   8,192   16,384",
        "all                               10,000  40.96%  50.00%  81.92%  100.00%",
        "_a $x_$ é?.jsonl                   9,000  45.51%  55.56%  91.02%  100.00%",
        "bbbbbbbbbbbbbbb…bbbbbbbbbbbbbbbb   1,000   0.00%   0.00%   0.00%  100.00%",
    ]
    facts = artifacts.read_manifest(tmp_path / "map", "03")["coverage_by_size"]
    assert facts["sizes"] == [4096, 5000, 8192, 16384] and facts["rows"][1] == {
        "name": "_a $x_$ é\n.jsonl",
        "tokens": 9000,
        "shares": [4096 / 9000, 5000 / 9000, 8192 / 9000, 1.0],
    }
    picture = tmp_path / "map" / "coverage.png"
    legend = [text.get_text().strip() for text in figures[0].legends[0].get_texts()]
    assert legend == ["all", r"_a \$x_\$ é?.jsonl", "b" * 15 + "…" + "b" * 16, "chosen: 5,000"]
    drawn = image.imread(picture)  # [480, 960, 4]
    assert drawn.shape == (480, 960, 4)
    assert (drawn[..., :3].max(-1) - drawn[..., :3].min(-1) > 0.3).sum() > 200  # coloured lines of the sources
    write_vocab_map(directory, tmp_path / "map", 20_000)  # the identity; smaller ones are still shown
    assert artifacts.read_manifest(tmp_path / "map", "03")["coverage_by_size"]["sizes"] == [4096, 8192, 16384]
    assert picture.exists()
    (tmp_path / "map" / "..coverage.new.1.tmp").touch()  # of a killed run
    write_vocab_map(prepared(), tmp_path / "map", 100)
    assert not picture.exists()  # no size is below that of the target
    assert sorted(path.name for path in (tmp_path / "map").iterdir()) == [".lock", "manifest.json", "vocab_map.pt"]


def test_the_command_line(run_script, prepared, tmp_path, monkeypatch, capsys):
    arguments = ["--prepared-dir", str(prepared()), "--output-dir", str(tmp_path / "map")]
    flags = ["--draft-vocab-size", 9, "--force-tokens", 88, 3]
    result = run_script("03_build_vocab_map.py", *arguments, *flags, cwd=tmp_path)
    for words in ("9 of 100 ids", "100.00%", "5 end, special and added tokens and --force-tokens (2)"):
        assert words in result.stdout
    assert "0 ids that never occur" in result.stdout and "chats" in result.stdout and not result.stderr
    script = runpy.run_path(str(REPOSITORY / "03_build_vocab_map.py"))  # running it under another name does nothing
    monkeypatch.setattr("sys.argv", ["03_build_vocab_map.py", *arguments])
    script["main"]()
    assert "full vocabulary of 100 ids, no map needed" in capsys.readouterr().out
