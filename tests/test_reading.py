"""Samples read ahead by threads: the same batches in the same order, within bounds, with faults where they belong."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from test_dry_run import GROUPED as CONFIG

from eagle3 import artifacts
from eagle3.draft.config import DraftConfig
from eagle3.draft.model import Batch
from eagle3.states import dequantise, quantise
from eagle3.terminal import UserError
from eagle3.training import reading
from eagle3.training.supervision import make_batch

STEPS = 3
CPU = torch.device("cpu")


def write_samples(directory: Path, count: int, stored: str = "bfloat16") -> list[dict]:
    """Stage 02's files with random states; their index records."""
    torch.manual_seed(0)
    written = []
    for index in range(count):
        tokens = 20 + 7 * (index % 5)
        mask = torch.arange(tokens) >= 9
        aux = torch.randn(tokens, 3, CONFIG.hidden_size).bfloat16()
        final = torch.randn(int(mask.sum()), CONFIG.hidden_size).bfloat16()
        sample = {"input_ids": torch.randint(0, CONFIG.vocab_size, (tokens,), dtype=torch.int32), "loss_mask": mask}
        if stored == "fp8":
            sample["aux_hidden"], sample["aux_scale"] = quantise(aux, aux.abs().amax(-1))
            sample["final_hidden"], sample["final_scale"] = quantise(final, final.abs().amax(-1))
            sample["aux_hidden"] = sample["aux_hidden"].flatten(1)
        else:
            sample |= {"aux_hidden": aux.flatten(1), "final_hidden": final}
        size = artifacts.save_tensors(artifacts.sample_path(directory, index), sample)
        counts = {"index": index, "tokens": tokens, "supervised": int(mask.sum()), "bytes": size}
        written.append(counts | {"ids": artifacts.ids_digest(sample["input_ids"]), "status": "done"})
    return written


def reader(directory: Path, steps: list[list[list[dict]]]) -> reading.Reader:
    return reading.Reader(reading.Source(directory, CONFIG, STEPS, CPU), steps, "served")


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("reader")]


def until(event: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not event():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not threads()


def plain_batch(directory: Path, records: list[dict]) -> Batch:
    samples = [artifacts.load_tensors(artifacts.sample_path(directory, record["index"])) for record in records]
    return make_batch(samples, STEPS, "served")


def same(one: Batch, other: Batch) -> bool:
    a, b = ({n: v for n, v in vars(batch).items() if isinstance(v, torch.Tensor)} for batch in (one, other))
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8))
        for name in a
    )


@pytest.mark.parametrize("stored", ["bfloat16", "fp8"])
@pytest.mark.parametrize("count", [1, 4])
def test_batches_are_those_of_the_samples_in_order(tmp_path: Path, monkeypatch, stored: str, count: int) -> None:
    monkeypatch.setattr(reading, "THREADS", count)
    records = write_samples(tmp_path, 12, stored)
    steps = [[records[0:3], records[3:4]], [records[4:9], records[9:10]], [records[10:12], []]]
    with reader(tmp_path, steps) as read:
        for step, packs in zip(read, steps, strict=True):
            for batch, pack in zip(step.batches, packs, strict=True):
                if pack:
                    assert same(batch, plain_batch(tmp_path, pack))
                else:
                    assert not batch.valid.any() and batch.input_ids.numel() == 2
            everyone = [record for pack in packs for record in pack]
            assert step.tokens == sum(record["tokens"] for record in everyone)
            assert step.bytes == sum(record["bytes"] for record in everyone) and step.waited > 0
    assert same(read._source.batch(records[:3], "served"), plain_batch(tmp_path, records[:3]))


def test_fp8_states_reach_the_device_restored(tmp_path: Path) -> None:
    records = write_samples(tmp_path, 2, "fp8")
    with reader(tmp_path, [[records]]) as read:
        (step,) = read
    moved = step.batches[0].to("cpu", torch.float32)
    states = [artifacts.load_tensors(artifacts.sample_path(tmp_path, index)) for index in (0, 1)]
    aux = [
        dequantise(s["aux_hidden"].view(-1, 3, CONFIG.hidden_size), s["aux_scale"], torch.float32).flatten(1)
        for s in states
    ]
    assert torch.equal(moved.aux_hidden, torch.cat(aux)) and moved.final_hidden.dtype == torch.float32


def test_what_is_read_ahead_is_bounded_in_bytes_and_not_in_steps(tmp_path: Path, monkeypatch) -> None:
    records = write_samples(tmp_path, 30)
    packs = [[record] for record in records]
    counted = []
    monkeypatch.setattr(reading, "load_sample", lambda *a, load=reading.load_sample: counted.append(a[1]) or load(*a))
    monkeypatch.setattr(reading, "AHEAD", sum(record["bytes"] for record in records[1:7]))
    with reader(tmp_path, [[pack] for pack in packs]) as read:
        handed_out = 0
        for number, step in enumerate(read):
            handed_out += step.bytes
            room, expected = reading.AHEAD, number + 1
            while expected < 30 and records[expected]["bytes"] <= room:
                room -= records[expected]["bytes"]
                expected += 1
            until(lambda expected=expected: len(counted) >= expected)
            time.sleep(0.01)  # a slow step, in which more would be read
            assert len(counted) == expected and read._ahead <= reading.AHEAD
    assert expected == 30 and sorted(record["index"] for record in counted) == list(range(30))
    assert records[0]["bytes"] * 5 < reading.AHEAD


