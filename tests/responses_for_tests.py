"""A backend that is scripted, and conversations for it."""

import json
import random
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

from eagle3.conversations import Conversation, TokenRow
from eagle3.masking import Masker
from eagle3.responses.backends import Backend, Generated, Outcome, Request, Sampling
from eagle3.responses.journal import Answers, Tally
from eagle3.responses.writer import write_answers
from eagle3.sources import Row

MADE_BY = {"target": "t", "tokenizer": "k", "dataset": "d"}


class Scripted:
    """Stands in for a backend: `answer(prompt's text, request)` gives the text of an answer, ids, or an outcome.

    A text gets the tokenizer's end token; a shorter `max_tokens` cuts it. Requests in flight finish in an order of
    `shuffle`, one a call. After `most` answers it raises KeyboardInterrupt.
    """

    name = "scripted"

    def __init__(
        self,
        tokenizer: Any,
        answer: Callable[[str, Request], str | list[int] | Outcome],
        *,
        window: int = 4,
        shuffle: int = 0,
        most: int | None = None,
        max_model_len: int = 10_000,
    ) -> None:
        self.tokenizer, self.answer, self.window, self.most = tokenizer, answer, window, most
        self.max_model_len = max_model_len
        self.requests: list[Request] = []
        self.prompts: list[str] = []
        self.widest = 0
        self._in_flight: dict[Hashable, Request] = {}
        self._random = random.Random(shuffle)

    def submit(self, key: Hashable, request: Request) -> None:
        assert key not in self._in_flight
        self._in_flight[key] = request
        self.widest = max(self.widest, len(self._in_flight))

    def finished(self) -> list[tuple[Any, Outcome]]:
        if not self._in_flight:
            return []
        if self.most is not None and len(self.requests) == self.most:
            raise KeyboardInterrupt
        key = self._random.choice(sorted(self._in_flight))
        request = self._in_flight.pop(key)
        self.requests.append(request)
        self.prompts.append(self.tokenizer.decode(request.prompt))
        said = self.answer(self.prompts[-1], request)
        if isinstance(said, Generated | Failed):
            return [(key, said)]
        ids = said if isinstance(said, list) else [*encode(self.tokenizer, said), self.tokenizer.eos_token_id]
        if len(ids) > request.max_tokens:
            return [(key, Generated(ids[: request.max_tokens], "length"))]
        return [(key, Generated(ids, "stop"))]

    def abandon(self) -> None:
        self._in_flight.clear()

    def close(self) -> None:
        pass


class Failed(str):
    """The outcome of a request that failed."""


def encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def of_user(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str, **fields: Any) -> dict:
    return {"role": "assistant", "content": text, **fields}


def rows_of(*rows: list[dict], tools: list | None = None, origin: str | None = None) -> list[tuple[Row, Conversation]]:
    return [(Row("test", n, None), Conversation(messages, tools, origin)) for n, messages in enumerate(rows, 1)]


def write(
    backend: Backend,
    rows: list[tuple[Row, Conversation]],
    path: Path,
    sampling: Sampling | None = None,
    **changes: Any,
) -> Tally:
    """write_answers with the settings of a small run."""
    settings = {"fingerprint": MADE_BY, "max_samples": None, "max_seq_len": 2000} | changes
    tokenizer = settings.pop("tokenizer", None) or backend.tokenizer
    end_ids = settings.pop("end_ids", [tokenizer.eos_token_id])
    masker = Masker(tokenizer, end_ids)
    sampling = sampling or Sampling(max_tokens=200)
    return write_answers(backend, masker, tokenizer, rows, path, sampling, end_ids=end_ids, **settings)


def numbers(path: Path) -> list[int]:
    """Row numbers of the answers that have samples."""
    return [row.number for row in Answers(path).rows() if isinstance(row.value, TokenRow)]
