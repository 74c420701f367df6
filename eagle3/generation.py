"""On-policy answers: the target writes the assistant turns of prompts, greedily, every turn of a row in order.

    python -m eagle3.generation --model-path M --prompts configs/conversations/prompts.jsonl --output answers.jsonl

Reads rows {"id", "turns": [user texts], "system"?}, writes chat rows {"id", "messages"}. The embedded conversations
were written by this command with the embedded target and --dtype float32. An answer that does not end within
--max-new-tokens, is empty, or would tokenise differently when read back ends its row before that turn; a row left
without any answer is dropped. Both are counted.
"""

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

from eagle3 import artifacts, terminal, vllm_runtime
from eagle3.target import load_tokenizer, open_target


def write_answers(llm: Any, tokenizer: Any, rows: list[dict[str, Any]], max_new_tokens: int) -> tuple[list, Counter]:
    """Answer all rows, turn by turn over the whole set. Returns chat rows in input order and, by reason,
    how many answers were refused."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=max_new_tokens)
    cut: Counter = Counter()
    chats = {row["id"]: [{"role": "system", "content": row["system"]}] if row.get("system") else [] for row in rows}
    open_rows = set(chats)
    turns = max(len(row["turns"]) for row in rows)
    with terminal.progress(sum(len(row["turns"]) for row in rows), "turn", "answers") as bar:
        for turn in range(turns):
            active = [row for row in rows if row["id"] in open_rows and len(row["turns"]) > turn]
            prompts = []
            for row in active:
                chats[row["id"]].append({"role": "user", "content": row["turns"][turn]})
                text = tokenizer.apply_chat_template(chats[row["id"]], tokenize=False, add_generation_prompt=True)
                opened = text.rstrip().endswith("<think>")  # a template does so for all prompts or for none
                prompts.append({"prompt_token_ids": tokenizer(text, add_special_tokens=False)["input_ids"]})
            for start in range(0, len(prompts), 32):
                outputs = llm.generate(prompts[start : start + 32], sampling, use_tqdm=False)
                for row, output in zip(active[start:], outputs, strict=False):
                    answer = output.outputs[0]
                    ids = list(answer.token_ids)[:-1]  # without the end-of-turn token
                    message = _message(answer.text, opened)
                    if answer.finish_reason != "stop":
                        reason = f"no end within {max_new_tokens} tokens"
                    elif message is None:
                        reason = "reasoning without an end"
                    elif not message["content"].strip():
                        reason = "empty answer"
                    elif tokenizer(answer.text, add_special_tokens=False)["input_ids"] != ids:
                        reason = "text tokenises differently"
                    else:
                        chats[row["id"]].append(message)
                        continue
                    cut[reason] += 1
                    open_rows.discard(row["id"])
                    chats[row["id"]].pop()  # the unanswered user turn
                bar.update(len(outputs))
    answered = [
        {"id": key, "messages": messages}
        for key, messages in chats.items()
        if messages and messages[-1]["role"] == "assistant"
    ]
    return answered, cut


def _message(text: str, opened: bool) -> dict[str, str] | None:
    """The assistant message of an answer. Reasoning that the prompt `opened` becomes a field of its own, which the
    template leaves out of later prompts; None when it does not end."""
    if not opened:
        return {"role": "assistant", "content": text}
    reasoning, closed, content = text.partition("</think>")
    return {"role": "assistant", "content": content, "reasoning_content": reasoning} if closed else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", required=True, help="target: model directory or hub name")
    parser.add_argument("--prompts", type=Path, required=True, help="jsonl of prompts")
    parser.add_argument("--output", type=Path, required=True, help="jsonl of chats to write")
    parser.add_argument("--max-new-tokens", type=int, default=512, help="longest answer kept")
    parser.add_argument("--dtype", default="bfloat16", help="engine's dtype")
    parser.add_argument("--trust-remote-code", action="store_true")
    arguments = parser.parse_args()
    started = time.monotonic()
    tokenizer = load_tokenizer(open_target(arguments.model_path), trust_remote_code=arguments.trust_remote_code)
    target = open_target(arguments.model_path, weights=True)
    rows = [json.loads(line) for line in arguments.prompts.read_text().splitlines() if line.strip()]
    llm = vllm_runtime.load(
        target.directory,
        arguments.output.with_suffix(".engine.log"),
        dtype=arguments.dtype,
        max_model_len=min(target.max_positions, 4096),
        trust_remote_code=arguments.trust_remote_code,
    )
    try:
        chats, cut = write_answers(llm, tokenizer, rows, arguments.max_new_tokens)
    finally:
        vllm_runtime.shutdown(llm)
    with artifacts.atomic_file(arguments.output, "w") as file:
        for chat in chats:
            file.write(json.dumps(chat, ensure_ascii=False) + "\n")
    terminal.summary(
        f"answers written to {arguments.output}",
        {"conversations": f"{len(chats)} of {len(rows)}", "answers refused": dict(cut) or 0},
        started,
    )


if __name__ == "__main__":
    terminal.quiet_libraries()
    terminal.run(main)
