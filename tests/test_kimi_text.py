"""Kimi-K2.5 as text: ids, masks and forced ids with its tokenizer and template; no remote code without the flag."""

import json
import os
import runpy
import shutil
import sys
from itertools import groupby
from pathlib import Path

import pytest
from conftest import REPOSITORY
from hypothesis import given, settings
from hypothesis import strategies as st
from kimi_for_tests import NAMED, RESERVED, write_kimi

from eagle3 import served_check
from eagle3.conversations import Conversation, parse_row
from eagle3.masking import Masker, Sample
from eagle3.model_files import tokenizer_hash
from eagle3.prepare.stage import forced_ids
from eagle3.sources import Row
from eagle3.target import load_tokenizer, open_target, require_trust
from eagle3.terminal import UserError

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
PROMPT = "<|im_assistant|>assistant<|im_middle|>"


@pytest.fixture(scope="module", params=["synthetic vocabulary", "real vocabulary"])
def kimi(request, tiny_kimi, tmp_path_factory) -> Path:
    if request.param == "synthetic vocabulary":
        return tiny_kimi
    file = os.environ.get("EAGLE3_KIMI_TIKTOKEN")
    if not file:
        pytest.skip("EAGLE3_KIMI_TIKTOKEN does not name the tiktoken.model of Kimi-K2.5, which is not ours to carry")
    return write_kimi(tmp_path_factory.mktemp("real") / "real-kimi", tiktoken=Path(file))


@pytest.fixture(scope="module")
def tokenizer(kimi):
    return load_tokenizer(open_target(str(kimi)), trust_remote_code=True)


@pytest.fixture(scope="module")
def masker(kimi, tokenizer) -> Masker:
    return Masker(tokenizer, open_target(str(kimi)).end_ids)


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def answer(text: str, reasoning: str | None = None, calls: list | None = None) -> dict:
    message = {"role": "assistant", "content": text}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    return message | ({"tool_calls": calls} if calls else {})


def call(arguments: dict, number: int = 0) -> dict:
    return {"id": f"functions.add:{number}", "type": "function", "function": {"name": "add", "arguments": arguments}}


def conversation(*messages: dict, tools: list | None = None) -> Conversation:
    return parse_row(Row("test", 1, {"messages": list(messages), "tools": tools}))


def generated(sample: Sample) -> list[tuple[list[int], list[int]]]:
    """For each run of supervised ids: all ids before it, and the run."""
    runs, start = [], 0
    for supervised, run in groupby(sample.mask):
        end = start + len(list(run))
        if supervised:
            runs.append((sample.ids[:start], sample.ids[start:end]))
        start = end
    return runs


def decoded(tokenizer, samples: list[Sample]) -> list[list[str]]:
    return [[tokenizer.decode(run) for _, run in generated(sample)] for sample in samples]


# ------------------------------------------------------------------------------------------------- ids


def test_ids_of_the_markers(kimi, tokenizer):
    target = open_target(str(kimi))
    base = target.vocab_size - RESERVED
    for place, (name, _) in NAMED.items():
        assert tokenizer.encode(name) == tokenizer(name, add_special_tokens=False)["input_ids"] == [base + place]
    assert target.end_ids == (base + 1, base + 2)  # [EOS] and <|im_end|>
    forced = forced_ids(tokenizer, list(target.end_ids))
    assert {base + place for place in NAMED} <= set(forced)
    if base == 163_584:  # as published
        markers = ["<|im_end|>", "<|im_user|>", "<|im_system|>", "<|tool_calls_section_begin|>", "<think>", "</think>"]
        assert [tokenizer.encode(name)[0] for name in markers] == [163586, 163587, 163594, 163595, 163606, 163607]


def test_the_final_reasoning_is_supervised_and_history_has_none(tokenizer, masker, caplog):
    talk = conversation(
        {"role": "system", "content": "Be brief."},
        user("What is 2 plus 2?"),
        answer(" That makes 4.", "I need the sum."),
        user("你好?"),
        answer("世界", "问题 so\n"),
    )
    samples = masker.samples(talk)
    system = "<|im_system|>system<|im_middle|>Be brief.<|im_end|>"
    first = f"{system}<|im_user|>user<|im_middle|>What is 2 plus 2?<|im_end|>{PROMPT}"
    texts = [
        [f"{first}<think>", "I need the sum.</think> That makes 4.<|im_end|>"],
        [
            f"{first}<think></think> That makes 4.<|im_end|><|im_user|>user<|im_middle|>你好?<|im_end|>{PROMPT}<think>",
            "问题 so\n</think>世界<|im_end|>",
        ],
    ]
    for sample, parts in zip(samples, texts, strict=True):
        prompt, written = (tokenizer.encode(part) for part in parts)
        assert sample == Sample(prompt + written, [False] * len(prompt) + [True] * len(written))
        assert sample.ids == tokenizer.encode("".join(parts))
    assert "Calling super().encode" not in caplog.text


