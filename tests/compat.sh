#!/usr/bin/env bash
# Builds the plugin against the oldest supported torch and tests what is different there: tests/compat.sh TORCH_VERSION
# The wheel goes into a virtual environment of its own; the package of the everyday build is not touched.
# COMPAT_TESTS=smoke: only that it works at all: import, collectives, DDP, a killed rank, a C++ program. COMPAT_TESTS=none: only
# builds.
set -euo pipefail
cd "$(dirname "$0")/.."
torch="$1"
venv=".venv-torch-$torch"
dir="build-torch-$torch"

./setup.sh venv "$venv" "$torch"
"$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --no-build-isolation . \
  --config-settings=build-dir="$dir" --config-settings=cmake.define.RESILIENT_BUILD_TESTS=OFF
[ "${COMPAT_TESTS:-all}" != none ] || exit 0
# From another folder, so that the installed package is imported and not the source tree.
source="$PWD"
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"
tests=(ops autoload training resize shrink grow)
[ "${COMPAT_TESTS:-all}" = all ] || tests=(autoload training heal cpp_program)
files=("${tests[@]/#/$source/tests/torch/test_}")
CPP_BUILD="$source/$dir" "$source/$venv/bin/python" -m pytest -q -c "$source/pyproject.toml" --rootdir "$source" \
  -m "not slow and not soak" "${files[@]/%/.py}"
[ "${COMPAT_TESTS:-all}" = all ] || exit 0
cmake -B "$source/$dir" -D RESILIENT_BUILD_TESTS=ON "$source" >/dev/null
cmake --build "$source/$dir" --target process_group_test
ctest --test-dir "$source/$dir" --output-on-failure --no-tests=error -R '^process_group_test$'
