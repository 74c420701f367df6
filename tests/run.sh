#!/usr/bin/env bash
# Lints and runs the tests. Arguments go to pytest; paths among them are relative to the checkout.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source configs/environment.sh
setup_environment test

lint=0
"$PYTHON" -m ruff check . || lint=1
"$PYTHON" -m ruff format --check . || lint=1
tests=0
"$PYTHON" -m pytest "$@" || tests=$?

[ "$lint" = 0 ] || echo "tests/run.sh: ruff complains above; $PYTHON -m ruff check --fix . && $PYTHON -m ruff format . mends most"
echo "tests/run.sh: $SECONDS s in all"
[ "$tests" != 0 ] || exit "$lint"
exit "$tests"