def test_a_micro_batch_beyond_the_budget_is_still_read_one_ahead(tmp_path: Path, monkeypatch) -> None:
    records = write_samples(tmp_path, 6)
    counted = []
    monkeypatch.setattr(reading, "load_sample", lambda *a, load=reading.load_sample: counted.append(a[1]) or load(*a))
    monkeypatch.setattr(reading, "AHEAD", 1)
    with reader(tmp_path, [[records[0:2]], [records[2:4]], [records[4:6]]]) as read:
        for number, _ in enumerate(read):
            expected = min(6, 2 * number + 4)
            until(lambda expected=expected: len(counted) >= expected)
            time.sleep(0.01)
            assert len(counted) == expected


def test_a_fault_is_raised_in_its_turn_and_names_the_sample(tmp_path: Path) -> None:
    records = write_samples(tmp_path, 9)
    path = artifacts.sample_path(tmp_path, 5)
    path.write_bytes(path.read_bytes()[:500])
    seen = []
    with (
        pytest.raises(UserError, match=rf"{path} is damaged") as caught,
        reader(tmp_path, [[[r]] for r in records]) as read,
    ):
        for step in read:
            seen.append(step)
            time.sleep(0.01)  # the fault is known long before
    assert len(seen) == 5 and caught.value.__notes__ == [f"while sample 5 was read from {path}"]


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), RuntimeError("a defect"), MemoryError()])
def test_errors_of_other_kinds_keep_their_kind(tmp_path: Path, monkeypatch, error: Exception) -> None:
    records = write_samples(tmp_path, 4)

    def load(directory: Path, record: dict, config: DraftConfig, load=reading.load_sample) -> dict:
        if record["index"] == 2:
            raise error
        return load(directory, record, config)

    monkeypatch.setattr(reading, "load_sample", load)
    with pytest.raises(type(error)) as caught, reader(tmp_path, [[records]]) as read:
        list(read)
    path = artifacts.sample_path(tmp_path, 2)
    assert caught.value is error and f"while sample 2 was read from {path}" in error.__notes__
    assert getattr(error, "filename", str(path)) == str(path)  # what the terminal shows of an OSError


def test_states_of_another_form_among_the_samples_are_refused(tmp_path: Path) -> None:
    records = write_samples(tmp_path, 2)
    path = artifacts.sample_path(tmp_path, 1)
    sample = {name: tensor.clone() for name, tensor in artifacts.load_tensors(path).items()}
    artifacts.save_tensors(path, sample | {"aux_hidden": sample["aux_hidden"].float()})
    source = reading.Source(tmp_path, CONFIG, STEPS, CPU)
    with pytest.raises(UserError, match=rf"{path} is damaged: aux_hidden is torch.float32, in other samples torch.bf"):
        source.batch(records, "served")


@pytest.mark.parametrize("error", [None, KeyError("of the training step")])
def test_leaving_early_is_prompt_and_reads_no_more(tmp_path: Path, monkeypatch, error: Exception | None) -> None:
    records = write_samples(tmp_path, 80)
    counted = []

    def slow(directory: Path, record: dict, config: DraftConfig, load=reading.load_sample) -> dict:
        counted.append(record["index"])
        time.sleep(0.05)
        return load(directory, record, config)

    monkeypatch.setattr(reading, "load_sample", slow)
    try:
        with reader(tmp_path, [[[record]] for record in records]) as read:
            for _ in read:
                left = time.monotonic()
                if error:
                    raise error
                break
    except KeyError:
        pass
    assert time.monotonic() - left < 0.5 and len(counted) < 20  # 80 samples take a second with four threads
    assert not threads()


def test_no_step_reads_nothing(tmp_path: Path) -> None:
    with reader(tmp_path, []) as read:
        assert list(read) == []
    assert not threads()


def test_the_time_that_training_waits_is_told(tmp_path: Path, monkeypatch) -> None:
    records = write_samples(tmp_path, 3)

    def slow(directory: Path, record: dict, config: DraftConfig, load=reading.load_sample) -> dict:
        time.sleep(0.2 if record["index"] < 2 else 0)
        return load(directory, record, config)

    monkeypatch.setattr(reading, "load_sample", slow)
    monkeypatch.setattr(reading, "AHEAD", 1)  # one step ahead
    with reader(tmp_path, [[[record]] for record in records]) as read:
        waited = []
        for step in read:
            waited.append(step.waited)
            time.sleep(0.1)
    assert waited[0] > 0.15 and 0.05 < waited[1] < 0.2 and waited[2] < 0.05


def test_threads_leave_the_training_its_own(tmp_path: Path, monkeypatch) -> None:
    """Each reads with one thread of torch's, and training keeps what it has."""
    records, inside = write_samples(tmp_path, 8), []
    before = torch.get_num_threads()
    torch.set_num_threads(3)

    def load(*arguments, load=reading.load_sample) -> dict:
        inside.append(torch.get_num_threads())
        return load(*arguments)

    monkeypatch.setattr(reading, "load_sample", load)
    try:
        with reader(tmp_path, [[records]]) as read:
            list(read)
        assert set(inside) == {1} and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
