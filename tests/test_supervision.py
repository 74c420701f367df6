"""Which draft starts count, how samples become batches and packs, and the walk tau."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.draft.loss import Teacher, compare
from eagle3.draft.model import StepOutput
from eagle3.training.metrics import Acceptance, expected_walk, measure, walk
from eagle3.training.supervision import make_batch, valid_steps


def starts(mask: str, steps: int, supervision: str, documents: list[int] | None = None) -> list[list[int]]:
    """Starts that count at each step; mask as a string of '.' and 'A'."""
    loss_mask = torch.tensor([letter == "A" for letter in mask])
    numbers = torch.tensor(documents or [0] * len(mask))
    return [row.nonzero()[:, 0].tolist() for row in valid_steps(loss_mask, numbers, steps, supervision)]


def test_served_supervision_starts_at_the_last_prompt_token_and_stays_inside_the_turn() -> None:
    # the turn is a3..a6: the target samples a3 itself, drafts from t = 2 on are a4, a5, a6
    assert starts("...AAAA.", 3, "served") == [[2, 3, 4], [2, 3], [2]]


def test_shifted_mask_counts_by_the_input_token_alone() -> None:
    assert starts("...AAAA.", 3, "shifted-mask") == [[2, 3, 4, 5], [1, 2, 3, 4], [0, 1, 2, 3]]


def test_a_draft_never_crosses_into_another_turn_or_document() -> None:
    assert starts(".AAA.AA.", 2, "served") == [[0, 1, 4], [0]]
    assert starts(".AA" + "AA.", 2, "served", [0, 0, 0, 1, 1, 1]) == [[0], []]
    assert starts(".AA" + ".AA", 2, "shifted-mask", [0, 0, 0, 1, 1, 1]) == [[0, 1, 3, 4], [0, 3]]


@settings(deadline=None, max_examples=200)
@given(
    documents=st.lists(st.lists(st.booleans(), min_size=1, max_size=20), min_size=1, max_size=4),
    steps=st.integers(1, 5),
    supervision=st.sampled_from(["served", "shifted-mask"]),
)
def test_packed_batch_equals_a_walk_over_each_document(documents, steps, supervision) -> None:
    """T27. An independent derivation, token by token, of rows, inputs, teachers and labels."""
    samples, wanted, offset, states = [], {}, 0, 0
    for number, mask in enumerate(documents):
        ids = torch.arange(len(mask), dtype=torch.int32) + 1000 * number
        count = sum(mask)
        samples.append(
            {
                "input_ids": ids,
                "loss_mask": torch.tensor(mask),
                "aux_hidden": torch.zeros(len(mask), 3),
                "final_hidden": torch.arange(states, states + count).float()[:, None],
            }
        )
        row_of = {t: states + place for place, t in enumerate(t for t in range(len(mask)) if mask[t])}
        for t in range(len(mask)):
            for k in range(steps):
                if supervision == "served":
                    span = range(t + 1, t + 3 + k)
                    counts = span[-1] < len(mask) and all(mask[i] for i in span)
                else:
                    counts = t + 1 + k < len(mask) and mask[t + 1 + k]
                if counts:
                    label = int(ids[t + 2 + k]) if t + 2 + k < len(mask) else -1
                    wanted[offset + t, k] = (int(ids[t + 1 + k]), row_of[t + 1 + k], label)
        offset, states = offset + len(mask), states + count
    batch = make_batch(samples, steps, supervision)
    found = {
        (int(batch.rows[r]), k): (
            int(batch.input_ids[batch.reach[k, r]]),
            int(batch.final_hidden[batch.teacher_index[k, r], 0]),
            int(batch.labels[k, r]),
        )
        for k in range(steps)
        for r in range(batch.rows.numel())
        if batch.valid[k, r]
    }
    assert found == wanted
    assert batch.rows.tolist() == sorted({t for t, _ in wanted})


# -------------------------------------------------------------------------------------------------- walk


def test_walk_jumps_over_accepted_drafts() -> None:
    assert walk([2, 0, 1, 0, 1, 0]) == [0, 3, 4]
    assert walk([]) == []


@settings(deadline=None)
@given(accepted=st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_a_sure_draft_is_expected_to_walk_as_it_walks(accepted) -> None:
    chance = [[float(k < a) for k in range(3)] for a in accepted]
    starts = walk(accepted)
    assert expected_walk(chance) == (len(starts), sum(accepted[i] for i in starts))


@settings(deadline=None, max_examples=30)
@given(chance=st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=3), min_size=1, max_size=5))
def test_the_expected_walk_is_the_mean_over_all_outcomes(chance) -> None:
    def outcomes(i: int) -> tuple[float, float]:
        """Expected starts and accepted drafts from place i on, branch by branch."""
        if i >= len(chance):
            return 0.0, 0.0
        starts, accepted, survived = 1.0, 0.0, 1.0
        for k, p in enumerate([*chance[i], 0.0]):
            stop = survived * (1 - p)
            rest = outcomes(i + k + 1)
            starts += stop * rest[0]
            accepted += stop * (k + rest[1])
            survived *= p
        return starts, accepted

    assert expected_walk(chance) == pytest.approx(outcomes(0))


def one_turn_output(length: int, predicted: list[list[int]]) -> tuple[StepOutput, object]:
    """A turn of `length` tokens after one prompt token, ids equal to positions, with the draft's predictions."""
    mask = torch.ones(length + 1, dtype=torch.bool)
    mask[0] = False
    sample = {
        "input_ids": torch.arange(length + 1, dtype=torch.int32),
        "loss_mask": mask,
        "aux_hidden": torch.zeros(length + 1, 3),
        "final_hidden": torch.zeros(length, 1),
    }
    return StepOutput(torch.zeros(len(predicted)), torch.tensor(predicted)), make_batch(
        [sample], len(predicted), "served"
    )


