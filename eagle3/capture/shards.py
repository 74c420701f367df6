"""Several engines or nodes on one directory: each writes a shard, and a merge makes one manifest and one index.

    manifest.shard-0-of-2.json  index.shard-0-of-2.jsonl  engine.shard-0-of-2.log   samples with an even number
    manifest.shard-1-of-2.json  index.shard-1-of-2.jsonl  engine.shard-1-of-2.log   samples with an odd number

Names never collide, so nodes without a shared file system copy their directories over each other before the merge.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from eagle3 import artifacts, terminal
from eagle3.artifacts import WHOLE, Index, Shard
from eagle3.terminal import UserError


def totals(records: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """What a manifest says of the latest records of its samples."""
    records = list(records)
    done = [record for record in records if record["status"] == "done"]
    tokens, size = sum(record["tokens"] for record in done), sum(record["bytes"] for record in done)
    return {
        "samples": len(done),
        "tokens": tokens,
        "supervised": sum(record["supervised"] for record in done),
        "consumed": sum(record["status"] == "consumed" for record in records),
        "failed": dict(Counter(record["reason"] for record in records if record["status"] == "failed")),
        "bytes": size,
        "bytes_per_token": round(size / tokens, 1) if tokens else None,
    }


def present(directory: Path) -> list[Shard]:
    """The shards that have a manifest in `directory`, ascending."""
    found = []
    for path in directory.glob("manifest.shard-*-of-*.json"):
        index, _, count = path.name.removeprefix("manifest.shard-").removesuffix(".json").partition("-of-")
        if index.isdigit() and count.isdigit():
            found.append(Shard(int(index), int(count)))
    return sorted(found, key=lambda shard: (shard.count, shard.index))


def require_same_division(directory: Path, shard: Shard) -> None:
    """Refuse a directory that was divided otherwise: its samples would be captured twice, or never."""
    others = present(directory)
    if (other := next((one for one in others if one.count != shard.count), None)) is not None:
        whole = "--num-shards is not given" if shard == WHOLE else f"--num-shards is {shard.count}"
        raise UserError(
            f"{directory} is divided into {other.count} shards, {whole}; give --num-shards {other.count}, or another "
            "--output-dir"
        )
    if shard != WHOLE and not others and any((directory / name).exists() for name in ("manifest.json", "index.jsonl")):
        raise UserError(
            f"{directory} belongs to a run without --num-shards; go on without it, or give another --output-dir"
        )


def merge(directory: Path) -> None:
    """Make manifest.json and index.jsonl of the shards in `directory`.

    Raises UserError when a shard is missing, unfinished or at work, or when they were not made from the same things.
    """
    started = time.monotonic()
    shards = present(directory)
    if not shards:
        raise UserError(f"{directory} has no manifest.shard-*.json; run stage 02 with --num-shards first")
    if len({shard.count for shard in shards}) > 1:
        raise UserError(f"{directory} has shards of {shards[0].count} and of {shards[-1].count}; delete the wrong ones")
    if missing := sorted(set(range(shards[0].count)) - {shard.index for shard in shards}):
        raise UserError(
            f"{directory}: shards {', '.join(map(str, missing))} of {shards[0].count} are missing; run them, or copy "
            "their files here"
        )
    with contextlib.ExitStack() as locks:
        for shard in (*shards, WHOLE):
            locks.enter_context(artifacts.directory_lock(directory, shard))
        manifests = [artifacts.read_manifest(directory, "02", shard=shard) for shard in shards]
        records: dict[int, dict[str, Any]] = {}
        for shard, manifest in zip(shards, manifests, strict=True):
            where = directory / shard.named("manifest.json")
            if not manifest["complete"]:
                raise UserError(f"{where}: this shard has not finished; run its command again")
            artifacts.require_same(where, manifest["fingerprint"], manifests[0]["fingerprint"], "make it again")
            index = Index(directory, shard).samples()
            if (found := totals(index.values())["samples"]) != manifest["samples"]:
                raise UserError(
                    f"{directory / shard.named('index.jsonl')} names {found} samples, the shard's manifest says "
                    f"{manifest['samples']}; run the shard's command again"
                )
            records |= index
        if lost := sorted(set(range(max(records, default=0))) - records.keys()):
            raise UserError(
                f"{directory}: sample {lost[0]} is in no shard, for stage 01 had fewer samples when its shard was "
                "captured; run the shards' commands again"
            )
        done = [record for record in records.values() if record["status"] == "done"]
        artifacts.require_whole(directory, "02", done)
        with artifacts.atomic_file(Index(directory).path) as file:
            artifacts.IndexWriter(file).add_all([record for _, record in sorted(records.items())])
        facts = {key: manifests[0][key] for key in ("hidden_size", "vocab_size", "aux_layers", "canary")}
        timings = [manifest.get("timing") for manifest in manifests]
        facts["timing"] = None
        if all(timings):  # shards are captured at the same time
            facts["timing"] = {
                "tokens": sum(timing["tokens"] for timing in timings),
                "seconds": max(timing["seconds"] for timing in timings),
            }
        artifacts.write_manifest(
            directory,
            "02",
            dict(manifests[0]["fingerprint"]),
            complete=True,
            wanted=sum(manifest["wanted"] for manifest in manifests),
            **totals(records.values()),
            **facts,
            shards=len(shards),
        )
    rows = {"hidden states": directory, "shards": len(shards), "samples": len(done)}
    terminal.summary("stage 02: shards merged", rows, started)
