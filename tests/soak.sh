#!/usr/bin/env bash
# Counts of hundreds, run once per part: tests/soak.sh PYTHON
#   20 demos, each rank killed in turn at a random time; 50 timed kills; the pytest cases marked "soak".
set -euo pipefail
cd "$(dirname "$0")/.."
python="$1"
runs="${RESILIENT_SOAK_RUNS:-20}"

for run in $(seq 1 "$runs"); do
  echo "== demo $run of $runs (seed $run, kills rank $((run % 4)))"
  "$python" docs/examples/demo.py --kill-rank "$((run % 4))" --seed "$run"
done
"$python" benchmarks/detect_bench.py --tries 50 --out benchmarks/results/detect.json
"$python" -m pytest -q tests -m soak
