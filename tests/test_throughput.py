"""What a run says of its speed: tokens, share of the peak, and the wait for data."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from test_reading import CONFIG, STEPS

from eagle3.training import throughput
from eagle3.training.estimate import Work, operations
from eagle3.training.reading import Step
from eagle3.training.supervision import make_batch

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(throughput.time, "monotonic", lambda: now[0])
    return now


def meter(device: torch.device = CPU, **options) -> throughput.Meter:
    defaults = {"train_lm_head": True, "loss": "kl", "dtype": "bfloat16"}
    return throughput.Meter(CONFIG, SimpleNamespace(**defaults | options), device)


def take(one: throughput.Meter, clock: list[float], seconds: float, waited: float, batches: list = ()) -> dict:
    """A step that took so many seconds, waiting included."""
    started = clock[0]
    clock[0] += seconds - waited
    return one.add(Step(list(batches), tokens=1000, bytes=5 * 10**8, waited=waited), started)


def test_figures_of_a_step_and_of_the_run(clock: list[float]) -> None:
    one = meter()
    assert one.rows() == {}  # nothing was trained
    found = take(one, clock, 0.5, 0.125)
    assert found == {"seconds": 0.5, "data_wait": 0.125, "tokens": 1000, "tokens_per_second": 2000.0}
    take(one, clock, 1.5, 0.0)
    assert one.rows() == {"speed": "1,000 tokens/s", "waited for data": "6.2% of the step time; 0.5 GB/s were read"}
    bar = throughput.shown(1.23456, {"tau": 1.5}, found)
    assert bar == {"loss": "1.235", "tau": "1.5", "tok/s": "2,000"}
    assert throughput.shown(1.0, None, found)["tau"] == "-"


def test_the_share_of_the_peak_is_operations_over_time_and_rate(clock: list[float], monkeypatch) -> None:
    mask = torch.arange(50) > 9
    nothing = {"aux_hidden": torch.empty(50, 0), "final_hidden": torch.empty(40, 0)}
    batch = make_batch(
        [{"input_ids": torch.zeros(50, dtype=torch.int32), "loss_mask": mask} | nothing], STEPS, "served"
    )
    monkeypatch.setattr(throughput, "matmul_rate", lambda dtype: 1e9 if dtype == torch.bfloat16 else 0)
    expected = operations(CONFIG, Work.of(batch), True)
    one = meter(GPU)
    found = take(one, clock, 0.5, 0.1, [batch, batch])
    assert found["share_of_peak"] == pytest.approx(2 * expected / 0.5 / 1e9, abs=6e-5)
    assert throughput.shown(1.0, None, found)["peak"] == f"{found['share_of_peak']:.0%}"
    assert f"{found['share_of_peak']:.0%} of the 0 TFLOP/s" in one.rows()["speed"]
    text = meter(GPU, loss="cross-entropy")
    teacher = 2 * CONFIG.hidden_size * CONFIG.draft_vocab_size * 40
    assert take(text, clock, 0.5, 0.1, [batch])["share_of_peak"] == pytest.approx(
        (expected - teacher) / 0.5e9, abs=6e-5
    )


def test_a_long_wait_is_told_once_with_a_remedy(clock: list[float], capsys) -> None:
    one = meter()
    for _ in range(throughput.WARM_UP):
        take(one, clock, 10, 9)  # the start
    for _ in range(59):
        take(one, clock, 1, 0.5)
    assert capsys.readouterr().err == ""  # the window is not over
    take(one, clock, 1, 0.5)
    said = capsys.readouterr().err
    assert said.startswith("warning: training waited for its data 50% of the last 60 s, in which 0.5 GB/s were read:")
    assert "--hidden-states-dir" in said and "--store-dtype fp8" in said and said.count("\n") == 1
    for _ in range(200):
        take(one, clock, 1, 0.5)
    assert capsys.readouterr().err == ""


def test_a_wait_that_is_short_or_passes_is_not_told(clock: list[float], capsys) -> None:
    one = meter()
    for number in range(throughput.WARM_UP + 600):
        take(one, clock, 1, 0.02 + (number % 60 == 30) * 0.5)  # 2.8% of each minute
    assert capsys.readouterr().err == ""
    for _ in range(122):  # two windows
        take(one, clock, 1, 0.04)
    assert "its data 4% of the last 6" in capsys.readouterr().err
