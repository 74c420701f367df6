#!/usr/bin/env python3
"""Stage 03: choose the draft vocabulary: the target ids that the draft can predict.

End, special and added tokens (roles, tools, thinking) are always in it; then the ids that are most frequent in the
answers of stage 01. Needs no GPU and takes seconds: run it again for another size. The table shows how many of the
assistant tokens smaller and larger draft vocabularies would hold.

Input:   PREPARED_DIR/token_freq.pt, token_freq_by_source.pt and manifest.json of stage 01
Output:  OUTPUT_DIR/vocab_map.pt (d2t: target id = i + d2t[i]; t2d: whether a target id is in it), coverage.png,
         manifest.json

Example:
    python 03_build_vocab_map.py --prepared-dir OUT/prepared --output-dir OUT/vocab_map --draft-vocab-size 32000
"""

import argparse
import time
from pathlib import Path

from eagle3 import terminal


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--prepared-dir", type=Path, required=True, help="output of stage 01")
    parser.add_argument("--output-dir", type=Path, required=True, help="where the map goes")
    parser.add_argument(
        "--draft-vocab-size", type=int, default=32000, help="ids in the draft vocabulary (default: %(default)s)"
    )
    parser.add_argument(
        "--force-tokens",
        type=int,
        nargs="+",
        default=[],
        metavar="ID",
        help="more ids that must be in it; of a file with one a line: --force-tokens $(cat FILE)",
    )
    arguments = parser.parse_args()
    if arguments.draft_vocab_size < 1:
        parser.error(f"--draft-vocab-size {arguments.draft_vocab_size}: expected at least 1")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    started = time.monotonic()
    from eagle3.vocab_map import write_vocab_map

    result = write_vocab_map(
        arguments.prepared_dir, arguments.output_dir, arguments.draft_vocab_size, arguments.force_tokens
    )
    if result.by_size.sizes:
        terminal.say("coverage: share of the assistant tokens inside a draft vocabulary")
        terminal.say("\n".join(f"  {line}" for line in result.by_size.lines()))
    if result.full:
        rows = {"draft vocabulary": f"full vocabulary of {result.size:,} ids, no map needed"}
    else:
        rows = {
            "draft vocabulary": f"{result.size:,} of {len(result.t2d):,} ids in {arguments.output_dir}",
            "coverage": f"{result.coverage:.2%} of the assistant tokens",
            "forced": f"{result.forced:,} end, special and added tokens"
            + (f" and --force-tokens ({len(set(arguments.force_tokens)):,})" if arguments.force_tokens else ""),
            "filled": f"{result.filled:,} ids that never occur in the answers",
        }
    terminal.summary("stage 03: draft vocabulary chosen", rows, started)


if __name__ == "__main__":
    terminal.quiet_libraries()
    terminal.run(main)
