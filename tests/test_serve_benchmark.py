"""benchmarks/serve.py without an engine: prompts, figures, and counters over HTTP as vLLM and SGLang give them."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import serve
from serve import Answers, Counts
from transformers import AutoTokenizer

from eagle3.terminal import UserError

# as vLLM 0.32 writes it: one engine of two, and a gauge that is none of the counters
METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:num_requests_running{{engine="0",model_name="m"}} 1.0
vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} {drafts}
vllm:spec_decode_num_drafts_total{{engine="1",model_name="m"}} 1.0
vllm:spec_decode_num_drafts_created{{engine="0",model_name="m"}} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="m"}} 12.0
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {accepted}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="0"}} {accepted}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="1"}} 0.0
"""


class Server(BaseHTTPRequestHandler):
    """Answers every prompt with its first two ids; counts like vLLM or SGLang."""

    kind = "vllm"
    drafts = 4

    def do_GET(self) -> None:
        drafting = self.server.drafting
        replies = {
            "vllm": {
                "/metrics": METRICS.format(drafts=float(Server.drafts), accepted=2.0 * Server.drafts)
                if drafting
                else "vllm:num_requests_running{} 1.0\n",
                "/v1/models": json.dumps({"data": [{"id": "m"}]}),
            },
            "sglang": {"/server_info": json.dumps({"speculative_algorithm": "EAGLE3" if drafting else None})},
            "none": {},
        }[self.server.kind]
        self.reply(replies.get(self.path))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.kind == "vllm":
            assert self.path == "/v1/completions" and body["model"] == "m" and body["temperature"] == 0
            Server.drafts += 3
            return self.reply(json.dumps({"choices": [{"token_ids": body["prompt"][:2]}]}))
        assert self.path == "/generate" and body["sampling_params"] == {"temperature": 0, "max_new_tokens": 9}
        meta = {"spec_verify_ct": 5, "spec_num_correct_drafts": 7, "spec_correct_drafts_histogram": [1, 1, 3]}
        return self.reply(json.dumps({"output_ids": body["input_ids"][:2], "meta_info": meta}))

    def reply(self, text: str | None) -> None:
        self.send_response(404 if text is None else 200)
        self.end_headers()
        self.wfile.write((text or "").encode())

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def start():
    """start(kind, drafting) -> URL of a server in this process."""
    servers = []

    def run(kind: str, drafting: bool = True) -> str:
        server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
        server.kind, server.drafting = kind, drafting
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield run
    for server in servers:
        server.shutdown()


def test_vllms_counters_are_the_difference_over_all_engines(start) -> None:
    answers = serve.running_server(start("vllm"), 9)([[5, 6, 7], [8, 9]], 2)
    assert answers.ids == [[5, 6], [8, 9]] and len(answers.latency) == 1
    assert answers.counts == Counts(6, 12, [12, 0])


def test_sglangs_counters_come_with_each_answer(start) -> None:
    answers = serve.running_server(start("sglang"), 9)([[5, 6, 7], [8, 9]], 1)
    assert answers.ids == [[5, 6], [8, 9]] and len(answers.latency) == 2
    # of 5 steps 1 accepted nothing, 1 one draft, 3 two: the first draft was right 4 times, the second 3 times
    assert answers.counts == Counts(10, 14, [8, 6])


@pytest.mark.parametrize(
    ("kind", "drafting", "line"),
    [
        ("vllm", False, "vLLM runs without a draft"),
        ("sglang", False, "SGLang runs without --speculative-algorithm"),
        ("none", False, "neither vLLM's /metrics nor SGLang's /server_info"),
    ],
)
def test_a_server_without_a_draft_is_refused(start, kind: str, drafting: bool, line: str) -> None:
    with pytest.raises(UserError, match=line):
        serve.running_server(start(kind, drafting), 9)


def test_a_server_that_is_not_there_is_one_line() -> None:
    with pytest.raises(UserError, match=r"does not answer .*; is the server running\?"):
        serve.running_server("http://127.0.0.1:9", 9)


def test_prompts_of_every_form_get_the_targets_template(smollm2: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    turn = {"role": "user", "content": "Hello"}
    rows = [
        {"prompt": "Hello"},
        {"turns": ["Hello", "More"]},
        {"messages": [turn, {"role": "assistant", "content": "x"}]},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, *others = serve.read_prompts(path, tokenizer, 20)
    assert others == [first, first] and tokenizer.decode(first).endswith("<|im_start|>assistant\n")
    assert len(serve.read_prompts(path, tokenizer, 2)) == 2
    path.write_text('{"text": "Hello"}\n')
    with pytest.raises(UserError, match=r'prompts\.jsonl:1 has no "prompt", "turns" or "messages" with a user turn'):
        serve.read_prompts(path, tokenizer, 20)


def test_figures_count_differing_answers_and_speed(tmp_path: Path) -> None:
    plain = Answers([[1, 2, 3], [4, 5, 6]], [2.0, 2.0], Counts())
    drafted = Answers([[1, 2, 3], [4, 9, 6]], [1.0, 1.0], Counts(4, 2, [2, 0]))
    report = serve.compare({1: drafted, 8: drafted}, {1: plain, 8: plain})
    assert report["tau"] == 1.5 and report["acceptance_by_position"] == [0.5, 0.0]
    entry = report["batch_1"]
    assert (entry["speed_up"], entry["identical"], entry["differing"]) == (2.0, 1, {1: 1})
    assert "1/2" in serve.table({"set": report})
    serve.draw({"sets": {"set": report}, "sweep": {"1": report, "3": report}}, tmp_path / "serve.png")
    assert (tmp_path / "serve.png").read_bytes().startswith(b"\x89PNG")
