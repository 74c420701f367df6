"""The report of a run as one HTML file that needs nothing else, after any stage.

    python -m eagle3.report OUT                                    # writes OUT/report.html
    python -m eagle3.report OUT --with-samples --model-path M      # and the text of three samples

OUT is the directory that holds prepared, hidden_states, vocab_map and draft, as run_pipeline.sh makes it. Without
--with-samples the file holds no text of the data.
"""

import argparse
from pathlib import Path
from typing import Any

from eagle3 import artifacts, terminal
from eagle3.terminal import UserError

SAMPLES = 3


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m eagle3.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output_dir", type=Path, metavar="OUT", help="the run's directory")
    parser.add_argument("--with-samples", action="store_true", help=f"also the text of the first {SAMPLES} samples")
    parser.add_argument("--model-path", help="target, for --with-samples: its tokenizer decodes the samples")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the tokenizer's Python code, likewise")
    arguments = parser.parse_args()
    if arguments.with_samples and arguments.model_path is None:
        raise UserError("--with-samples needs the tokenizer: give --model-path, the target of stage 01")

    from eagle3.report.page import page
    from eagle3.report.read import read_run

    run = read_run(arguments.output_dir)
    texts = None
    if arguments.with_samples:
        prepared = run.parts["01"]
        if not run.samples:
            raise UserError(f"--with-samples: {prepared.absent or f'{prepared.directory} names no sample'}")
        texts = read_texts(prepared, run.samples[:SAMPLES], arguments.model_path, arguments.trust_remote_code)
    path = arguments.output_dir / "report.html"
    with artifacts.atomic_file(path) as file:
        file.write(page(run, texts).encode(errors="replace"))
    terminal.say(f"{path}: {path.stat().st_size / 1e3:,.0f} kB")


def read_texts(
    prepared: Any, records: list[dict[str, Any]], model_path: str, trust_remote_code: bool
) -> list[tuple[dict[str, Any], list[tuple[bool, str]]]]:
    """The samples of `records` in parts (supervised, text). Raises UserError for another target than stage 01's."""
    from eagle3.model_files import tokenizer_hash
    from eagle3.prepare.show import spans
    from eagle3.target import load_tokenizer, open_target

    target = open_target(model_path)
    artifacts.require_same(
        prepared.directory / "manifest.json",
        prepared.manifest["fingerprint"],
        {"target": target.config_hash, "tokenizer": tokenizer_hash(target.directory)},
        "give the --model-path that stage 01 had, unchanged",
    )
    tokenizer = load_tokenizer(target, trust_remote_code=trust_remote_code)
    return [(record, spans(prepared.directory, record, tokenizer, target.vocab_size)) for record in records]


if __name__ == "__main__":
    terminal.quiet_libraries()
    terminal.run(main)
