#!/usr/bin/env bash
# Builds the plugin against the newest torch of each minor and smoke-tests it there: tests/compat_all.sh [MINOR ...]
# (default: the supported ones). One after another, each in a virtual environment and a build folder of its own
# (compat.sh), which are deleted when it is over, however it ends: one takes 6 GB. At the end a table; the exit code is
# 1 when one failed, and all of them are run. COMPAT_TESTS=all: what compat.sh tests, instead of the short set.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
[ $# -gt 0 ] || set -- 2.11 2.12 2.13 2.14 2.15
export COMPAT_TESTS="${COMPAT_TESTS:-smoke}"
current=""

clean() {  # What compat.sh has made for the version that is under way.
  [ -z "$current" ] || rm -rf ".venv-torch-$current" "build-torch-$current"
  current=""
}
trap clean EXIT
trap 'exit 130' INT TERM

newest() {  # The last version of that minor that PyPI has for this Python.
  python3 -m pip index versions torch --disable-pip-version-check 2>/dev/null |
    sed -n 's/^Available versions: //p' | tr -d ' ' | tr , '\n' | grep -E "^${1//./\\.}\.[0-9]+$" | sort -V | tail -n 1
}

table="" failed=0
for minor in "$@"; do
  start=$SECONDS version="$(newest "$minor")"
  if [ -z "$version" ]; then
    outcome="not on PyPI"
  elif [ -e ".venv-torch-$version" ] || [ -e "build-torch-$version" ]; then
    outcome="not run: .venv-torch-$version or build-torch-$version is there, which is not ours to delete"
  else
    echo "== torch $version"
    current="$version" outcome=passed
    tests/compat.sh "$version" || outcome=failed
    clean
  fi
  [ "$outcome" = passed ] || failed=1
  table+="$(printf '%-6s %-8s %5d s  %s' "$minor" "${version:--}" $((SECONDS - start)) "$outcome")"$'\n'
done
printf 'minor  torch      time    outcome\n%s' "$table"
exit "$failed"
