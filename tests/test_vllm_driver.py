"""Stage 02's side of vLLM, without an engine: what it makes of requests refused, answered twice, out of order, or lost.

A stand-in computes in this process what the engine and its connector do in theirs: states that tell their token and
layer, written by the product's own code. test_capture.py has the real engine.
"""

import contextlib
import os
from collections.abc import Iterator
from multiprocessing.connection import Client
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from capture_for_tests import random_prompts, samples_of, settings_for, write_prepared

from eagle3 import artifacts, vllm_runtime
from eagle3.artifacts import Index
from eagle3.capture import extract
from eagle3.capture.interface import EngineDied, EngineSettings, Fault, Written
from eagle3.capture.payload import Payload, fill, write
from eagle3.capture.run import KILLED
from eagle3.capture.vllm_engine import VllmEngine
from eagle3.states import Layout
from eagle3.target import TargetHead, open_target
from eagle3.terminal import UserError

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(vllm_runtime.version() is None, reason="vllm is not installed"),
]


def made_up(ids: torch.Tensor, layers: int, hidden_size: int) -> torch.Tensor:
    """States [T, L, H] of ids [T]: each tells its token and its layer."""
    columns = torch.arange(hidden_size) + 1
    return torch.sin(ids[:, None, None] * 0.01 + torch.arange(layers)[:, None] + columns * 0.1)


class StandIn:
    """vLLM as far as the driver sees it. `batch` requests are computed at a time, the last one first."""

    started: list["StandIn"]
    batch = 4
    deadly: int | None = None  # a token that ends the engine
    repeat = False  # every answer comes twice
    lose: int | None = None  # a token whose request is never answered
    unwritable = ""  # name of the file that the disk does not take

    def __init__(self, model: Path, log: Path, **arguments: Any) -> None:
        log.touch()
        self.arguments = arguments
        given = arguments["kv_transfer_config"]["kv_connector_extra_config"]["eagle3"]
        self.layout = Layout(**given["layout"] | {"layers": tuple(given["layout"]["layers"])})
        self.head = TargetHead(open_target(str(model)), torch.float32, "cpu")
        self.driver = Client(given["address"], family="AF_UNIX")
        self.waiting: list[tuple[list[int], Any]] = []
        self.most_waiting = self.most_staged = 0
        self.llm_engine = self.engine_core = self
        self.guard = SimpleNamespace(close=lambda: None)
        self.started.append(self)

    def enqueue(self, prompt: dict[str, list[int]], params: Any, use_tqdm: bool) -> None:
        if len(ids := prompt["prompt_token_ids"]) + 1 > self.arguments["max_model_len"]:
            raise ValueError(f"the prompt of {len(ids)} tokens and one more are longer than the model's maximum")
        self.waiting.append((ids, params))
        self.most_waiting = max(self.most_waiting, len(self.waiting))

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting)

    def step(self) -> list[Any]:
        from vllm.v1.engine.exceptions import EngineDeadError

        now, self.waiting = self.waiting[: self.batch][::-1], self.waiting[self.batch :]
        if self.driver.closed or any(self.deadly in ids for ids, _ in now):
            self.driver.close()
            raise EngineDeadError
        answers = [self._answer(ids, params) for ids, params in now if self.lose not in ids]
        staged = [*vllm_runtime.private_folder().glob("*.pt"), *vllm_runtime.private_folder().glob("*.tmp")]
        self.most_staged = max(self.most_staged, len(staged))
        return answers * 2 if self.repeat else answers

    def _answer(self, ids: list[int], params: Any) -> Any:
        order = params.extra_args["kv_transfer_params"]["eagle3"]
        tokens = torch.tensor(ids, dtype=torch.int32)
        mask = torch.zeros(len(ids), dtype=torch.bool)
        for start, end in order["runs"]:
            mask[start:end] = True
        states = made_up(tokens, len(self.layout.layers), self.layout.hidden_size)
        payload = Payload(self.layout, tokens, mask, pinned=False)
        assert fill(self.layout, [(payload, len(states))], states) is None
        path = Path(order["path"])
        outcome = UserError(f"{path}: no space") if path.name == self.unwritable else write(path, payload)
        for _ in range(1 + self.repeat):
            self.driver.send((order["ticket"], outcome))
        logprobs = None
        if params.prompt_logprobs:
            top = self.head(states[:-1, -1]).log_softmax(-1).topk(params.prompt_logprobs)
            rows = zip(top.indices.tolist(), top.values.tolist(), strict=True)
            logprobs = [None, *(self._row(*row) for row in rows)]
        parameters = {"ticket": order["ticket"], "saved": True}
        return SimpleNamespace(finished=True, kv_transfer_params=parameters, prompt_logprobs=logprobs, outputs=[])

    @staticmethod
    def _row(ids: list[int], values: list[float]) -> dict[int, Any]:
        pairs = zip(ids, values, strict=True)
        return {token: SimpleNamespace(rank=rank, logprob=value) for rank, (token, value) in enumerate(pairs, 1)}

    def shutdown(self) -> None:
        self.driver.close()


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> type[StandIn]:
    stand_in = type("StandIn", (StandIn,), {"started": []})
    monkeypatch.setattr(vllm_runtime, "load", stand_in)
    for name in ("PYTHONPATH", "VLLM_ALLOW_LONG_MAX_MODEL_LEN"):  # which the driver sets
        monkeypatch.setenv(name, os.environ.get(name, ""))
    return stand_in


