#!/usr/bin/env bash
# Stock verl with a `flexfloor:` section, on this machine's CPU: four ranks, three epochs, elastic rollout, and proof.
#   1. an own virtual environment with pinned requirements (some minutes, once)
#   2. recipes/train_cpu.py: the arms named on its command line (--help), each a real verl run, then the report
# Needs Linux, Python 3.11, two cores and 12 GiB of free memory; all arms take about 40 minutes on two cores.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash tools/environment.sh
venv="${FLEXFLOOR_VENV:-$PWD/.venv}"
exec "$venv/bin/python" recipes/train_cpu.py "$@"
