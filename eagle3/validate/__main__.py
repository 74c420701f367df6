"""Check that a draft directory is what vLLM and SGLang read.

    python -m eagle3.validate DIR --model-path M [--server vllm|sglang]

DIR is an export of stage 04 or any published Llama-type EAGLE-3 draft, M the target it drafts for. Prints a finding a
line and the counts; exits with 1 where one is an error.
"""

import argparse
from pathlib import Path

from eagle3 import terminal


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIR", help="draft: config.json and .safetensors files")
    parser.add_argument("--model-path", required=True, help="target: model directory or hub name")
    parser.add_argument("--server", choices=("vllm", "sglang"), help="check for this one (default: both)")
    arguments = parser.parse_args()

    from eagle3.target import open_target
    from eagle3.validate import SERVERS, findings

    servers = (arguments.server,) if arguments.server else SERVERS
    found = findings(arguments.directory, open_target(arguments.model_path), servers)
    for finding in found:
        print(finding)
    errors = sum(finding.severity == "error" for finding in found)
    print(f"{arguments.directory}: {errors} errors, {len(found) - errors} warnings for {' and '.join(servers)}")
    return 1 if errors else 0


if __name__ == "__main__":
    terminal.quiet_libraries()
    terminal.run(main)
