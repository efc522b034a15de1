#!/usr/bin/env bash
# Sets itself up and runs the tests that a laptop can run: tests/unit, tests/engine (real vLLM on CPU), tests/verl
# (stock verl, real vLLM) and tests/npu (packages of Ascend, read and not run).
# Arguments go to pytest and replace these folders:  bash tools/test.sh tests/unit -k planner
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash tools/environment.sh
venv="${FLEXFLOOR_VENV:-$PWD/.venv}"
[ $# -gt 0 ] || set -- tests/unit tests/engine tests/verl tests/npu
printf '[test] pytest %s\n' "$*" >&2
exec "$venv/bin/python" -m pytest "$@"
