#!/usr/bin/env bash
# Sets itself up and runs the tests that a laptop can run: tests/unit (one worker a core), then one after another
# tests/engine (real vLLM on CPU), tests/verl (stock verl, real vLLM) and tests/npu (packages of Ascend, read and not
# run). Arguments go to pytest instead:  bash tools/test.sh tests/unit -k planner
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash tools/environment.sh
venv="${FLEXFLOOR_VENV:-$PWD/.venv}"
run() {
    printf '[test] pytest %s\n' "$*" >&2
    "$venv/bin/python" -m pytest "$@"
}

if [ $# -gt 0 ]; then
    run "$@"
    exit
fi
failed=0
run tests/unit -n auto --durations=5 || failed=1
run tests/engine tests/verl tests/npu --durations=25 || failed=1
exit "$failed"
