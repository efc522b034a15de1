#!/usr/bin/env bash
# Sets itself up and runs the tests that a laptop can run: tests/unit and tests/engine (real vLLM on CPU).
# Arguments go to pytest and replace these two folders:  bash tools/test.sh tests/unit -k planner
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash tools/environment.sh
venv="${FLEXFLOOR_VENV:-$PWD/.venv}"
[ $# -gt 0 ] || set -- tests/unit tests/engine
printf '[test] pytest %s\n' "$*" >&2
exec "$venv/bin/python" -m pytest "$@"
