#!/usr/bin/env bash
# Chromium for tests/integration/test_page.py: as root on Debian it is installed when it is missing; otherwise this says what to do.
set -euo pipefail

for name in chromium chromium-browser google-chrome; do
  command -v "$name" >/dev/null && exit 0
done

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  printf 'browser: missing: Chromium on PATH, which the test of the page needs (Debian: apt-get install chromium)\n' >&2
  exit 0
fi

printf 'browser: installing from apt: chromium\n' >&2
export DEBIAN_FRONTEND=noninteractive
install() { apt-get install --yes -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null 2>&1; }
install || { apt-get update -qq >/dev/null && install; } || {
  printf 'browser: apt-get could not install chromium\n' >&2
  exit 1
}
