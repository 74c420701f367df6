"""Rows for tests: written in every format, parsed, and found by the datasets library without the hub."""

import json
from contextlib import closing

import pyarrow
import pytest
from pyarrow import parquet

from eagle3.conversations import SkipRow, parse_row
from eagle3.sources import Row, open_datasets

CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
SHARED = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
LINES = ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.json", "a.json.gz", "a.json.zst")
FORMATS = (*LINES, "a.parquet", "array.json", "array.json.gz")


def write_rows(path, rows):
    """Write rows in the format that the file's name tells; a name that begins with `array` gets a JSON array."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    content = (json.dumps(rows, indent=1) if path.name.startswith("array") else lines).encode()
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=100)
    elif path.suffix in (".gz", ".zst"):
        with pyarrow.output_stream(path, compression={".gz": "gzip", ".zst": "zstd"}[path.suffix]) as file:
            file.write(content)
    else:
        path.write_bytes(content)
    return path


def numbered(count, start=0):
    return [{"n": n, "text": f"row {n} " + "é" * (n % 7)} for n in range(start, start + count)]


def value(row):
    return json.loads(row.value) if isinstance(row.value, bytes) else row.value


def read(tmp_path, *specs, shuffle=None):
    """(source, number, value) of all rows."""
    with closing(open_datasets([str(spec) for spec in specs], shuffle=shuffle).rows(tmp_path)) as rows:
        return [(row.source, row.number, value(row)) for row in rows]


def parse(value, columns=None, **settings):
    return parse_row(Row("file", 1, value), columns, **settings)


def reason(value, columns=None, **settings):
    with pytest.raises(SkipRow) as skip:
        parse(value, columns, **settings)
    return str(skip.value)


def chat(*messages):
    return {"messages": [{"role": role, "content": content} for role, content in messages]}


def hub_of(monkeypatch, expected, rows):
    """Let the datasets library find these rows when it is asked for the `expected` name, config, split and revision."""
    import datasets
    from datasets.packaged_modules.json import json as json_module

    class Builder(json_module.Json):
        __module__ = json_module.__name__

        def __init__(self, *asked):
            self.asked = asked

        def as_streaming_dataset(self, split):
            name, config, revision = self.asked
            assert expected == (name, config, split, revision)
            return rows

    monkeypatch.setattr(
        datasets, "load_dataset_builder", lambda name, config, revision: Builder(name, config, revision)
    )