@pytest.fixture
def settings(tiny_target: Path, tmp_path: Path) -> EngineSettings:
    return settings_for(tiny_target, tmp_path / "out", batch_tokens=400)


@pytest.fixture
def engine(vllm: type[StandIn], settings: EngineSettings) -> Iterator[VllmEngine]:
    with contextlib.closing(VllmEngine(settings, longest=160)) as opened:
        yield opened
    assert not list(vllm_runtime.private_folder().glob("*.pt"))


def assert_states_of(directory: Path, index: int, prompt: list[int]) -> None:
    sample = artifacts.load_tensors(artifacts.sample_path(directory, index))
    states = made_up(torch.tensor(prompt, dtype=torch.int32), 4, 64)
    assert sample["input_ids"].tolist() == prompt
    assert torch.equal(sample["aux_hidden"], states[:, :3].flatten(1))
    assert torch.equal(sample["final_hidden"], states[sample["loss_mask"], 3])


def test_answers_that_come_twice_and_in_another_order(engine: VllmEngine, settings, vllm) -> None:
    """Case H07: matched by their ticket; no sample has the states of another."""
    vllm.repeat = True
    prompts = random_prompts([50, 60, 70, 80, 90, 100, 110, 20, 30])
    outcomes = [(one.index, outcome) for one, outcome in engine.capture(samples_of(prompts))]
    assert sorted(index for index, _ in outcomes) == list(range(9))
    assert all(isinstance(outcome, Written) for _, outcome in outcomes)
    for index, prompt in enumerate(prompts):
        assert_states_of(settings.output_dir, index, prompt)
    scored = engine.score(prompts[:3], 5)
    for prompt, one in zip(prompts, scored, strict=False):
        assert torch.equal(one.states, made_up(torch.tensor(prompt, dtype=torch.int32), 4, 64))
        assert one.top_ids.shape == (len(prompt) - 1, 5)


def test_a_prompt_of_twice_the_length_ends_nothing(engine: VllmEngine, settings) -> None:
    """Case H06: nine files, and one refusal with its reason."""
    prompts = random_prompts([50, 60, 70, 320, 90, 100, 110, 20, 30, 160])
    outcomes = {one.index: outcome for one, outcome in engine.capture(samples_of(prompts))}
    refused = outcomes.pop(3)
    assert isinstance(refused, Fault) and "vLLM refused the prompt: ValueError: the prompt of 320" in refused.detail
    assert sorted(outcomes) == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    for index in outcomes:
        assert_states_of(settings.output_dir, index, prompts[index])
    fault, scored = engine.score([prompts[3], prompts[0]], 5)
    assert isinstance(fault, Fault) and len(scored.states) == 50


def test_a_request_that_vllm_loses_is_a_fault(engine: VllmEngine, vllm) -> None:
    prompts = random_prompts([50, 60, 70])
    vllm.lose = prompts[1][30]
    outcomes = {one.index: outcome for one, outcome in engine.capture(samples_of(prompts))}
    assert [isinstance(outcomes[index], Written) for index in range(3)] == [True, False, True]
    assert outcomes[1] == Fault("engine gave no states", "vLLM lost the request")


