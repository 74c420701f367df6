"""Prompts that must not be trained on, such as those of test sets, and the conversations that hold one."""

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3 import terminal
from eagle3.conversations import SkipRow, parse_row
from eagle3.sources import LocalFiles
from eagle3.terminal import UserError

SEPARATORS = re.compile(r"[\W_]+")  # all but letters and digits, of any script


@dataclass(frozen=True)
class Exclusion:
    """Normal forms of the user turns that must not be trained on."""

    prompts: frozenset[str]

    def __len__(self) -> int:
        return len(self.prompts)

    def identity(self) -> str:
        """Equal for equal sets of prompts, for fingerprints."""
        return hashlib.sha256("\n".join(sorted(self.prompts)).encode()).hexdigest()[:16]

    def matches(self, messages: Iterable[dict[str, Any]]) -> bool:
        """Whether a user turn is one of the prompts, after normalising."""
        turns = (message["content"] for message in messages if message["role"] == "user")
        return any(normal_form(turn) in self.prompts for turn in turns)


def normal_form(text: str) -> str:
    """Letters and digits only, compatible forms and upper and lower case alike."""
    return SEPARATORS.sub("", unicodedata.normalize("NFKC", text).casefold())


def load_exclusion(paths: list[Path]) -> Exclusion:
    """The prompts of text files with one a line, and of any files and rows that stage 01 reads; answers do not matter.

    Every user turn counts. Raises UserError for a file without any; a row without is said once a file.
    """
    prompts: set[str] = set()
    for path in paths:
        skipped: Counter[str] = Counter()
        turns = _text_lines(path) if path.suffix == ".txt" else _user_turns(path, skipped)
        found = {form for turn in turns if (form := normal_form(turn))}
        reasons = "; ".join(f"{count} × {reason}" for reason, count in skipped.most_common(3))
        if not found:
            raise UserError(
                f"--exclude {path}: no prompt in it{f' ({reasons})' if reasons else ''}; "
                "give a .txt file with one prompt a line, or rows as --dataset takes them"
            )
        if skipped:
            terminal.warn(f"--exclude {path}: {skipped.total():,} rows have no prompt and exclude nothing ({reasons})")
        prompts |= found
    return Exclusion(frozenset(prompts))


def _text_lines(path: Path) -> Iterator[str]:
    try:
        with open(path, encoding="utf-8") as lines:
            yield from lines
    except UnicodeDecodeError as error:
        raise UserError(f"--exclude {path} is not UTF-8 text ({error}); convert it") from error


def _user_turns(path: Path, skipped: Counter[str]) -> Iterator[str]:
    for row in LocalFiles(path, "--exclude").rows():
        try:
            conversation = parse_row(row, answers_needed=False)
        except SkipRow as skip:
            if str(skip) != "blank line":
                skipped[str(skip)] += 1
            continue
        yield from (message["content"] for message in conversation.messages if message["role"] == "user")
