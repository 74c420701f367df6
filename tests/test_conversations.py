"""Rows to messages: every shape that real files have, and every fault named instead of mended."""

import json

import pyarrow
import pytest
from pyarrow import parquet

from eagle3.conversations import HubDataset, LocalFiles, Row, SkipRow, open_dataset, parse_row
from eagle3.terminal import UserError

CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
SHARED = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}


def parse(value):
    return parse_row(Row("file", 1, value))


def chat(*messages):
    return {"messages": [{"role": role, "content": content} for role, content in messages]}


def write_lines(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def read(path):
    """(place, messages or reason) of all rows."""
    result = []
    for row in LocalFiles(path).rows():
        try:
            result.append((row.place, parse_row(row).messages))
        except SkipRow as skip:
            result.append((row.place, str(skip)))
    return result


def test_both_formats_give_the_same_messages():
    assert parse(CHAT) == parse(SHARED) == parse(json.dumps(CHAT).encode())
    assert parse(CHAT).messages == [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    names = {"conversations": [{"from": "system", "value": "s"}, {"from": "user", "value": "q"}]}
    for name in ("gpt", "chatgpt", "assistant"):
        row = {"conversations": [*names["conversations"], {"from": name, "value": "a"}]}
        assert [message["role"] for message in parse(row).messages] == ["system", "user", "assistant"]


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "world"}]
    assert parse(chat(("user", parts), ("assistant", "a"))) == parse(chat(("user", "Hello world"), ("assistant", "a")))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b" \n", "blank line"),
        (b"{bad json", "invalid JSON"),
        (b"\xff\xfe{}", "invalid JSON"),
        (b"[" * 100_000, "invalid JSON"),
        ([CHAT], "row is not an object"),
        ({}, "no messages or conversations"),
        ({"messages": None}, r"no messages or conversations \(columns: messages\)"),
        ({"prompt": "q", "answer": "a"}, r"no messages or conversations \(columns: answer, prompt\)"),
        ({"messages": [{"speaker": "user", "text": "q"}]}, r"message without role \(keys: speaker, text\)"),
        ({"messages": "text"}, "messages is not a list"),
        ({"conversations": {}}, "conversations is not a list"),
        ({"messages": []}, "messages is empty"),
        ({"messages": ["text"]}, "message is not an object"),
        ({"messages": [{"role": "user"}]}, "user content is null"),
        (chat(("user", "q"), ("my-model", "a")), "unknown role 'my-model'"),
        (chat(("user", "q"), (None, "a")), "unknown role None"),
        (chat(("user", "q"), (["x"], "a")), r"unknown role \['x'\]"),
        (chat(("user", "q")), "no assistant turn"),
        (chat(("assistant", "a"), ("user", "q"), ("assistant", "b")), "conversation starts with the assistant"),
        (chat(("user", "q"), ("assistant", None)), "assistant content is null"),
        (chat(("user", "q"), ("assistant", "")), "assistant content is empty"),
        (chat(("user", "q"), ("assistant", " \n")), "assistant content is empty"),
        (chat(("user", "q"), ("assistant", 7)), "assistant content of type int"),
        (chat(("user", True), ("assistant", "a")), "user content of type bool"),
        (chat(("user", {"a": 1}), ("assistant", "a")), "user content of type dict"),
        (chat(("user", [{"type": "image_url"}]), ("assistant", "a")), "user content part of type image_url"),
        (chat(("user", ["text"]), ("assistant", "a")), "user content part of type str"),
        (chat(("user", "q"), ("assistant", "a")) | {"tools": "no list"}, "tools is not a list"),
        ({"messages": [{"role": "assistant", "content": "a", "tool_calls": [{"x": 1}]}]}, "malformed tool_calls"),
    ],
)
def test_faults_are_named(value, reason):
    with pytest.raises(SkipRow, match=f"^{reason}$"):
        parse(value)


def test_surrogates():
    row = chat(("user", "\ud83d\ude00 ok"), ("assistant", "bad \ud83d"))
    assert [message["content"] for message in parse(json.dumps(row).encode()).messages] == ["😀 ok", "bad \ufffd"]
    with pytest.raises(SkipRow) as skip:
        parse(rb'{"messages": [{"role": "\ud83d", "content": "q"}]}')
    str(skip.value).encode()


def test_tool_calls_as_text_and_as_objects_are_equal():
    def row(arguments):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        return {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [call]}]}

    assert parse(row('{"a": 1}')) == parse(row({"a": 1}))
    assert parse(row({"a": 1})).messages[1]["content"] == ""


def test_digest_follows_the_text_and_trailing_counts_what_no_answer_follows():
    assert parse(CHAT).digest == parse(SHARED).digest
    assert parse(CHAT).digest != parse(chat(("user", "q"), ("assistant", "b"))).digest
    assert parse(chat(("user", "q"), ("assistant", "a"), ("user", "x"), ("user", "y"))).trailing == 2
    assert parse(CHAT).trailing == 0


