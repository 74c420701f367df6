"""How far two captures of the same samples are apart: other engines, versions, chunked prefill, fp8.

    python -m eagle3.capture.compare OUT/hidden_states OTHER/hidden_states

Prints ||a - b|| / ||b|| by layer over the samples that both directories hold; reads samples, changes nothing.
"""

import argparse
from pathlib import Path
from typing import Any

from eagle3 import terminal
from eagle3.terminal import UserError


def compare(one: Path, other: Path) -> dict[int, tuple[float, float]]:
    """Layer id -> relative error over all samples, and of the worst sample. `other` is the reference.

    Raises UserError when the directories are of different layers, or have no sample of equal ids and mask in common.
    """
    import torch

    from eagle3 import artifacts
    from eagle3.artifacts import Index

    manifests = [artifacts.read_manifest(directory, "02") for directory in (one, other)]
    layers = manifests[0]["fingerprint"]["layers"]
    where = other / "manifest.json"
    artifacts.require_same(where, manifests[1]["fingerprint"], {"layers": layers}, "capture the same --aux-layers")
    records = [Index(directory).samples() for directory in (one, other)]
    sums = torch.zeros(len(layers), 2, dtype=torch.float64)  # of squares: differences, reference
    worst = torch.zeros(len(layers), dtype=torch.float64)
    compared = 0
    for index in records[0].keys() & records[1].keys():
        pair = records[0][index], records[1][index]
        if any(record["status"] != "done" for record in pair) or pair[0]["ids"] != pair[1]["ids"]:
            continue
        a, b = (
            _states(artifacts.load_sample(directory, "02", record, manifests[0]["vocab_size"]), len(layers))
            for directory, record in zip((one, other), pair, strict=True)
        )
        if any(x.shape != y.shape for x, y in zip(a, b, strict=True)):
            continue  # another loss mask
        squares = torch.tensor(
            [[(x - y).square().sum(), y.square().sum()] for x, y in zip(a, b, strict=True)], dtype=torch.float64
        )
        sums += squares
        worst = torch.maximum(worst, (squares[:, 0] / squares[:, 1].clamp_min(1e-30)).sqrt())
        compared += 1
    if not compared:
        raise UserError(
            f"{one} and {other} have no sample of the same ids and mask in common; prepare both from one run"
        )
    errors = (sums[:, 0] / sums[:, 1].clamp_min(1e-30)).sqrt()
    terminal.say(f"{compared} samples compared")
    return {layer: (errors[i].item(), worst[i].item()) for i, layer in enumerate(layers)}


def _states(sample: dict[str, Any], layers: int) -> list[Any]:
    """Float states of each layer: [T, H] of the aux layers, [S, H] of the last."""
    import torch

    from eagle3.states import dequantise

    aux = sample["aux_hidden"].view(len(sample["input_ids"]), layers - 1, -1)  # [T, A, H]
    final = sample["final_hidden"]  # [S, H]
    aux = dequantise(aux, sample["aux_scale"], torch.float32) if "aux_scale" in sample else aux.float()
    final = dequantise(final, sample["final_scale"], torch.float32) if "final_scale" in sample else final.float()
    return [*aux.unbind(1), final]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("one", type=Path, help="output directory of stage 02")
    parser.add_argument("other", type=Path, help="another one, the reference")
    arguments = parser.parse_args()
    for layer, (error, worst) in compare(arguments.one, arguments.other).items():
        terminal.say(f"  layer {layer:>3}: relative error {error:.2e}, worst sample {worst:.2e}")


if __name__ == "__main__":
    terminal.quiet_libraries()
    terminal.run(main)
