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


def pack(records: list[dict], max_tokens: int) -> list[list[dict]]:
    """Fill packs of at most `max_tokens` tokens in the given order (next fit)."""
    packs: list[list[dict]] = []
    room = 0
    for record in records:
        if record["tokens"] > max_tokens:
            raise UserError(
                f"sample {record['index']} has {record['tokens']} tokens, --max-tokens is {max_tokens}; raise it"
            )
        if not packs or record["tokens"] > room:
            packs.append([])
            room = max_tokens
        packs[-1].append(record)
        room -= record["tokens"]
    return packs


def epoch_packs(records: list[dict], max_tokens: int, seed: int, epoch: int) -> list[list[dict]]:
    """The packs of one epoch: shuffled by (seed, epoch), then packed."""
    order = list(records)
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return pack(order, max_tokens)


def step_packs(packs: list[list[dict]], step: int, rank: int, world: int, accumulation: int) -> list[list[dict]]:
    """This rank's packs of one optimizer step, `accumulation` of them; the last step fills up with empty packs."""
    first = step * world * accumulation
    places = [first + micro * world + rank for micro in range(accumulation)]
    return [packs[place] if place < len(packs) else [] for place in places]


def steps_per_epoch(packs: int, world: int, accumulation: int) -> int:
    """Optimizer steps that `packs` packs take, the last partial one included."""
    return -(-packs // (world * accumulation))
