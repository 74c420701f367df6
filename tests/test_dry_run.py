"""What a training run takes: the formulas against autograd's own counts, and `04_train_draft.py --dry-run`."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from eagle3 import artifacts
from eagle3.draft.config import DraftConfig
from eagle3.draft.loss import Teacher
from eagle3.draft.model import Batch, DraftModel
from eagle3.training import packing
from eagle3.training.estimate import Weights, Work, operations, saved_bytes, state_bytes, work_of
from eagle3.training.supervision import make_batch

pytestmark = pytest.mark.usefixtures("one_thread")

GROUPED = DraftConfig(
    hidden_size=64,
    intermediate_size=160,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rms_norm_eps=1e-6,
    rope={"rope_type": "default", "rope_theta": 10000.0},
    max_position_embeddings=512,
    vocab_size=600,
    draft_vocab_size=300,
    aux_layers=(1, 2, 3),
)
WIDE = replace(
    GROUPED,
    hidden_size=96,
    num_attention_heads=8,
    num_key_value_heads=8,
    head_dim=32,
    draft_vocab_size=40,
    fc_norm=True,
)


def batch_of(config: DraftConfig, documents: list[tuple[int, int]], steps: int, supervision: str = "served") -> Batch:
    """Documents of so many tokens, the last so many supervised in turns of at most 40."""
    samples = []
    for tokens, supervised in documents:
        mask = torch.arange(tokens) >= tokens - supervised
        mask[::40] = False
        samples.append(
            {
                "input_ids": torch.randint(0, config.vocab_size, (tokens,), dtype=torch.int32),
                "loss_mask": mask,
                "aux_hidden": torch.randn(tokens, len(config.aux_layers) * config.hidden_size),
                "final_hidden": torch.randn(int(mask.sum()), config.hidden_size),
            }
        )
    return make_batch(samples, steps, supervision)


def draft(config: DraftConfig, dtype: torch.dtype = torch.float32) -> DraftModel:
    torch.manual_seed(0)
    model = DraftModel(config)
    model.initialise(
        torch.randn(config.vocab_size, config.hidden_size), torch.randn(config.draft_vocab_size, config.hidden_size), 0
    )
    return model.to(dtype)


def tensors(value: Any) -> list[torch.Tensor]:
    """All tensors that hang on an object of the training step."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [one for part in value.values() for one in tensors(part)]
    if isinstance(value, list | tuple):
        return [one for part in value for one in tensors(part)]
    return tensors(vars(value)) if type(value).__module__.startswith("eagle3") else []


def counted(model: DraftModel, batch: Batch) -> int:
    """Bytes that are kept of one forward pass, each storage once; weights and the batch are not among them."""
    batch = batch.to("cpu", model.fc.weight.dtype)
    teacher = Teacher(batch.final_hidden.to(model.fc.weight.dtype) @ model.lm_head.weight.detach().T)
    known = [*model.parameters(), *model.buffers(), *tensors(batch), *tensors(teacher)]
    own = {one.untyped_storage().data_ptr() for one in known}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(batch, teacher)  # held: what is kept must not be freed and counted again
    for one in tensors(output.loss.grad_fn.work):
        keep(one)
    return sum(kept.values())