def test_a_draft_right_only_at_its_first_step_has_tau_two() -> None:
    """T46: a draft token and the bonus."""
    # 9 tokens: starts t = 0..7; step 0 predicts t + 2 (right), step 1 is always wrong
    output, batch = one_turn_output(9, [[t + 2 for t in range(8)], [0] * 8])
    sums = Acceptance(2)
    measure(output, batch, torch.arange(20), sums)
    report = sums.report()
    assert report["tau"] == 2.0 and report["tau_by_drafts"] == [2.0, 2.0]
    assert report["acceptance_by_position"] == [1.0, 0.0]
    assert report["accuracy_by_step"] == [1.0, 0.0]


def test_walk_and_plain_mean_differ_and_out_of_vocabulary_is_wrong() -> None:
    # right everywhere, but id 5 is outside the draft vocabulary
    output, batch = one_turn_output(7, [[t + 2 for t in range(6)], [t + 3 for t in range(6)]])
    to_draft = torch.arange(20)
    to_draft[5] = -1
    sums = Acceptance(2)
    measure(output, batch, to_draft, sums)
    # leading right by start: t=0: 2,3 -> 2; t=1: 3,4 -> 2; t=2: 4,(5) -> 1; t=3: (5) -> 0; t=4: 6,7 -> 2; t=5: 7 -> 1
    report = sums.report()
    # the walk: t=0 accepts 2 3, t=3 nothing (5 is outside), t=4 accepts 6 7
    assert (sums.starts[1], sums.position, sums.lost[1]) == (3, [2, 2], 1)
    assert report["tau"] == pytest.approx(1 + 4 / 3, abs=1e-4) and report["lost_to_vocabulary"] == round(1 / 3, 5)
    # with one draft: t=0 accepts 2, t=2 accepts 4, t=4 accepts 6; never at t=3, where 5 is wanted
    assert (sums.starts[0], sums.accepted[0], sums.lost[0]) == (3, 3, 0)
    assert report["tau_plain_mean"] == pytest.approx(1 + 8 / 6, abs=1e-3)
    assert report["outside_vocabulary_by_step"] == [round(1 / 6, 5), round(1 / 5, 5)]


def test_acceptance_is_told_by_how_far_out_a_start_lies() -> None:
    """S09. Starts t = 0 .. 598 of one turn; right drafts only from t = 512 on, one each."""
    length = 600
    output, batch = one_turn_output(length, [[t + 2 if t >= 512 else 0 for t in range(length - 1)]])
    sums = Acceptance(1)
    measure(output, batch, torch.arange(length + 1), sums)
    assert sums.far_starts == [512, 44, 0, 0, 0, 0] and sums.far_accepted == [0, 44, 0, 0, 0, 0]
    assert sums.report()["tau_by_tokens_before"] == {"below_512": 1.0, "below_1024": 2.0}


def test_sums_survive_the_reduction_over_ranks() -> None:
    output, batch = one_turn_output(7, [[t + 2 for t in range(6)], [t + 3 for t in range(6)]])
    output.overlap = torch.full((2, 6), 0.5)
    sums = Acceptance(2)
    measure(output, batch, torch.arange(20), sums)
    again = Acceptance.of(sums.tensor(), 2)
    assert again == sums and again.report() == sums.report()
    assert "tau_sampled_estimate_by_drafts" in sums.report()


def test_overlap_counts_the_targets_probability_outside_the_vocabulary_as_lost() -> None:
    torch.manual_seed(0)
    target, draft, ids = torch.randn(5, 50), torch.randn(5, 20), torch.arange(0, 40, 2)
    p = target.softmax(-1)
    q = torch.zeros(5, 50).index_copy_(1, ids, draft.softmax(-1))
    teacher = Teacher(target[:, ids], target.logsumexp(-1))
    expected = torch.minimum(p, q).sum(-1)
    _, _, overlap = compare(draft.clone(), teacher, torch.arange(5), torch.ones(5, dtype=torch.bool))
    torch.testing.assert_close(overlap, expected)
