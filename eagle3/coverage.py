"""The share of supervised tokens that draft vocabularies of several sizes hold, in all and by source."""

import io
import logging
from dataclasses import dataclass
from typing import Any

import torch

SIZES = (4096, 8192, 16384, 32768, 65536)
SHOWN = 8  # sources with most tokens; the others are taken together
LONGEST_NAME = 32


@dataclass(frozen=True)
class Row:
    name: str  # of the source, "all", or how many others
    tokens: int  # supervised
    shares: list[float]  # of these inside the draft vocabulary, for each size


@dataclass(frozen=True)
class Coverage:
    """The table: all sources, the largest ones, the others together."""

    sizes: list[int]  # draft vocabularies, ascending
    chosen: int  # the one that is used
    rows: list[Row]

    def lines(self) -> list[str]:
        """For the terminal; the size that is used has a star."""
        heads = ["ids in the draft vocabulary", "tokens"]
        heads += [f"{size:,}{'*' if size == self.chosen else ''}" for size in self.sizes]
        table = [
            [_printable(row.name), f"{row.tokens:,}", *(f"{share:.2%}" for share in row.shares)] for row in self.rows
        ]
        widths = [max(map(len, column)) for column in zip(heads, *table, strict=True)]
        return [
            "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in (heads, *table)
        ]

    def facts(self) -> dict[str, Any]:
        """For the manifest."""
        return {"sizes": self.sizes, "rows": [vars(row) for row in self.rows]}

    def png(self) -> bytes:
        """The table as a figure."""
        logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it tells of caches and fonts
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 4), dpi=120, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        total, *sources = self.rows
        shown = {"marker": "o", "color": "black", "zorder": 3}
        axes.plot(self.sizes, [100 * share for share in total.shares], label=_label(total), **shown)
        for row in sources if len(sources) > 1 else []:
            axes.plot(self.sizes, [100 * share for share in row.shares], marker=".", linewidth=1, label=_label(row))
        if self.chosen in self.sizes:
            axes.axvline(self.chosen, color="gray", linestyle=":", label=f"chosen: {self.chosen:,}", zorder=0)
        axes.set_xscale("log", base=2)
        ticks = [size for size in SIZES if size in self.sizes] or self.sizes
        axes.set_xticks(ticks, [f"{size:,}" for size in ticks])
        axes.minorticks_off()
        axes.set_xlabel("ids in the draft vocabulary")
        axes.set_ylabel("supervised tokens inside it (%)")
        axes.grid(alpha=0.3)
        figure.legend(loc="outside right upper", fontsize=8, frameon=False)
        file = io.BytesIO()
        figure.savefig(file, format="png")
        return file.getvalue()


def coverage(order: torch.Tensor, by_source: dict[str, torch.Tensor], size: int, least: int) -> Coverage:
    """Coverage of SIZES and of `size`, each with the first ids of `order`, int64 [V].

    Sizes below `least` and from V on are left out. `by_source` maps a source to int64 [2, P]: ids, and how often each
    occurs.
    """
    vocab_size = len(order)
    sizes = sorted(value for value in {*SIZES, size} if least <= value < vocab_size)
    place = torch.empty_like(order)  # [V], of each id in the order
    place[order] = torch.arange(vocab_size)
    # [sources, sizes]: tokens whose id enters with the size at the latest; the last column counts all
    edges = torch.tensor([*sizes, vocab_size])
    inside = torch.zeros(len(by_source), len(edges), dtype=torch.int64)
    for row, (ids, counts) in zip(inside, by_source.values(), strict=True):
        row.index_add_(0, torch.bucketize(place[ids], edges, right=True), counts)
    inside = inside.cumsum(1)
    tokens = inside[:, -1].tolist()
    names = list(by_source)
    largest = sorted(range(len(names)), key=lambda index: (-tokens[index], names[index]))
    rows = [_row("all", inside.sum(0)), *(_row(names[index], inside[index]) for index in largest[:SHOWN])]
    if others := largest[SHOWN:]:
        rows.append(_row(f"{len(others)} others", inside[others].sum(0)))
    return Coverage(sizes, size, rows)


def _row(name: str, inside: torch.Tensor) -> Row:
    *counts, tokens = inside.tolist()
    return Row(name, tokens, [count / tokens if tokens else 0.0 for count in counts])


def _printable(name: str) -> str:
    """A file's name without control characters, its middle left out where it is long."""
    name = "".join(character if character.isprintable() else "?" for character in name)
    half = LONGEST_NAME // 2
    return name if len(name) <= LONGEST_NAME else f"{name[: half - 1]}…{name[-half:]}"


def _label(row: Row) -> str:
    """For a legend, which takes $ for mathematics and leaves out what begins with an underscore."""
    return " " + _printable(row.name).replace("$", r"\$")
