"""Samples as a person reads them: the text that the target sees, with what the draft learns from in colour."""

import os
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from eagle3 import artifacts
from eagle3.artifacts import Index

GREEN, PLAIN = "\033[1;32m", "\033[0m"
CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}  # data must not steer the terminal


def show(directory: Path, tokenizer: Any, count: int, vocab_size: int) -> Iterator[str]:
    """Yields the first `count` samples of stage 01 as text; supervised is green, or in «» without a terminal."""
    coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    opening, closing = (GREEN, PLAIN) if coloured else ("«", "»")
    for record in list(Index(directory).samples().values())[:count]:
        parts = spans(directory, record, tokenizer, vocab_size)
        text = "".join(f"{opening}{part}{closing}" if supervised else part for supervised, part in parts)
        yield (
            f"--- sample {record['index']}, {record['source']}:{record['row']}: {record['tokens']} tokens, "
            f"{record['supervised']} supervised ({'green' if coloured else 'in «»'})\n{text}"
        )


def spans(directory: Path, record: dict[str, Any], tokenizer: Any, vocab_size: int) -> list[tuple[bool, str]]:
    """The text of one sample of stage 01 in runs of tokens: whether they are supervised, and what they say."""
    sample = artifacts.load_sample(directory, "01", record, vocab_size)
    pairs = zip(sample["input_ids"].tolist(), sample["loss_mask"].tolist(), strict=True)
    return [
        (supervised, tokenizer.decode([token for token, _ in run], skip_special_tokens=False).translate(CONTROLS))
        for supervised, run in groupby(pairs, key=lambda pair: pair[1])
    ]
