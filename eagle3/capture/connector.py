"""The KV connector that writes captured states; vLLM's processes import it by module path.

vLLM's method extract_hidden_states keeps the states in cache blocks of the engine. Its own connector writes whole
states for a reader to load, cut and write again. This one makes the finished file of a sample in the engine's process:
rows that no one trains on never leave the GPU, fp8 is made there, and each byte is written once.

    stage 02 (driver)                    engine: scheduler side           engine: worker of rank 0
    request with Order  ------------->   request finished: Save   ----->  copy off the cache, check, write
    Written or Fault of the ticket  <-------------- socket --------------

Subclass of vLLM's, whose private parts it uses: with the cache's layout, they differ between 0.26 and 0.32.
"""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Client
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)

from eagle3.capture.interface import Fault, Written, ids_digest
from eagle3.capture.payload import Payload, fill, write
from eagle3.states import Layout
from eagle3.terminal import UserError, is_out_of_memory, short

PIECE_BYTES = 64 << 20  # of states on the device at a time, beside the engine's own memory
WRITERS = 16  # threads; most of the time each waits for the disk


@dataclass(frozen=True)
class Order:
    """What a request carries: which states to write, and where. Plain values, for vLLM serialises them."""

    ticket: int  # the driver's name for the request
    path: str
    digest: str  # ids_digest of the tokens
    runs: list[list[int]]  # [start, end) of the supervised tokens
    whole: bool  # unquantised, with final states everywhere

    def parameters(self) -> dict[str, Any]:
        return {"eagle3": asdict(self)}


@dataclass
class Save:
    """A finished request whose states wait in cache blocks."""

    request: str  # vLLM's id
    order: Order
    input_ids: torch.Tensor  # int32 [T], as the engine had them
    blocks: list[int]
    copied: threading.Event = field(default_factory=threading.Event)

    def __getstate__(self) -> dict[str, Any]:  # an event does not travel; each process makes its own
        return {name: value for name, value in vars(self).items() if name != "copied"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, copied=threading.Event())


@dataclass
class CaptureMetadata(KVConnectorMetadata):
    saves: list[Save] = field(default_factory=list)