@pytest.mark.parametrize(
    ("config", "documents", "steps"),
    [
        (GROUPED, [(90, 70), (200, 120), (33, 8)], 4),
        (WIDE, [(300, 60), (40, 39)], 3),
        (replace(WIDE, draft_vocab_size=500, fc_norm=False, norm_output=True), [(64, 63)] * 5, 6),
    ],
    ids=["grouped", "wide", "head"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bytes_kept_for_backward_are_those_that_are_there(
    config: DraftConfig, documents: list[tuple[int, int]], steps: int, dtype: torch.dtype
) -> None:
    batch = batch_of(config, documents, steps)
    found = counted(draft(config, dtype), batch)
    assert saved_bytes(config, Work.of(batch), dtype.itemsize) == pytest.approx(found, rel=0.003)


@pytest.mark.parametrize("trained", [True, False])
def test_operations_are_those_that_torch_counts(trained: bool) -> None:
    config = replace(WIDE, num_key_value_heads=4)
    batch = batch_of(config, [(90, 70), (200, 120)], 4)
    model, work = draft(config), Work.of(batch)
    model.lm_head.weight.requires_grad_(trained)
    head = torch.randn(config.draft_vocab_size, config.hidden_size)

    def added(start: Any, a: Any, b: Any, out_shape: Any, **scales: Any) -> int:
        return 2 * a[0] * a[1] * b[1]

    in_place = {torch.ops.aten.addmm_: added}  # how gradients are summed
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        model(batch, Teacher(batch.final_hidden @ head.T)).loss.sum().backward()
    # plain attention computes the keys that a row does not see as well; those of its own are not counted there. Of a
    # single one two products are no matmuls
    query = config.num_attention_heads * config.head_dim
    starts, counts = batch.shared.first.unique_consecutive(return_counts=True)  # of each document
    scores = int((counts * (batch.shared.last[counts.cumsum(0) - 1] + 1 - starts)).sum())
    own = 14 * work.rows * work.steps * (work.steps - 1) // 2 - 4 * work.rows
    expected = operations(config, work, trained) + query * (14 * work.steps * (scores - work.seen) + own)
    assert counter.get_total_flops() == expected


def test_zero_divides_by_its_stage() -> None:
    """Of 1000 trained weights on 4 ranks; 12 bytes of float32 master weights and moments each."""
    weights = Weights(trained=1000, frozen=500, teacher=50)

    def parts(stage: int) -> list[int]:
        return list(state_bytes(weights, 2, {"zero_optimization": {"stage": stage}}, 4).values())

    assert parts(0) == [3000, 100, 2000, 12000]
    assert parts(1) == [3000, 100, 2000, 3000]
    assert parts(2) == [3000, 100, 500, 3000]
    assert parts(3) == [1500, 100, 500, 3000]
    assert list(state_bytes(weights, 4, {}, 4).values()) == [6000, 200, 4000, 8000]
    config = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    assert list(state_bytes(weights, 2, config, 4))[3].endswith("in host memory")


@pytest.fixture(scope="module")
def dry_run(tiny_target: Path, states: Path, run_script: Any) -> Any:
    def run(*flags: object, **environment: str) -> str:
        paths = ["--hidden-states-dir", states / "hidden_states", "--vocab-map-dir", states / "vocab_map"]
        paths += ["--model-path", tiny_target, "--output-dir", states / "draft"]
        environment |= {"OMP_NUM_THREADS": "1"}
        return run_script("04_train_draft.py", *paths, "--dry-run", *flags, environment=environment).stdout

    return run


def test_work_of_samples_is_that_of_their_batch(states: Path) -> None:
    """States are not read for it."""
    directory = states / "hidden_states"
    records = list(artifacts.Index(directory).samples().values())[:3]
    samples = [artifacts.load_tensors(artifacts.sample_path(directory, record["index"])) for record in records]
    for supervision in ("served", "shifted-mask"):
        work = work_of(directory, records, 3, supervision)
        assert work == Work.of(make_batch(samples, 3, supervision)) and work.rows > 50


def test_a_dry_run_says_what_a_run_takes_and_makes_nothing(dry_run: Any, states: Path) -> None:
    before = sorted(states.rglob("*"))
    flags = ["--epochs", 3, "--max-tokens", 128, "--accumulation", 2, "--ttt-steps", 3, "--val-fraction", 0.1]
    text = dry_run(*flags, WORLD_SIZE="2", RANK="0")
    assert sorted(states.rglob("*")) == before

    records = list(artifacts.Index(states / "hidden_states").samples().values())
    train, _ = packing.hold_out(records, 0.1, 0)
    packs = [packing.epoch_packs(train, 128, 128, 0, epoch, packing.Cost(1, 1, 1)) for epoch in range(3)]
    steps = [packing.steps_per_epoch(len(one), 2, 2) for one in packs]
    rows = {key.strip(): value for key, value in re.findall(r"^  (\S.*?|  \S.*?)  +(.*)$", text, re.MULTILINE)}
    assert rows["optimizer steps"].startswith(f"{sum(steps)}: 3 epochs of {len(train)} samples")
    # 3 aux layers of 64, 4 heads of 32, 2 key/value heads, MLP 128, 64 draft ids, 4 norms and the final one
    trained = 3 * 64 * 64 + 128 * (128 + 2 * 64) + 128 * 64 + 3 * 64 * 128 + 64 * 64 + 4 * 64
    frozen = 49152 * 64  # the embedding
    assert rows["weights"].startswith(f"{trained:,} trained, {frozen:,} frozen")
    assert rows["memory a rank"].endswith("2 ranks, ZeRO stage 2, without workspace and communication buckets")
    assert float(rows["FLOPs a token"].split(",")[0]) > 1e5
    size = re.fullmatch(r"(.+) MB by all ranks", rows["states read a step"])[1]
    total = sum(record["bytes"] for record in train) * 3 / sum(steps)
    assert float(size) * 1e6 == pytest.approx(total, abs=5e3)  # as rounded
    assert rows["hours"].startswith("no GPU") or torch.cuda.is_available()


@pytest.mark.slow
def test_a_dry_run_speaks_once_and_refuses_what_the_run_would(dry_run: Any, states: Path) -> None:
    assert dry_run(WORLD_SIZE="2", RANK="1") == ""
    with pytest.raises(AssertionError, match=r"error: sample \d+ has \d+ tokens, --max-tokens is 20; raise it"):
        dry_run("--max-tokens", 20)
    assert not (states / "draft").exists()
