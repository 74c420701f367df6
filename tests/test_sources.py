"""Rows of files and hub datasets: every format, any order of opening them, shuffling and interleaving that repeat."""

import gzip
import json
import os
import subprocess
import sys
import time
from contextlib import closing

import pyarrow
import pytest
from pyarrow import parquet
from rows_for_tests import CHAT, FORMATS, SHARED, hub_of, numbered, read, write_rows

from eagle3.conversations import SkipRow, parse_row
from eagle3.sources import LocalFiles, Row, open_datasets
from eagle3.terminal import UserError

# ------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_rows(tmp_path, name):
    rows = numbered(1_000)
    path = write_rows(tmp_path / name, rows)
    assert read(tmp_path, path) == [(name, n + 1, row) for n, row in enumerate(rows)]
    known = name in ("a.jsonl", "a.json", "a.parquet")
    assert open_datasets([str(path)]).total() == (1_000 if known else None)


def test_a_directory_of_a_mixture_is_read_by_relative_path(tmp_path):
    """Files with other columns, of other formats, in folders and behind links. (P07)"""
    data = tmp_path / "data"
    write_rows(data / "b.jsonl", [CHAT | {"id": 1, "system": None}, CHAT | {"id": "x", "system": "S"}])
    write_rows(data / "a" / "z.parquet", [SHARED | {"extra": 1}])
    write_rows(data / "a" / "deep" / "c.jsonl.gz", [CHAT | {"extra": [1]}])
    (data / "c.json").write_text("\ufeff" + json.dumps([SHARED | {"extra": [1]}, CHAT]), encoding="utf-8")
    write_rows(data / "d.json", [CHAT])
    for hidden in (".cache/e.jsonl", ".f.jsonl"):
        write_rows(data / hidden, [{"bad": 1}])
    (data / "README.md").write_text("not read")
    write_rows(tmp_path / "elsewhere" / "g.jsonl", [CHAT])
    (data / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "circle").symlink_to(data)
    rows = list(open_datasets([str(data)]).rows(tmp_path))
    places = ["a/deep/c.jsonl.gz:1", "a/z.parquet:1", "b.jsonl:1", "b.jsonl:2", "c.json:1", "c.json:2", "d.json:1"]
    assert [row.place for row in rows] == [*places, "linked/g.jsonl:1"]
    assert {str(parse_row(row).messages) for row in rows} == {str(parse_row(Row("", 1, CHAT)).messages)}


@pytest.mark.parametrize("late", [False, True])
def test_a_column_that_is_null_for_long(tmp_path, late):
    """60,000 rows of one type and one of another, in both orders. (P06)"""
    rows = [json.dumps(SHARED | {"system": None, "fill": "x" * 300})] * 60_000
    rows.insert(len(rows) if late else 0, json.dumps(SHARED | {"system": "S"}))
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    read_rows = list(open_datasets([str(tmp_path)]).rows(tmp_path))
    assert len(read_rows) == 60_001
    assert {parse_row(row).digest for row in read_rows} == {parse_row(Row("", 1, CHAT)).digest}


def test_lines_keep_their_numbers(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"a": 1}\n\n{bad\r\n{"a": 2}')
    rows = list(open_datasets([str(tmp_path)]).rows(tmp_path))
    assert [(row.number, row.value) for row in rows] == [
        (1, b'{"a": 1}\n'),
        (2, b"\n"),
        (3, b"{bad\r\n"),
        (4, b'{"a": 2}'),
    ]
    shuffled = list(open_datasets([str(tmp_path)], shuffle=1).rows(tmp_path))
    assert sorted(shuffled, key=lambda row: row.number) == rows


def test_fields_that_arrow_adds_are_left_out(tmp_path):
    """Objects of one column get each other's fields as nulls; tools and arguments must not show them. (P05)"""
    calls = [{"function": {"name": "f", "arguments": arguments}} for arguments in ({"a": 1}, {"b": [None, "x"]})]
    rows = [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]}
        for call in calls
    ]
    path = write_rows(tmp_path / "a.parquet", rows)
    assert parquet.read_table(path).to_pylist() != rows
    assert [row for _, _, row in read(tmp_path, path)] == rows


