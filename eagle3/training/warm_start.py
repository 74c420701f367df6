"""--init-from: training starts from the weights of a published draft or of an own export instead of random ones.

Both layouts are read (eagle3/validate/stored.py), safetensors alone. The draft's shape is taken from there too. Rows of
lm_head belong to target ids, never to places: a vocabulary map made again from other data has another order.
"""

import hashlib
from typing import Any

import torch

from eagle3.draft.config import DROPPED_ROPE_KEYS, NORM_KEYS, ROPE_KEYS, DraftConfig, rope_parameters
from eagle3.draft.model import DraftModel
from eagle3.export import draft_to_target
from eagle3.target import Target, local_directory, read_embedding
from eagle3.terminal import UserError
from eagle3.validate import config as config_rules
from eagle3.validate import layers, tensors
from eagle3.validate.check import Check
from eagle3.validate.stored import IDS, open_draft

UNKNOWN_PARTS = ("norm_before_residual", "norm_before_fc", "attention_bias", "mlp_bias")  # to draft/model.py
EMBEDDING = "embed_tokens.weight"
NOT_LEARNED = (EMBEDDING, "d2t", "t2d")
HELPERS = "verifier_"  # copies of the target's tensors in speculators' training checkpoints
COMPARED_ROWS = 8192  # of the embedding at a time


def open_source(name: str, target: Target) -> Check:
    """The draft `name` (a directory or hub name) beside the target, headers only.

    Raises UserError when it holds no safetensors, values of the wrong kind, a map that is none, NaN or zeros.
    """
    directory = local_directory(name, "--init-from", ["*.json", "*.safetensors"])
    source = Check(open_draft(directory), target, ("vllm",))
    if source.draft.pickled:
        listed = ", ".join(source.draft.pickled)
        raise UserError(
            f"--init-from {directory} has its weights only as {listed}, which can run code when loaded; convert them "
            "to safetensors"
        )
    if not source.draft.tensors:
        raise UserError(f"--init-from {directory} has no .safetensors file; give the directory of a draft")
    if config_rules.kinds(source):
        tensors.vocabulary(source)
        tensors.values(source)
    if errors := [finding for finding in source.found if finding.severity == "error"]:
        raise UserError(f"--init-from {directory}: {errors[0].text}")
    return source


def stated_shape(source: Check, given: dict[str, Any]) -> dict[str, Any]:
    """The source's shape as a draft config file states one; what `given`, such a file, states stays."""
    config, heads = source.config, source.config["num_attention_heads"]
    found = {
        "intermediate_size": config["intermediate_size"],
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "rms_norm_eps": float(config.get("rms_norm_eps", 1e-6)),
    }
    if not any(given.get(key) for key in ROPE_KEYS):
        found["rope_parameters"] = rope_parameters(config)
    return found | {key: True for key in NORM_KEYS if _norms(source)[key]} | given