class CaptureConnector(ExampleHiddenStatesConnector):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        given = self._kv_transfer_config.get_from_extra_config("eagle3", None)
        self._layout = Layout(**given["layout"] | {"layers": tuple(given["layout"]["layers"])})
        self._address = given["address"]
        self._finished: list[Save] = []  # scheduler side
        self._saving: dict[str, Save] = {}  # worker side, until their blocks may be used again
        self._sending = threading.Lock()
        self._batches: SimpleQueue[tuple[torch.cuda.Event, list[Save]]] = SimpleQueue()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        # CPU attention takes no other layout than its own, and the rows of a state are contiguous in that too
        return super().get_required_kvcache_layout(vllm_config) if torch.cuda.is_available() else None

    def get_finished_count(self) -> int:
        return 1  # rank 0 alone writes; vLLM 0.26 would wait for every rank

    # ------------------------------------------------------------------------------------- scheduler side

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Keep the blocks until the states are off them; the ticket goes back with the request's output."""
        order = Order(**(request.kv_transfer_params or {})["eagle3"])
        if request.num_computed_tokens < len(request.prompt_token_ids):
            return False, {"ticket": order.ticket, "saved": False}
        ids = torch.tensor(request.prompt_token_ids, dtype=torch.int32)
        self._finished.append(Save(request.request_id, order, ids, list(block_ids)))
        return True, {"ticket": order.ticket, "saved": True}

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        metadata = CaptureMetadata(self._finished)
        self._finished = []
        return metadata

    # ---------------------------------------------------------------------------------------- worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        if self._is_tp_rank_zero:
            self._driver = Client(self._address, family="AF_UNIX")
            self._writers = ThreadPoolExecutor(WRITERS, thread_name_prefix="eagle3-write")
            if self._kv_cache.is_cuda:
                self._stream = torch.cuda.Stream(priority=-1)
                threading.Thread(target=self._copy_forever, name="eagle3-copy", daemon=True).start()

    def wait_for_save(self) -> None:
        pass  # the states are in the cache

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Start saving what the scheduler names.

        vLLM calls this before it launches a step's forward pass, so that the copies wait for no pass but the ones that
        made the states, and run beside the new one. Begun in get_finished they would wait for the new one as well.
        """
        super().bind_connector_metadata(connector_metadata)
        saves = connector_metadata.saves
        if not saves or not self._is_tp_rank_zero:
            return
        self._saving |= {save.request: save for save in saves}
        if not self._kv_cache.is_cuda:  # a copy in another thread would take cores from the engine's own
            self._copy(saves)
            return
        ready = torch.cuda.Event()
        ready.record()  # the passes that filled the blocks
        self._batches.put((ready, saves))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The requests whose blocks are free again."""
        done = {request for request, save in self._saving.items() if save.copied.is_set()}
        for request in done:
            del self._saving[request]
        return done or None, None

    def _copy_forever(self) -> None:
        """Beside the forward passes, on a stream whose few operations go before theirs."""
        while True:
            ready, saves = self._batches.get()
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(ready)
                self._copy(saves)

    def _copy(self, saves: list[Save]) -> None:
        """Bring the states of `saves` to the host, let their blocks go, and have the files written."""
        for whole in (False, True):
            group = [save for save in saves if save.order.whole == whole]
            try:
                results = self._to_host(group, self._layout.unquantised() if whole else self._layout)
            except Exception as error:  # the engine must go on, and its blocks must come free
                reason = "out of memory" if is_out_of_memory(error) else "engine gave no states"
                results = [Fault(reason, short(error))] * len(group)
            for save, result in zip(group, results, strict=True):
                save.copied.set()
                self._writers.submit(self._finish, save, result)

    @torch.inference_mode()
    def _to_host(self, saves: list[Save], layout: Layout) -> list[Payload | Fault]:
        """The tensors of each sample's file; complete when this returns."""
        results = [self._payload(save, layout) for save in saves]
        cache, size = self._kv_cache, self._block_size
        pieces, slots, room = [], [], self._piece_tokens(layout)
        for save, payload in zip(saves, results, strict=True):
            if isinstance(payload, Fault):
                continue
            at = torch.arange(len(payload))  # [T]
            place = torch.tensor(save.blocks)[at // size] * size + at % size  # [T], slots of the cache
            for part in place.split(room):
                if pieces and sum(map(len, slots)) + len(part) > room:
                    self._gather(layout, pieces, torch.cat(slots))
                    pieces, slots = [], []
                pieces.append((payload, len(part)))
                slots.append(part)
        if pieces:
            self._gather(layout, pieces, torch.cat(slots))
        if cache.is_cuda:
            copied = torch.cuda.Event(blocking=True)  # sleeps instead of spinning
            copied.record()
            copied.synchronize()
        return results

    def _gather(self, layout: Layout, pieces: list[tuple[Payload, int]], slots: torch.Tensor) -> None:
        cache = self._kv_cache
        states = extract_from_kv_cache(cache, slots.to(cache.device, non_blocking=True), len(slots))  # [n, L, H]
        if fault := fill(layout, pieces, states):
            raise ValueError(fault.detail)

    def _payload(self, save: Save, layout: Layout) -> Payload | Fault:
        """Empty tensors for a sample's file, if the engine computed the sample at all."""
        tokens, order = len(save.input_ids), save.order
        if order.digest != ids_digest(save.input_ids):
            return Fault("states of other tokens", f"the engine had {tokens} tokens, not those of the sample")
        if len(save.blocks) * self._block_size < tokens:
            return Fault("wrong shape", f"{len(save.blocks)} cache blocks cannot hold {tokens} tokens")
        mask = torch.zeros(tokens, dtype=torch.bool)
        for start, end in order.runs:
            mask[start:end] = True
        return Payload(layout, save.input_ids, mask, pinned=self._kv_cache.is_cuda)

    def _piece_tokens(self, layout: Layout) -> int:
        return max(64, PIECE_BYTES // (len(layout.layers) * layout.hidden_size * self._kv_cache.element_size()))

    def _finish(self, save: Save, payload: Payload | Fault) -> None:
        try:
            outcome = payload if isinstance(payload, Fault) else write(Path(save.order.path), payload)
        except (UserError, OSError) as error:  # of the disk: the driver decides
            outcome = error
        except Exception as error:
            outcome = Fault("not written", short(error))
        self._send(save.order.ticket, outcome)

    def _send(self, ticket: int, outcome: Written | Fault | Exception) -> None:
        with self._sending, contextlib.suppress(OSError):  # the driver may be gone
            self._driver.send((ticket, outcome))
