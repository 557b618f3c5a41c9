#!/usr/bin/env bash
# Checks session.pml: no state that can be reached breaks a claim, and every planted error is found.
# Needs spin and a C compiler. About 20 s; $MODEL_SECONDS bounds each search (default 60).
set -euo pipefail
model="$(cd "$(dirname "$0")" && pwd)/session.pml"
seconds="${MODEL_SECONDS:-60}"
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
failed=0

# search NAME WANTED MACRO...: WANTED is "holds" or the text of the violation that must be found.
search() {
  local name="$1" wanted="$2" found status=0
  shift 2
  mkdir "$folder/$name"
  cd "$folder/$name"
  spin "$@" -a "$model" >spin.log || { cat spin.log >&2; exit 2; }
  ${CC:-cc} -w -O2 -DSAFETY -DCOLLAPSE -DMEMLIM=1000 -o pan pan.c
  timeout "$seconds" ./pan -m100000 >pan.log 2>&1 || status=$?
  found="$(sed -n 's/^pan:[0-9]*: \(.*\) (at depth.*/\1/p' pan.log)"
  if [ "$status" -ne 0 ] || grep -q "Search not completed" pan.log && [ -z "$found" ]; then
    found="the search did not end: $(tail -n 1 pan.log)"
  fi
  found="${found:-holds}"
  local states
  states="$(sed -n 's/^ *\([0-9.e+]*\) states, stored.*/\1/p' pan.log)"
  if [[ "$found" == *"$wanted"* ]]; then
    echo "model: $name: $found (${states:-?} states)"
    return
  fi
  echo "model: $name: expected \"$wanted\", found \"$found\"" >&2
  if [ -f session.pml.trail ]; then
    cp "$model" .
    spin "$@" -t -p -r session.pml | grep -E "Send|Recv|assert" | tail -n 60 >&2 || true
  fi
  failed=1
}

one=(-DWRITERS=1 -DFORGETS=0)
forget=(-DWRITERS=1 -DCRASHES=1 -DREQUESTS=2)
two=(-DCUTS=1 -DCRASHES=1 -DREQUESTS=1 -DFORGETS=0)
pipelined=(-DCUTS=0 -DCRASHES=1 -DREQUESTS=2 -DFORGETS=0)
search one_writer holds "${one[@]}"
search forgotten_session holds "${forget[@]}"
search two_writers holds "${two[@]}"
search two_writers_pipelined holds "${pipelined[@]}"
search split_transaction '!(applied[' "${one[@]}" -DSPLIT_TRANSACTION
search answer_early 'durable_applied[' "${one[@]}" -DANSWER_EARLY
search no_stale_check '!(applied[' "${one[@]}" -DNO_STALE_CHECK
search known_flag '!(applied[' "${forget[@]}" -DKNOWN_FLAG
search eager_trim 'answered[' "${one[@]}" -DEAGER_TRIM
search retry_unknown '!(applied[' "${forget[@]}" -DRETRY_UNKNOWN
search tell_early 'durable_generation' "${two[@]}" -DTELL_EARLY
exit "$failed"
