"""Order and packing of samples: deterministic in seed and epoch, whatever the number of ranks."""

import hashlib
import random

from eagle3.terminal import UserError


def hold_out(records: list[dict], fraction: float, seed: int) -> tuple[list[dict], list[dict]]:
    """Split records by conversation into (train, held out): the conversations with the smallest keyed hashes.

    At least one conversation is held out when `fraction` is above 0, and at least one is left to train on.
    """
    conversations = sorted(
        {record["conversation"] for record in records},
        key=lambda name: hashlib.sha256(f"{seed}/{name}".encode()).digest(),
    )
    if fraction <= 0:
        return records, []
    if len(conversations) < 2:
        raise UserError(f"{len(conversations)} conversation cannot be split; give more samples or --val-fraction 0")
    count = min(max(1, round(fraction * len(conversations))), len(conversations) - 1)
    held = set(conversations[:count])
    return [r for r in records if r["conversation"] not in held], [r for r in records if r["conversation"] in held]


def pack(records: list[dict], max_tokens: int, max_rows: int) -> list[list[dict]]:
    """Fill packs of at most `max_tokens` tokens and `max_rows` supervised ones in the given order (next fit).

    Two budgets because memory follows both: a prompt token costs its state, key and value, a supervised one the
    activations of every TTT step.
    """
    packs: list[list[dict]] = []
    tokens = rows = 0  # of the last pack
    for record in records:
        for count, most, flag in (("tokens", max_tokens, "--max-tokens"), ("supervised", max_rows, "--max-rows")):
            if record[count] > most:
                named = "tokens" if count == "tokens" else "supervised tokens"
                raise UserError(f"sample {record['index']} has {record[count]} {named}, {flag} is {most}; raise it")
        if not packs or tokens + record["tokens"] > max_tokens or rows + record["supervised"] > max_rows:
            packs.append([])
            tokens = rows = 0
        packs[-1].append(record)
        tokens += record["tokens"]
        rows += record["supervised"]
    return packs


def epoch_packs(records: list[dict], max_tokens: int, max_rows: int, seed: int, epoch: int) -> list[list[dict]]:
    """The packs of one epoch: shuffled by (seed, epoch), then packed."""
    order = list(records)
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return pack(order, max_tokens, max_rows)


def step_packs(packs: list[list[dict]], step: int, rank: int, world: int, accumulation: int) -> list[list[dict]]:
    """This rank's packs of one optimizer step, `accumulation` of them; the last step fills up with empty packs."""
    first = step * world * accumulation
    places = [first + micro * world + rank for micro in range(accumulation)]
    return [packs[place] if place < len(packs) else [] for place in places]


def steps_per_epoch(packs: int, world: int, accumulation: int) -> int:
    """Optimizer steps that `packs` packs take, the last partial one included."""
    return -(-packs // (world * accumulation))
