"""The choice between the capture engines; each is imported only when it is used."""

import importlib.metadata

from eagle3 import vllm_runtime
from eagle3.capture.interface import Engine, EngineSettings
from eagle3.terminal import UserError


def choose(name: str) -> tuple[str, str]:
    """Engine and version behind `--engine`, without importing it: auto is vllm where it is installed."""
    if name == "auto":
        name = "vllm" if vllm_runtime.version() else "transformers"
    version = vllm_runtime.version() if name == "vllm" else importlib.metadata.version("transformers")
    if version is None:
        raise UserError("--engine vllm: vllm is not installed here; install it, or use --engine transformers")
    return name, version


def open_engine(name: str, settings: EngineSettings, longest: int) -> Engine:
    """Load the target for prompts of up to `longest` tokens; takes seconds to minutes, output goes to engine.log."""
    if name == "vllm":
        from eagle3.capture.vllm_engine import VllmEngine

        return VllmEngine(settings, longest)
    from eagle3.capture.transformers_engine import TransformersEngine

    return TransformersEngine(settings)
