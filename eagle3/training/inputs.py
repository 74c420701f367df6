"""What stages 02 and 03 left, checked to belong together and to the target."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eagle3 import artifacts
from eagle3.model_files import tokenizer_hash
from eagle3.target import Target
from eagle3.terminal import UserError

# set by flags of stage 04, so that one value cannot stand in two places
OWN_DEEPSPEED_KEYS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "bf16",
    "fp16",
    "optimizer",
    "scheduler",
)
# what else DeepSpeed 0.19 takes at the top level; it ignores a misspelt key without a word
OTHER_DEEPSPEED_KEYS = (
    "zero_optimization",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "aio",
    "checkpoint",
    "comms_logger",
    "communication_data_type",
    "data_types",
    "disable_allgather",
    "dump_state",
    "flops_profiler",
    "gradient_allreduce_op",
    "gradient_predivide_factor",
    "log_level",
    "memory_breakdown",
    "prescale_gradients",
    "wall_clock_breakdown",
)
ZERO_STAGES = (0, 1, 2)


@dataclass(frozen=True)
class Inputs:
    """Checked inputs of a training run."""

    directory: Path  # stage 02's
    records: list[dict[str, Any]]  # index records of whole samples, ascending
    planned: list[dict[str, Any]]  # these and those of the samples that stage 02 failed, ascending
    aux_layers: list[int]
    d2t: torch.Tensor  # int64 [D]
    t2d: torch.Tensor  # bool [V]
    fingerprint: dict[str, str]  # of states, samples and vocabulary map

    def sources(self) -> list[str]:
        """Names of the data sources, in order of size."""
        names = [record["dataset"] for record in self.records]
        return sorted(set(names), key=lambda name: (-names.count(name), name))


def open_inputs(target: Target, hidden_states: Path, vocab_map: Path) -> Inputs:
    """Open both directories. Raises UserError naming the field and both values where something does not match."""
    states = artifacts.read_manifest(hidden_states, "02")
    mapped = artifacts.read_manifest(vocab_map, "03")
    made_from = states["fingerprint"]
    this = {"target": target.config_hash, "tokenizer": tokenizer_hash(target.directory)}
    artifacts.require_same(hidden_states, made_from, this, "give the --model-path that stage 02 had, unchanged")
    if not states["complete"]:
        raise UserError(f"{hidden_states}: stage 02 has not finished; rerun it")
    same = {"target": made_from["target"], "tokenizer": made_from["tokenizer"]}
    artifacts.require_same(vocab_map, mapped["fingerprint"], same, "rerun stage 03 for the data of these states")
    vocab = artifacts.load_fields(vocab_map / "vocab_map.pt", artifacts.VOCAB_MAP, "03")
    _check_vocab_map(vocab_map, vocab, mapped["fingerprint"]["draft_vocab_size"], target.vocab_size)
    index = artifacts.Index(hidden_states).samples()
    records = [record for record in index.values() if record["status"] == "done"]
    known = ("tokens", "supervised", "conversation")
    planned = [r for r in index.values() if r["status"] == "done" or all(r.get(field) is not None for field in known)]
    if not records or len(records) != states["samples"]:
        raise UserError(
            f"{hidden_states}/index.jsonl names {len(records)} finished samples, manifest.json says "
            f"{states['samples']}; run the command of stage 02 again"
        )
    artifacts.require_whole(hidden_states, "02", records)
    if sum(record["supervised"] for record in records) == 0:
        raise UserError(f"{hidden_states}: no supervised token in {len(records)} samples; look at the data of stage 01")
    return Inputs(
        directory=hidden_states,
        records=records,
        planned=planned,
        aux_layers=states["aux_layers"],
        d2t=vocab["d2t"].clone(),
        t2d=vocab["t2d"].clone(),
        fingerprint={
            "states": artifacts.digest(made_from),
            "samples": artifacts.digest(
                [[record[field] for field in ("index", "tokens", "supervised", "status")] for record in planned]
            ),
            "vocab_map": artifacts.digest(mapped["fingerprint"]),
        },
    )


def _check_vocab_map(directory: Path, vocab: dict[str, torch.Tensor], draft_size: int, vocab_size: int) -> None:
    d2t, t2d = vocab["d2t"], vocab["t2d"]
    found = (d2t.shape[0], int(t2d.sum()), t2d.shape[0])
    wanted = (draft_size, draft_size, vocab_size)
    if found != wanted:
        raise UserError(
            f"{directory}/vocab_map.pt: d2t has {found[0]} ids, t2d marks {found[1]} of {found[2]}; "
            f"the manifest and the target say {wanted[0]}, {wanted[1]} of {wanted[2]}; rerun stage 03"
        )
    ids = torch.arange(draft_size) + d2t
    inside = draft_size == 0 or bool(0 <= ids.min() <= ids.max() < vocab_size)
    if not (inside and bool((ids[1:] > ids[:-1]).all()) and bool(t2d[ids].all())):
        raise UserError(
            f"{directory}/vocab_map.pt: d2t and t2d disagree, or the ids do not ascend within 0 to {vocab_size - 1}; "
            "rerun stage 03"
        )


def read_deepspeed_config(path: Path) -> dict[str, Any]:
    """DeepSpeed's JSON. Raises UserError naming every key that a flag of stage 04 sets, every unknown one, 'auto', and
    a ZeRO stage other than 0, 1 and 2."""
    try:
        config = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(f"--deepspeed-config {path}: {error}") from error
    if twice := [key for key in OWN_DEEPSPEED_KEYS if key in config]:
        raise UserError(f"--deepspeed-config {path} sets {', '.join(twice)}; remove them, flags of stage 04 set these")
    if unknown := [key for key in config if key not in OTHER_DEEPSPEED_KEYS]:
        raise UserError(
            f"--deepspeed-config {path} has unknown keys {', '.join(unknown)}; known: {', '.join(OTHER_DEEPSPEED_KEYS)}"
        )
    stage = config.get("zero_optimization", {}).get("stage", 0)
    if stage not in ZERO_STAGES:
        raise UserError(f"--deepspeed-config {path}: ZeRO stage {stage}; a draft is trained with 0, 1 or 2")
    if '"auto"' in json.dumps(config):
        raise UserError(f'--deepspeed-config {path} holds "auto", which only the transformers trainer resolves')
    return config