def test_nothing_is_staged_beyond_what_is_in_flight(engine: VllmEngine, settings, vllm) -> None:
    """Case H13: 200 prompts; a sample goes to its place at once, and a scored prompt's file is read and gone."""
    prompts = random_prompts([20] * 200)
    done = 0
    for _, outcome in engine.capture(samples_of(prompts)):
        done += 1
        assert isinstance(outcome, Written) and len(list(settings.output_dir.rglob("*.pt"))) >= done
    [stand_in] = vllm.started
    assert done == 200 and stand_in.most_waiting <= 400 // 20
    assert stand_in.most_staged == 0 and not list(settings.output_dir.rglob("*.tmp"))
    engine.score(prompts[:16], 5)
    assert 0 < stand_in.most_staged <= 16 and not list(vllm_runtime.private_folder().glob("*.pt"))


def prepared_for(tmp_path: Path, model: Path, prompts: list[list[int]]) -> Path:
    return write_prepared(tmp_path / "prepared", model, prompts)


def test_a_sample_as_long_as_the_target_takes(vllm, settings: EngineSettings, tiny_target, tmp_path, capsys) -> None:
    """Cases H05 (room for the one token that vLLM samples) and H04 (in one pass, said on the terminal)."""
    prompts = random_prompts([1024, 20, 30])
    extract.extract(prepared_for(tmp_path, tiny_target, prompts), "vllm", settings)
    [stand_in] = vllm.started
    assert stand_in.arguments["max_model_len"] == 1025 and os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] == "1"
    assert stand_in.arguments["max_num_batched_tokens"] >= 1025 and not stand_in.arguments["enable_chunked_prefill"]
    assert "each prompt in one pass (chunked prefill off), up to 1025 tokens a pass" in capsys.readouterr().out
    for index, prompt in enumerate(prompts):
        assert_states_of(settings.output_dir, index, prompt)


def test_a_stage_with_a_sample_that_vllm_refuses(vllm, settings, tiny_target, tmp_path, monkeypatch, capsys) -> None:
    """Case H06: one of ten is skipped and listed, nothing that is done is lost."""
    prompts = random_prompts([50, 60, 70, 320, 90, 100, 110, 20, 30, 160])
    monkeypatch.setattr(
        vllm, "enqueue", lambda self, prompt, *rest, **more: enqueue_up_to(200, self, prompt, *rest, **more)
    )
    extract.extract(prepared_for(tmp_path, tiny_target, prompts), "vllm", settings)
    manifest = artifacts.read_manifest(settings.output_dir, "02")
    assert manifest["complete"] and manifest["samples"] == 9 and manifest["failed"] == {"engine gave no states": 1}
    record = Index(settings.output_dir).samples()[3]
    assert record["status"] == "failed" and "vLLM refused the prompt" in record["detail"]
    output, errors = capsys.readouterr()
    assert "9 of 10" in output and "sample 3 skipped after two tries: engine gave no states" in errors


def enqueue_up_to(limit: int, stand_in: StandIn, prompt: dict, *rest: Any, **more: Any) -> None:
    if len(prompt["prompt_token_ids"]) > limit:
        raise ValueError("too long")
    StandIn.enqueue(stand_in, prompt, *rest, **more)


def test_an_engine_that_dies_of_a_sample(vllm, settings: EngineSettings, tiny_target, tmp_path, capsys) -> None:
    """Once with others, once alone: what was finished counts, and the same command goes on without the sample."""
    prompts = random_prompts([50, 60, 70, 80, 90, 100, 110, 20, 30, 40])
    vllm.deadly = prompts[6][105]  # beyond what the canary sees of it
    prepared = prepared_for(tmp_path, tiny_target, prompts)
    with pytest.raises(EngineDied, match=r"vLLM died while computing; .* sample 6 ended it twice and is left out"):
        extract.extract(prepared, "vllm", settings)
    assert len(vllm.started) == 2 and ("starting it again, with each of them alone" in capsys.readouterr().err)
    assert Index(settings.output_dir).samples()[6]["reason"] == KILLED
    assert extract.extract(prepared, "vllm", settings) and len(vllm.started) == 3
    for index in sorted(set(range(10)) - {6}):
        assert_states_of(settings.output_dir, index, prompts[index])
    assert artifacts.read_manifest(settings.output_dir, "02")["failed"] == {KILLED: 1}


def test_a_disk_error_in_the_engine_ends_the_run(vllm, settings, tiny_target, tmp_path) -> None:
    vllm.unwritable = "00000002.pt"
    prepared = prepared_for(tmp_path, tiny_target, random_prompts([50, 60, 70, 80]))
    with pytest.raises(UserError, match=r"00000002\.pt: no space$"):
        extract.extract(prepared, "vllm", settings)
    assert not artifacts.read_manifest(settings.output_dir, "02")["complete"]
