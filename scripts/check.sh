#!/usr/bin/env bash
# The gates a change must pass before its tests matter: lint, format, types, shell. All are run.
set -euo pipefail
cd "$(dirname "$0")/.."

failed=()
gate() {
    echo "== $*"
    ".venv/bin/$1" "${@:2}" || failed+=("$1")
}

gate ruff check
gate ruff format --check
gate mypy
gate shellcheck scripts/*.sh scripts/slurm/*.s* .ci/run
gate python scripts/check_prose.py

if ((${#failed[@]})); then
    echo "failed: ${failed[*]}" >&2
    exit 1
fi
