"""Shared fixtures: the embedded real target, and a tiny random one that loads in a blink."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent

from namespace_for_tests import Namespace  # noqa: E402

from eagle3 import terminal  # noqa: E402

terminal.quiet_libraries()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The embedded default target (converted to the user's cache on first use, 20 s)."""
    from eagle3.default_target import default_target

    return default_target()


@pytest.fixture(scope="module")
def namespace() -> Iterator[Namespace]:
    """Where file systems of a test's own can be mounted."""
    try:
        opened = Namespace()
    except OSError as error:
        pytest.skip(f"the kernel lets no mount namespace be made here: {error}")
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def tiny_target(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random float32 Llama of 8 layers and hidden 64 with the embedded target's tokenizer; untied, sharded."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    directory = tmp_path_factory.mktemp("tiny-target")
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.float32,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(directory, max_shard_size="8MB")
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_kimi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in for Kimi-K2.5, not quantised."""
    from kimi_for_tests import write_kimi

    return write_kimi(tmp_path_factory.mktemp("kimi") / "tiny-kimi")


@pytest.fixture(scope="session")
def tiny_kimi_int4(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The stand-in with INT4 experts, and one with the same weights unpacked."""
    from kimi_for_tests import write_kimi

    folder = tmp_path_factory.mktemp("kimi-int4")
    return write_kimi(folder / "packed-kimi", experts="int4"), write_kimi(
        folder / "unpacked-kimi", experts="dequantised"
    )


@pytest.fixture(scope="module")
def states(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with hidden_states/ and vocab_map/ of random states, as stage 04 takes them."""
    from states_for_tests import write_states

    directory = tmp_path_factory.mktemp("states")
    write_states(directory, tiny_target)
    return directory


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny matrices gain nothing from threads, and on a busy machine the threads wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def run_script():
    """Run one of the numbered scripts as a user does: `run_script("01_prepare_dataset.py", "--flag", value)`."""

    def run(script: str, *arguments: object, check: bool = True, **settings) -> subprocess.CompletedProcess:
        environment = os.environ | settings.pop("environment", {})
        result = subprocess.run(
            [sys.executable, str(REPOSITORY / script), *map(str, arguments)],
            capture_output=True,
            text=True,
            env=environment,
            timeout=settings.pop("timeout", 600),
            **settings,
        )
        if check and result.returncode:
            raise AssertionError(f"{script} exited {result.returncode}\n{result.stdout}\n{result.stderr}")
        return result

    return run


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """A small jsonl of chat rows: single and multi-turn, with and without a system message."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"What is {n} plus {n}?"},
                {"role": "assistant", "content": f"{n} plus {n} is {2 * n}, which is an even number."},
                {"role": "user", "content": "And doubled?"},
                {"role": "assistant", "content": f"Doubled, that makes {4 * n}."},
            ][: 4 if n % 2 else 2]
        }
        for n in range(1, 13)
    ]
    rows[3]["messages"].insert(0, {"role": "system", "content": "Answer in one sentence."})
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
