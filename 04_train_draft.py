#!/usr/bin/env python3
"""Stage 04: train the EAGLE-3 draft with training-time test under DeepSpeed, and export it.

Reads   OUT/hidden_states (stage 02) and OUT/vocab_map (stage 03); embedding, final norm and lm_head of the target
Writes  OUT/draft: checkpoints/ metrics.jsonl tensorboard/ export/ manifest.json; export/ is of the highest tau
Needs   a GPU with room for the draft, its float32 optimizer state and one pack; or a CPU and a small target

    python 04_train_draft.py --model-path M --hidden-states-dir OUT/hidden_states --vocab-map-dir OUT/vocab_map \\
        --output-dir OUT/draft
    torchrun --standalone --nproc-per-node 8 04_train_draft.py ...        # or: deepspeed 04_train_draft.py ...

The same command after an interruption continues from the last checkpoint; the same command after the end exports
again. Embeddings are the target's, frozen. The loss is the KL divergence from the target's distribution over the draft
vocabulary, divided by the global count of supervised rows of the optimizer step (all ranks and micro-batches).
"""

import argparse
import contextlib
import dataclasses
import os
import time
from pathlib import Path

from eagle3 import terminal
from eagle3.terminal import UserError
from eagle3.training.schedule import SCHEDULES


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model-path", required=True, help="target: model directory or hub name")
    parser.add_argument(
        "--tensor",
        action="append",
        default=[],
        metavar="ROLE=NAME",
        help="the target's embed_tokens, norm or lm_head in its weight files, where its name cannot be guessed",
    )
    parser.add_argument("--hidden-states-dir", type=Path, required=True, help="output of stage 02")
    parser.add_argument("--vocab-map-dir", type=Path, required=True, help="output of stage 03")
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=10, help="passes over the training samples (default %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=1e-4, help="peak, AdamW (default %(default)s)")
    parser.add_argument(
        "--schedule",
        choices=SCHEDULES,
        default="cosine",
        help="learning rate after warm-up: cosine to a tenth, linear to zero, or constant and then linear to zero over "
        "the last fifth of the steps (default %(default)s)",
    )
    parser.add_argument("--warmup-ratio", type=float, default=0.03, help="share of steps (default %(default)s)")
    parser.add_argument("--weight-decay", type=float, default=0.0, help="(default %(default)s)")
    parser.add_argument("--clip", type=float, default=0.5, help="largest gradient norm (default %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=4096, help="tokens of a micro-batch (default %(default)s)")
    parser.add_argument(
        "--max-rows", type=int, help="supervised tokens of a micro-batch: memory follows both (default: --max-tokens)"
    )
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches a step (default %(default)s)")
    parser.add_argument("--ttt-steps", type=int, default=5, help="training-time test steps (default %(default)s)")
    parser.add_argument(
        "--step-decay", type=float, default=1.0, help="step k of the loss weighs DECAY**k (default %(default)s)"
    )
    parser.add_argument(
        "--loss",
        choices=("kl", "cross-entropy"),
        default="kl",
        help="to the target's distribution over the draft vocabulary, or with the text's tokens (default %(default)s)",
    )
    parser.add_argument(
        "--loss-norm",
        choices=("per-step", "first-step"),
        default="per-step",
        help="divide each step's loss by its own rows, or by those of step 0 (default %(default)s)",
    )
    parser.add_argument(
        "--supervision",
        choices=("served", "shifted-mask"),
        default="served",
        help="which starts count at a step: as a server drafts, or as speculators 0.9 (README)",
    )
    parser.add_argument(
        "--lm-head",
        choices=("trained", "frozen"),
        default="trained",
        help="both start at the target's rows, or those of --init-from",
    )
    parser.add_argument(
        "--activation-checkpointing", action="store_true", help="compute each TTT step again in backward: less memory"
    )
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="auto: float32 on CPU")
    parser.add_argument("--val-fraction", type=float, default=0.05, help="conversations held out (default %(default)s)")
    parser.add_argument("--save-every", type=int, default=500, help="steps between checkpoints (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--deepspeed-config",
        type=Path,
        default=Path(__file__).resolve().parent / "configs/deepspeed/zero2.json",
        help="DeepSpeed JSON without batch sizes, precision and clipping (default %(default)s)",
    )
    parser.add_argument(
        "--draft-config",
        type=Path,
        help="JSON that states the draft's shape, as configs/drafts/*.json (default: derived from the target)",
    )
    parser.add_argument(
        "--init-from",
        metavar="DRAFT",
        help="start from a published draft or an own export, a directory or hub name (default: random weights)",
    )
    parser.add_argument("--fc-norm", action="store_true", help="EAGLE-3.1: norm each aux layer's states before fc")
    parser.add_argument(
        "--norm-output", action="store_true", help="EAGLE-3.1: hand the final norm's output on to the next step"
    )
    parser.add_argument(
        "--format",
        choices=("servers", "speculators"),
        default="servers",
        help="servers: export/ for vLLM and SGLang; speculators: also export-speculators/ in that library's layout",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print what the run would take (memory, steps, hours), and end"
    )
    parser.add_argument("--note", help="a line for the model card and the closing summary")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher passes it
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    if os.environ.get("WORLD_SIZE", "1") != "1":
        terminal.end_with_parent()  # a launcher killed by -9 must not leave its ranks training on
    with contextlib.ExitStack() as stack:
        try:
            return run_stage(arguments, stack)
        except (RuntimeError, MemoryError) as error:
            if not terminal.is_out_of_memory(error):
                raise
            told = "".join(f"; {note}" for note in getattr(error, "__notes__", []))
            raise UserError(
                f"out of memory ({terminal.short(error)}){told}; activations grow with --max-tokens (now "
                f"{arguments.max_tokens}) and --ttt-steps (now {arguments.ttt_steps}), lower these or --max-rows, or "
                "give --activation-checkpointing; optimizer states are spread over more ranks, or put into host memory "
                "by offload_optimizer in --deepspeed-config's JSON"
            ) from error


