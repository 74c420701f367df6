"""The endpoint backend against a server that misbehaves in every way that one in use does."""

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from responses_for_tests import lines_of, rows_of, user, write
from tokenizers_for_tests import PLAIN, fast_bytes

from eagle3.responses import endpoint
from eagle3.responses.backends import Generated, Request, generate
from eagle3.responses.endpoint import EndpointBackend
from eagle3.terminal import Stopped, UserError

Replies = dict[str, Callable[[dict | None], Any]]
PATHS = {"models": "/v1/models", "tokenize": "/tokenize", "completions": "/v1/completions"}
MODELS = {"data": [{"id": "m", "max_model_len": 512}]}


class Handler(BaseHTTPRequestHandler):
    """Replies as server.replies says by path: JSON, (status, text), or None for a connection that breaks."""

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"] or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        self.server.seen.append((self.path, body))
        reply = self.server.replies.get(self.path, lambda body: (404, '{"detail": "Not Found"}'))(body)
        if reply is None:
            return self.connection.close()
        status, text = reply if isinstance(reply, tuple) else (200, json.dumps(reply))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args: object) -> None:
        pass


def echo(body: dict) -> dict:
    """The prompt's first ids as the answer."""
    ids = body["prompt"][: body["max_tokens"]]
    return {"choices": [{"token_ids": ids, "finish_reason": "length", "text": "?"}]}


@pytest.fixture
def tokenizer():
    return fast_bytes(PLAIN)


@pytest.fixture
def serve(tokenizer) -> Iterator[Callable[..., Any]]:
    """serve(**replies by path) -> a server; None leaves a path out."""
    servers = []

    def run(**changes: Any) -> Any:
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        replies = {
            "/v1/models": lambda body: MODELS,
            "/tokenize": lambda body: {"tokens": tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]},
            "/v1/completions": echo,
        }
        replies |= {PATHS[name]: reply for name, reply in changes.items()}
        server.replies = {path: reply for path, reply in replies.items() if reply}
        server.seen, server.url = [], f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return server

    yield run
    for server in servers:
        server.shutdown()
        server.server_close()


def request(prompt: list[int], **changes: Any) -> Request:
    settings = {"max_tokens": 2, "temperature": 0.5, "top_p": 0.9, "seed": 7, "stop_ids": (257,)}
    return Request(prompt, **(settings | changes))


def test_what_is_asked_for_and_what_comes_back(serve, tokenizer):
    server = serve()
    backend = EndpointBackend(f"{server.url}/v1/", tokenizer, 3)
    prompts = [[65 + n, 66, 67] for n in range(8)]
    assert generate(backend, map(request, prompts)) == [Generated(prompt[:2], "length") for prompt in prompts]
    assert (backend.window, backend.max_model_len, backend.name) == (3, 512, f"m at {server.url}")
    body = next(body for path, body in server.seen if path == "/v1/completions" and body["prompt"] == prompts[3])
    assert body == {
        "model": "m",
        "prompt": prompts[3],
        "return_token_ids": True,
        "max_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": 7,
        "stop_token_ids": [257],
        "stop": [],
        "skip_special_tokens": False,
    }
    backend.close()


def test_requests_are_made_at_the_same_time(serve, tokenizer):
    together = threading.Barrier(4, timeout=20)

    def completions(body):
        if len(body["prompt"]) == 1:
            together.wait()
        return echo(body)

    backend = EndpointBackend(serve(completions=completions).url, tokenizer, 4)
    assert len(generate(backend, [request([n]) for n in range(8)])) == 8


@pytest.mark.parametrize(
    ("replies", "line"),
    [
        ({"models": None}, r"lists no model \(HTTP 404: .*Not Found.*\); give the base URL"),
        ({"models": lambda body: {"data": []}}, r"lists no model; give the base URL"),
        ({"models": lambda body: (200, "<html>")}, r"does not answer \(JSONDecodeError: .*\); give the base URL"),
        ({"models": lambda body: (503, "starting")}, r"does not answer \(HTTP 503: starting\); give the base URL"),
        (
            {"completions": lambda body: {"choices": [{"text": "a", "finish_reason": "length"}]}},
            "returns no token ids; it needs vllm 0.11 or later",
        ),
        ({"tokenize": lambda body: {"tokens": [1, 2]}}, "m tokenises otherwise than --model-path, first at token 0"),
        (
            {"completions": lambda body: (400, '{"error": {"message": "max_tokens\\nmore"}}')},
            "HTTP 400: max_tokens; mend the server",
        ),
    ],
)
def test_a_server_that_is_of_no_use_is_refused_in_one_line(serve, tokenizer, replies, line):
    with pytest.raises(UserError, match=f"^--responses-endpoint http://127.0.0.1:\\d+:? {line}") as error:
        EndpointBackend(serve(**replies).url, tokenizer)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "127.0.0.1:9", "nonsense"])
def test_no_server_at_all_is_one_line(url, tokenizer):
    with pytest.raises(UserError, match=f"--responses-endpoint {url} does not answer .*; give the base URL of"):
        EndpointBackend(url, tokenizer)