def test_a_directory_with_different_columns_and_kinds_of_file(tmp_path):
    write_lines(tmp_path / "a.jsonl", CHAT | {"id": 1, "system": None}, "{bad", "", CHAT | {"id": "x", "system": "S"})
    (tmp_path / "b.json").write_text("\ufeff" + json.dumps([SHARED | {"extra": [1]}, CHAT]), encoding="utf-8")
    write_lines(tmp_path / "c.json", CHAT)
    parquet.write_table(pyarrow.Table.from_pylist([SHARED, SHARED]), tmp_path / "d.parquet")
    (tmp_path / "README.md").write_text("not read")
    messages = parse(CHAT).messages
    assert read(tmp_path) == [
        ("a.jsonl:1", messages),
        ("a.jsonl:2", "invalid JSON"),
        ("a.jsonl:3", "blank line"),
        ("a.jsonl:4", messages),
        ("b.json:1", messages),
        ("b.json:2", messages),
        ("c.json:1", messages),
        ("d.parquet:1", messages),
        ("d.parquet:2", messages),
    ]


def test_total_counts_rows(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n{"a": 2}')
    assert LocalFiles(tmp_path).total() == 2
    parquet.write_table(pyarrow.Table.from_pylist([SHARED] * 3), tmp_path / "b.parquet")
    assert LocalFiles(tmp_path).total() == 5


def test_later_files_are_not_opened_before_their_turn(tmp_path):
    write_lines(tmp_path / "a.jsonl", CHAT, CHAT)
    (tmp_path / "b.parquet").write_text("not parquet")
    (tmp_path / "c.json").write_text('[{"messages": ')
    rows = LocalFiles(tmp_path).rows()
    assert [next(rows).number, next(rows).number] == [1, 2]
    with pytest.raises(UserError, match=r"b\.parquet is not a readable parquet file"):
        next(rows)
    with pytest.raises(UserError, match=r"c\.json is not valid JSON"):
        next(LocalFiles(tmp_path / "c.json").rows())


def test_identity_follows_names_and_content(tmp_path):
    first = write_lines(tmp_path / "a.jsonl", CHAT)
    before = LocalFiles(tmp_path).identity()
    assert before.startswith(f"{tmp_path} (sha256 ") and LocalFiles(tmp_path).identity() == before
    first.write_text(first.read_text().replace("q", "Q"))
    changed = LocalFiles(tmp_path).identity()
    first.rename(tmp_path / "b.jsonl")
    assert len({before, changed, LocalFiles(tmp_path).identity()}) == 3


def test_what_is_no_dataset_is_refused(tmp_path):
    (tmp_path / "a.txt").touch()
    for dataset, message in {
        str(tmp_path): "no .json, .jsonl, .parquet files directly in this directory",
        str(tmp_path / "a.txt"): "expected a file that ends in .json, .jsonl, .parquet, or a directory",
        str(tmp_path / "none.jsonl"): "no such file or directory",
        "none.jsonl": "no such file or directory",
        "./none": "no such file or directory",
    }.items():
        with pytest.raises(UserError) as error:
            open_dataset(dataset, "train")
        assert message in str(error.value) and dataset in str(error.value)


def hub_dataset(expected, name, rows):
    """A builder of the datasets library that gives these rows."""
    from datasets.packaged_modules.json import json as json_module

    class Builder(json_module.Json):
        __module__ = json_module.__name__

        def __init__(self):
            assert name == expected

        def as_streaming_dataset(self, split):
            assert split == "train"
            return rows

    return Builder()


def test_hub_rows_and_a_failure_between_them(monkeypatch):
    import datasets

    def rows():
        yield SHARED
        raise ConnectionError("gone\nmore")

    monkeypatch.setattr(datasets, "load_dataset_builder", lambda name: hub_dataset("some/name", name, rows()))
    hub = open_dataset("some/name", "train")
    assert isinstance(hub, HubDataset) and hub.identity() == "some/name" and hub.total() is None
    read_rows = hub.rows()
    assert parse_row(next(read_rows)) == parse(CHAT)
    with pytest.raises(UserError, match=r"^--dataset some/name: reading failed after row 1 \(ConnectionError: gone\)"):
        next(read_rows)


def test_hub_streams_the_rows_of_real_parquet_and_stops_early(monkeypatch, tmp_path):
    import datasets

    parquet.write_table(pyarrow.Table.from_pylist([SHARED] * 500), tmp_path / "a.parquet")
    real = datasets.load_dataset_builder
    monkeypatch.setattr(
        datasets, "load_dataset_builder", lambda _: real("parquet", data_files=str(tmp_path / "a.parquet"))
    )
    rows = open_dataset("some/name", "train").rows()
    assert [next(rows).place for _ in range(3)] == ["some/name:1", "some/name:2", "some/name:3"]
    rows.close()
