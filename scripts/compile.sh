#!/usr/bin/env bash
# Builds the wheel whose request path is compiled (pyproject.toml names the modules; mypyc compiles them) and unpacks it.
# Usage: scripts/compile.sh BIN FOLDER. BIN is the bin folder of the virtual environment, FOLDER gets what the wheel holds; the wheel itself
# goes to dist/. Built from a copy of the tree: compiled modules beside their sources would hide every later change of them.
set -euo pipefail

cd "$(dirname "$0")/.."
usage='usage: scripts/compile.sh BIN FOLDER'
bin=$(cd "${1:?$usage}" && pwd)
folder=${2:?$usage}

say() { printf 'compile: %s\n' "$*" >&2; }

# A compiler and Python's headers, from apt when root may install them.
headers=$("$bin/python" -c 'import sysconfig; print(sysconfig.get_path("include") + "/Python.h")')
if ! command -v gcc >/dev/null || [ ! -e "$headers" ]; then
  version=$("$bin/python" -c 'import sys; print("python%d.%d-dev" % sys.version_info[:2])')
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    say "missing: gcc and Python's headers (Debian: apt-get install gcc libc6-dev $version)"
    exit 1
  fi
  say "installing from apt: gcc libc6-dev $version"
  export DEBIAN_FRONTEND=noninteractive
  { apt-get update -qq && apt-get install --yes -qq --no-install-recommends gcc libc6-dev "$version"; } >/dev/null
fi

copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
git ls-files -z --cached --others --exclude-standard | tar --create --null --files-from=- --ignore-failed-read 2>/dev/null | tar --extract -C "$copy"
say "compiling (a minute or two)"
if ! (cd "$copy" && HATCH_BUILD_HOOKS_ENABLE=1 "$bin/python" -m build --wheel --no-isolation --outdir "$copy/dist" . >"$copy/log" 2>&1); then
  tail -n 40 "$copy/log" >&2
  exit 1
fi
mkdir -p dist
cp "$copy"/dist/*.whl dist/
rm -rf "$folder"
"$bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$folder" "$copy"/dist/*.whl
say "done: $(ls "$copy/dist"), unpacked in $folder"
