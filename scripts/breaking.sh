#!/usr/bin/env bash
# Compares protos/ with an earlier commit: nobody's client may break. Usage: scripts/breaking.sh BUF
# The earlier commit: $AGAINST, or the last release tag, or main when it is another commit, or the parent commit.
set -euo pipefail

cd "$(dirname "$0")/.."
buf=${1:?usage: scripts/breaking.sh BUF}

skip() {
  printf 'buf breaking: skipped, %s\n' "$*"
  exit 0
}

git rev-parse --verify --quiet HEAD >/dev/null 2>&1 || skip "this is not a git checkout"
head=$(git rev-parse HEAD)

# Prints the first commit that differs from HEAD and has protos.
baseline() {
  local name commit
  for name in ${AGAINST:-$(git describe --tags --abbrev=0 --match 'v*' 2>/dev/null) origin/main main HEAD~1}; do
    commit=$(git rev-parse --verify --quiet "$name^{commit}") || continue
    [ "$commit" != "$head" ] || continue
    [ -n "$(git ls-tree -d --name-only "$commit" protos)" ] || continue
    printf '%s %s\n' "$commit" "$name"
    return
  done
}

read -r commit name <<<"$(baseline)" || true
[ -n "${commit:-}" ] || skip "no earlier commit with protos is at hand"

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
git archive "$commit" protos buf.yaml | tar -x -C "$folder"
"$buf" breaking --against "$folder"
printf 'buf breaking: nothing breaks against %s (%.12s)\n' "$name" "$commit"
