#!/usr/bin/env bash
# Counts of hundreds, run once per part of the project: tests/soak.sh PYTHON [PART...]; all of them by default.
#   demos    20, each rank killed in turn at a random time
#   kills    50 timed ones
#   cases    those of pytest marked "soak"
#   threads  the C++ tests with threads delayed at random (tests/support/schedule_perturbation.cc), 20 seeds, a
#            quarter of the cases of each program with each of them
# Goes on after a failure; ends with 1. Each part leaves its line in benchmarks/results/soak.json when it ends.
# Less of it: SOAK_RUNS demos, SOAK_SEEDS seeds, SOAK_KILLS of a training (200), SOAK_REBUILDS (1000).
set -uo pipefail
cd "$(dirname "$0")/.."
python="$1"
shift
runs="${SOAK_RUNS:-20}" seeds="${SOAK_SEEDS:-20}"
jobs=$((2 * $(nproc)))  # Under delays the programs mostly wait.

demos() {
  of="$runs"
  for run in $(seq 1 "$runs"); do
    echo "== demo $run of $runs (seed $run, kills rank $((run % 4)))"
    "$python" docs/examples/demo.py --kill-rank "$((run % 4))" --seed "$run" && passed=$((passed + 1))
  done
}

kills() {
  echo "== timed kills"
  "$python" benchmarks/detect_bench.py --tries 50 --out build/soak_kills.json && passed=1
}

cases() {
  echo "== cases marked soak"
  "$python" -m pytest -q tests -m soak && passed=1
}

threads() {
  of="$seeds"
  local whole='store_(network|network_proxy|pauses)_test|smoke_test' except  # Long ones of one case each.
  for seed in $(seq 1 "$seeds"); do
    except=(-E "$whole")
    [ $((seed % 4)) -ne 0 ] || except=()
    echo "== C++ tests, threads delayed, seed $seed of $seeds"
    PERTURB_SEED=$seed LD_PRELOAD=$PWD/build/tests/libschedule_perturbation.so \
      GTEST_TOTAL_SHARDS=4 GTEST_SHARD_INDEX=$((seed % 4)) \
      ctest --test-dir build -L 'unit|ranks' -j "$jobs" --output-on-failure "${except[@]}" && passed=$((passed + 1))
  done
}

# PART PASSED OF SECONDS
record() {
  PYTHONPATH=benchmarks "$python" - "$@" <<'END'
import datetime, json, pathlib, sys

import record

part, *numbers = sys.argv[1:]
passed, of, seconds = map(int, numbers)
path = pathlib.Path("benchmarks/results/soak.json")
parts = json.loads(path.read_text()) if path.exists() else {}
today = datetime.date.today().isoformat()
parts[part] = {"passed": passed, "of": of, "seconds": seconds, "date": today}
record.write(path, parts)
print(part, parts[part])
END
}

all=(demos kills cases threads)
[ $# -gt 0 ] || set -- "${all[@]}"
for part in "$@"; do
  [[ " ${all[*]} " == *" $part "* ]] || { echo "soak.sh: no part '$part'" >&2; exit 2; }
done
failed=0
for part in "$@"; do
  started=$SECONDS passed=0 of=1
  "$part"
  record "$part" "$passed" "$of" "$((SECONDS - started))"
  [ "$passed" -eq "$of" ] || failed=1
done
exit "$failed"
