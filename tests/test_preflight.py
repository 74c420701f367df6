"""Stage 02 before the engine is loaded: GPU, host and shared memory, ports, packages; nvidia-smi is a stand-in."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from capture_for_tests import random_prompts, settings_for, write_prepared
from conftest import REPOSITORY

from eagle3 import engine_guard
from eagle3.capture import engines, extract, preflight
from eagle3.capture.interface import EngineSettings
from eagle3.packages import require_packages
from eagle3.target import load_tokenizer, open_target
from eagle3.terminal import UserError

GIB = 1 << 30
SMI = """#!/bin/sh
case "$*" in
  --query-gpu=uuid,index,memory.total,memory.free\\ *) cat "{place}/gpus" ;;
  --query-compute-apps=gpu_uuid,pid,process_name,used_memory\\ *) cat "{place}/apps" ;;
  *) exit 6 ;;
esac
[ ! -f "{place}/next" ] || mv "{place}/next" "{place}/gpus"
"""


class Machine:
    """GPUs of 96 GiB by nvidia-smi's numbers, and those of them that CUDA shows, in CUDA's order."""

    def __init__(self, place: Path, patch: pytest.MonkeyPatch) -> None:
        self.place, self._patch = place, patch
        (place / "nvidia-smi").write_text(SMI.format(place=place))
        (place / "nvidia-smi").chmod(0o755)
        patch.setenv("PATH", f"{place}:{os.environ['PATH']}")
        patch.setattr(preflight, "PATIENCE", 0.0)
        patch.setattr(torch.cuda, "mem_get_info", lambda number: pytest.fail("half a GB of a GPU was taken to look"))

    def show(self, free: dict[int, float], visible: list[int], apps: str = "", total: float = 96) -> None:
        """`free` GiB by number; `visible` numbers; `apps` as nvidia-smi prints them, GPU numbers for their uuids."""
        (self.place / "gpus").write_text(self.listed(free))
        (self.place / "apps").write_text("".join(f"GPU-00-{line.strip()}\n" for line in apps.splitlines() if line))
        properties = [SimpleNamespace(uuid=f"00-{n}", total_memory=int(total * GIB), is_integrated=0) for n in visible]
        self._patch.setattr(torch.cuda, "device_count", lambda: len(visible))
        self._patch.setattr(torch.cuda, "get_device_properties", lambda number: properties[number])

    @staticmethod
    def listed(free: dict[int, float]) -> str:
        # nvidia-smi counts what the driver keeps for itself as well
        return "".join(f"GPU-00-{n}, {n}, {96 * 1024 + 600}, {int(size * 1024)}\n" for n, size in free.items())


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    (tmp_path / "smi").mkdir()
    return Machine(tmp_path / "smi", monkeypatch)


@pytest.fixture
def settings(tiny_target: Path, tmp_path: Path) -> EngineSettings:
    return settings_for(tiny_target, tmp_path / "out")


def refusal(engine: str, settings: EngineSettings) -> str:
    with pytest.raises(UserError) as error:
        preflight.check(engine, settings)
    assert "\n" not in str(error.value)
    return str(error.value)


def target_of(settings: EngineSettings, place: Path, gib: float, **config) -> EngineSettings:
    """Settings for a target whose one weight file is as large as that, and has no content on the disk."""
    place.mkdir()
    rows = int(gib * GIB) // 2 // 1024
    end = 2 * rows * 1024
    header = json.dumps({"embed_tokens.weight": {"dtype": "BF16", "shape": [rows, 1024], "data_offsets": [0, end]}})
    with open(place / "model.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header.encode())
        file.truncate(8 + len(header) + end)
    shape = {"hidden_size": 1024, "num_hidden_layers": 8, "vocab_size": rows, "num_attention_heads": 64}
    (place / "config.json").write_text(json.dumps(shape | config))
    layout = dataclasses.replace(settings.layout, dtype="bfloat16")
    return dataclasses.replace(settings, target=open_target(str(place)), layout=layout)


# --------------------------------------------------------------------------------------------- GPU memory


def test_free_gpus_pass_without_a_word(machine: Machine, settings: EngineSettings, capfd) -> None:
    machine.show(dict.fromkeys(range(8), 95.9), [0, 1, 2, 3])
    preflight.check("vllm", dataclasses.replace(settings, tensor_parallel_size=4))
    assert capfd.readouterr() == ("", "")


def test_a_process_in_the_way_is_named_and_left_alone(machine: Machine, settings: EngineSettings) -> None:
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        machine.show({0: 95.9, 1: 20.5}, [0, 1], f"1, {sleeper.pid}, /opt/venv/bin/python, serve, 77100")
        line = refusal("vllm", dataclasses.replace(settings, tensor_parallel_size=2))
        assert sleeper.poll() is None
        sleeper.kill()
    assert line == (
        f"GPU 1 has 20.5 GiB of 96.0 GiB free, 86.4 GiB are wanted, in the way: pid {sleeper.pid} "
        "(/opt/venv/bin/python, serve, 77100 MiB); end it if you do not need it, or give --gpu-memory-utilization 0.21 "
        "(now 0.9)"
    )
    preflight.check("vllm", dataclasses.replace(settings, tensor_parallel_size=2, gpu_memory_utilization=0.21))


def test_the_gpus_of_the_run_are_those_that_cuda_shows_in_its_order(machine: Machine, settings: EngineSettings) -> None:
    """CUDA_VISIBLE_DEVICES=5,2 and CUDA's own order, fastest first: numbers are nvidia-smi's, matched by uuid."""
    machine.show({2: 95.9, 5: 1.5, 0: 1.0}, [5, 2], "5, 11, trainer, 90000\n2, 12, desktop, 40\n0, 13, other, 95000")
    line = refusal("vllm", settings)
    assert line.startswith("GPU 5 has 1.5 GiB") and "pid 11 (trainer, 90000 MiB)" in line
    assert "desktop" not in line and "other" not in line
    machine.show({2: 1.5, 5: 95.9, 0: 1.0}, [5, 2])
    preflight.check("vllm", settings)  # the second GPU is not this run's


def test_no_lower_share_is_advised_that_cannot_hold_the_weights(
    machine: Machine, settings: EngineSettings, tmp_path: Path
) -> None:
    large = dataclasses.replace(target_of(settings, tmp_path / "model", 300), tensor_parallel_size=4)
    machine.show(dict.fromkeys(range(4), 70), range(4), "0, 7, a, [N/A]\n1, 8, b, 1")
    line = refusal("vllm", large)
    assert "pid 7 (a); GPU 1" in line and line.endswith("end them if you do not need them")
    machine.show(dict.fromkeys(range(4), 80), range(4))
    assert refusal("vllm", large).endswith("or give --gpu-memory-utilization 0.83 (now 0.9)")


def test_eight_full_gpus_make_one_line(machine: Machine, settings: EngineSettings) -> None:
    apps = "".join(f"{gpu}, {100 * gpu + n}, python3, 10000\n" for gpu in range(8) for n in range(9))
    machine.show(dict.fromkeys(range(8), 2.0), range(8), apps)
    line = refusal("vllm", dataclasses.replace(settings, tensor_parallel_size=8))
    assert "pid 3 (python3, 10000 MiB) and 5 more; GPU 1 has" in line and "; 4 more GPUs likewise; end them" in line


def test_processes_that_cannot_be_seen(machine: Machine, settings: EngineSettings) -> None:
    machine.show({0: 2.0}, [0])
    assert "in the way: nothing that nvidia-smi shows here: another container's, or" in refusal("vllm", settings)


def test_memory_that_comes_free_in_time(machine: Machine, settings: EngineSettings, monkeypatch) -> None:
    monkeypatch.setattr(preflight, "PATIENCE", 5.0)
    machine.show({0: 2.0}, [0])
    (machine.place / "next").write_text(machine.listed({0: 95.0}))
    started = time.monotonic()
    preflight.check("vllm", settings)
    assert time.monotonic() - started < 3


def test_what_a_killed_run_left_is_called_that(machine: Machine, settings: EngineSettings) -> None:
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        started = engine_guard.family({sleeper.pid: engine_guard.look(sleeper.pid)[1]})
        record = {"host": socket.gethostname(), "stage": {"1": 0}, "watcher": {}, "engine": started}
        record["commands"] = {sleeper.pid: "VLLM::EngineCore"}
        (settings.output_dir / ".engine-99.json").write_text(json.dumps(record))
        machine.show({0: 2.0}, [0], f"0, {sleeper.pid}, VLLM::EngineCore, 90000")
        line = refusal("vllm", settings)
        sleeper.kill()
    assert f"pid {sleeper.pid} (VLLM::EngineCore, 90000 MiB) left by a killed run; end it" in line


def test_weights_larger_than_the_gpus(machine: Machine, settings: EngineSettings, tmp_path: Path) -> None:
    """554 GB of weights: seven GPUs would hold them, eight divide 64 heads."""
    kimi = target_of(settings, tmp_path / "model", 554.3e9 / GIB)
    machine.show(dict.fromkeys(range(4), 95.9), range(4))
    line = refusal("vllm", dataclasses.replace(kimi, tensor_parallel_size=4))
    assert line == (
        "the target's weights take 516.2 GiB, 4 GPUs of which 86.4 GiB each may be used (--gpu-memory-utilization) "
        "cannot hold them; it takes 8, 4 visible"
    )
    machine.show(dict.fromkeys(range(8), 95.9), range(8))
    assert refusal("vllm", dataclasses.replace(kimi, tensor_parallel_size=4)).endswith("give --tensor-parallel-size 8")
    preflight.check("vllm", dataclasses.replace(kimi, tensor_parallel_size=8))


def test_transformers_spreads_over_what_is_free(machine: Machine, settings: EngineSettings, tmp_path: Path) -> None:
    large = dataclasses.replace(target_of(settings, tmp_path / "model", 120), device="cuda")
    machine.show({0: 95, 1: 30}, [0, 1], "1, 9, serve, 66000")
    preflight.check("transformers", large)
    machine.show({0: 95, 1: 20}, [0, 1], "1, 9, serve, 76000")
    line = refusal("transformers", large)
    assert line.startswith("GPU 1 has 20.0 GiB of 96.0 GiB free, 60.0 GiB are wanted, in the way: pid 9 (serve, 76000")
    assert "utilization" not in line


@pytest.mark.parametrize("case", ["no nvidia-smi", "slice of a GPU", "memory of the host", "nvidia-smi fails"])
def test_cuda_is_asked_where_nvidia_smi_does_not_know(
    machine: Machine, settings: EngineSettings, monkeypatch, case: str
) -> None:
    machine.show({0: 95.9}, [0], total=48 if case == "slice of a GPU" else 96)
    if case == "no nvidia-smi":
        monkeypatch.setenv("PATH", "/nowhere")
    elif case == "nvidia-smi fails":
        (machine.place / "gpus").unlink()
    elif case == "memory of the host":
        (machine.place / "gpus").write_text("GPU-00-0, 0, [N/A], [N/A]\n")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (3 * GIB, 48 * GIB))
    line = refusal("vllm", settings)
    assert line.startswith("GPU 0 has 3.0 GiB of 48.0 GiB free, 43.2 GiB are wanted")


# ---------------------------------------------------------------------------- shared memory, ports, host


def test_little_shared_memory(machine: Machine, settings: EngineSettings, monkeypatch, tmp_path: Path) -> None:
    machine.show({0: 95.9, 1: 95.9}, [0, 1])
    usage = preflight.shutil.disk_usage("/")._replace(free=64_000_000)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda place: usage)
    preflight.check("vllm", settings)  # one GPU has nobody to talk to
    two = dataclasses.replace(settings, tensor_parallel_size=2)
    line = refusal("vllm", two)
    assert line.startswith("/dev/shm has 64 MB free, several GPUs need 1074 MB there") and "--shm-size=16g or" in line
    monkeypatch.setattr(preflight, "SHARED_MEMORY", tmp_path / "none")
    assert "has 0 MB free" in refusal("vllm", two)


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        yield server.getsockname()[1]


@pytest.mark.parametrize("name", ["VLLM_PORT", "MASTER_PORT"])
def test_a_taken_port_is_said(settings: EngineSettings, monkeypatch, capsys, taken_port: int, name: str) -> None:
    monkeypatch.setenv(name, str(taken_port))
    preflight.check("vllm", settings)
    assert f"warning: {name} is {taken_port}, which another process is using; unset it" in capsys.readouterr().err
    with socket.socket() as free:
        free.bind(("", 0))
        monkeypatch.setenv(name, str(free.getsockname()[1]))
    preflight.check("vllm", settings)
    assert capsys.readouterr().err == ""


def test_a_port_that_is_none(settings: EngineSettings, monkeypatch) -> None:
    monkeypatch.setenv("VLLM_PORT", "tcp://vllm.default:8000")
    assert refusal("vllm", settings).startswith("VLLM_PORT is tcp://vllm.default:8000, expected a port; unset it")
    preflight.check("transformers", settings)  # has no use for it


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_weights_larger_than_the_host(settings: EngineSettings, monkeypatch, tmp_path: Path, engine: str) -> None:
    large = target_of(settings, tmp_path / "model", 12)
    (tmp_path / "meminfo").write_text("MemTotal:       32000000 kB\nMemAvailable:    9437184 kB\n")
    monkeypatch.setattr(preflight, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(preflight, "CONTAINER_LIMIT", tmp_path / "memory.max")
    line = refusal(engine, large)
    assert line.startswith("the target's weights take 12.0 GiB in bfloat16, the host has 9.0 GiB of memory available")
    (tmp_path / "meminfo").write_text("MemAvailable:   14000000 kB\n")
    preflight.check(engine, large)
    float32 = dataclasses.replace(large, layout=dataclasses.replace(large.layout, dtype="float32"))
    assert "take 24.0 GiB in float32" in refusal(engine, float32)
    (tmp_path / "memory.max").write_text("max\n")
    preflight.check(engine, large)
    (tmp_path / "memory.max").write_text(f"{8 * GIB}\n")
    assert "the host has 8.0 GiB" in refusal(engine, large)


def test_weights_as_the_engine_holds_them(tiny_target, tiny_kimi_int4, tmp_path) -> None:
    """bfloat16 of a float32 checkpoint takes half; transformers unpacks INT4, vLLM does not; no layer beyond N."""

    def stored(model: Path, packed: bool | None = None) -> int:
        headers = [preflight.model_files.read_header(path) for path in model.glob("*.safetensors")]
        entries = [
            pair for header in headers for pair in header.items() if packed in (None, pair[0].endswith("_packed"))
        ]
        return sum(entry["data_offsets"][1] - entry["data_offsets"][0] for _, entry in entries)

    for dtype, share in (("float32", 1), ("bfloat16", 2)):
        settings = settings_for(tiny_target, tmp_path / "out", dtype=dtype)
        for engine in ("vllm", "transformers"):
            assert preflight.weight_bytes(engine, settings) == stored(tiny_target) // share
    packed, _ = tiny_kimi_int4
    settings = settings_for(packed, tmp_path / "out", dtype="bfloat16")
    bias = 7 * 4 * 2  # bytes of float32 that bfloat16 halves: 7 layers of 4 experts
    assert preflight.weight_bytes("vllm", settings) == stored(packed) - bias
    assert preflight.weight_bytes("transformers", settings) == stored(packed) - bias + 3 * stored(packed, packed=True)
    shallow = dataclasses.replace(settings.target, config=settings.target.config | {"num_hidden_layers": 1})
    expected = stored(packed) - sum(stored_layer(packed, layer) for layer in range(1, 8))
    assert preflight.weight_bytes("vllm", dataclasses.replace(settings, target=shallow)) == expected


def stored_layer(model: Path, layer: int) -> int:
    header = preflight.model_files.read_header(model / f"model-{layer + 1:05d}-of-000011.safetensors")
    return sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in header.values())


def test_extract_looks_before_it_loads(settings: EngineSettings, tiny_target, machine, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(engines, "choose", lambda name: ("vllm", "0.32.0"))
    monkeypatch.setattr(engines, "open_engine", lambda *_: pytest.fail("the engine was loaded"))
    machine.show({0: 2.0}, [0], "0, 9, serve, 94000")
    prepared = write_prepared(tmp_path / "prepared", tiny_target, random_prompts([20]))
    with pytest.raises(UserError, match=r"in the way: pid 9 \(serve, 94000 MiB\)"):
        extract.extract(prepared, "vllm", settings)
    assert not (settings.output_dir / "manifest.json").exists(), "what an earlier run finished stays usable"


# ------------------------------------------------------------------------------------------------ packages


@pytest.fixture
def kimi(tiny_kimi: Path, tmp_path: Path) -> Path:
    """The stand-in, whose tokenizer needs one more package, and so does a file that it imports."""
    copy = preflight.shutil.copytree(tiny_kimi, tmp_path / "kimi")
    code = (copy / "tokenization_kimi.py").read_text()
    (copy / "tokenization_kimi.py").write_text("import eagle3_absent_one\n" + code)
    more = """
