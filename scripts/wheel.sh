#!/usr/bin/env bash
# Installs the compiled wheel from dist/ into an empty environment, and tries it there: the command runs, and its request path is compiled.
# Usage: scripts/wheel.sh BIN. BIN is the bin folder of the virtual environment whose Python made the wheel (`make compile`).
set -euo pipefail

cd "$(dirname "$0")/.."
bin=$(cd "${1:?usage: scripts/wheel.sh BIN}" && pwd)
root=$PWD
tag=$("$bin/python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
wheel=$(ls -t dist/kvc_mesh-*-"$tag"-*-linux_*.whl | head -n 1)

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$bin/python" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --constraint constraints.txt "$wheel"
cd "$folder"
venv/bin/kvc demo --help >/dev/null
venv/bin/kvc router --print-config >/dev/null
venv/bin/python -P "$root/scripts/compiled.py"
printf 'wheel: %s runs from an empty environment\n' "$wheel" >&2
