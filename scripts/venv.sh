#!/usr/bin/env bash
# Make .venv and install the project into it, editable, with what its tests need.
#
# .venv/installed holds what the last complete installation was made from. Equal: nothing to do.
# Different: install again on top. The word "incomplete": a run was cut short, start afresh.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly STAMP=.venv/installed

inputs() { pwd -P && cat pyproject.toml setup.py; }

state=""
if [[ -x .venv/bin/python && -f $STAMP ]]; then
    state=$(<"$STAMP")
fi

case $state in
    "$(inputs)") exit 0 ;;
    "" | "$(pwd -P)"$'\n'*) keep=true ;;
    *) keep=false ;; # cut short, or the checkout moved: a virtual environment holds absolute paths
esac

usable() { .venv/bin/python -c 'import pip, sys; sys.exit(sys.version_info < (3, 12))'; }
if ! $keep || ! usable 2>/dev/null; then
    python=$(scripts/python.sh)
    echo "Making .venv with $("$python" --version) ($python)"
    "$python" -m venv --clear .venv
fi

echo "Installing into .venv. The first time this loads PyTorch (1.5 GB, 5 GB unpacked):"
echo "one to five minutes."
echo incomplete >"$STAMP"
# The pins of the extra are constraints too: else pip loads the newest torch as well, before it
# reads that the tests run with another one.
.venv/bin/python >.venv/constraints.txt <<'PYTHON'
import tomllib

with open("pyproject.toml", "rb") as file:
    print(*tomllib.load(file)["project"]["optional-dependencies"]["dev"], sep="\n")
PYTHON
.venv/bin/python -m pip install --disable-pip-version-check \
    --constraint .venv/constraints.txt --editable '.[dev]'
inputs >"$STAMP"
echo "Installed. Nothing more is loaded until pyproject.toml or setup.py changes."
