#!/usr/bin/env bash
# Packs what a GPU machine without a network needs to build this commit and to run tests/gpu/run.sh: the sources of
# HEAD, the Debian 12 packages of the build, unpacked, and a few Python wheels: tests/gpu/bundle.sh OUT.tar.gz
# There: tar -xzf OUT.tar.gz && resilient_gpu/build.sh && resilient_gpu/run.sh
# It fails when the archive is larger than 64 MiB. PYTHON_THERE (default: 3.12) is the Python of that machine.
set -euo pipefail
out="$(realpath -m "$1")"
cd "$(dirname "$0")/../.."
limit=$((64 << 20))
python_there="${PYTHON_THERE:-3.12}"
# Beside the libraries of setup.sh's build set: what these need at run time, and what reads their .pc files.
runtime="libuv1 libsqlite3-0 libssl3 libmicrohttpd12 libprotobuf32 libprotobuf-lite32 libprotoc32 libxxhash0 libgtest-dev
  googletest pkgconf-bin libpkgconf3 libgnutls30 libp11-kit0 libidn2-0 libunistring2 libtasn1-6 libnettle8 libhogweed6
  libgmp10 libffi8 zlib1g"
# What every machine with a compiler has.
of_the_host='^(libc|libm|libdl|libpthread|librt|libgcc_s|libstdc\+\+|ld-linux-x86-64)\.so'
wheels="cmake<4 ninja scikit-build-core pathspec packaging pytest pluggy iniconfig pygments expecttest hypothesis
  sortedcontainers"

[ "$(uname -m)" = x86_64 ] || { echo "bundle: the packages are of x86-64, this is $(uname -m)" >&2; exit 2; }
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
bundle="$work/resilient_gpu"
root="$bundle/root"
mkdir -p "$bundle/source" "$root" "$work/debs" "$bundle/wheels"

git archive HEAD | tar -x -C "$bundle/source"
git rev-parse HEAD >"$bundle/source/COMMIT"
rm -rf "$bundle/source"/{docs/*.md,docs/decisions,tests/fuzz/corpus,benchmarks/results}
# shellcheck disable=SC2016
printf '%s\n' '#!/usr/bin/env bash' 'here="$(cd "$(dirname "$0")" && pwd)"' \
  'exec "$here/source/tests/gpu/build.sh" "$here" "$@"' >"$bundle/build.sh"
# shellcheck disable=SC2016
printf '%s\n' '#!/usr/bin/env bash' 'here="$(cd "$(dirname "$0")" && pwd)"' '. "$here/environment" || exit 2' \
  'exec "$here/source/tests/gpu/run.sh" --python "$PYTHON" --build "$here/build" --out "$here/gpu.json" "$@"' \
  >"$bundle/run.sh"
chmod +x "$bundle"/*.sh

build_packages="$(sed -n '/^build_packages=/,/"$/p' setup.sh | tr -d '"' | tr ' ' '\n' | grep -E '^(lib.*-dev|nlohmann.*|protobuf-compiler)$')"
# shellcheck disable=SC2086
(cd "$work/debs" && apt-get -qq -o APT::Sandbox::User=root download $build_packages $runtime)
for package in "$work"/debs/*.deb; do dpkg -x "$package" "$root"; done
# One tree, whatever the package's place; nothing is read but headers, libraries, and what finds them.
[ ! -d "$root/lib" ] || cp -a "$root/lib/." "$root/usr/lib/"
libraries="$root/usr/lib/x86_64-linux-gnu"
find "$root" -mindepth 1 -maxdepth 1 ! -name usr -exec rm -rf {} +
find "$root/usr" -mindepth 1 -maxdepth 1 ! -name bin ! -name include ! -name lib ! -name share -exec rm -rf {} +
find "$root/usr/share" -mindepth 1 -maxdepth 1 ! -name cmake ! -name pkgconfig -exec rm -rf {} +
find "$root/usr/bin" -type f ! -name 'protoc*' ! -name pkgconf -delete
find "$libraries" -name '*.a' ! -name 'libg*test*.a' ! -name 'libgmock*.a' ! -name libmbedcrypto.a -delete
find "$libraries" -name 'libmbed*.so*' -delete  # Of Mbed TLS the archive is linked.
find "$libraries" \( -name engines-3 -o -name ossl-modules -o -name debug \) -prune -exec rm -rf {} +
# They say where they were installed; here it is where they lie. Their own libraries are not linked statically.
# shellcheck disable=SC2016
find "$root/usr" -name '*.pc' -exec sed -i -E \
  -e 's#^(prefix|exec_prefix|libdir|includedir)=/usr#\1=${pcfiledir}/../../..#' -e '/^Requires\.private:/d' {} +
# shellcheck disable=SC2016
sed -i -E 's#=\$\{pcfiledir\}/\.\./\.\./\.\.#=${pcfiledir}/../..#' "$root"/usr/share/pkgconfig/*.pc

# Whatever a library needs is there too, or every machine has it.
missing="$(for library in "$libraries"/*.so*; do
  [ -L "$library" ] || objdump -p "$library" | awk '$1 == "NEEDED" {print $2}'
done | sort -u | grep -Ev "$of_the_host" | while read -r name; do [ -e "$libraries/$name" ] || echo "$name"; done)"
[ -z "$missing" ] || { echo "bundle: libraries need what is not there: $missing" >&2; exit 1; }
broken="$(find "$libraries" -xtype l)"
[ -z "$broken" ] || { echo "bundle: links to nothing: $broken" >&2; exit 1; }

platforms=()
for glibc in 17 24 27 28 31 34; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
# shellcheck disable=SC2086
python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version "$python_there" \
  --implementation cp "${platforms[@]}" --platform manylinux2014_x86_64 -d "$bundle/wheels" $wheels

mkdir -p "$(dirname "$out")"
tar -C "$work" --sort=name --owner=0 --group=0 -cf - resilient_gpu | gzip -9 >"$out"
size="$(stat -c %s "$out")"
du -sk "$bundle"/* | awk '{sub(/.*\//, "", $2); printf "bundle: %-8s %6.1f MiB unpacked\n", $2, $1 / 1024}'
awk -v size="$size" -v out="$out" 'BEGIN {printf "bundle: %s, %.1f MiB\n", out, size / 1048576}'
if [ "$size" -gt "$limit" ]; then
  echo "bundle: larger than $((limit >> 20)) MiB, which is what can be sent there" >&2
  exit 1
fi
