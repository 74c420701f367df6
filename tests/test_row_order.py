"""The order of rows: interleaved by weight, shuffled by seed, the same in every run and format."""

import datetime
import os
from collections import Counter
from contextlib import closing
from fractions import Fraction

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from rows_for_tests import FORMATS, SHARED, hub_of, numbered, read, value, write_rows

from eagle3 import sources
from eagle3.conversations import parse_row
from eagle3.sources import Row, open_datasets


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.fractions(min_value=Fraction(1, 100), max_value=100), st.integers(0, 60)), min_size=1, max_size=15
    )
)
def test_interleaving_keeps_shares_within_one_row_and_loses_nothing(datasets):
    streams = [iter([Row(str(which), n, None) for n in range(1, size + 1)]) for which, (_, size) in enumerate(datasets)]
    weights = [weight for weight, _ in datasets]
    rows = list(sources._interleaved(streams, weights))
    for which, (_, size) in enumerate(datasets):
        assert [row.number for row in rows if row.source == str(which)] == list(range(1, size + 1))
    taken, left = Counter(), [size for _, size in datasets]
    for number, row in enumerate(rows, 1):
        taken[int(row.source)] += 1
        for which, weight in enumerate(weights):
            assert abs(taken[which] - number * weight / sum(weights)) < 1
        if min(size - taken[which] for which, size in enumerate(left)) == 0:
            break  # one of them has ended


def test_interleaving_goes_on_in_proportion_when_a_dataset_ends(tmp_path):
    for name, count in (("a", 20), ("b", 2), ("c", 40)):
        write_rows(tmp_path / f"{name}.jsonl", numbered(count))
    rows = read(tmp_path, *(tmp_path / spec for spec in ("a.jsonl:0.5", "b.jsonl:0.25", "c.jsonl:0.25")))
    assert "".join(source[0] for source, _, _ in rows) == "abacabaca" + "aac" * 7 + "a" + "c" * 31


@pytest.mark.parametrize("name", FORMATS)
def test_shuffling_is_the_same_permutation_for_every_format(tmp_path, name):
    rows = numbered(3_000)
    plain = read(tmp_path, write_rows(tmp_path / "plain.jsonl", rows), shuffle=3)
    path = write_rows(tmp_path / name, rows)
    shuffled = read(tmp_path, path, shuffle=3)
    assert [row[1:] for row in shuffled] == [row[1:] for row in plain]
    assert sorted(shuffled, key=lambda row: row[1]) == read(tmp_path, path)
    another = read(tmp_path, path, shuffle=4)
    assert another != shuffled and sorted(map(str, another)) == sorted(map(str, shuffled))
    assert sorted(os.listdir(tmp_path)) == sorted({"plain.jsonl", name})


def test_a_shuffled_directory_mixes_its_files(tmp_path, monkeypatch, capsys):
    data = tmp_path / "data"
    write_rows(data / "a.jsonl", numbered(300))
    (data / "b.jsonl").touch()
    write_rows(data / "c.parquet", numbered(300, 300))
    write_rows(data / "d.jsonl", numbered(300, 600))
    shuffled = read(tmp_path, data, shuffle=0)
    assert sorted(shuffled, key=lambda row: row[:2]) == read(tmp_path, data)
    counts = Counter(row[0] for row in shuffled[:300])
    assert all(70 < counts[name] < 130 for name in ("a.jsonl", "c.parquet", "d.jsonl"))
    assert capsys.readouterr().out == f"data: copying 1 file to {tmp_path}, to be shuffled\n"
    monkeypatch.setattr(sources, "MOST_OPEN", 2)
    assert read(tmp_path, data, shuffle=0) == shuffled
    assert capsys.readouterr().out == f"data: copying 4 files to {tmp_path}, to be shuffled\n"


def test_the_shuffled_order_is_fixed_for_good(tmp_path):
    """A run that is resumed with newer libraries must meet the same order."""
    write_rows(tmp_path / "a.jsonl", numbered(8))
    assert [n for _, n, _ in read(tmp_path, tmp_path / "a.jsonl", shuffle=1)] == [3, 5, 8, 6, 1, 7, 4, 2]


def test_every_row_is_equally_likely_at_every_place(tmp_path):
    write_rows(tmp_path / "a.jsonl", numbered(4))
    counts = Counter()
    for seed in range(800):
        counts.update((n, place) for place, (_, n, _) in enumerate(read(tmp_path, tmp_path / "a.jsonl", shuffle=seed)))
    assert len(counts) == 16 and all(150 < count < 250 for count in counts.values())


def test_values_that_json_cannot_hold_are_shuffled_as_text(tmp_path):
    moment = datetime.datetime(2026, 1, 2, 3, 4)
    table = pyarrow.Table.from_pylist([SHARED | {"when": moment, "raw": b"\xff", "nan": float("nan")}])
    parquet.write_table(table, tmp_path / "a.parquet")
    [row] = open_datasets([str(tmp_path)], shuffle=1).rows(tmp_path)
    assert value(row)["when"] == "2026-01-02 03:04:00" and value(row)["raw"] == "b'\\xff'"
    assert parse_row(row) == parse_row(Row("", 1, SHARED))


def test_a_full_disk_names_the_folder(tmp_path, monkeypatch):
    path = write_rows(tmp_path / "a.jsonl.gz", numbered(10))
    with open("/dev/full", "r+b", buffering=0) as full:
        monkeypatch.setattr(sources.tempfile, "TemporaryFile", lambda dir, buffering: full)
        with pytest.raises(OSError, match="No space left") as error:
            read(tmp_path, path, shuffle=1)
    assert error.value.filename == str(tmp_path)


def test_hub_rows_are_shuffled_through_a_buffer(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "BUFFER", 100)
    hub_of(monkeypatch, ("some/name", None, "train", None), numbered(1_000))
    numbers = [n for _, n, _ in read(tmp_path, "some/name", shuffle=5)]
    assert sorted(numbers) == list(range(1, 1_001)) and numbers != sorted(numbers)
    assert numbers == [n for _, n, _ in read(tmp_path, "some/name", shuffle=5)]
    assert numbers != [n for _, n, _ in read(tmp_path, "some/name", shuffle=6)]
    assert 90 < max(number - place for place, number in enumerate(numbers)) <= 101
    with closing(open_datasets(["some/name"], shuffle=5).rows(tmp_path)) as rows:
        assert value(next(rows))["n"] == numbers[0] - 1
