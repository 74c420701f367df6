"""Python packages that a target needs beside this program's own: imports of its remote code, what unpacks its weights.

Read from the files of the model directory; nothing is imported.
"""

import ast
import importlib.util
from collections.abc import Collection, Iterator
from pathlib import Path

from eagle3.model_files import read_json
from eagle3.terminal import UserError

CONFIGS = ("config.json", "tokenizer_config.json", "preprocessor_config.json", "processor_config.json")
QUANTISERS = {  # quant_method -> what transformers imports for it (5.19)
    "aqlm": ("aqlm",),
    "auto-round": ("auto_round",),
    "awq": ("gptqmodel",),
    "bitsandbytes": ("bitsandbytes",),
    "compressed-tensors": ("compressed_tensors",),
    "gptq": ("optimum", "gptqmodel"),
    "hqq": ("hqq",),
    "quark": ("quark",),
    "torchao": ("torchao",),
    "vptq": ("vptq",),
}
DISTRIBUTIONS = {"PIL": "pillow", "cv2": "opencv-python", "quark": "amd-quark", "yaml": "pyyaml"}  # named otherwise


def require_packages(directory: Path, classes: Collection[str], *, unpacks: bool = False) -> None:
    """Raises UserError naming every package that is needed and not installed, with the pip command.

    `classes` are the names in auto_map (AutoTokenizer, ...) whose code is going to run; `unpacks`: transformers is
    going to load the weights, quantised as config.json says.
    """
    needed: dict[str, str] = {}  # package -> what needs it
    for path in _code_files(directory, classes):
        needed |= dict.fromkeys(_imports(path), path.name) | needed
    if unpacks:
        config = read_json(directory / "config.json") or {}
        text = config.get("text_config") or {}
        method = (config.get("quantization_config") or text.get("quantization_config") or {}).get("quant_method")
        needed |= dict.fromkeys(QUANTISERS.get(method, ()), f"{method} weights")
    if missing := {package: user for package, user in needed.items() if not _is_installed(package)}:
        named = ", ".join(f"{package} ({user})" for package, user in missing.items())
        command = " ".join(DISTRIBUTIONS.get(package, package.replace("_", "-")) for package in missing)
        raise UserError(f"{directory} needs packages that are not installed: {named}; pip install {command}")


def auto_classes(directory: Path) -> set[str]:
    """Names of all classes for which the directory has remote code."""
    return set(_auto_map(directory))


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # a module that somebody made by hand
        return True


def _auto_map(directory: Path) -> dict[str, str]:
    """Class name -> its code, as module.Class or repository--module.Class."""
    found: dict[str, str] = {}
    for name in CONFIGS:
        declared = (read_json(directory / name) or {}).get("auto_map")
        for key, value in declared.items() if isinstance(declared, dict) else ():
            slow_and_fast = [value] if isinstance(value, str) else value
            if code := next((one for one in reversed(slow_and_fast or ()) if one), None):
                found.setdefault(key, code)
    return found


def _code_files(directory: Path, classes: Collection[str]) -> list[Path]:
    """Files in the directory that define these classes, with all that those import from beside them."""
    files: list[Path] = []
    todo = [code.rpartition(".")[0] for name, code in _auto_map(directory).items() if name in classes]
    while todo:
        path = directory / f"{todo.pop()}.py"  # another repository's code has no such path
        if path.is_file() and path not in files:
            files.append(path)
            todo += [
                name
                for node in _required(_parse(path))
                if isinstance(node, ast.ImportFrom) and node.level
                for name in ([node.module] if node.module else [alias.name for alias in node.names])
            ]
    return sorted(files)


def _imports(path: Path) -> list[str]:
    """Packages that transformers refuses to run a file of remote code without."""
    found = []
    for node in _required(_parse(path)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.append(node.module)
    return sorted({name.partition(".")[0] for name in found})


def _parse(path: Path) -> ast.AST:
    try:
        return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{path} is no Python code ({error}); fetch it again") from error


def _required(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those in a `try`, which does without, and those under `if is_..._available()`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Try) or (isinstance(child, ast.If) and _asks_for_package(child.test)):
            continue
        yield child
        yield from _required(child)


def _asks_for_package(test: ast.expr) -> bool:
    calls = (node.func for node in ast.walk(test) if isinstance(node, ast.Call))
    return any(getattr(call, "id", getattr(call, "attr", "")).endswith("available") for call in calls)
