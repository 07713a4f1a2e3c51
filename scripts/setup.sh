#!/usr/bin/env bash
# Makes or renews the virtual environment with everything that `make check`, `make test` and `make demo` need.
# Usage: scripts/setup.sh FOLDER. The interpreter may be named in PYTHON. As root, what Debian lacks is installed with apt-get.
set -euo pipefail

cd "$(dirname "$0")/.."
folder=${1:?usage: scripts/setup.sh FOLDER}

say() { printf 'setup: %s\n' "$*" >&2; }

fail() {
  say "$*"
  exit 1
}

# True when the interpreter runs and has a version that pyproject.toml allows.
suits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' >/dev/null 2>&1; }

find_python() {
  local name
  for name in ${PYTHON:-python3.11 python3.12 python3.13 python3 /usr/bin/python3}; do
    if suits "$name"; then
      command -v "$name"
      return
    fi
  done
  return 1
}

can_apt() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }

apt_install() {
  say "installing from apt: $*"
  export DEBIAN_FRONTEND=noninteractive
  apt-get install --yes -qq --no-install-recommends "$@" >/dev/null 2>&1 ||
    { apt-get update -qq >/dev/null && apt-get install --yes -qq --no-install-recommends "$@" >/dev/null; } ||
    fail "apt-get could not install: $*"
}

python=$(find_python) || {
  [ -z "${PYTHON:-}" ] || fail "PYTHON=$PYTHON is not a Python 3.11, 3.12 or 3.13"
  can_apt || fail "missing: Python 3.11, 3.12 or 3.13 on PATH (Debian: apt-get install python3 python3-venv); or name one in PYTHON"
  apt_install python3 python3-venv
  python=$(find_python) || fail "missing: apt's python3 is not 3.11, 3.12 or 3.13; name an interpreter in PYTHON"
}

if ! "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
  package=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
  can_apt || fail "missing: the venv module of $python (Debian: apt-get install $package)"
  apt_install "$package"
fi

if ! suits "$folder/bin/python" || ! "$folder/bin/python" -m pip --version >/dev/null 2>&1; then
  say "making $folder with $("$python" --version)"
  "$python" -m venv --clear "$folder"
fi

pip() { "$folder/bin/python" -m pip --disable-pip-version-check "$@"; }

say "installing the dependencies into $folder"
pip install -qq 'pip>=25.1' || fail "pip could not renew itself; is a package index reachable?"
pip install -qq --constraint constraints.txt --editable . --group dev || fail "pip could not install the dependencies"
say "done"
