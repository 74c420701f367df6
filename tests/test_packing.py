"""How samples become micro-batches: each once, within both budgets, nearly full, of like cost for a step's ranks."""

import random
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eagle3.terminal import UserError
from eagle3.training import packing

TOKENS = packing.Cost(token=1, supervised=0, key=0)


def records(lengths: list[int], failed: set[int] = frozenset()) -> list[dict]:
    """The first half of each sample is a prompt."""
    return [
        {"index": i, "tokens": n, "supervised": n - n // 2, "conversation": f"c{i // 2}"}
        | {"status": "failed" if i in failed else "done"}
        for i, n in enumerate(lengths)
    ]


def indices(packs: list[list[dict]]) -> list[list[int]]:
    return [[record["index"] for record in pack] for pack in packs]


def next_fit(documents: list[dict], max_tokens: int, max_rows: int) -> int:
    """Packs of the simplest rule: begin a new one where the next sample does not fit."""
    count = tokens = rows = 0
    for record in documents:
        if not count or tokens + record["tokens"] > max_tokens or rows + record["supervised"] > max_rows:
            count, tokens, rows = count + 1, 0, 0
        tokens, rows = tokens + record["tokens"], rows + record["supervised"]
    return count


def chats(count: int) -> list[dict]:
    """Lengths as conversations have them."""
    rng = random.Random(0)
    lengths = [min(4096, max(16, round(rng.lognormvariate(6.55, 0.9)))) for _ in range(count)]  # exp(6.55) is 700
    return [
        {"index": i, "tokens": n, "supervised": max(4, round(n * rng.uniform(0.3, 0.9))), "status": "done"}
        for i, n in enumerate(lengths)
    ]


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=60),
    failed=st.sets(st.integers(0, 59)),
    world=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    epoch=st.integers(0, 3),
    max_rows=st.integers(25, 64),
)
def test_every_sample_is_seen_once_an_epoch_whatever_the_ranks(
    lengths, failed, world, accumulation, epoch, max_rows
) -> None:
    """T28: also where there are fewer than a batch takes."""
    packs = packing.epoch_packs(records(lengths, failed), 64, max_rows, 3, epoch, TOKENS)
    assert all(sum(record["tokens"] for record in pack) <= 64 for pack in packs)
    assert all(sum(record["supervised"] for record in pack) <= max_rows for pack in packs)
    steps = packing.steps_per_epoch(len(packs), world, accumulation)
    seen = [
        record["index"]
        for step in range(steps)
        for rank in range(world)
        for pack in packing.step_packs(packs, step, rank, world, accumulation)
        for record in pack
    ]
    assert sorted(seen) == [index for index in range(len(lengths)) if index not in failed]
    assert all(len(packing.step_packs(packs, 0, rank, world, accumulation)) == accumulation for rank in range(world))


@settings(deadline=None, max_examples=300)
@given(
    documents=st.lists(st.tuples(st.integers(1, 200), st.floats(0, 1)), min_size=1, max_size=80),
    max_rows=st.integers(200, 300),
    few_open=st.integers(1, 4),
)
@example(
    documents=[(298, 1.0), (1, 1.0)], max_rows=300, few_open=1
)  # the newest is open even if hardly any room is left
def test_there_are_never_more_packs_than_next_fit_makes(documents, max_rows, few_open) -> None:
    given_records = [
        {"index": i, "tokens": tokens, "supervised": round(share * tokens)}
        for i, (tokens, share) in enumerate(documents)
    ]
    most = next_fit(given_records, 300, max_rows)
    assert len(packing.pack(given_records, 300, max_rows)) <= most
    with mock.patch.object(packing, "OPEN", few_open):
        assert len(packing.pack(given_records, 300, max_rows)) <= most


def test_a_sample_goes_where_it_leaves_least_among_the_packs_that_are_open() -> None:
    documents = [{"index": i, "tokens": tokens, "supervised": 1} for i, tokens in enumerate((700, 800, 900, 200))]
    assert indices(packing.pack(documents, 1000, 10)) == [[0], [1, 3], [2]]
    with mock.patch.object(packing, "OPEN", 2):  # the second was closed for the third
        assert indices(packing.pack(documents, 1000, 10)) == [[0, 3], [1], [2]]


def test_the_scarcer_budget_decides_what_fits_best() -> None:
    counts = ((100, 70), (200, 60), (300, 30))
    documents = [{"index": i, "tokens": tokens, "supervised": rows} for i, (tokens, rows) in enumerate(counts)]
    assert indices(packing.pack(documents, 1000, 100)) == [[0, 2], [1]]  # 30 rows are left there, 40 in the other
    assert indices(packing.pack(documents, 600, 1000)) == [[0, 1, 2]]


@pytest.mark.parametrize(("max_rows", "least", "next_fits"), [(8192, 0.99, 0.90), (4096, 0.97, 0.86)])
def test_packs_of_conversations_are_nearly_full(max_rows: int, least: float, next_fits: float) -> None:
    documents = chats(20_000)
    totals = (sum(record["tokens"] for record in documents) / 8192, sum(r["supervised"] for r in documents) / max_rows)
    assert max(totals) / len(packing.pack(documents, 8192, max_rows)) > least
    assert max(totals) / next_fit(documents, 8192, max_rows) < next_fits


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=60),
    failed=st.sets(st.integers(0, 59)),
    seed=st.integers(),
)
def test_a_failed_sample_leaves_a_hole_and_shifts_nothing(lengths, failed, seed) -> None:
    def packs(failures: set[int]) -> list[list[int]]:
        return indices(packing.epoch_packs(records(lengths, failures), 64, 40, seed, 0, TOKENS))

    assert packs(failed) == [[index for index in pack if index not in failed] for pack in packs(set())]