def test_a_server_with_several_models_or_without_tokenize_is_used(serve, tokenizer, capsys):
    models = {"data": [{"id": "base"}, {"id": "adapter"}]}
    server = serve(models=lambda body: models, tokenize=None)
    backend = EndpointBackend(server.url, tokenizer, 1)
    assert backend.model == "base" and backend.max_model_len > 1 << 40
    said = capsys.readouterr()
    assert f"{server.url} serves base, adapter; base writes the answers" in said.out
    assert "does not say how it tokenises (HTTP 404: " in said.err


def test_passing_faults_are_waited_out(serve, tokenizer, monkeypatch):
    monkeypatch.setattr(endpoint, "PAUSES", (0.01, 0.02))
    faults = [(500, "engine died"), None, (503, "starting"), (429, "slow down"), (200, "cut off {")]

    def completions(body):
        return faults.pop(0) if faults and body["max_tokens"] == 2 else echo(body)

    backend = EndpointBackend(serve(completions=completions).url, tokenizer, 1)
    assert generate(backend, [request([65, 66, 67])]) == [Generated([65, 66], "length")] and not faults


def test_faults_that_last_are_the_rows_outcome(serve, tokenizer, monkeypatch):
    monkeypatch.setattr(endpoint, "PAUSES", (0.02,))
    server = serve()
    backend = EndpointBackend(server.url, tokenizer, 2, patience=0.5)
    server.replies["/v1/completions"] = lambda body: (500, "engine died") if body["prompt"] == [1] else echo(body)
    started = time.monotonic()
    assert generate(backend, [request([1]), request([2])]) == ["HTTP 500: engine died", Generated([2], "length")]
    assert 0.4 < time.monotonic() - started < 5
    assert sum(path == "/v1/completions" and body["prompt"] == [1] for path, body in server.seen) > 5


def test_a_refusal_is_the_rows_outcome_at_once(serve, tokenizer):
    server = serve()
    backend = EndpointBackend(server.url, tokenizer, 1)
    server.seen.clear()
    server.replies["/v1/completions"] = lambda body: (400, '{"error": {"message": "too long\\nby 3"}}')
    assert generate(backend, [request([1])]) == ["HTTP 400: too long"] and len(server.seen) == 1
    server.replies["/v1/completions"] = lambda body: {"choices": [{"token_ids": [5], "finish_reason": "abort"}]}
    assert generate(backend, [request([1])]) == ["vLLM ended the request (abort)"]


def test_a_server_that_is_stuck_is_asked_again(serve, tokenizer, monkeypatch):
    monkeypatch.setattr(endpoint, "QUEUED", 0.3)
    monkeypatch.setattr(endpoint, "PAUSES", (0.01,))
    calls, free = [], threading.Event()

    def completions(body):
        calls.append(body)
        if len(calls) == 2:  # the first is the check at the start
            free.wait(10)
        return echo(body)

    backend = EndpointBackend(serve(completions=completions).url, tokenizer, 1)
    assert generate(backend, [request([65, 66], max_tokens=1)]) == [Generated([65], "length")]
    assert len(calls) == 3
    free.set()


def test_a_signal_ends_the_wait_at_once_and_the_journal_is_whole(serve, tokenizer, tmp_path):
    free = threading.Event()

    def completions(body):
        if "second" in tokenizer.decode(body["prompt"]):
            free.wait(30)
        return echo(body)

    def stop(number, frame):
        raise Stopped

    backend = EndpointBackend(serve(completions=completions).url, tokenizer, 2)
    path = tmp_path / "answers.jsonl"
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    started = time.monotonic()
    try:
        with pytest.raises(Stopped):
            write(backend, rows_of([user("first")], [user("second")]), path, tokenizer=tokenizer)
    finally:
        signal.signal(signal.SIGALRM, before)
    backend.close()
    assert time.monotonic() - started < 5
    free.set()
    assert path.read_bytes().endswith(b"\n") and [line["row"] for line in lines_of(path)[1:]] == [1]


def test_what_is_abandoned_does_not_come_back(serve, tokenizer):
    free = threading.Event()

    def completions(body):
        if body["prompt"] == [1]:
            free.wait(30)
        return echo(body)

    server = serve(completions=completions)
    backend = EndpointBackend(server.url, tokenizer, 1)
    for number in range(3):
        backend.submit(number, request([1 + number]))
    time.sleep(0.2)
    backend.abandon()
    assert backend.finished() == []
    free.set()
    assert generate(backend, [request([9])]) == [Generated([9], "length")]
    assert [body["prompt"] for path, body in server.seen if path == "/v1/completions"][1:] == [[1], [9]]


def test_closing_does_not_wait_for_answers(serve, tokenizer):
    free = threading.Event()
    backend = EndpointBackend(
        serve(completions=lambda body: echo(body) if body["max_tokens"] == 1 else free.wait(30)).url, tokenizer, 2
    )
    for number in range(4):
        backend.submit(number, request([65]))
    started = time.monotonic()
    backend.close()
    assert time.monotonic() - started < 1
    free.set()
