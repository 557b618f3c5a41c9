#!/usr/bin/env bash
# Builds everything in DIR and installs the package, editable, into VENV: tests/build.sh VENV DIR
# Nothing is done twice: with nothing changed this is one no-op ninja run.
set -euo pipefail
cd "$(dirname "$0")/.."
venv="$1" dir="$2"
stamp="$dir/.package"
# The one that pip's build takes: another version does not know its log, and builds everything anew.
PATH="$PWD/$venv/bin:$PATH"

if [ -f "$dir/build.ninja" ]; then
  ninja -C "$dir" --quiet
fi
if [ ! -f "$stamp" ] || [ pyproject.toml -nt "$stamp" ] ||
  [ -n "$(find "$dir/torch_plugin" "$dir/bin/resilient-store" -newer "$stamp" \
    \( -name '*.so' -o -name resilient-store \) -print -quit 2>/dev/null)" ]; then
  echo "build: building the package in $dir (the first time takes some minutes)"
  "$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable . \
    --config-settings=build-dir="$dir" --config-settings=cmake.define.RESILIENT_BUILD_TESTS=ON
  touch "$stamp"
fi
