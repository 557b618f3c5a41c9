#!/usr/bin/env bash
# What only a GPU can show, in at most nine minutes: tests/gpu/run.sh [--build DIR] [--python PYTHON] [--out FILE]
#   [--logs DIR] [--seconds N] [--fake] [PART ...]
# Without a CUDA device nothing runs: it says why and ends with 0. Each part has a time limit of its own; what fails or
# hangs does not keep the next one from running. The exit code is 1 when one failed. FILE (default:
# benchmarks/results/gpu.json) says what was run, on what, and what was measured; DIR has the output of each part.
# --fake: on the fake GPU of tests/support, which shows that these tests are right, and nothing of a GPU.
set -uo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
root="$(cd "$here/../.." && pwd)"
python="$root/.venv/bin/python" build="$root/build" out="" logs="" seconds=530 fake=""
[ -x "$python" ] || python=python3
# Name and time limit; together more than there is: none of them should need so much.
limits=(conformance=90 libraries=30 collectives=120 sharing=90 faults=90 hangs=110 graphs=60 rebuilds=120 training=110 overhead=45 upstream=120)
parts=()

usage() { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }
while [ $# -gt 0 ]; do
  case "$1" in
    --build | --python | --out | --logs | --seconds)
      [ $# -gt 1 ] || usage
      printf -v "${1#--}" %s "$2"
      shift ;;
    --fake) fake=1 ;;
    -*) usage ;;
    *) parts+=("$1") ;;
  esac
  shift
done
mode=real
if [ -n "$fake" ]; then
  mode=fake
  unset 'limits[1]'  # It is about the real libraries.
fi
logs="${logs:-$build/gpu-logs}" results="$root/benchmarks/results"
[ -z "$fake" ] || results="$logs"
out="${out:-$results/gpu.json}"
export GPU_TESTS=$mode PYTORCH_NVML_BASED_CUDA_CHECK=1
mkdir -p "$logs" || exit 2
rm -f "$logs"/parts "$logs"/figures.jsonl "$logs"/*.log "$logs"/*.xml
facts="$(timeout -k 5 120 "$python" "$here/report.py" facts 2>"$logs/facts.log")" || case $? in
  3)
    echo "tests/gpu: skipped: $facts"
    exit 0 ;;
  *)
    echo "tests/gpu: $facts $(tail -n 1 "$logs/facts.log")" >&2
    exit 2 ;;
esac
echo "tests/gpu: on $facts"

# The C++ tests find the libraries that Python's torch has; the fake's are in the build.
mapfile -t libraries < <("$python" "$here/report.py" libraries)

command_of() {  # Into `command`.
  local report="$logs/$1.xml"
  local gtest=(env "${libraries[@]}") pytest=("$python" -m pytest -c "$root/pyproject.toml" --rootdir "$root" -q)
  case "$1" in
    conformance) command=("${gtest[@]}" "$build/bin/nccl_gpu_test" "--gtest_output=xml:$report") ;;
    libraries)
      command=("${gtest[@]}" "$build/bin/nccl_test" "--gtest_filter=NcclLibrary*:NcclHeaders*"
        "--gtest_output=xml:$report") ;;
    *) command=("${pytest[@]}" --junit-xml "$report" "$root/tests/gpu/test_gpu_$1.py") ;;
  esac
}

export GPU_FIGURES="$logs/figures.jsonl"
began=$SECONDS
for entry in "${limits[@]}"; do
  part="${entry%=*}" limit="${entry#*=}"
  [ ${#parts[@]} -eq 0 ] || [[ " ${parts[*]} " == *" $part "* ]] || continue
  [ -z "$fake" ] || limit=$((2 * limit))  # Kernels are those of the CPU.
  left=$((seconds - (SECONDS - began)))
  [ "$limit" -le "$left" ] || limit=$left
  if [ "$limit" -lt 5 ]; then
    echo "$part 0 0 no-time" >>"$logs/parts"
    continue
  fi
  command_of "$part"
  start=$SECONDS code=0
  timeout -k 5 "$limit" "${command[@]}" >"$logs/$part.log" 2>&1 || code=$?
  echo "$part $((SECONDS - start)) $limit $code" >>"$logs/parts"
  [ "$code" -eq 0 ] || tail -n 15 "$logs/$part.log"
  echo "tests/gpu: $part: exit code $code, $((SECONDS - start)) of $limit s"
done
"$python" "$here/report.py" write --facts "$facts" --logs "$logs" --out "$out"