def require_fit(source: Check, config: DraftConfig) -> None:
    """Raises UserError with both values where the source computes otherwise than a draft of `config` would."""
    there, where = source.config, f"--init-from {source.draft.directory}"
    stated = stated_shape(source, {})
    rope = stated.pop("rope_parameters")
    have = {
        "num_hidden_layers": there["num_hidden_layers"],
        "hidden_size": there["hidden_size"],
        "the width of the target's states": source.state_width,
        "vocab_size": there["vocab_size"],
        "hidden_act": there.get("hidden_act") or "silu",
        **stated,
        **_norms(source),
        "rope": rope,
    } | {key: bool(there.get(key) or source.eagle.get(key)) for key in UNKNOWN_PARTS}
    want = {
        "num_hidden_layers": 1,
        "the width of the target's states": config.hidden_size,
        "hidden_act": "silu",
        "rope": config.rope,
    } | dict.fromkeys(UNKNOWN_PARTS, False)
    for key, found in have.items():
        wanted = want[key] if key in want else getattr(config, key)
        if found != wanted:
            raise UserError(f"{where}: {key} is {found!r}, this run has {wanted!r}; start from a draft of this shape")
    ids, nested = there.get(IDS), source.eagle.get(IDS)
    target = source.target
    default = [2, target.num_layers // 2, target.num_layers - 3]  # of both servers
    # ids that only eagle_config has are vLLM's to vLLM and SGLang's to SGLang
    possible = [ids] if ids else [nested, layers.captured_by_sglang(nested, target)] if nested else [default]
    if list(config.aux_layers) not in possible:
        raise UserError(
            f"{where}: its aux layers are {' or '.join(map(str, possible))}, the states of stage 02 are of "
            f"{list(config.aux_layers)}; rerun stage 02 with its --aux-layers"
        )


def start(model: DraftModel, source: Check, ids: torch.Tensor) -> tuple[str, str]:
    """Put the source's weights into `model`, whose lm_head holds the target's rows for the draft ids `ids` int64 [D].

    Returns what was done, in a line, and a digest of the weights. Raises UserError naming tensors that are missing,
    unknown or of another shape, and an embedding that is not the target's.
    """
    stored, where = source.draft.tensors, f"--init-from {source.draft.directory}"
    parameters = {name.replace("midlayer.", "layers.0.", 1): one for name, one in model.named_parameters()}
    if missing := sorted(parameters.keys() - stored.keys()):
        raise UserError(f"{where} lacks {', '.join(missing)}; start from a whole draft")
    known = {*parameters, *NOT_LEARNED}
    if unknown := [name for name in sorted(stored.keys() - known) if not name.startswith(HELPERS)]:
        raise UserError(f"{where} has tensors that this draft does not: {', '.join(unknown[:3])}; start from another")
    for name, parameter in parameters.items():
        wanted = tuple(parameter.shape)
        if name == "lm_head.weight":
            wanted = (source.draft_vocab, wanted[1])
        if stored[name].shape != wanted:
            raise UserError(f"{where}: {name} is {list(stored[name].shape)}, this run has {list(wanted)}")
    _require_same_embedding(source)

    digest = hashlib.sha256()
    theirs = torch.arange(source.draft_vocab)  # target ids, [D of the source]
    if "d2t" in stored:
        theirs = draft_to_target(stored["d2t"].read().long())
    digest.update(theirs.numpy().tobytes())
    place = torch.full((source.target.vocab_size,), -1)
    place[theirs] = torch.arange(len(theirs))
    place = place[ids]  # row of each of this run's ids, [D]
    with torch.no_grad():
        for name, parameter in sorted(parameters.items()):
            tensor = stored[name].read()
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
            if name == "lm_head.weight":
                parameter[place >= 0] = tensor[place[place >= 0]].to(parameter.dtype)
            else:
                parameter.copy_(tensor)
    taken, line = int((place >= 0).sum()), f"lm_head as it is, of the same {len(ids)} draft ids"
    if not torch.equal(theirs, ids):
        line = (
            f"lm_head by target id, {taken} of {len(ids)} rows from its {len(theirs)}, {len(ids) - taken} whose ids it "
            "lacks from the target's"
        )
    line = f"starting from {source.draft.directory}: {len(parameters) - 1} tensors as they are, {line}"
    line += "; draft ids are those of --vocab-map-dir"
    rope = {**(source.config.get("rope_scaling") or {}), **(source.config.get("rope_parameters") or {})}
    if dropped := [key for key in DROPPED_ROPE_KEYS if key in rope]:
        line += f"; {', '.join(dropped)} of its rope are left out, for servers do not agree on them"
    return line, digest.hexdigest()[:16]


def _norms(source: Check) -> dict[str, bool]:
    return {"fc_norm": source.fc_norm, "norm_output": bool(source.config.get("norm_output"))}


def _require_same_embedding(source: Check) -> None:
    """Training and SGLang take the target's, so a draft with another one of its own would not be the same draft."""
    stored = source.draft.tensors.get(EMBEDDING)
    if stored is None:
        return
    theirs, where = read_embedding(source.target), f"--init-from {source.draft.directory}"
    if stored.shape != tuple(theirs.shape):
        raise UserError(f"{where}: embed_tokens is {list(stored.shape)}, the target's {list(theirs.shape)}")
    differing = 0
    for first in range(0, len(theirs), COMPARED_ROWS):
        mine = stored.rows(first, first + COMPARED_ROWS).float()
        # as stored in bf16 or fp16 of the target's
        close = torch.isclose(mine, theirs[first : first + COMPARED_ROWS].float(), rtol=1e-2, atol=1e-6)
        differing += int((~close).any(1).sum())
    if differing:
        raise UserError(
            f"{where}: {differing} of {len(theirs)} rows of embed_tokens are not the target's, which a draft is "
            "trained and served with; start from a draft of this target"
        )