def test_later_files_are_not_opened_before_their_turn(tmp_path):
    """Ten rows of a million lines, and of fifty parquet files of which all but the first are corrupt. (P33)"""
    (tmp_path / "many").mkdir()
    (tmp_path / "many" / "a.jsonl").write_bytes(b'{"a": 1}\n' * 1_000_000)
    write_rows(tmp_path / "shards" / "00.parquet", numbered(12))
    for shard in range(1, 50):
        (tmp_path / "shards" / f"{shard:02}.parquet").write_bytes(b"PAR1 not parquet")
    for name in ("many", "shards"):
        started = time.monotonic()
        with closing(open_datasets([str(tmp_path / name)]).rows(tmp_path)) as rows:
            assert [next(rows).number for _ in range(10)] == list(range(1, 11))
        assert time.monotonic() - started < 5
    with pytest.raises(UserError, match=r"shards/01\.parquet cannot be read after row 0 \(ArrowInvalid: "):
        read(tmp_path, tmp_path / "shards")
    assert open_datasets([str(tmp_path / "shards")]).total() is None


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.zst", "a.parquet", "array.json"])
@pytest.mark.parametrize("keep", [0.5, 0.9999])
def test_a_cut_file_is_named_with_the_row_reached(tmp_path, name, keep):
    path = write_rows(tmp_path / name, [{"text": os.urandom(500).hex()} for _ in range(5_000)])
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
    reached, rows = 0, LocalFiles(path).rows()
    with pytest.raises(UserError) as error:
        for row in rows:
            reached = row.number
    assert f"{path} cannot be read after row {reached} (" in str(error.value)
    assert "\n" not in str(error.value)
    assert (reached > 0) == name.startswith("a.json")
    with pytest.raises(UserError, match="cannot be read after row"):
        read(tmp_path, path, shuffle=1)


