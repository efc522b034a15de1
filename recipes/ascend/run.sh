#!/usr/bin/env bash
# Doctor, calibration, an epoch without history, then planned epochs; all methods take the same steps. Never run on an NPU.
#   bash recipes/ascend/run.sh flex_n2 MODEL_DIR PROMPTS.jsonl OUT_DIR
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[ $# -eq 4 ] || { printf 'usage: run.sh METHOD MODEL_DIR PROMPTS OUT_DIR\n' >&2; exit 2; }
method="$1" model="$2" prompts="$3" out="$4"
config="recipes/ascend/$method.yaml"
source recipes/ascend/env.sh

flexfloor doctor --platform ascend --config "$config"
[ -d "$out/calibration" ] || flexfloor calibrate --model "$model" --config "$config" --out "$out/calibration"
flexfloor rollout --bootstrap --model "$model" --prompts "$prompts" --config "$config" --out "$out/epoch0"
flexfloor plan --lengths "$out/epoch0/lengths.jsonl" --config "$config" --out "$out/plan1.json"
flexfloor rollout --plan "$out/plan1.json" --model "$model" --prompts "$prompts" --config "$config" --out "$out/epoch1"
flexfloor report "$out/epoch1" --baseline "$out/epoch0"
