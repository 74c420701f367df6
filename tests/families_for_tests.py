"""Chat templates of the families, in the form of the public ones, and small tokenizers for them."""

from functools import cache
from typing import NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from eagle3.masking import Masker

TODAY = "2026-11-30"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]

# Llama 3.1 and 3.2: a default system turn with dates, contents trimmed, one tool call a turn and no text beside it
LLAMA3 = """
{{- bos_token }}
{%- if strftime_now is defined %}{% set today = strftime_now("%d %b %Y") %}
{%- else %}{% set today = "26 Jul 2024" %}{% endif %}
{%- if messages[0].role == 'system' %}
{%- set system = messages[0].content | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
{%- if tools is not none %}{{ 'Environment: ipython\n' }}{% endif %}
{{- 'Cutting Knowledge Date: December 2023\nToday Date: ' + today + '\n\n' }}
{%- if tools is not none %}{% for t in tools %}{{ t | tojson(indent=4) }}{{ '\n\n' }}{% endfor %}{% endif %}
{{- system + '<|eot_id|>' }}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + m.content + '<|eot_id|>' }}
{%- elif 'tool_calls' in m %}
{%- if m.tool_calls | length != 1 %}
{{- raise_exception('This model only supports single tool-calls at once!') }}
{%- endif %}
{%- set call = m.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson }}{{ '}<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}
"""
# Gemma 2 and 3: the system turn is part of the first user turn, roles must alternate (a TOK-B)
GEMMA = """
{{- bos_token }}
{%- set first = '' %}
{%- if messages[0].role == 'system' %}
{%- set first = messages[0].content + '\n\n' %}{% set messages = messages[1:] %}
{%- endif %}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (first if loop.first else '') }}
{{- m.content | trim }}{{ '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}
"""
# Qwen3: reasoning of turns before the last query is left out; the last turn has a think block, be it an empty one
QWEN3 = """
{%- if tools %}
{{- '<|im_start|>system\n' + (messages[0].content + '\n\n' if messages[0].role == 'system' else '') }}
{{- '# Tools\n<tools>' }}
{%- for t in tools %}{{ '\n' }}{{ t | tojson }}{% endfor %}
{{- '\n</tools><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, query=messages | length - 1) %}
{%- for m in messages[::-1] %}
{%- if ns.searching and m.role == 'user'
    and not (m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}
{%- set ns.searching = false %}{% set ns.query = messages | length - 1 - loop.index0 %}
{%- endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}
{%- set content = m.content %}{% set reasoning = '' %}
{%- if m.reasoning_content is string %}{% set reasoning = m.reasoning_content %}
{%- elif '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.query and (loop.last or reasoning) %}
{{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
{%- else %}{{ content }}{% endif %}
{%- for c in m.tool_calls or [] %}
{%- if not loop.first or content %}{{ '\n' }}{% endif %}
{{- '<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' }}
{{- c.function.arguments | tojson }}{{ '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}
"""
# Qwen3's later thinking models: the generation prompt opens the block
QWEN3_THINKING = QWEN3[: QWEN3.index("{%- if enable_thinking")] + "{{- '<think>\\n' }}\n{%- endif %}\n"
# DeepSeek V3: no newlines. R1: the prompt opens the block, and a finished turn has no reasoning
DEEPSEEK_V3 = """
{%- set ns = namespace(system='') %}
{%- for m in messages %}{% if m.role == 'system' %}{% set ns.system = m.content %}{% endif %}{% endfor %}
{{- bos_token }}{{ ns.system }}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<｜User｜>' + m.content }}{% endif %}
{%- if m.role == 'assistant' %}{{ '<｜Assistant｜>' + m.content + '<｜end▁of▁sentence｜>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}
"""
DEEPSEEK_R1 = DEEPSEEK_V3.replace(
    "'<｜Assistant｜>' + m.content", "'<｜Assistant｜>' + m.content.split('</think>')[-1]"
).replace("{{ '<｜Assistant｜>' }}", "{{ '<｜Assistant｜><think>\\n' }}")
# gpt-oss: channels. Reasoning is a field of its own, left out of finished turns and of calls before a final answer
HARMONY = """
{%- macro facts() -%}
{{ 'You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\nCurrent date: ' }}
{{- strftime_now('%Y-%m-%d') + '\n\nReasoning: medium\n\n# Valid channels: analysis, commentary, final.' }}
{{- ' Channel must be included for every message.' }}
{%- if tools %}{{ "\nCalls to these tools must go to the commentary channel: 'functions'." }}{% endif %}
{%- endmacro -%}
{{- '<|start|>system<|message|>' + facts() + '<|end|>' }}
{%- set instructions = '' %}
{%- if messages[0].role in ['developer', 'system'] %}
{%- set instructions = messages[0].content %}{% set messages = messages[1:] %}
{%- endif %}
{%- if instructions or tools %}
{{- '<|start|>developer<|message|>' }}
{%- if instructions %}{{ '# Instructions\n\n' + instructions }}{% endif %}
{%- if tools %}
{{- '\n\n# Tools\n\n## functions\n\nnamespace functions {\n\n' }}
{%- for t in tools %}{{ 'type ' + t.function.name + ' = () => any;\n\n' }}{% endfor %}
{{- '} // namespace functions' }}
{%- endif %}
{{- '<|end|>' }}
{%- endif %}
{%- set last = namespace(call=none) %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- for text in [m.content, m.thinking or ''] %}
{%- if '<|channel|>analysis<|message|>' in text or '<|channel|>final<|message|>' in text %}
{{- raise_exception('You have passed a message containing <|channel|> tags') }}
{%- endif %}
{%- endfor %}
{%- if 'tool_calls' in m %}
{%- set ns = namespace(answered=false) %}
{%- for after in messages[loop.index:] %}
{%- if after.role == 'assistant' and 'tool_calls' not in after %}{% set ns.answered = true %}{% endif %}
{%- endfor %}
{%- if m.content and m.thinking %}
{{- raise_exception('Cannot pass both content and thinking in an assistant message with tool calls!') }}
{%- endif %}
{%- if not ns.answered and (m.content or m.thinking) %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + (m.content or m.thinking) + '<|end|>' }}
{%- endif %}
{%- set call = m.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson }}{{ '<|call|>' }}
{%- set last.call = call.name %}
{%- elif loop.last and not add_generation_prompt %}
{%- if 'thinking' in m %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}
{%- else %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{% set last.call = none %}
{%- endif %}
{%- elif m.role == 'tool' %}
{%- if last.call is none %}{{ raise_exception('a tool message without a call before it') }}{% endif %}
{{- '<|start|>functions.' + last.call + ' to=assistant<|channel|>commentary<|message|>' }}
{{- m.content | tojson + '<|end|>' }}
{%- elif m.role == 'user' %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}
"""
CHATML_MARKERS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
DEEPSEEK_MARKERS = [
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
]
QWEN3_MARKERS = [*CHATML_MARKERS, "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
QWEN3_MARKERS += ["<think>", "</think>"]


class Family(NamedTuple):
    """A chat template and the tokens it needs; `ends` are those that end a generation, `bos` begins each text."""

    template: str
    markers: list[str]
    ends: list[str]
    bos: str | None = None


FAMILIES = {
    "llama3": Family(
        LLAMA3,
        "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eom_id|> <|eot_id|>".split(),
        ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
        "<|begin_of_text|>",
    ),
    "gemma": Family(GEMMA, "<bos> <eos> <start_of_turn> <end_of_turn>".split(), ["<eos>", "<end_of_turn>"], "<bos>"),
    "qwen3": Family(QWEN3, QWEN3_MARKERS, ["<|im_end|>", "<|endoftext|>"]),
    "qwen3-thinking": Family(QWEN3_THINKING, QWEN3_MARKERS, ["<|im_end|>", "<|endoftext|>"]),
    "deepseek-v3": Family(DEEPSEEK_V3, DEEPSEEK_MARKERS, ["<｜end▁of▁sentence｜>"], "<｜begin▁of▁sentence｜>"),
    "deepseek-r1": Family(DEEPSEEK_R1, DEEPSEEK_MARKERS, ["<｜end▁of▁sentence｜>"], "<｜begin▁of▁sentence｜>"),
    "harmony": Family(
        HARMONY,
        "<|startoftext|> <|endoftext|> <|return|> <|constrain|> <|channel|> <|start|> <|end|> <|message|> "
        "<|call|>".split(),
        ["<|return|>", "<|call|>", "<|endoftext|>"],
    ),
}
# how the tokenizers of GPT-4, Llama 3, Qwen and DeepSeek cut text; a run of newlines is one piece
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@cache
def words() -> str:
    """A byte-level BPE vocabulary with a few merges, words and runs of newlines among them, as a tokenizer's JSON."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    text = "assistant user system tool final analysis the sum of two numbers is even. So I add 12 to 30 \n\n\n\n \n\n"
    backend.train_from_iterator(
        [text] * 3 + ["\n\n\n\n"] * 9,
        trainers.BpeTrainer(
            vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False, min_frequency=1
        ),
    )
    return backend.to_str()


@cache
def sentencepiece() -> str:
    """Spaces as "▁", single characters with a few merges, bytes for all others: a tokenizer of Gemma's kind."""
    names = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", "\n", *map(chr, range(33, 127))]
    merges = [("\n", "\n"), ("▁", "t"), ("h", "e"), ("▁t", "he"), ("m", "o"), ("d", "e"), ("de", "l"), ("mo", "del")]
    names += [first + second for first, second in merges]
    backend = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, merges, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend.to_str()


def family(name: str) -> PreTrainedTokenizerFast:
    """A small tokenizer of that family; left to itself it puts the token for the beginning before each text."""
    template, markers, ends, bos = FAMILIES[name]
    backend = Tokenizer.from_str(sentencepiece() if name == "gemma" else words())
    plain = {"<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>", "<｜User｜>"}
    backend.add_tokens([AddedToken(marker, normalized=False, special=marker not in plain) for marker in markers])
    if bos:
        backend.post_processor = processors.TemplateProcessing(f"{bos} $A", None, [(bos, backend.token_to_id(bos))])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=ends[-1], bos_token=bos)
    tokenizer.chat_template = template
    return tokenizer


def family_masker(name: str) -> Masker:
    tokenizer = family(name)
    return Masker(tokenizer, tokenizer.convert_tokens_to_ids(FAMILIES[name].ends), date=TODAY)


@cache
def two_ways(name: str) -> tuple[Masker, Masker]:
    """A masker that trusts its fast ways at once, and one that has none of them."""
    fast, plain = family_masker(name), family_masker(name)
    fast._unproven, plain._markers, plain._template._watched = 0, None, None
    return fast, plain
