#!/usr/bin/env bash
# Counts of hundreds, run once per part: tests/soak.sh PYTHON [RESULT.json]
#   20 demos, each rank killed in turn at a random time; 50 timed kills; the pytest cases marked "soak"; the C++
#   tests with threads delayed at random (tests/support/schedule_perturbation.cc), of those of many hundred cases a
#   quarter with each seed. Goes on after a failure; ends with 1.
# A part of it: SOAK_RUNS demos, SOAK_SEEDS seeds, SOAK_KILLS of a training (200), SOAK_REBUILDS (1000).
set -uo pipefail
cd "$(dirname "$0")/.."
python="$1" result="${2:-benchmarks/results/soak.json}"
runs="${SOAK_RUNS:-20}" seeds="${SOAK_SEEDS:-20}"
demos=0 timed=false cases=false perturbed=0 started=$SECONDS
many='(comm_(conformance|faults|hierarchical|programs)|nccl|nccl_sockets|staged)_test' quarters=4
perturbed_ctest() {
  LD_PRELOAD=$PWD/build/tests/libschedule_perturbation.so \
    ctest --test-dir build -L 'unit|ranks' -j 2 --output-on-failure "$@"
}

for run in $(seq 1 "$runs"); do
  echo "== demo $run of $runs (seed $run, kills rank $((run % 4)))"
  "$python" docs/examples/demo.py --kill-rank "$((run % 4))" --seed "$run" && demos=$((demos + 1))
done
echo "== timed kills"
"$python" benchmarks/detect_bench.py --tries 50 --out benchmarks/results/detect.json && timed=true
echo "== cases marked soak"
"$python" -m pytest -q tests -m soak && cases=true
for seed in $(seq 1 "$seeds"); do
  echo "== C++ tests, threads delayed, seed $seed of $seeds"
  export PERTURB_SEED=$seed
  passed=true
  perturbed_ctest -E "$many" || passed=false
  GTEST_TOTAL_SHARDS=$quarters GTEST_SHARD_INDEX=$((seed % quarters)) perturbed_ctest -R "$many" || passed=false
  $passed && perturbed=$((perturbed + 1))
done

printf '{"demos_equal": [%d, %d], "timed_kills": %s, "soak_cases": %s, "perturbed_seeds": [%d, %d], "seconds": %d}\n' \
  "$demos" "$runs" "$timed" "$cases" "$perturbed" "$seeds" "$((SECONDS - started))" | tee "$result"
[ "$demos" -eq "$runs" ] && [ "$perturbed" -eq "$seeds" ] && $timed && $cases
