#!/usr/bin/env bash
# Builds the plugin and the tests for a GPU from an unpacked bundle (bundle.sh), without a network, against the torch that
# $PYTHON (default: python3) has: tests/gpu/build.sh BUNDLE [JOBS]
# Nothing is installed into the machine: all of it goes into BUNDLE, and its libraries are found there when they run.
set -euo pipefail
bundle="$(cd "$1" && pwd)" jobs="${2:-$(nproc)}"
python="$(command -v "${PYTHON:-python3}")"
root="$bundle/root/usr" libraries="$bundle/root/usr/lib/x86_64-linux-gnu"
started=$SECONDS

missing() { echo "tests/gpu/build.sh: $1" >&2; exit 2; }
command -v g++ >/dev/null || missing "no g++ here"
"$python" -c "import torch" || missing "no torch in $python"
[ -e "$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] ||
  missing "no Python.h for $python (Debian: python3-dev)"

# Of the wheels only what is not here already: torch's own environment comes first.
tools="$bundle/tools"
wanted=()
for wheel in "$bundle"/wheels/*.whl; do
  name="$(basename "$wheel")"
  "$python" -c "import importlib.metadata as m, sys; m.version(sys.argv[1])" "${name%%-*}" 2>/dev/null || wanted+=("$wheel")
done
[ ${#wanted[@]} -eq 0 ] || "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile \
  --upgrade --target "$tools" "${wanted[@]}"
PATH="$tools/bin:$(dirname "$python"):$PATH"
export PATH PYTHONPATH="$tools${PYTHONPATH:+:$PYTHONPATH}"

# Programs of the packages: their libraries are beside them, and nobody else is to get these.
for name in protoc pkgconf; do
  printf '#!/bin/sh\nLD_LIBRARY_PATH="%s" exec "%s/bin/%s" "$@"\n' "$libraries" "$root" "$name" >"$bundle/$name"
  chmod +x "$bundle/$name"
done

export CXXFLAGS="-isystem $root/include -isystem $root/include/x86_64-linux-gnu"
# The old form of a path for libraries, which holds for the libraries of libraries as well.
export LDFLAGS="-L$libraries -Wl,--disable-new-dtags -Wl,-rpath,$libraries"
export PKG_CONFIG_LIBDIR="$libraries/pkgconfig:$root/share/pkgconfig" CMAKE_BUILD_PARALLEL_LEVEL="$jobs"
settings=(
  "cmake.define.CMAKE_PREFIX_PATH=$root"
  "cmake.define.CMAKE_INSTALL_RPATH_USE_LINK_PATH=ON"
  "cmake.define.PKG_CONFIG_EXECUTABLE=$bundle/pkgconf"
  "cmake.define.Protobuf_PROTOC_EXECUTABLE=$bundle/protoc"
  "cmake.define.OPENSSL_ROOT_DIR=$root"
  "cmake.define.RESILIENT_BUILD_TESTS=ON"
  "build-dir=$bundle/build"
  "build.targets=_C;resilient-store;nccl_gpu_test;nccl_test"
)
"$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-build-isolation --no-compile --upgrade --target "$bundle/site" \
  "${settings[@]/#/--config-settings=}" "$bundle/source"

{
  echo "export PYTHON='$python'"
  echo "export PYTHONPATH='$bundle/site:$tools'\${PYTHONPATH:+:\$PYTHONPATH}"
} >"$bundle/environment"
echo "tests/gpu/build.sh: built in $((SECONDS - started)) s; $bundle/run.sh runs the tests"