def test_a_file_that_is_not_what_its_name_says(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(b'{"a": 1}\n')
    with pytest.raises(UserError, match=r"a\.jsonl\.gz cannot be read after row 0 \(OSError: zlib inflate failed"):
        read(tmp_path, tmp_path / "a.jsonl.gz")


def test_several_members_of_a_compressed_file_are_one(tmp_path):
    parts = [b"".join(json.dumps(row).encode() + b"\n" for row in numbered(500, start)) for start in (0, 500)]
    (tmp_path / "a.jsonl.gz").write_bytes(b"".join(gzip.compress(part) for part in parts))
    assert [row["n"] for _, _, row in read(tmp_path, tmp_path / "a.jsonl.gz")] == list(range(1_000))


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl.zst"])
def test_memory_does_not_grow_with_the_file(tmp_path, name):
    path = write_rows(tmp_path / name, [{"text": os.urandom(1_000).hex()} for _ in range(20_000)])
    most = 0
    for row in LocalFiles(path).rows():
        if row.number % 500 == 0:
            most = max(most, pyarrow.total_allocated_bytes())
    assert path.stat().st_size > 20e6 and most < 4e6


def test_an_error_of_the_system_is_no_fault_of_the_file(tmp_path):
    path = write_rows(tmp_path / "a.jsonl.gz", numbered(3))
    rows = open_datasets([str(path)]).rows(tmp_path)
    path.unlink()
    with pytest.raises(FileNotFoundError) as error:
        next(rows)
    assert error.value.filename == str(path)


def test_links_and_odd_names(tmp_path):
    """A hub cache links names to blobs; a name may hold any bytes. (P12)"""
    write_rows(tmp_path / "blobs" / "a.jsonl", numbered(2)).rename(tmp_path / "blobs" / "0abc")
    (tmp_path / "rows.jsonl").symlink_to(tmp_path / "blobs" / "0abc")
    assert [source for source, _, _ in read(tmp_path, tmp_path / "rows.jsonl")] == ["rows.jsonl"] * 2
    odd = os.fsencode(tmp_path) + b"/odd/\xff.jsonl"
    (tmp_path / "odd").mkdir()
    with open(odd, "wb") as file:
        file.write(b"{}\n")
    assert read(tmp_path, tmp_path / "odd") == [("\\xff.jsonl", 1, {})]
    (tmp_path / "odd" / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError):
        read(tmp_path, tmp_path / "odd")


def test_local_rows_need_no_network(tmp_path):
    """Neither the datasets library nor a socket is touched. (P35)"""
    for name in FORMATS:
        write_rows(tmp_path / name, numbered(3))
    program = (
        "import socket, sys, pathlib\n"
        "def refuse(*_): raise AssertionError('network')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "from eagle3.sources import open_datasets\n"
        f"data = open_datasets([{str(tmp_path)!r}], shuffle=1)\n"
        f"data.identity(); data.total(); rows = list(data.rows(pathlib.Path({str(tmp_path)!r})))\n"
        "print(len(rows), [name for name in ('datasets', 'huggingface_hub') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == f"{3 * len(FORMATS)} []"


def test_identity_follows_names_and_content(tmp_path):
    first = write_rows(tmp_path / "data" / "a.jsonl", [CHAT])

    def identity(shuffle=None):
        return open_datasets([str(tmp_path / "data")], shuffle=shuffle).identity()

    before = identity()
    assert before == identity() and json.loads(json.dumps(before)) == before
    assert {**before[0], "sha256": 0} == {"name": "data", "files": 1, "sha256": 0, "weight": 1.0, "shuffle": None}
    assert identity(shuffle=7) == [before[0] | {"shuffle": 7}]
    first.write_text(first.read_text().replace("q", "Q"))
    changed = identity()
    first.rename(tmp_path / "data" / "b.jsonl")
    assert len({str(before), str(changed), str(identity())}) == 3


# ------------------------------------------------------------------------------------------------- specs


def test_what_is_no_dataset_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").touch()
    write_rows(tmp_path / "a.jsonl", [CHAT])
    write_rows(tmp_path / "both" / "in" / "b.jsonl", [CHAT])
    (tmp_path / "none").mkdir()
    for specs, message in {
        ("none",): "--dataset none: no .json, .jsonl, .jsonl.gz, .jsonl.zst, .json.gz, .json.zst, .parquet files in",
        ("a.txt",): "--dataset a.txt: expected a file that ends in .json, .jsonl, .jsonl.gz,",
        ("no.jsonl",): "--dataset no.jsonl: no such file or directory",
        ("no.jsonl.gz:2",): "--dataset no.jsonl.gz: no such file or directory",
        ("./no",): "--dataset ./no: no such file or directory",
        ("https://host/a/b",): "--dataset https://host/a/b: no such file or directory",
        ("",): "no such file or directory",
        ("a.jsonl:x",): "--dataset a.jsonl:x: weight 'x', expected a number above 0",
        ("a.jsonl:0",): "weight '0', expected a number above 0",
        ("a.jsonl:-1",): "weight '-1', expected",
        ("a.jsonl:nan",): "weight 'nan', expected",
        ("a.jsonl:1e999999999",): "weight '1e999999999', expected",
        ("a.jsonl:",): "weight '', expected",
        ("a.jsonl,split=x",): "--dataset a.jsonl,split=x: split only fit hub datasets, a.jsonl is local; leave it out",
        ("x/y,splits=x",): "--dataset x/y,splits=x: 'splits=x', expected each of config, split, revision once",
        ("x/y,split=",): "'split=', expected each of config",
        ("x/y,split=a,split=b",): "'split=b', expected each of config",
        ("a.jsonl", "./a.jsonl"): f"--dataset: {tmp_path}/a.jsonl is in 2 of the given datasets; leave it out",
        ("both", "both/in:2"): f"--dataset: {tmp_path}/both/in/b.jsonl is in 2 of the given datasets",
    }.items():
        with pytest.raises(UserError) as error:
            open_datasets(list(specs))
        assert message in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(UserError, match="seed -1 of the shuffle: expected at least 0"):
        open_datasets(["a.jsonl"], shuffle=-1)


def test_a_path_that_exists_is_that_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "a,split=x:3" / "b.jsonl", [CHAT])
    assert [source for source, _, _ in read(tmp_path, "a,split=x:3")] == ["b.jsonl"]
    assert open_datasets(["a,split=x:3:0.5"]).identity()[0]["weight"] == 0.5
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(read(tmp_path, "~/a,split=x:3")) == 1


def test_sources_of_several_datasets_name_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "one" / "a.jsonl", numbered(1))
    write_rows(tmp_path / "one.jsonl", numbered(1))
    write_rows(tmp_path / "x" / "one" / "a.jsonl", numbered(1))
    for shuffle in (None, 1):
        assert [row[0] for row in read(tmp_path, "one", "one.jsonl", shuffle=shuffle)] == ["one/a.jsonl", "one.jsonl"]
        assert [row[0] for row in read(tmp_path, "one:2", "x/one", "./one.jsonl", shuffle=shuffle)] == [
            "one/a.jsonl",
            "x/one/a.jsonl",
            "./one.jsonl",
        ]
    assert str(open_datasets(["one:2", "one.jsonl"])) == "one, one.jsonl"


