#!/usr/bin/env bash
# Installs what a target of the Makefile needs: Debian packages, then a Python environment.
#   setup.sh packages [build|lint|fuzz|model|bench ...]   Debian packages of these sets; root or sudo, otherwise exit 2
#   setup.sh venv DIR TORCH_VERSION [all]                 Python environment with that torch from PyPI; all: with the linters
#                                                         and the frameworks of tests/frameworks
#   setup.sh bench_venv DIR                               what only benchmarks need in it, where PyPI has it for this machine
set -euo pipefail
cd "$(dirname "$0")"

build_packages="g++ make cmake ninja-build pkg-config ccache libuv1-dev libsqlite3-dev libssl-dev libmicrohttpd-dev
  libprotobuf-dev protobuf-compiler libcli11-dev nlohmann-json3-dev libxxhash-dev libmbedtls-dev libgtest-dev libgmock-dev openssl python3-venv python3-dev python3-yaml
  iproute2"
lint_packages="clang-14 clang-format-14"
model_packages="spin"
fuzz_packages="clang-14 libclang-rt-14-dev llvm-14"
bench_packages="mpich libmpich-dev openmpi-bin libopenmpi-dev python3-matplotlib"

packages() {
  local wanted="" missing="" name
  for set_name in "$@"; do
    local list="${set_name}_packages"
    wanted="$wanted ${!list}"
  done
  for name in $wanted; do
    dpkg-query -W -f='${Status}' "$name" 2>/dev/null | grep -q "ok installed" || missing="$missing $name"
  done
  [ -n "$missing" ] || return 0
  local sudo=""
  if [ "$(id -u)" -ne 0 ]; then
    if command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
      sudo="sudo"
    else
      echo "setup: Debian packages are missing and this user may not install them. Run once:" >&2
      echo "  sudo apt-get install -y$missing" >&2
      exit 2
    fi
  fi
  $sudo apt-get update -qq
  $sudo apt-get install -y --no-install-recommends --print-uris$missing 2>/dev/null |
    awk '/^\047/ {bytes += $3} END {printf "setup: downloading %.0f MB of Debian packages\n", bytes / 1e6}'
  # shellcheck disable=SC2086
  DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends $missing >/dev/null
}

venv() {
  local dir="$1" torch="$2"
  # expecttest and hypothesis: torch.testing imports them.
  local requirements="torch==$torch numpy scikit-learn pytest scikit-build-core>=0.10 protobuf expecttest hypothesis"
  # Frameworks: versions that work with torch 2.15.
  [ "${3:-}" != all ] || requirements+=" ruff==0.17.* clang-tidy==23.1.4 accelerate==1.15.0 lightning==2.6.6 deepspeed==0.19.8 transformers==5.23.0"
  local stamp="$dir/.installed"
  [ "$(cat "$stamp" 2>/dev/null)" != "$requirements" ] || return 0
  echo "setup: making $dir with torch $torch from PyPI (about 2.5 GB to download, 6 GB on disk)"
  python3 -m venv "$dir"
  # shellcheck disable=SC2086
  "$dir/bin/pip" install --quiet --disable-pip-version-check $requirements
  echo "$requirements" >"$stamp"
}

# Not in `venv`: without a wheel for this machine it is a build in Rust, and tests do without.
bench_venv() {
  "$1/bin/pip" install --quiet --disable-pip-version-check --only-binary torchft torchft==0.2.0 ||
    echo "setup: torchft could not be installed; the benchmarks leave it out" >&2
}

command="${1:?usage: setup.sh packages SET... | venv DIR TORCH [all] | bench_venv DIR}"
shift
"$command" "$@"
