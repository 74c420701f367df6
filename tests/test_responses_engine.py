"""Real vLLM, as an engine and as a server: the target's own ids, every end id ends an answer, both give the same."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from responses_for_tests import lines_of, rows_of, user, write
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle3 import vllm_runtime
from eagle3.responses.backends import Backend, Generated, Request, Sampling, generate, open_backend
from eagle3.target import Target, open_target
from eagle3.terminal import UserError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(vllm_runtime.version() is None, reason="vllm is not installed"),
]

TEXTS = ["Hello", "What is a river?", "Name three animals.", "1 + 1", "Write a long story about a whale and a ship."]
MOST = 24  # tokens of an answer
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


@dataclass(frozen=True)
class Known:
    """A target with three end ids, and what transformers makes of its prompts."""

    target: Target
    tokenizer: Any
    prompts: list[list[int]]
    answers: list[Generated]  # greedy

    def requests(self, **changes: Any) -> list[Request]:
        settings = {"max_tokens": MOST, "temperature": 0.0, "top_p": 1.0, "seed": 0, "stop_ids": self.target.end_ids}
        return [Request(prompt, **(settings | changes)) for prompt in self.prompts]


@pytest.fixture(scope="module")
def known(smollm2, tmp_path_factory) -> Known:
    """The embedded target, with two tokens of its own greedy answers made end ids: one of the config, one of
    generation_config.json; what the tokenizer knows is another one still."""
    directory = tmp_path_factory.mktemp("ends") / "target"
    shutil.copytree(smollm2, directory, copy_function=os.symlink)
    for name in ("config.json", "generation_config.json"):  # not those of the user's cache
        content = (directory / name).read_text()
        (directory / name).unlink()
        (directory / name).write_text(content)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    prompts = [
        tokenizer(
            tokenizer.apply_chat_template([user(text)], tokenize=False, add_generation_prompt=True),
            add_special_tokens=False,
        )["input_ids"]
        for text in TEXTS
    ]
    greedy = [
        model.generate(torch.tensor([prompt]), max_new_tokens=MOST, do_sample=False)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    first, second = (  # far enough into one answer, and in no other
        next(token for token in greedy[n][3:] if all(token not in ids for m, ids in enumerate(greedy) if m != n))
        for n in (0, 1)
    )
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"eos_token_id": [tokenizer.eos_token_id, first]}))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [second], "repetition_penalty": 3.0}))
    target = open_target(str(directory), weights=True)
    assert set(target.end_ids) == {tokenizer.eos_token_id, first, second}
    answers = []
    for ids in greedy:
        end = next((place for place, token in enumerate(ids) if token in target.end_ids), None)
        answers.append(Generated(ids, "length") if end is None else Generated(ids[: end + 1], "stop"))
    assert answers[0].ids[-1] == first and answers[1].ids[-1] == second
    assert {answer.reason for answer in answers} == {"stop", "length"}
    return Known(target, tokenizer, prompts, answers)


@contextlib.contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def from_engine(known, tmp_path_factory) -> dict[str, Any]:
    """All that is asked of the engine, which is gone before the server starts: two at once would crawl."""
    folder = tmp_path_factory.mktemp("engine")
    with environment(ENVIRONMENT):
        backend = open_backend(known.target, known.tokenizer, folder / "engine.log", dtype="float32", max_model_len=400)
        with contextlib.closing(backend):
            return ask(backend, known, folder)


def ask(backend: Backend, known: Known, folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = {"greedy": generate(backend, known.requests())}
    hot = [replace(request, seed=n) for n, request in enumerate(known.requests(temperature=1.0))]
    results["sampled"] = generate(backend, hot)
    results["sampled again"] = generate(backend, hot[::-1])[::-1]
    results["other seeds"] = generate(backend, [replace(request, seed=100 + request.seed) for request in hot])
    results["too long"] = generate(backend, [replace(hot[0], prompt=[5] * 500), hot[1]])
    text = known.tokenizer.decode(known.answers[2].ids[3:5])
    results["until text"] = generate(backend, [replace(known.requests()[2], stop_text=text)])
    for number, request in enumerate(hot):
        backend.submit(number, request)
    backend.abandon()
    results["abandoned"] = backend.finished()
    rows = rows_of(*([user(text), user("More"), user("And?")] for text in TEXTS))
    path = folder / "answers.jsonl"
    write(backend, rows, path, Sampling(max_tokens=MOST), tokenizer=known.tokenizer, end_ids=known.target.end_ids)
    results["rows"] = sorted(lines_of(path)[1:-1], key=lambda line: line["order"])
    return results


@pytest.fixture(scope="module")
def from_server(from_engine, known, tmp_path_factory) -> dict[str, Any]:
    """The same, asked of vLLM's server."""
    folder = tmp_path_factory.mktemp("server")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(known.target.directory)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "400"]
    command += ["--enforce-eager", "--served-model-name", "served"]
    url = f"http://127.0.0.1:{port}"
    with open(folder / "server.log", "wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | ENVIRONMENT, start_new_session=True)
    try:
        for _ in range(1200):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{url}/health", timeout=5)
                break
            assert server.poll() is None, (folder / "server.log").read_text()[-3000:]
            time.sleep(0.25)
        backend = open_backend(
            known.target, known.tokenizer, folder / "engine.log", endpoint=url, max_model_len=400, concurrency=8
        )
        with contextlib.closing(backend):
            return {"name": backend.name, "limit": backend.max_model_len, **ask(backend, known, folder)}
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(15)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)


