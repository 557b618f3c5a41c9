#!/usr/bin/env bash
# What can be said about the sources without running them: tests/lint.sh [BUILD_DIR [all]]
# BUILD_DIR (default: build) says which Python and torch; the tree that is looked at is configured beside it. $RUFF and $CLANG_TIDY name the programs
# of the environment that setup.sh makes, or PATH has them. From 22 on clang-tidy leaves system headers alone: with
# torch's headers that is a third of the time.
# clang-tidy looks at what has changed since it last passed on everything (tests/affected.py); `all`: at everything.
# $LINT_JOBS: clang-tidy processes at a time (default 2). All parts run; the exit code is 1 if any found something.
set -uo pipefail
cd "$(dirname "$0")/.."
build="${1:-build}"
all="${2:-}"
jobs="${LINT_JOBS:-2}"
failed=()

# The versioned name where the distribution has one: other versions format differently.
clang_format="$(command -v clang-format-14 || command -v clang-format)" ||
  { echo "lint: clang-format is missing (make packages-lint)" >&2; exit 2; }
clang_tidy="$(command -v "${CLANG_TIDY:-clang-tidy}")" || { echo "lint: clang-tidy is missing: set CLANG_TIDY" >&2; exit 2; }

part() {
  local name="$1" start=$SECONDS
  shift
  if ! "$@"; then failed+=("$name"); fi
  echo "lint: $name, $((SECONDS - start)) s"
}

# A tree that is configured and not built: each source by itself and without precompiled headers, so that it has to include
# what it uses.
database() {
  local cache="$build/CMakeCache.txt" of_tree="$build/lint"
  cmake -S . -B "$of_tree" -G Ninja -D CMAKE_UNITY_BUILD=OFF -D CMAKE_DISABLE_PRECOMPILE_HEADERS=ON -D RESILIENT_BUILD_TESTS=OFF \
    -D "RESILIENT_BUILD_TORCH=$(sed -n 's/^RESILIENT_BUILD_TORCH:[^=]*=//p' "$cache")" \
    -D "Python_EXECUTABLE=$(sed -n 's/^Python_EXECUTABLE:[^=]*=//p' "$cache")" >/dev/null &&
    ninja -C "$of_tree" --quiet store/core/store.pb.h
}

sources() { git ls-files -co --exclude-standard -- "$@"; }

format() { sources '*.h' '*.cc' | xargs -r "$clang_format" --dry-run -Werror; }

# Our own compiled sources only: tests are held by the compilers' warnings, generated code by nobody.
tidy() {
  local root files known
  root="$(pwd -P)"
  database || { echo "lint: $build/lint could not be configured" >&2; return 1; }
  files="$(python3 - "$build/lint/compile_commands.json" "$root" <<'PY'
import json, os, sys
root = sys.argv[2] + "/"
folders = ("runtime/", "store/", "torch_plugin/csrc/")
files = {os.path.realpath(os.path.join(e["directory"], e["file"])) for e in json.load(open(sys.argv[1]))}
names = sorted(f[len(root):] for f in files if f.startswith(root))
# The slow ones first, so that no processor is left waiting at the end.
print("\n".join(sorted((n for n in names if n.startswith(folders)), key=lambda n: not n.startswith("torch_plugin/"))))
PY
)" || return 1
  [ -n "$files" ] || { echo "lint: $build/lint/compile_commands.json names no source of this tree" >&2; return 1; }
  known="$(wc -l <<<"$files")"
  [ "$all" = all ] || files="$(xargs python3 tests/affected.py passed <<<"$files")" || return 1
  [ -n "$files" ] || { echo "lint: none of $known sources has changed since clang-tidy passed on all of them"; return 0; }
  echo "lint: clang-tidy looks at $(wc -l <<<"$files") of $known sources"
  # gcc's own options are not known to clang.
  tr '\n' '\0' <<<"${files}" | xargs -0 -r -n 1 -P "$jobs" "$clang_tidy" -p "$build/lint" --quiet \
    --extra-arg=-Wno-unknown-warning-option --extra-arg=-Wno-ignored-optimization-argument \
    2> >(grep -vE '^[0-9]+ warnings? (generated|treated)|^Suppressed|^Use -header-filter|^$' >&2)
}

ruff_all() {
  local ruff="${RUFF:-ruff}"
  command -v "$ruff" >/dev/null || { echo "lint: ruff is missing: set RUFF" >&2; return 1; }
  "$ruff" check . && "$ruff" format --check .
}

part clang-format format
part tidy.py python3 tests/tidy.py
part ruff ruff_all
if [ -f "$build/CMakeCache.txt" ]; then
  part clang-tidy tidy
else
  echo "lint: $build/CMakeCache.txt is missing: configure first (cmake --preset dev, or make build)" >&2
  failed+=(clang-tidy)
fi
if [ ${#failed[@]} -gt 0 ]; then
  echo "lint: failed: ${failed[*]}" >&2
  exit 1
fi