def run_stage(arguments: argparse.Namespace, stack: contextlib.ExitStack) -> int:
    """The stage. Ranks and lock are given back when `stack` closes; returns the exit code."""
    started = time.monotonic()
    if not 0 <= arguments.val_fraction < 1:
        raise UserError(f"--val-fraction {arguments.val_fraction}: expected a share from 0 up to 1")
    for name in ("epochs", "max_tokens", "max_rows", "accumulation", "ttt_steps", "save_every"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value}: expected at least 1")

    import torch

    from eagle3 import artifacts
    from eagle3.draft.config import NORM_KEYS, derive, read_draft_config
    from eagle3.draft.model import DraftModel
    from eagle3.export import (
        config_json,
        draft_to_target,
        export_tensors,
        read_export,
        target_to_draft,
        write_export,
    )
    from eagle3.model_card import model_card
    from eagle3.target import TargetHead, open_target, parse_tensor_names, read_embedding
    from eagle3.training import best, checkpoints, engine, loop, packing, warm_start
    from eagle3.training import inputs as training_inputs
    from eagle3.validate import require_servable

    # ------------------------------------------------------------------------------------------------- inputs
    target = open_target(arguments.model_path, weights=True, tensor_names=parse_tensor_names(arguments.tensor))
    inputs = training_inputs.open_inputs(target, arguments.hidden_states_dir, arguments.vocab_map_dir)
    stated = read_draft_config(arguments.draft_config) if arguments.draft_config else {}
    source = warm_start.open_source(arguments.init_from, target) if arguments.init_from else None
    if source:
        stated = warm_start.stated_shape(source, stated)
    norms = [key for key in NORM_KEYS if getattr(arguments, key)]
    ids = draft_to_target(inputs.d2t)  # [D]
    config = derive(target, ids.numel(), inputs.aux_layers, stated, norms)
    if source:
        warm_start.require_fit(source, config)
    deepspeed_config = training_inputs.read_deepspeed_config(arguments.deepspeed_config)
    train, held_out = packing.hold_out(inputs.planned, arguments.val_fraction, arguments.seed)
    held_out = list(filter(packing.is_whole, held_out))
    if arguments.dry_run:
        from eagle3.training.estimate import show_dry_run

        show_dry_run(arguments, target, inputs, stated, deepspeed_config, train)
        return 0

    # ---------------------------------------------------------------------------------------------- the draft
    rank, world = stack.enter_context(engine.distributed())
    device = engine.device()
    automatic = "bfloat16" if device.type == "cuda" else "float32"
    options = loop.TrainOptions(
        epochs=arguments.epochs,
        learning_rate=arguments.learning_rate,
        schedule=arguments.schedule,
        warmup_ratio=arguments.warmup_ratio,
        weight_decay=arguments.weight_decay,
        clip=arguments.clip,
        max_tokens=arguments.max_tokens,
        max_rows=arguments.max_rows or arguments.max_tokens,
        accumulation=arguments.accumulation,
        ttt_steps=arguments.ttt_steps,
        step_decay=arguments.step_decay,
        loss=arguments.loss,
        loss_norm=arguments.loss_norm,
        supervision=arguments.supervision,
        train_lm_head=arguments.lm_head == "trained",
        dtype=automatic if arguments.dtype == "auto" else arguments.dtype,
        seed=arguments.seed,
    )
    head = TargetHead(target, getattr(torch, options.dtype), device, rows=ids)
    described = config_json(config, target)  # refuses before hours of training what no server would take
    model = DraftModel(config)
    model.recompute = arguments.activation_checkpointing
    model.initialise(read_embedding(target), head.weight, options.seed)
    started_from, init_from = warm_start.start(model, source, ids) if source else (None, None)
    model.to(getattr(torch, options.dtype))  # DeepSpeed would cast the weights, and leave the embedding as it is

    stack.enter_context(checkpoints.output_lock(arguments.output_dir))
    fingerprint = {"target": target.config_hash, **inputs.fingerprint, "val_fraction": arguments.val_fraction}
    fingerprint |= {"draft": artifacts.digest(dataclasses.asdict(config)), "init_from": init_from}
    fingerprint["tensors"] = target.tensor_names or None
    fingerprint |= {
        key: value for key, value in dataclasses.asdict(options).items() if key not in ("epochs", "accumulation")
    }
    checkpoints.claim_output(arguments.output_dir, fingerprint)
    if rank == 0:
        weights = sum(parameter.numel() for parameter in model.parameters())
        terminal.say(
            f"draft of {weights / 1e6:.1f} M weights, lm_head {arguments.lm_head}, embeddings frozen; "
            f"{ids.numel()} draft ids, aux layers {inputs.aux_layers}, {options.ttt_steps} TTT steps; "
            f"{sum(map(packing.is_whole, train))} samples to train on, {len(held_out)} held out; "
            f"{world} rank{'s' if world > 1 else ''} on {device.type}, {options.dtype}"
        )
        if started_from:
            terminal.say(started_from)

    # ---------------------------------------------------------------------------------------------- train
    trainer = loop.Trainer(
        model,
        head,
        lambda: TargetHead(target, getattr(torch, options.dtype), device),
        options,
        deepspeed_config,
        inputs.directory,
        arguments.output_dir,
        train,
        held_out,
        target_to_draft(inputs.d2t, target.vocab_size),
        arguments.save_every,
    )
    if trainer.resume() and rank == 0:
        terminal.say(f"continuing after step {trainer.step} of {trainer.total_steps}")
    if stopped := trainer.run():
        if rank == 0:
            terminal.say(f"stopped after step {trainer.step}; checkpoint written, the same command continues")
        return 128 + stopped

    # --------------------------------------------------------------------------------------------- export
    export = arguments.output_dir / "export"
    longest = max(record["tokens"] for record in train if packing.is_whole(record))
    last = {"epoch": trainer.epoch, "step": trainer.step, "report": trainer.last_report}
    kept = trainer.best or last  # without held-out conversations nothing tells which is the best
    if rank == 0:
        artifacts.write_manifest(arguments.output_dir, "04", fingerprint, complete=False)  # while it is exchanged
        if trainer.best:
            best.load(trainer.best_file, trainer.model)
        card = model_card(
            target, config, dataclasses.asdict(options), kept["report"], inputs.sources(), longest, arguments.note
        )
        tensors = export_tensors(trainer.model, {"d2t": inputs.d2t, "t2d": inputs.t2d})
        write_export(export, tensors, described, card)
        require_servable(export, target)
        if arguments.format == "speculators":
            from eagle3.export_speculators import write_speculators

            write_speculators(Path(f"{export}-speculators"), tensors, config, target, options.ttt_steps, card)
    checkpoints.barrier()
    report = trainer.evaluate(read_export(export, config).to(device, head.weight.dtype)) if held_out else None
    if rank == 0:
        artifacts.write_manifest(
            arguments.output_dir,
            "04",
            fingerprint,
            complete=True,
            epochs=options.epochs,
            accumulation=options.accumulation,
            ranks=world,
            steps=trainer.step,
            skipped_steps=trainer.guard.skipped,
            exported=in_short(kept),
            last=in_short(last),
            longest_sample=longest,
            held_out=[record["index"] for record in held_out],
            baselines=trainer.baselines,
            report=report,
        )
        rows = {"export": export, "optimizer steps": f"{trainer.step}, {trainer.guard.skipped} of them skipped"}
        rows["exported draft"] = f"epoch {kept['epoch']}, step {kept['step']}: "
        if not held_out:
            rows["exported draft"] += "the last, for nothing was held out"
        elif kept["step"] == last["step"]:
            rows["exported draft"] += f"the last, with the highest tau, {kept['report']['tau']}"
        else:
            rows["exported draft"] += f"the highest tau, {kept['report']['tau']}; the last had {last['report']['tau']}"
        if arguments.format == "speculators":
            rows["speculators' layout"] = f"{export}-speculators"
        if report:
            rows |= {
                f"tau, {options.ttt_steps} drafts": f"{report['tau']} (walk) from {report['walk_starts']} starts",
                "beside it": f"{trainer.baselines['untrained']['tau']} by the draft before its first step, "
                f"{trainer.baselines['most_frequent_token']['tau']} by one that always says the most frequent token",
                "tau by drafts": f"{report['tau_by_drafts']} for 1 to {options.ttt_steps}",
                "if sampled": f"{report['tau_sampled_estimate_by_drafts']} expected at temperature 1, an estimate",
                "plain mean": f"{report['tau_plain_mean']} (not what a server counts)",
                "lost to vocabulary": f"{report['lost_to_vocabulary']:.1%} of the walk's steps",
                "accuracy by step": report["accuracy_by_step"],
            }
        rows |= trainer.meter.rows()
        if arguments.note:
            rows["note"] = arguments.note
        terminal.summary("stage 04: draft trained and exported; the figures are of the exported files", rows, started)
    return 0


def in_short(evaluated: dict) -> dict:
    """Epoch, step and tau of an evaluation, for the manifest; tau is None where nothing was held out."""
    return {"epoch": evaluated["epoch"], "step": evaluated["step"], "tau": (evaluated["report"] or {}).get("tau")}


if __name__ == "__main__":
    terminal.quiet_libraries()
    terminal.run(main)
