"""vLLM's ExampleHiddenStatesConnector where there is no GPU, for benchmarks/capture.py: its two CUDA parts replaced.

The stock connector copies through a CUDA stream into pinned memory, and asks for a cache layout that CPU attention does
not take. Scheduling, locks and file format stay vLLM's.
"""

from functools import partial

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
    extract_from_kv_cache,
)


class _Copied:
    """Stands in for the CUDA event of a copy that is already complete."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


class StockOnCpu(ExampleHiddenStatesConnector):
    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: object) -> str | None:
        return None

    def _submit_async_write(self, pending: PendingSave) -> None:
        tokens = pending.token_ids.shape[0]
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = (blocks[:, None] * self._block_size + torch.arange(self._block_size)).flatten()[:tokens]  # [T]
        # indexing copies, so the engine may reuse the blocks as soon as this returns
        states = extract_from_kv_cache(self._kv_cache, slots, tokens).contiguous()  # [T, L, H]
        event = _Copied()
        future = self._executor.submit(
            self._write_tensors,
            {"hidden_states": states, "token_ids": pending.token_ids.clone()},
            event,
            pending.filename,
            self._lock_fds.pop(pending.req_id),  # held since the request arrived: readers sleep on it
        )
        self._req_copy_events[pending.req_id] = event
        self._req_futures[pending.req_id] = future
        future.add_done_callback(partial(self._on_write_done, pending.req_id))