def test_tool_calls_are_supervised_with_their_reasoning_and_results_are_not(tokenizer, masker):
    talk = conversation(
        user("What is 1 plus 2?"),
        answer("I add.", "Which tool?", [call({"a": 1, "b": "é"}), call({}, 1)]),
        {"role": "tool", "tool_call_id": "functions.add:0", "content": "3"},
        answer("It makes 3.", "So it is."),
        tools=TOOLS,
    )
    [sample] = masker.samples(talk)
    calls = (
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1, "b": "é"}'
        "<|tool_call_end|><|tool_call_begin|>functions.add:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>"
    )
    assert decoded(tokenizer, [sample]) == [
        [f"Which tool?</think>I add.{calls}<|im_end|>", "So it is.</think>It makes 3.<|im_end|>"]
    ]
    text = tokenizer.decode(sample.ids)
    assert text.startswith("<|im_system|>tool_declare<|im_middle|># Tools") and "type add = " in text
    assert f"<|im_end|><|im_system|>tool<|im_middle|>## Return of functions.add:0\n3<|im_end|>{PROMPT}<think>So" in text


def test_an_answer_without_reasoning_after_calls_with_it(tokenizer, masker):
    """Rendered to its end, the conversation has no reasoning any more; the server's prompt still had it."""
    result = {"role": "tool", "tool_call_id": "functions.add:0", "content": "3"}
    [sample] = masker.samples(conversation(user("Add."), answer("", "I add.", [call({})]), result, answer(" 3")))
    called, said = decoded(tokenizer, [sample])[0]
    assert called.startswith("I add.</think><|tool_calls_section_begin|>") and said == " 3<|im_end|>"
    assert tokenizer.decode(sample.ids).endswith(f"{PROMPT}<think></think> 3<|im_end|>")


@pytest.mark.parametrize("text", ["<think>I need it.</think>So 4.", "I need it.</think>So 4."])
def test_reasoning_inside_the_content_as_servers_give_it(tokenizer, masker, text):
    talk = conversation(user("2 plus 2?"), answer(text), user("And?"), answer("No more."))
    samples = masker.samples(talk)
    assert decoded(tokenizer, samples) == [["I need it.</think>So 4.<|im_end|>"], ["No more.<|im_end|>"]]
    assert samples == masker.samples(
        conversation(user("2 plus 2?"), answer("So 4.", "I need it."), user("And?"), answer("No more."))
    )


def test_an_answer_that_speaks_of_think_tags_has_no_reasoning(tokenizer, masker):
    said = "Between <think> and </think>."
    [sample] = masker.samples(conversation(user("How?"), answer(said)))
    assert decoded(tokenizer, [sample]) == [[f"{said}<|im_end|>"]]
    assert tokenizer.decode(sample.ids).endswith(f"{PROMPT}<think></think>{said}<|im_end|>")


# ------------------------------------------------------------------------- random conversations, an oracle

words = st.text(alphabet="ab E1é你\n .'\t🙂", max_size=12)
said = words.filter(str.strip)
rounds = st.tuples(st.none() | said, words, st.lists(st.dictionaries(said, words, max_size=2), min_size=1, max_size=2))
turn = st.tuples(
    words, st.lists(rounds, max_size=2), st.none() | said, said, st.sampled_from(["field", "tagged", "raw"])
)


def messages_of(system: str | None, turns: list) -> list[dict]:
    messages = [{"role": "system", "content": system}] if system else []
    for question, calling, reasoning, text, form in turns:
        messages.append(user(question))
        for why, spoken, arguments in calling:
            calls = [call(values, number) for number, values in enumerate(arguments)]
            messages.append(answer(spoken, why, calls))
            messages += [{"role": "tool", "tool_call_id": one["id"], "content": "3"} for one in calls]
        if reasoning is None or form == "field":
            messages.append(answer(text, reasoning))
        else:
            messages.append(answer(f"{'<think>' if form == 'tagged' else ''}{reasoning}</think>{text}"))
    return messages


def written_by_the_target(messages: list[dict]) -> list[tuple[str, str]]:
    """What Kimi-K2.5 would have been given, and would have generated, at each assistant turn."""

    def parts(message: dict) -> tuple[str, str]:
        reasoning, text = message.get("reasoning_content") or "", message["content"]
        if "</think>" in text:
            reasoning, text = text.removeprefix("<think>").split("</think>")
        calls = "".join(
            f"<|tool_call_begin|>{one['id']}<|tool_call_argument_begin|>"
            f"{json.dumps(one['function']['arguments'], ensure_ascii=False)}<|tool_call_end|>"
            for one in message.get("tool_calls", ())
        )
        section = f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>" if calls else ""
        return reasoning, f"{text}{section}<|im_end|>"

    pairs = []
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = messages[:place]
        plain = [i for i, m in enumerate(before) if m["role"] == "assistant" and "tool_calls" not in m]
        prompt = ""
        for i, m in enumerate(before):
            if m["role"] == "assistant":
                reasoning, rest = parts(m)
                kept = "" if plain and i <= plain[-1] else reasoning
                prompt += f"{PROMPT}<think>{kept}</think>{rest}"
            elif m["role"] == "tool":
                prompt += f"<|im_system|>tool<|im_middle|>## Return of {m['tool_call_id']}\n{m['content']}<|im_end|>"
            else:
                prompt += f"<|im_{m['role']}|>{m['role']}<|im_middle|>{m['content']}<|im_end|>"
        reasoning, rest = parts(message)
        if reasoning:
            pairs.append((f"{prompt}{PROMPT}<think>", f"{reasoning}</think>{rest}"))
        else:  # as with thinking=False, where the server's prompt closes the block
            pairs.append((f"{prompt}{PROMPT}<think></think>", rest))
    return pairs


