"""A vLLM server that runs already: its completions API with token ids both ways, from threads.

Passing faults (no connection, a reset, a time-out, HTTP 5xx, 408 and 429) are waited out for minutes, since a server in
use may be restarted; any other refusal is the row's own.
"""

import http.client
import json
import queue
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Hashable
from itertools import chain, repeat
from typing import Any

from eagle3 import terminal
from eagle3.responses.backends import Outcome, Request, outcome
from eagle3.terminal import UserError, short

PAUSES = (1, 2, 4, 8, 16)  # seconds before each new try; from then on the last again
PATIENCE = 300.0  # seconds of passing faults after which a request has failed
SLOWEST = 5  # tokens a second of one answer: below that, after QUEUED seconds, a server counts as stuck
QUEUED = 300
PROBE = "Naïve test 1234: 你好,\n\n\tdef f(x): return x"


class _Refused(Exception):
    """The server's word that a request is wrong. Its text is one line."""


class _Passing(Exception):
    """A fault that another try may not meet. Its text is one line."""


class EndpointBackend:
    """`concurrency` threads, each with one request at a time."""

    def __init__(self, url: str, tokenizer: Any, concurrency: int = 64, patience: float = PATIENCE) -> None:
        """Checks the server. Raises UserError when it does not answer, gives no token ids or tokenises differently."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self.window = concurrency
        self._patience = patience
        self._todo: queue.SimpleQueue = queue.SimpleQueue()  # of key, request, and the queue for its outcome
        self._done: queue.SimpleQueue = queue.SimpleQueue()
        self._in_flight = 0
        self._closed = threading.Event()
        self._connect(tokenizer)
        self.name = f"{self.model} at {self.url}"
        for _ in range(concurrency):  # daemons: nobody waits for an answer after Ctrl-C
            threading.Thread(target=self._work, daemon=True).start()

    def submit(self, key: Hashable, request: Request) -> None:
        self._in_flight += 1
        self._todo.put((key, request, self._done))

    def finished(self) -> list[tuple[Any, Outcome]]:
        if not self._in_flight:
            return []
        self._in_flight -= 1
        key, result = self._done.get()
        if isinstance(result, Exception):  # of this program, not of the server
            raise result
        return [(key, result)]

    def abandon(self) -> None:
        self._in_flight = 0
        self._done = queue.SimpleQueue()  # what is in flight goes to the one before, and what is queued is not begun

    def close(self) -> None:
        self._closed.set()
        for _ in range(self.window):
            self._todo.put(None)

    # ----------------------------------------------------------------------------------------- the server

    def _connect(self, tokenizer: Any) -> None:
        where = f"--responses-endpoint {self.url}"
        try:
            models = self._call("/v1/models")["data"]
            served = [model["id"] for model in models]
            self.model = served[0]
        except (_Refused, KeyError, IndexError, TypeError) as error:
            said = f" ({error})" if isinstance(error, _Refused) else ""
            raise UserError(f"{where} lists no model{said}; give the base URL of a vLLM OpenAI server") from error
        except _Passing as error:
            raise UserError(
                f"{where} does not answer ({error}); give the base URL of a vLLM OpenAI server that runs"
            ) from error
        if len(served) > 1:
            terminal.say(f"{self.url} serves {', '.join(served)}; {self.model} writes the answers")
        self.max_model_len = models[0].get("max_model_len") or sys.maxsize
        try:
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": PROBE}], tokenize=False, add_generation_prompt=True
            )
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            self._require_same_tokenizer(where, text, ids)
            reply = self._complete(Request(ids, 1, 0.0, 1.0, 0, ()), timeout=QUEUED)
        except (_Refused, _Passing) as error:
            raise UserError(f"{where}: {error}; mend the server, then run the same command") from error
        if not isinstance(reply.get("token_ids"), list):
            raise UserError(f"{where} returns no token ids; it needs vllm 0.11 or later")

    def _require_same_tokenizer(self, where: str, text: str, ids: list[int]) -> None:
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        try:
            theirs = self._call("/tokenize", body).get("tokens")
        except _Refused as error:
            terminal.warn(f"{self.url} does not say how it tokenises ({error}); it must serve the target itself")
            return
        if theirs != ids:
            place = next((n for n, (a, b) in enumerate(zip(ids, theirs, strict=False)) if a != b), "the end")
            raise UserError(
                f"{where}: {self.model} tokenises otherwise than --model-path, first at token {place}; "
                "give the target that the server has"
            )

    def _work(self) -> None:
        while (job := self._todo.get()) is not None and not self._closed.is_set():
            key, request, done = job
            if done is not self._done:
                continue
            try:
                done.put((key, self._ask(request)))
            except Exception as error:
                done.put((key, error))

    def _ask(self, request: Request) -> Outcome:
        give_up = None
        for pause in chain(PAUSES, repeat(PAUSES[-1])):
            try:
                answer = self._complete(request, timeout=QUEUED + request.max_tokens / SLOWEST)
                return outcome(answer["token_ids"], answer["finish_reason"])
            except _Refused as error:
                return str(error)
            except _Passing as error:
                now = time.monotonic()
                give_up = give_up or now + self._patience
                if now + pause > give_up or self._closed.wait(pause):
                    return str(error)
        raise AssertionError  # the pauses have no end

    def _complete(self, request: Request, timeout: float) -> dict[str, Any]:
        """The server's choice: token_ids, finish_reason."""
        body = {"model": self.model, "prompt": request.prompt, "return_token_ids": True, **request.settings()}
        try:
            return self._call("/v1/completions", body, timeout)["choices"][0]
        except (KeyError, IndexError, TypeError) as error:
            raise _Refused(f"a reply without choices ({short(error)})") from error

    def _call(self, path: str, body: dict[str, Any] | None = None, timeout: float = 30.0) -> Any:
        """GET, or POST of JSON; the reply's JSON."""
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=timeout) as reply:
                return json.loads(reply.read())
        except urllib.error.HTTPError as error:
            line = f"HTTP {error.code}: {_message(error)}"
            raise (_Passing if error.code >= 500 or error.code in (408, 429) else _Refused)(line) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            cause = getattr(error, "reason", error)
            raise _Passing(short(cause) if isinstance(cause, Exception) else str(cause)) from error


def _message(error: urllib.error.HTTPError) -> str:
    """The first line of what the server says."""
    try:
        text = error.read().decode(errors="replace")
    except (OSError, http.client.HTTPException):
        text = ""
    try:
        said = json.loads(text)
        text = said.get("error", said).get("message") or text
    except (ValueError, AttributeError):
        pass
    lines = str(text).strip().splitlines()
    return lines[0][:160] if lines else error.reason
