"""The content of a sample's file, made from states on any device, checked before it is written.

In vLLM this runs inside the engine's process: rows that no one trains on never leave the GPU, and fp8 halves the rest.
"""

from pathlib import Path

import torch

from eagle3 import artifacts
from eagle3.capture.interface import Fault, Written
from eagle3.states import STORED, Layout, quantise


class Payload:
    """Tensors of one sample on the host, filled piece by piece.

    input_ids int32 [T], loss_mask bool [T], aux_hidden [T, A*H] (aux layers ascending, side by side), final_hidden
    [S, H] (state N, before the final norm, where loss_mask is true); for fp8 also aux_scale [T, A], final_scale [S].
    """

    def __init__(self, layout: Layout, input_ids: torch.Tensor, loss_mask: torch.Tensor, *, pinned: bool) -> None:
        self._layout, self._pinned = layout, pinned
        self._input_ids, self._loss_mask = input_ids, loss_mask
        self._rows = loss_mask.nonzero()[:, 0]  # [S]
        tokens, supervised, aux, width = len(input_ids), len(self._rows), len(layout.layers) - 1, layout.hidden_size

        def host(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, pin_memory=pinned)

        self._aux = host(tokens, aux, width, dtype=STORED[layout.aux])
        self._final = host(supervised, width, dtype=STORED[layout.final])
        self._aux_scale = host(tokens, aux, dtype=torch.float32) if layout.aux == "fp8" else None
        self._final_scale = host(supervised, dtype=torch.float32) if layout.final == "fp8" else None
        self._largest = host(tokens, aux + 1, dtype=torch.float32)
        self._filled = self._filled_rows = 0  # tokens, supervised ones

    def __len__(self) -> int:
        return len(self._input_ids)

    def rows_of_next(self, count: int) -> torch.Tensor:
        """Which of the next `count` tokens are supervised, int64 [n] from 0."""
        start = self._filled
        first, last = torch.searchsorted(self._rows, torch.tensor([start, start + count])).tolist()
        return self._rows[first:last] - start

    def take(
        self,
        largest: torch.Tensor,
        aux: torch.Tensor,
        aux_scale: torch.Tensor | None,
        final: torch.Tensor,
        final_scale: torch.Tensor | None,
    ) -> None:
        """Copy what is stored of the next n tokens: largest [n, L], aux [n, A, H], final [s, H], scales [n, A], [s].

        Copies from a GPU into pinned memory are only queued, on the current stream; others are complete.
        """
        tokens = slice(self._filled, self._filled + len(aux))
        rows = slice(self._filled_rows, self._filled_rows + len(final))
        self._filled, self._filled_rows = tokens.stop, rows.stop
        self._largest[tokens].copy_(largest, non_blocking=self._pinned)
        self._aux[tokens].copy_(aux, non_blocking=self._pinned)
        self._final[rows].copy_(final, non_blocking=self._pinned)
        if aux_scale is not None:
            self._aux_scale[tokens].copy_(aux_scale, non_blocking=self._pinned)
        if final_scale is not None:
            self._final_scale[rows].copy_(final_scale, non_blocking=self._pinned)

    def fault(self) -> Fault | None:
        """What is wrong with the states; to be asked when the copies are complete."""
        if self._filled != len(self._input_ids):
            return Fault("wrong shape", f"states of {self._filled} of {len(self._input_ids)} tokens")
        finite = self._largest.isfinite().all(dim=0)  # [L]; an infinity or a NaN anywhere is the largest
        if not finite.all():
            bad = [layer for layer, good in zip(self._layout.layers, finite.tolist(), strict=True) if not good]
            return Fault("states not finite", f"layers {bad}")
        return None

    def largest(self) -> float:
        """Largest magnitude of all states."""
        return self._largest.max().item()

    def tensors(self) -> dict[str, torch.Tensor]:
        """What the file holds; each tensor has a storage of its own."""
        named = {
            "input_ids": self._input_ids,
            "loss_mask": self._loss_mask,
            "aux_hidden": self._aux.flatten(1),
            "final_hidden": self._final,
            "aux_scale": self._aux_scale,
            "final_scale": self._final_scale,
        }
        return {name: tensor for name, tensor in named.items() if tensor is not None}


def fill(layout: Layout, pieces: list[tuple[Payload, int]], states: torch.Tensor) -> Fault | None:
    """Give states [n, L, H] to their samples: the next `count` tokens of each payload, one after the other.

    A few operations for all of them: beside a forward pass each one on the GPU waits for its turn. Returns what is
    wrong with the states' form, and takes nothing then.
    """
    tokens = sum(count for _, count in pieces)
    expected, dtype = (tokens, len(layout.layers), layout.hidden_size), getattr(torch, layout.dtype)
    if tuple(states.shape) != expected or states.dtype != dtype:
        return Fault("wrong shape", f"{tuple(states.shape)} {states.dtype}, expected {expected} {dtype}")
    rows, start = [], 0
    for payload, count in pieces:
        rows.append(payload.rows_of_next(count) + start)
        start += count
    supervised = torch.cat(rows).to(states.device, non_blocking=True)  # [s]
    largest = torch.linalg.vector_norm(states, float("inf"), dim=-1, dtype=torch.float32)  # [n, L]
    aux, aux_scale = _stored(layout.aux, states[:, :-1], largest[:, :-1])
    final, final_scale = _stored(layout.final, states[supervised, -1], largest[supervised, -1])
    counts, row_counts = [count for _, count in pieces], [len(one) for one in rows]
    for (payload, _), *parts in zip(
        pieces,
        largest.split(counts),
        aux.split(counts),
        aux_scale.split(counts) if aux_scale is not None else [None] * len(pieces),
        final.split(row_counts),
        final_scale.split(row_counts) if final_scale is not None else [None] * len(pieces),
        strict=True,
    ):
        payload.take(*parts)
    return None


def _stored(stored: str, states: torch.Tensor, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """States [..., H] and their magnitudes [...] in the form `stored`, contiguous: a strided copy to the host waits."""
    return quantise(states, largest) if stored == "fp8" else (states.contiguous(), None)


def write(path: Path, payload: Payload) -> Written | Fault:
    """Check the sample and write its file; nothing of what fails the check is written."""
    if fault := payload.fault():
        return fault
    return Written(artifacts.save_tensors(path, payload.tensors()), payload.largest())
