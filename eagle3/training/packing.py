"""Which samples make a micro-batch, and in which order: the same for a seed and epoch, whatever the number of ranks."""

import hashlib
import random
from bisect import bisect_left, insort
from dataclasses import dataclass
from operator import itemgetter

from eagle3.terminal import UserError

OPEN = 128  # packs that may still take a sample
FULL = 0.01  # of a budget: with less room than that a pack takes no more
WINDOW = 1024  # packs among which those of like cost are found
ALIKE = 64  # packs of like cost in a row: those of an optimizer step, on up to so many ranks


def is_whole(record: dict) -> bool:
    """Whether stage 02 has written the sample."""
    return record["status"] == "done"


def hold_out(records: list[dict], fraction: float, seed: int) -> tuple[list[dict], list[dict]]:
    """Split records by conversation into (train, held out): the conversations with the smallest keyed hashes.

    At least one conversation with a whole sample is held out when `fraction` is above 0, and at least one is left to
    train on. Where the others go does not depend on which samples are whole.
    """
    conversations = sorted(
        {record["conversation"] for record in records},
        key=lambda name: hashlib.sha256(f"{seed}/{name}".encode()).digest(),
    )
    if fraction <= 0:
        return records, []
    sound = {record["conversation"] for record in records if is_whole(record)}
    if len(sound) < 2:
        raise UserError(f"{len(sound)} conversation cannot be split; give more samples or --val-fraction 0")
    places = [place for place, name in enumerate(conversations) if name in sound]
    count = min(max(places[0] + 1, round(fraction * len(conversations))), places[-1])
    held = set(conversations[:count])
    return [r for r in records if r["conversation"] not in held], [r for r in records if r["conversation"] in held]


@dataclass(frozen=True)
class Cost:
    """Floating-point operations that a sample takes, from its lengths alone."""

    token: float
    supervised: float  # token, all TTT steps
    key: float  # that a draft start attends to, all TTT steps

    def __call__(self, record: dict) -> float:
        """Of an index record. Where the supervised tokens lie is not known: at the end, say, where most of them are."""
        tokens, supervised = record["tokens"], record["supervised"]
        return self.token * tokens + self.supervised * supervised + self.key * supervised * (tokens - supervised / 2)


def require_fit(records: list[dict], max_tokens: int, max_rows: int) -> None:
    """Raises UserError naming the first sample that no pack takes."""
    for record in records:
        for count, most, flag in (("tokens", max_tokens, "--max-tokens"), ("supervised", max_rows, "--max-rows")):
            if record[count] > most:
                named = "tokens" if count == "tokens" else "supervised tokens"
                raise UserError(f"sample {record['index']} has {record[count]} {named}, {flag} is {most}; raise it")


def pack(records: list[dict], max_tokens: int, max_rows: int) -> list[list[dict]]:
    """Fill packs of at most `max_tokens` tokens and `max_rows` supervised ones, taking the records as they come.

    Two budgets because memory follows both: a prompt token costs its state, key and value, a supervised one the
    activations of every TTT step. A record goes where it leaves least of the budget that is scarcer over all records
    (best fit), among the OPEN packs that have most. There are never more packs than next fit makes: what that has in
    one pack all fits into the first one that is begun meanwhile, and the newest is open until the next is begun.
    """
    require_fit(records, max_tokens, max_rows)
    scarce, other, most, most_other = "tokens", "supervised", max_tokens, max_rows
    if sum(record["supervised"] for record in records) * max_tokens > sum(r["tokens"] for r in records) * max_rows:
        scarce, other, most, most_other = other, scarce, most_other, most
    packs: list[list[dict]] = []
    room_of_other: list[int] = []  # by pack
    growing: list[tuple[int, int]] = []  # room of the scarce budget and number of a pack, ascending
    for record in records:
        needed, needed_of_other = record[scarce], record[other]
        place = bisect_left(growing, (needed,))
        while place < len(growing) and room_of_other[growing[place][1]] < needed_of_other:
            place += 1
        if place < len(growing):
            room, number = growing.pop(place)
        else:
            if len(growing) == OPEN:
                del growing[0]  # closed: it has least room
            room, number = most, len(packs)
            packs.append([])
            room_of_other.append(most_other)
        packs[number].append(record)
        room -= needed
        room_of_other[number] -= needed_of_other
        if number == len(packs) - 1 or (room >= FULL * most and room_of_other[number] >= FULL * most_other):
            insort(growing, (room, number))
    return packs


def epoch_packs(
    records: list[dict], max_tokens: int, max_rows: int, seed: int, epoch: int, cost: Cost
) -> list[list[dict]]:
    """The packs of one epoch: records shuffled by (seed, epoch), packed, and packs of like cost put side by side.

    Planned with the samples that stage 02 failed, which then are left out of their packs: the place of every other
    sample is what it would be had they not failed, and a pack of nothing else stays as an empty one.
    """
    rng = random.Random(f"{seed}/{epoch}")
    budgets = max_tokens, max_rows
    order = [r for r in records if is_whole(r) or (r["tokens"] <= max_tokens and r["supervised"] <= max_rows)]
    order.sort(key=itemgetter("index"))
    rng.shuffle(order)
    return [list(filter(is_whole, one)) for one in _side_by_side(pack(order, *budgets), cost, rng)]


def _side_by_side(packs: list[list[dict]], cost: Cost, rng: random.Random) -> list[list[dict]]:
    """The packs in an order in which ranks finish together: neighbours cost about the same, steps are shuffled.

    Of each WINDOW packs, sorted by cost, runs of ALIKE are shuffled; inside a run halves are exchanged at random, then
    halves of halves, and so on. So 2, 4, ... ALIKE packs from a multiple of that number on are next to each other in
    cost, whatever the number of ranks: the order does not depend on it.
    """
    ordered: list[list[dict]] = []
    for start in range(0, len(packs), WINDOW):
        window = sorted(packs[start : start + WINDOW], key=lambda one: sum(map(cost, one)))
        odd = len(window) % ALIKE  # what is left of the last window comes last: its cheapest, or its dearest
        cut = odd if rng.random() < 0.5 else len(window) - odd
        rest, window = (window[:cut], window[cut:]) if cut == odd else (window[cut:], window[:cut])
        runs = [window[place : place + ALIKE] for place in range(0, len(window), ALIKE)]
        rng.shuffle(runs)
        for run in [*runs, rest]:
            ordered += _halves_exchanged(run, rng)
    return ordered


def _halves_exchanged(run: list[list[dict]], rng: random.Random) -> list[list[dict]]:
    """Where it cannot be halved the larger part is a power of two and stays in front."""
    if len(run) < 2:
        return run
    half = 1 << (len(run) - 1).bit_length() - 1
    first, second = (_halves_exchanged(part, rng) for part in (run[:half], run[half:]))
    return second + first if len(run) == 2 * half and rng.random() < 0.5 else first + second


def step_packs(packs: list[list[dict]], step: int, rank: int, world: int, accumulation: int) -> list[list[dict]]:
    """This rank's packs of one optimizer step, `accumulation` of them; the last step fills up with empty packs."""
    first = step * world * accumulation
    places = [first + micro * world + rank for micro in range(accumulation)]
    return [packs[place] if place < len(packs) else [] for place in places]


def steps_per_epoch(packs: int, world: int, accumulation: int) -> int:
    """Optimizer steps that `packs` packs take, the last partial one included."""
    return -(-packs // (world * accumulation))