# --------------------------------------------------------------------------------------------------- hub


def test_hub_rows_and_a_failure_between_them(tmp_path, monkeypatch):
    def rows():
        yield SHARED | {"extra": None}
        raise ConnectionError("gone\nmore")

    hub_of(monkeypatch, ("some/name", None, "train", None), rows())
    data = open_datasets(["some/name"])
    assert data.total() is None and str(data) == "some/name"
    read_rows = data.rows(tmp_path)
    assert next(read_rows) == Row("some/name", 1, SHARED)
    with pytest.raises(UserError, match=r"^--dataset some/name: reading failed after row 1 \(ConnectionError: gone\)"):
        next(read_rows)


def test_hub_settings(tmp_path, monkeypatch):
    hub_of(monkeypatch, ("some/name", "c", "s", "refs/pr/1"), [SHARED] * 2)
    spec = "some/name,config=c,split=s,revision=refs/pr/1:0.25"
    settings = {"name": "some/name", "config": "c", "split": "s", "revision": "refs/pr/1"}
    assert open_datasets([spec]).identity() == [settings | {"weight": 0.25, "shuffle": None}]
    with pytest.raises(UserError, match="--dataset some/name is given twice; give it once, with a weight"):
        open_datasets([spec, spec])
    write_rows(tmp_path / "a.jsonl", numbered(2))
    assert [row[0] for row in read(tmp_path, tmp_path / "a.jsonl", spec)] == [
        "a.jsonl",
        "a.jsonl",
        "some/name",
        "some/name",
    ]


def test_what_the_hub_says_is_kept_on_one_line(monkeypatch):
    import datasets

    def refuse(name, config, revision):
        raise ValueError("Config name is missing.\nPlease pick one among: ['a', 'b']")

    monkeypatch.setattr(datasets, "load_dataset_builder", refuse)
    with pytest.raises(UserError) as error:
        open_datasets(["some/name"])
    assert "Config name is missing. Please pick one among: ['a', 'b']); give a local file" in str(error.value)


def test_hub_streams_the_rows_of_real_parquet_and_stops_early(monkeypatch, tmp_path):
    import datasets

    write_rows(tmp_path / "a.parquet", [SHARED] * 500)
    real = datasets.load_dataset_builder
    monkeypatch.setattr(
        datasets, "load_dataset_builder", lambda *_, **__: real("parquet", data_files=str(tmp_path / "a.parquet"))
    )
    rows = open_datasets(["some/name"]).rows(tmp_path)
    assert [next(rows).place for _ in range(3)] == ["some/name:1", "some/name:2", "some/name:3"]
    rows.close()


def test_rows_of_a_kind_that_cannot_be_used_are_named_by_place(tmp_path):
    """(P09)"""
    lines = ['{"messages": []}', '{"messages": null}', "{}", '{"messages": "text"}', json.dumps(CHAT), "", "{bad json"]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    said = {}
    for row in open_datasets([str(tmp_path)]).rows(tmp_path):
        try:
            said[row.place] = parse_row(row).messages
        except SkipRow as skip:
            said[row.place] = str(skip)
    assert said == {
        "a.jsonl:1": "messages is empty",
        "a.jsonl:2": "no conversation in columns messages",
        "a.jsonl:3": "row without columns",
        "a.jsonl:4": "messages is not a list",
        "a.jsonl:5": CHAT["messages"],
        "a.jsonl:6": "blank line",
        "a.jsonl:7": "invalid JSON",
    }
