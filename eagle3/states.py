"""How hidden states are stored: bfloat16 or float32 as the engine computed them, or fp8 with one scale per state.

fp8 is e4m3 with one float32 scale per token and layer: a state of H numbers takes H + 4 bytes instead of 2 H.
float16 is never used: states of some targets exceed its largest number, 65504.
"""

from dataclasses import asdict, dataclass

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0  # largest number of e4m3
STORED = {"bfloat16": torch.bfloat16, "float32": torch.float32, "fp8": FP8}  # names in flags and manifests
FILE_OVERHEAD = 3000  # bytes a `.pt` of six tensors takes besides their content, at most


@dataclass(frozen=True)
class Layout:
    """What a sample's file of stage 02 holds. Plain values, so that it travels into engine processes."""

    layers: tuple[int, ...]  # ids, ascending: the aux layers, then N
    hidden_size: int
    dtype: str  # of the engine: "bfloat16" or "float32"
    aux: str  # aux states as stored: the engine's dtype, or "fp8"
    final: str  # final states as stored, likewise

    def sample_bytes(self, tokens: int, supervised: int) -> int:
        """Size of the file of a sample, FILE_OVERHEAD included."""
        aux = tokens * (len(self.layers) - 1) * self._state_bytes(self.aux)
        final = supervised * self._state_bytes(self.final)
        return aux + final + tokens * 5 + FILE_OVERHEAD  # int32 id and bool mask

    def _state_bytes(self, stored: str) -> int:
        return self.hidden_size * STORED[stored].itemsize + (4 if stored == "fp8" else 0)

    def unquantised(self) -> "Layout":
        """The same states as the engine computed them."""
        return Layout(**asdict(self) | {"aux": self.dtype, "final": self.dtype})


def quantise(states: torch.Tensor, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """States [..., H] and the largest magnitude of each [...] -> fp8 [..., H] and float32 scales [...]."""
    scale = (largest.float() / FP8_MAX).clamp_min(torch.finfo(torch.float32).tiny)
    return (states.float() / scale[..., None]).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale


def dequantise(stored: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp8 [..., H] and float32 scales [...] -> states [..., H] in `dtype`."""
    return (stored.float() * scale[..., None]).to(dtype)


def all_finite(stored: torch.Tensor) -> bool:
    """Whether stored states hold no infinity and no NaN. Extremes are found many times faster than sums, and tell."""
    if stored.numel() == 0:
        return True
    if stored.dtype == FP8:  # no infinities; NaN is 0x7f or 0xff, the largest with and without a sign
        return int(stored.view(torch.int8).amax()) != 0x7F and int(stored.view(torch.uint8).amax()) != 0xFF
    low, high = stored.aminmax()  # NaN, if there is one
    return bool(low.isfinite() and high.isfinite())
