"""Chat templates and tokenizers with the habits that masking must cope with.

Fixtures of the public cases: TOK-A is the embedded target (byte-level BPE, ChatML, a default system turn), TOK-A2
CONCATENATES, TOK-B the Gemma family of families_for_tests.py (roles must alternate) and REJECTS_SYSTEM, TOK-C the Qwen3
family, STRIPS_REASONING and ADDS_EMPTY_THINK, TOK-D `write_slow_target` (Python, no offsets) and the Kimi stand-in,
TOK-E GENERATION_MARKERS.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from eagle3.conversations import Conversation, SkipRow
from eagle3.masking import Masker, Sample

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONCATENATES = (  # a list of parts is no string (TOK-A2)
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
GENERATION_MARKERS = (  # TOK-E; masks do not use them
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# strips reasoning from all turns but the last message, as many reasoning models do
STRIPS_REASONING = PLAIN.replace(
    "{{ m['content'] }}",
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}",
)
# hybrid reasoning models: a last answer without reasoning gets an empty think block that the prompt does not have
ADDS_EMPTY_THINK = PLAIN.replace(
    "{{ m['content'] }}",
    "{% if m['role'] == 'assistant' and loop.last and '</think>' not in m['content'] %}"
    "<think>\n\n</think>\n\n{% endif %}{{ m['content'] }}",
)
# Kimi-K2.5: the generation prompt opens the reasoning; turns up to the last answer without tool calls lose it
OPENS_REASONING = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m['role'] == 'assistant' and not m.get('tool_calls') %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}<think>"
    "{% if loop.index0 > ns.last %}{{ m.get('reasoning_content', '') }}{% endif %}</think>{% endif %}"
    "{{ m['content'] }}{% if m.get('tool_calls') %}<calls>{{ m['tool_calls'] | tojson }}</calls>{% endif %}"
    "<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)
# DeepSeek-R1: a newline after the opened block, and no block at all in a finished turn
OPENS_WITH_NEWLINE = PLAIN.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
REJECTS_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}" + PLAIN
IGNORES_GENERATION_PROMPT = PLAIN.split("{% if add_generation_prompt %}")[0]
STRIPS_CONTENT = PLAIN.replace("{{ m['content'] }}", "{{ m['content'] | trim }}")
DROPS_WORDS = PLAIN.replace("{{ m['content'] }}", "{{ m['content'] | truncate(12) }}")
NO_HEADERS = "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"
WITH_TOOLS = PLAIN.replace(
    "<|im_end|>\n{% endfor %}",
    "{% for c in m.get('tool_calls', []) %}<tool_call>{{ c['function'] | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}",
)
# the prompt ends in a space, which byte-level BPE joins with the word after it
SPACE_BEFORE_ANSWER = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
# Llama 2: no header, the answer follows a space
INSTRUCT = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }}</s>{% endif %}{% endfor %}"
)
# a server's prompt depends on what the user wrote
SWITCHED_BY_THE_USER = PLAIN.replace(
    "<|im_start|>assistant\n{% endif %}",
    "<|im_start|>assistant\n{% if '/no_think' in messages[-1]['content'] %}<think></think>{% endif %}{% endif %}",
)
TRIMS_THE_LAST = PLAIN.replace(
    "{{ m['content'] }}", "{% if loop.last %}{{ m['content'] | trim }}{% else %}{{ m['content'] }}{% endif %}"
)
# the end token of an answer that is not the last one is the next turn's
ENDS_WITH_THE_NEXT = (
    "{% for m in messages %}{% if m['role'] == 'user' and not loop.first %}<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}{% if m['role'] == 'user' %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if not add_generation_prompt and messages | length > 2 %}<|im_end|>{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Mistral: reasoning of a field in a block of another name, an empty one for none; XML arguments
OTHER_BLOCK = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "[THINK]{{ m.get('thinking', '') }}[/THINK]{% endif %}{{ m['content'] }}"
    "{% for c in m.get('tool_calls', []) %}<call={{ c['function']['name'] }}>"
    "{% for k, v in c['function']['arguments'].items() %}<arg={{ k }}>{{ v }}</arg>{% endfor %}</call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKERS = ["<|im_start|>", "<|im_end|>", "<think>", "</think>"]


def with_think_tags(directory: Path) -> Any:
    """The tokenizer of `directory` with think tags as tokens."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in ("<think>", "</think>")])
    return tokenizer


def marks_beginning() -> PreTrainedTokenizerFast:
    """One token a character and a mark before each text, as SentencePiece tokenizers of the Llama 2 kind put it."""
    characters = ["▁", *map(chr, range(33, 127))]
    backend = Tokenizer(models.BPE({character: i for i, character in enumerate(characters)}, []))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    tokenizer.chat_template = INSTRUCT
    return tokenizer


def fast_bytes(template: str) -> PreTrainedTokenizerFast:
    """One token a byte, ids 0 to 255, then MARKERS. Left to itself it puts a token before each text."""
    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(marker, normalized=False, special=True) for marker in MARKERS])
    backend.post_processor = processors.TemplateProcessing("<|im_start|> $A", None, [("<|im_start|>", 256)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = template
    return tokenizer


SLOW_BYTES = """
from transformers import PreTrainedTokenizer


class ByteTokenizer(PreTrainedTokenizer):
    vocab_files_names = {}

    @property
    def vocab_size(self):
        return 256

    def get_vocab(self):
        return {f"<{i:02x}>": i for i in range(256)} | self.added_tokens_encoder

    def _tokenize(self, text, **kwargs):
        return [f"<{byte:02x}>" for byte in text.encode()]

    def _convert_token_to_id(self, token):
        return int(token[1:3], 16)

    def _convert_id_to_token(self, index):
        return f"<{index:02x}>"

    def convert_tokens_to_string(self, tokens):
        plain = [bytes([int(t[1:3], 16)]) if t not in self.added_tokens_encoder else t.encode() for t in tokens]
        return b"".join(plain).decode(errors="replace")

    def __call__(self, *arguments, **settings):
        if settings.get("return_offsets_mapping"):
            raise NotImplementedError
        return super().__call__(*arguments, **settings)

    def apply_chat_template(self, conversation, tokenize=False, add_generation_prompt=True, **settings):
        return super().apply_chat_template(
            conversation, tokenize=tokenize, add_generation_prompt=add_generation_prompt, **settings
        )
"""


def write_slow_target(directory: Path, template: str) -> Path:
    """A model directory whose tokenizer is Python code of its own, with the ids of `fast_bytes`."""
    directory.mkdir()
    (directory / "tokenization_bytes.py").write_text(SLOW_BYTES)
    (directory / "chat_template.jinja").write_text(template)
    added = {
        str(256 + i): {"content": marker, "special": True, "normalized": False, "lstrip": False, "rstrip": False}
        for i, marker in enumerate(MARKERS)
    }
    settings = {
        "tokenizer_class": "ByteTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_bytes.ByteTokenizer", None]},
        "added_tokens_decoder": added,
        "eos_token": "<|im_end|>",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {"model_type": "llama", "vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 8, "eos_token_id": 257}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def maskers_of(directory: Path) -> Callable[[str], Masker]:
    """Makes a masker with the tokenizer of `directory`, think tags as tokens, and the template that is given."""
    tokenizer = with_think_tags(directory)

    def masker(template: str) -> Masker:
        tokenizer.chat_template = template
        return Masker(tokenizer, [2])

    return masker


def outcome(masker: Masker, conversation: Conversation) -> list[Sample] | str:
    """The samples, or why there are none."""
    try:
        return masker.samples(conversation)
    except SkipRow as skip:
        return str(skip)
