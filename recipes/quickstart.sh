#!/usr/bin/env bash
# From a fresh checkout to a planned, elastic, token-identical rollout and what it saved, in two steps:
#   1. an own virtual environment with pinned requirements (some minutes, once)
#   2. the main job: recipes/quickstart.py (at most 4 minutes and 6 GiB on two cores)
# Needs Linux and Python 3.11. Arguments go to quickstart.py (--help says which).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash tools/environment.sh
venv="${FLEXFLOOR_VENV:-$PWD/.venv}"
exec "$venv/bin/python" recipes/quickstart.py "$@"