def test_the_engine_gives_transformers_ids_up_to_any_end_id(from_engine, known):
    assert from_engine["greedy"] == known.answers


def test_a_seed_gives_the_same_whatever_else_runs(from_engine):
    assert from_engine["sampled"] == from_engine["sampled again"]
    assert all(a != b for a, b in zip(from_engine["sampled"], from_engine["other seeds"], strict=True))


def test_a_prompt_that_is_too_long_is_that_rows_failure(from_engine):
    refused, answered = from_engine["too long"]
    assert refused.startswith("vLLM refused the prompt: ") and answered == from_engine["sampled"][1]


def test_what_is_abandoned_does_not_come_back(from_engine):
    assert from_engine["abandoned"] == []  # and the rows, asked for next, are right


def test_a_text_ends_an_answer(from_engine, known):
    [answer] = from_engine["until text"]
    assert answer.reason == "stop" and known.answers[2].ids[: len(answer.ids)] == answer.ids and len(answer.ids) < MOST


def test_turns_of_a_row_hold_the_targets_ids(from_engine, known):
    assert [line["row"] for line in from_engine["rows"]] == [1, 2, 3, 4, 5]
    for line, prompt, answer in zip(from_engine["rows"], known.prompts, known.answers, strict=True):
        begin, end = line["samples"][0]["runs"][0]
        assert line["samples"][0]["input_ids"][:begin] == prompt
        assert line["samples"][0]["input_ids"][begin:end] == answer.ids


def test_the_server_gives_the_engines_ids(from_server, from_engine, known):
    assert from_server["name"].startswith("served at http://127.0.0.1:") and from_server["limit"] == 400
    for asked in ("greedy", "sampled", "sampled again", "other seeds", "until text", "abandoned", "rows"):
        assert from_server[asked] == from_engine[asked], asked
    refused, answered = from_server["too long"]
    assert refused.startswith("HTTP 400: ") and answered == from_engine["sampled"][1]


class Dying:
    """vLLM's LLM for one request, whose engine dies before it is computed."""

    def __init__(self, dies: bool) -> None:
        self.llm_engine, self.dies, self.prompts = self, dies, []

    def enqueue(self, prompt: dict, params: Any, use_tqdm: bool) -> list[str]:
        self.prompts.append(prompt["prompt_token_ids"])
        return [f"{len(self.prompts)}-a1b2"]

    def step(self) -> list[Any]:
        from vllm.v1.engine.exceptions import EngineDeadError

        if self.dies:
            raise EngineDeadError
        answer = SimpleNamespace(token_ids=[7], finish_reason="length")
        return [
            SimpleNamespace(request_id=str(n + 1), finished=True, outputs=[answer]) for n in range(len(self.prompts))
        ]

    def has_unfinished_requests(self) -> bool:
        return False


@pytest.mark.parametrize("deaths", [1, 2])
def test_an_engine_that_dies_is_started_again_once(deaths, known, tmp_path, monkeypatch, capsys):
    engines = [Dying(n < deaths) for n in range(3)]
    started, closed = [], []

    def load(directory: Path, log: Path, **settings: Any) -> Dying:
        log.touch()
        started.append(engines[len(started)])
        return started[-1]

    monkeypatch.setattr(vllm_runtime, "load", load)
    monkeypatch.setattr(vllm_runtime, "shutdown", closed.append)
    backend = open_backend(known.target, known.tokenizer, tmp_path / "engine.log", max_model_len=400)
    requests = known.requests()[:2]
    if deaths == 1:
        assert generate(backend, requests) == [Generated([7], "length")] * 2
        assert "vLLM died while computing" in capsys.readouterr().err
    else:
        with pytest.raises(
            UserError, match=r"^vLLM died while computing; its output is in .*; the same command continues$"
        ):
            generate(backend, requests)
    assert started == engines[:2] and closed == engines[:1]
    assert engines[1].prompts == [request.prompt for request in requests]
