"""What a rule is given, and what it leaves."""

from dataclasses import dataclass, field
from typing import Any

from eagle3.target import Target
from eagle3.validate.stored import StoredDraft

SERVERS = ("vllm", "sglang")
NAMES = {"vllm": "vLLM", "sglang": "SGLang"}


@dataclass(frozen=True)
class Finding:
    """One fault. `code` is short and stable; `text` says what was found, with the values, and what to do."""

    severity: str  # error: a server refuses, or drafts wrongly; warning: the text says what it depends on
    code: str
    text: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.text} [{self.code}]"


@dataclass
class Check:
    """One check of one draft for some servers; rules add to `found`."""

    draft: StoredDraft
    target: Target
    servers: tuple[str, ...]
    found: list[Finding] = field(default_factory=list)

    def error(self, code: str, text: str) -> None:
        self.found.append(Finding("error", code, text))

    def warning(self, code: str, text: str) -> None:
        self.found.append(Finding("warning", code, text))

    def add(self, wrong: bool, code: str, text: str) -> None:
        """An error if `wrong`, else a warning."""
        self.found.append(Finding("error" if wrong else "warning", code, text))

    @property
    def vllm(self) -> bool:
        return "vllm" in self.servers

    @property
    def sglang(self) -> bool:
        return "sglang" in self.servers

    @property
    def config(self) -> dict[str, Any]:
        return self.draft.config

    @property
    def eagle(self) -> dict[str, Any]:
        return self.config.get("eagle_config") or {}

    @property
    def fc_norm(self) -> bool:
        """Whether each state has a norm before fc, under any name and at any place that a config has for it."""
        return bool(self.config.get("fc_norm") or self.config.get("use_aux_norm") or self.eagle.get("fc_norm"))

    @property
    def draft_vocab(self) -> int:
        size = self.config.get("draft_vocab_size")
        return self.config["vocab_size"] if size is None else size

    @property
    def state_width(self) -> int:
        """Width of one of the target's states, as the draft has it."""
        return self.config.get("target_hidden_size", self.config["hidden_size"])