@settings(max_examples=150, deadline=None)
@given(system=st.none() | said, turns=st.lists(turn, min_size=1, max_size=3))
def test_every_turn_is_supervised_as_the_target_wrote_it(tokenizer, masker, system, turns):
    messages = messages_of(system, turns)
    samples = masker.samples(conversation(*messages))
    runs = [run for sample in samples for run in generated(sample)]
    expected = written_by_the_target(messages)
    assert [(tokenizer.decode(before), tokenizer.decode(run)) for before, run in runs] == expected
    assert runs == [(tokenizer.encode(before), tokenizer.encode(run)) for before, run in expected]
    assert all(sample.mask[-1] for sample in samples)


# ------------------------------------------------------------------------------------------- remote code


@pytest.fixture
def marked(tiny_kimi, tmp_path) -> tuple[Path, Path]:
    """The stand-in with remote code that leaves a file when it is run; directory and file."""
    directory, marker = tmp_path / "marked-kimi", tmp_path / "remote-code-ran"
    shutil.copytree(tiny_kimi, directory)
    for path in directory.glob("*.py"):
        path.write_text(f"open({str(marker)!r}, 'a').write(__name__ + '\\n')\n{path.read_text()}")
    return directory, marker


def main_of(script: str):
    if script.endswith(".py"):
        return runpy.run_path(str(REPOSITORY / script), run_name="script")["main"]
    return served_check.main


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("01_prepare_dataset.py", ["--output-dir", "out", "--dataset", "chats.jsonl"]),
        ("02_extract_hidden_states.py", ["--prepared-dir", "p", "--output-dir", "out", "--engine", "vllm"]),
        ("02_extract_hidden_states.py", ["--prepared-dir", "p", "--output-dir", "out", "--engine", "transformers"]),
        ("eagle3.served_check", ["--prepared-dir", "p", "--draft-dir", "d"]),
    ],
)
def test_remote_code_is_refused_by_name_and_never_run(script, arguments, marked, tmp_path, monkeypatch):
    directory, marker = marked
    monkeypatch.chdir(tmp_path)
    Path("chats.jsonl").touch()
    monkeypatch.setattr(sys, "argv", [script, "--model-path", str(directory), *arguments])
    with pytest.raises(UserError) as refusal:
        main_of(script)()
    assert str(refusal.value) == (
        f"the tokenizer, {directory}/tokenization_kimi.py, is remote code; read it, then give --trust-remote-code"
    )
    assert not marker.exists() and not (tmp_path / "out").exists()


def test_remote_code_runs_with_the_flag_and_is_part_of_the_tokenizers_hash(marked, tiny_kimi):
    directory, marker = marked
    target = open_target(str(directory))
    load_tokenizer(target, trust_remote_code=True)
    assert "tokenization_kimi" in marker.read_text()  # so that the file's absence elsewhere says something
    assert tokenizer_hash(directory) != tokenizer_hash(tiny_kimi)


@pytest.mark.parametrize(
    ("config", "tokenizer", "file"),
    [
        ({"model_type": "kimi_k25"}, {}, None),
        ({"model_type": "kimi_k99"}, {}, "configuration_new.py"),
        ({"model_type": "kimi_k99", "auto_map": {}}, {}, None),
        ({"model_type": "llama"}, {"auto_map": {"AutoTokenizer": ["tok_slow.Slow", None]}}, "tok_slow.py"),
        ({"model_type": "llama"}, {"auto_map": ["tok_slow.Slow", "tok_fast.Fast"]}, "tok_fast.py"),
        ({"model_type": "llama"}, {"auto_map": {"AutoTokenizer": "them/repo--tok.Tok"}}, "tok.py"),
        ({"model_type": "llama"}, {"auto_map": {"AutoProcessor": "processing.Processor"}}, None),
    ],
)
def test_what_needs_remote_code(config, tokenizer, file, tmp_path):
    sizes = dict.fromkeys(("hidden_size", "num_hidden_layers", "vocab_size"), 8)
    described = sizes | {"auto_map": {"AutoConfig": "configuration_new.NewConfig"}} | config
    (tmp_path / "config.json").write_text(json.dumps(described))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    target = open_target(str(tmp_path))
    require_trust(target, True)
    if file is None:
        require_trust(target, False)
    else:
        with pytest.raises(UserError, match=f"/{file}, is remote code; read it, then give --trust-remote-code"):
            require_trust(target, False)
