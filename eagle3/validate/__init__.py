"""Check that a draft directory is what vLLM and SGLang read, before anyone waits for a server to find out.

For this program's export and any published Llama-type EAGLE-3 draft, speculators' layout too. Both servers start with
most of these faults, and then accept no draft at all.

The rules were read from vLLM 0.32 and SGLang 0.5.14. Files named in comments: vllm/ is the first package, srt/ is
sglang/srt of the second, transformers is 5.19 (SGLang pins 5.8.1).
"""

from pathlib import Path

from eagle3 import terminal
from eagle3.target import Target
from eagle3.terminal import UserError
from eagle3.validate import config, layers, tensors
from eagle3.validate.check import SERVERS, Check, Finding
from eagle3.validate.stored import open_draft

__all__ = ["SERVERS", "Finding", "findings", "require_servable"]


def findings(directory: Path, target: Target, servers: tuple[str, ...] = SERVERS) -> list[Finding]:
    """Check the draft in `directory` for `target` against `servers`. Reads one tensor at a time.

    Raises UserError where there is no draft to check: no config.json, or a file that cannot be read.
    """
    draft = open_draft(directory)
    check = Check(draft, target, servers)
    if draft.speculators and "sglang" in servers:
        # srt/: no file knows speculators_model_type
        check.error("layout", "SGLang does not read speculators' layout; give it the plain one, as 04's export/")
        check.servers = tuple(server for server in servers if server != "sglang")
    if check.servers and config.kinds(check):  # the others compute with these values
        config.described(check)
        config.rope(check)
        layers.layer_ids(check)
        if draft.pickled:
            # vllm/model_executor/model_loader/default_loader.py and srt/model_loader/loader.py fall back to them
            listed = ", ".join(draft.pickled)
            check.error("pickled", f"weights only as {listed}, which can run code when loaded; convert to safetensors")
        elif not draft.tensors:
            check.error("no-weights", "no .safetensors file; fetch or export it again")
        else:
            tensors.names_and_shapes(check)
            tensors.vocabulary(check)
            tensors.values(check)
            tensors.embedding(check)
    return check.found


def require_servable(directory: Path, target: Target) -> None:
    """Print the warnings for both servers; raises UserError naming the first error and how many there are."""
    found = findings(directory, target)
    for finding in found:
        if finding.severity == "warning":
            terminal.warn(f"{directory}: {finding.text}")
    if errors := [finding for finding in found if finding.severity == "error"]:
        more = f" ({len(errors)} errors; python -m eagle3.validate lists them)" if errors[1:] else ""
        raise UserError(f"{directory}: {errors[0].text}{more}")