from eagle3_absent_two.part import name
try:
    import eagle3_absent_three
except ImportError:
    pass
if is_flash_attn_2_available():
    import eagle3_absent_four
"""
    with open(copy / "tool_declaration_ts.py", "a") as file:
        file.write(more)
    (copy / "modeling_kimi.py").write_text("import eagle3_absent_five\n")  # vLLM has its own
    return copy


def test_packages_of_remote_code_are_listed_with_the_command(kimi: Path, tmp_path: Path) -> None:
    """Case H21: by both stages, in one line, before anything is loaded."""
    expected = (
        f"{kimi} needs packages that are not installed: eagle3_absent_one (tokenization_kimi.py), eagle3_absent_two "
        "(tool_declaration_ts.py); pip install eagle3-absent-one eagle3-absent-two"
    )
    target = open_target(str(kimi))
    with pytest.raises(UserError) as error:
        load_tokenizer(target, trust_remote_code=True)
    assert str(error.value) == expected
    with pytest.raises(UserError) as error:
        preflight.require_target_packages("vllm", target, trust_remote_code=True)
    assert str(error.value) == expected
    preflight.require_target_packages("transformers", target, trust_remote_code=True)  # loads no tokenizer
    config = json.loads((kimi / "config.json").read_text())
    config["auto_map"]["AutoModelForCausalLM"] = "modeling_kimi.Kimi"
    (kimi / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"eagle3_absent_five \(modeling_kimi\.py\); pip install eagle3-absent-five$"):
        preflight.require_target_packages("transformers", target, trust_remote_code=True)


def test_packages_that_unpack_weights(tiny_kimi_int4, monkeypatch, capsys) -> None:
    """Case H21: compressed-tensors for the transformers engine; vLLM brings its own."""
    target = open_target(str(tiny_kimi_int4[0]))
    preflight.require_target_packages("transformers", target, trust_remote_code=False)
    monkeypatch.setitem(sys.modules, "compressed_tensors", None)  # as if it were not installed
    with pytest.raises(UserError, match=r"compressed_tensors \(compressed-tensors weights\); pip install compressed-t"):
        preflight.require_target_packages("transformers", target, trust_remote_code=False)
    preflight.require_target_packages("vllm", target, trust_remote_code=False)


def test_code_that_is_no_python(kimi: Path) -> None:
    (kimi / "tokenization_kimi.py").write_text("def (:\n")
    with pytest.raises(UserError, match=r"tokenization_kimi\.py is no Python code \(invalid syntax.*fetch it again"):
        require_packages(kimi, ("AutoTokenizer",))


def test_an_import_error_inside_a_tokenizer_is_no_damaged_file(kimi: Path) -> None:
    code = (
        "def load():\n    try:\n        import eagle3_absent\n    except ImportError as error:\n        raise error\n"
    )
    (kimi / "tokenization_kimi.py").write_text(code + "load()\n")
    with pytest.raises(UserError, match=r"does not load \(ModuleNotFoundError: .*'eagle3_absent'\); install what it"):
        load_tokenizer(open_target(str(kimi)), trust_remote_code=True)


SCRIPTS = """
import runpy, sys
from eagle3.terminal import quiet_libraries
quiet_libraries()
sys.modules["tiktoken"] = None
for arguments in {runs!r}:
    sys.argv = arguments
    try:
        runpy.run_path("{root}/" + arguments[0], run_name="__main__")
    except SystemExit as end:
        print("ended", end.code, flush=True)
"""


def test_both_scripts_without_tiktoken(tiny_kimi: Path, tmp_path: Path, chats: Path) -> None:
    """Case H21: help is printed, and the run ends at once in a line that names the package."""
    model = ["--model-path", str(tiny_kimi), "--output-dir", str(tmp_path / "out"), "--trust-remote-code"]
    runs = [
        ["01_prepare_dataset.py", "--help"],
        ["02_extract_hidden_states.py", "--help"],
        ["01_prepare_dataset.py", *model, "--dataset", str(chats)],
        ["02_extract_hidden_states.py", *model, "--prepared-dir", str(tmp_path)],
    ]
    code = SCRIPTS.format(runs=runs, root=REPOSITORY)
    result = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    line = f"error: {tiny_kimi} needs packages that are not installed: tiktoken (tokenization_kimi.py); "
    assert result.stderr.splitlines() == [line + "pip install tiktoken"] * 2
    ended = [line for line in result.stdout.splitlines() if line.startswith("ended")]
    assert ended == ["ended 0", "ended 0", "ended 1", "ended 1"] and result.stdout.count("usage:") == 2
