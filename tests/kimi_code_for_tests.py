"""Remote code and chat template of the Kimi-K2.5 stand-in: what the real repository's do, written for the tests."""

TEXT_CONFIGURATION = """
from transformers import DeepseekV3Config as Native


class DeepseekV3Config(Native):
    model_type = "kimi_k2"
"""

CONFIGURATION = """
from transformers import PretrainedConfig

from .configuration_deepseek import DeepseekV3Config


class KimiK25Config(PretrainedConfig):
    model_type = "kimi_k25"

    def __init__(self, text_config=None, vision_config=None, **kwargs):
        self.text_config = DeepseekV3Config(**(text_config or {}))
        self.vision_config = PretrainedConfig(**(vision_config or {}))
        super().__init__(**kwargs)
"""

TOOL_DECLARATION = """
def type_of(schema):
    if "enum" in schema:
        return " | ".join(repr(value) for value in schema["enum"])
    if schema.get("type") == "object":
        return "{" + ", ".join(f"{name}: {type_of(part)}" for name, part in schema["properties"].items()) + "}"
    return {"integer": "number"}.get(schema.get("type"), schema.get("type", "any"))


def encode_tools_to_typescript_style(tools):
    lines = ["# Tools", "", "## functions", "namespace functions {"]
    for tool in tools:
        function = tool["function"]
        if function.get("description"):
            lines.append("// " + function["description"])
        lines.append(f"type {function['name']} = (_: {type_of(function.get('parameters') or {})}) => any;")
    return "\\n".join([*lines, "}", ""])
"""

TOKENIZATION = r"""
import os
from logging import getLogger
from shutil import copyfile

import tiktoken
from tiktoken.load import load_tiktoken_bpe
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.tokenization_utils import PreTrainedTokenizer

from .tool_declaration_ts import encode_tools_to_typescript_style

logger = getLogger(__name__)  # not transformers' own: its verbosity does not hold here

UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
BEFORE, AFTER = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join((
    r"[\p{Han}]+",
    BEFORE + UPPER + "*" + LOWER + "+" + AFTER,
    BEFORE + UPPER + "+" + LOWER + "*" + AFTER,
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
))


class TikTokenTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "tiktoken.model"}
    model_input_names = ["input_ids", "attention_mask"]
    reserved = 256

    def __init__(self, vocab_file, bos_token="[BOS]", eos_token="[EOS]", unk_token=None, pad_token=None,
                 additional_special_tokens=None, added_tokens_decoder=None, **kwargs):
        self.vocab_file = vocab_file
        ranks = load_tiktoken_bpe(vocab_file)
        names = {token: added.content for token, added in (added_tokens_decoder or {}).items()}
        numbers = range(len(ranks), len(ranks) + self.reserved)
        self.special_tokens = {names.get(token, f"<|reserved_token_{token}|>"): token for token in numbers}
        special = self.special_tokens
        self.model = tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)
        self.characters = bytes_to_unicode()
        self.bytes = {character: byte for byte, character in self.characters.items()}
        spelled = (self.model.decode_single_token_bytes(token) for token in range(self.model.n_vocab))
        self.decoder = {token: "".join(map(self.characters.get, text)) for token, text in enumerate(spelled)}
        self.encoder = {text: token for token, text in self.decoder.items()}
        if additional_special_tokens is None:  # transformers 5 hands the list on under another name
            additional_special_tokens = ["<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>"]
        super().__init__(bos_token=bos_token, eos_token=eos_token, unk_token=unk_token, pad_token=pad_token,
                         additional_special_tokens=additional_special_tokens,
                         added_tokens_decoder=added_tokens_decoder, **kwargs)

    @property
    def vocab_size(self):
        return self.model.n_vocab

    def get_vocab(self):
        return self.encoder

    def encode(self, text, allow_special_tokens=True, **kwargs):
        if kwargs:
            logger.warning(f"Calling super().encode with {kwargs}")
            return super().encode(text, **kwargs)
        if allow_special_tokens:
            return self.model.encode(text, allowed_special="all")
        return self.model.encode(text, disallowed_special=())

    def decode(self, token_ids, **kwargs):
        if kwargs:
            return super().decode(token_ids, **kwargs)
        return self.model.decode([token_ids] if isinstance(token_ids, int) else list(token_ids))

    def _tokenize(self, text, **kwargs):
        return [self.decoder[token] for token in self.encode(text)]

    def _convert_token_to_id(self, token):
        return self.encoder.get(token, self.unk_token_id)

    def _convert_id_to_token(self, index):
        return self.decoder.get(index)

    def convert_tokens_to_string(self, tokens):
        return bytes(self.bytes[character] for character in "".join(tokens)).decode("utf-8", "replace")

    def save_vocabulary(self, save_directory, filename_prefix=None):
        path = os.path.join(save_directory, (f"{filename_prefix}-" if filename_prefix else "") + "tiktoken.model")
        if os.path.abspath(path) != os.path.abspath(self.vocab_file):
            copyfile(self.vocab_file, path)
        return (path,)

    # other defaults than the base class has: text, with the generation prompt
    def apply_chat_template(self, conversation, tools=None, tokenize=False, add_generation_prompt=True, thinking=True,
                            **kwargs):
        tools = in_order(tools)
        if tools:
            kwargs["tools_ts_str"] = encode_tools_to_typescript_style(tools)
        return super().apply_chat_template(conversation, tools=tools, tokenize=tokenize, thinking=thinking,
                                           add_generation_prompt=add_generation_prompt, **kwargs)


def in_order(value):
    if isinstance(value, dict):
        return {key: in_order(value[key]) for key in sorted(value)}
    return [in_order(item) for item in value] if isinstance(value, list) else value
"""

# Turns up to the last answer without tool calls are history, whose reasoning is left out; text alone, no images.
CHAT_TEMPLATE = """
{%- set last = namespace(answer=-1) -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' and not m.tool_calls -%}{%- set last.answer = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if tools -%}
<|im_system|>tool_declare<|im_middle|>{{ tools_ts_str or tools | tojson(separators=(',', ':')) }}<|im_end|>
{%- endif -%}
{%- for m in messages -%}
{{ {'user': '<|im_user|>', 'assistant': '<|im_assistant|>'}.get(m.role, '<|im_system|>') }}
{{- m.name or m.role }}<|im_middle|>
{%- if m.role == 'assistant' -%}
<think>{% if loop.index0 > last.answer and thinking is not false %}{{ m.reasoning_content or '' }}{% endif %}</think>
{%- elif m.role == 'tool' -%}
{{ '## Return of ' ~ m.tool_call_id ~ '\\n' }}
{%- endif -%}
{%- if m.content is string -%}
{{ m.content }}
{%- else -%}
{%- for part in m.content or [] -%}{{ part.text }}{%- endfor -%}
{%- endif -%}
{%- if m.tool_calls -%}
<|tool_calls_section_begin|>
{%- for call in m.tool_calls -%}
<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>
{%- set arguments = call.function.arguments -%}
{{ arguments if arguments is string else arguments | tojson }}<|tool_call_end|>
{%- endfor -%}
<|tool_calls_section_end|>
{%- endif -%}
<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_assistant|>assistant<|im_middle|><think>{% if thinking is false %}</think>{% endif %}
{%- endif -%}
"""