def test_a_failed_sample_that_would_fit_nowhere_is_no_fault() -> None:
    packs = packing.epoch_packs(records([90, 5], failed={0}), 64, 64, 0, 0, TOKENS)
    assert indices(packs) == [[1]]


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40), shuffled=st.randoms())
def test_the_plan_does_not_depend_on_the_order_of_the_index(lengths, shuffled) -> None:
    """Shards of stage 02 may be merged in any order."""
    other = records(lengths)
    shuffled.shuffle(other)
    plans = [indices(packing.epoch_packs(one, 64, 40, 1, 2, TOKENS)) for one in (records(lengths), other)]
    assert plans[0] == plans[1]


def test_an_epoch_has_its_own_packs_and_keeps_them() -> None:
    plans = [indices(packing.epoch_packs(records([5] * 30), 20, 20, 0, epoch, TOKENS)) for epoch in (0, 1, 0)]
    assert plans[0] == plans[2]
    assert sorted(map(sorted, plans[0])) != sorted(map(sorted, plans[1]))
    other_seed = packing.epoch_packs(records([5] * 30), 20, 20, 1, 0, TOKENS)
    assert indices(other_seed) != plans[0]


@settings(deadline=None)
@given(lengths=st.lists(st.integers(51, 100), min_size=1, max_size=400), power=st.integers(0, 6), seed=st.integers())
def test_ranks_of_a_step_get_neighbours_in_cost(lengths, power, seed) -> None:
    """Groups of 2^n up to ALIKE packs divide a window by cost: their spreads add up to no more than the window's."""
    with mock.patch.object(packing, "WINDOW", 128):
        packs = packing.epoch_packs(records(lengths), 100, 100, seed, 0, TOKENS)
    costs = [TOKENS(pack[0]) for pack in packs]
    assert len(packs) == len(lengths)

    def spread(size: int) -> float:
        groups = (costs[start : start + size] for start in range(0, len(costs), size))
        return sum(max(group) - min(group) for group in groups)

    assert spread(2**power) <= spread(128)


@pytest.mark.parametrize(("ranks", "most"), [(8, 0.02), (6, 0.03)])
def test_ranks_hardly_wait_for_each_other(ranks: int, most: float) -> None:
    """Idle share of the ranks if each step takes as long as its dearest pack; costs of Kimi's draft with 7 steps."""
    cost = packing.Cost(token=2e9, supervised=3e10, key=8e5)
    packs = packing.epoch_packs(chats(20_000), 8192, 8192, 0, 0, cost)
    costs = [sum(map(cost, pack)) for pack in packs]

    def idle(order: list[float]) -> float:
        steps = [order[start : start + ranks] for start in range(0, len(order) - ranks, ranks)]
        return 1 - sum(map(sum, steps)) / sum(ranks * max(step) for step in steps)

    assert idle(costs) < most
    random.Random(0).shuffle(costs)
    assert idle(costs) > 0.1
    whole = [cost for cost in costs if cost > 0.9 * max(costs)]
    assert len(whole) < len(costs) / 2, "costs differ"


def test_dear_steps_are_spread_over_the_epoch() -> None:
    packs = packing.epoch_packs(records([51 + i % 50 for i in range(4096)]), 100, 100, 0, 0, TOKENS)
    costs = [TOKENS(pack[0]) for pack in packs]
    means = [sum(costs[start : start + 512]) / 512 for start in range(0, len(costs), 512)]
    assert max(means) - min(means) < 15  # of 50 between the cheapest and the dearest


def test_a_sample_longer_than_a_pack_is_named() -> None:
    with pytest.raises(UserError, match=r"sample 1 has 90 tokens, --max-tokens is 64"):
        packing.pack(records([5, 90]), 64, 64)
    with pytest.raises(UserError, match=r"sample 1 has 32 supervised tokens, --max-rows is 31; raise it"):
        packing.pack(records([5, 64]), 64, 31)


# ----------------------------------------------------------------------------------------------- held out


@settings(deadline=None)
@given(count=st.integers(4, 60), fraction=st.floats(0.01, 0.9), failed=st.sets(st.integers(0, 59)))
@example(count=4, fraction=0.9, failed=set())
def test_held_out_split_is_by_conversation_and_never_empty(count, fraction, failed) -> None:
    """T29: at least one conversation, however small the fraction."""
    everything = records([5] * count, failed)
    sound = {record["conversation"] for record in everything if packing.is_whole(record)}
    if len(sound) < 2:
        with pytest.raises(UserError, match=f"{len(sound)} conversation cannot be split"):
            packing.hold_out(everything, fraction, seed=0)
        return
    train, held = packing.hold_out(everything, fraction, seed=0)
    assert {r["conversation"] for r in train}.isdisjoint(r["conversation"] for r in held)
    assert len(train) + len(held) == count
    assert any(map(packing.is_whole, train)) and any(map(packing.is_whole, held))
    assert packing.hold_out(everything, fraction, seed=0) == (train, held)


def test_who_is_held_out_does_not_depend_on_what_failed() -> None:
    def held(failed: set[int]) -> list[int]:
        return [record["index"] for record in packing.hold_out(records([5] * 60, failed), 0.3, seed=0)[1]]

    everyone = held(set())
    assert len(everyone) == 18 and held({0, 1, 2, 3, 17, 40, *everyone[:4]}) == everyone


def test_one_conversation_cannot_be_split() -> None:
    with pytest.raises(UserError, match="--val-fraction 0"):
        packing.hold_out(records([5, 5]), 0.1, seed=0)
    assert packing.hold_out(records([5, 5]), 0.0, seed=0)[1] == []
