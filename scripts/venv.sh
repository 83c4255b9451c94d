#!/usr/bin/env bash
# Make .venv and install the project into it, editable: with what training and the tests need, or
# with `planner` as its argument the commands alone, which need neither torch nor Megatron.
#
# .venv/installed says what is in there: the checkout's path, what was installed, and from what.
# All as they are now: nothing to do. Another path, or no path at all: a virtual environment holds
# absolute paths, or its first installation was cut short; start afresh. Anything else: install on
# top, and for the planner nothing on top of everything. A link is to another checkout's, which is
# not ours to change.
#
# $UV may name a uv that installs everything in half a minute; it does not read pip's settings.
set -euo pipefail
cd "$(dirname "$0")/.."
if [[ -L .venv ]]; then
    exit 0
fi

readonly STAMP=.venv/installed

checkout=$(pwd -P)
sources=$(cat pyproject.toml setup.py)
everything=$checkout$'\n'everything$'\n'$sources
wanted=$everything
if [[ ${1-} == planner ]]; then
    wanted=$checkout$'\n'planner$'\n'$sources
fi

state=$checkout # an environment that somebody else made is taken as it is
if [[ -f $STAMP ]]; then
    state=$(<"$STAMP")
fi
usable() { .venv/bin/python -c 'import pip, sys; sys.exit(not (3, 12) <= sys.version_info < (3, 14))'; }

quiet=()
if [[ ${state%%$'\n'*} != "$checkout" ]] || ! usable 2>/dev/null; then
    python=$(scripts/python.sh)
    echo "Making .venv with $("$python" --version) ($python)"
    "$python" -m venv --clear .venv
    if [[ $wanted == "$everything" ]]; then
        echo "Installing into it. PyTorch is 1.5 GB to load and 5 GB unpacked: one to five minutes."
    fi
    : >"$STAMP"
elif [[ $state == "$wanted" || $state == "$everything" ]]; then
    exit 0
else
    echo "Updating .venv to pyproject.toml and setup.py."
    quiet=(--quiet)
    echo "$checkout" >"$STAMP"
fi

install=(.venv/bin/python -m pip install ${quiet[@]+"${quiet[@]}"} --disable-pip-version-check)
if [[ $wanted != "$everything" ]]; then
    "${install[@]}" --editable .
    echo "$wanted" >"$STAMP"
    echo "Installed: .venv/bin/fold3d"
    exit 0
fi
# PyPI's torch is built with CUDA 13, which needs a driver for it. A driver for CUDA 12 runs what is
# built with 12.6.
build=
if [[ $(nvidia-smi 2>/dev/null) == *"CUDA Version: 12."* ]]; then
    build=cu126
    install+=(--extra-index-url "https://download.pytorch.org/whl/$build")
    echo "This node's driver is for CUDA 12, so PyTorch is the one of $build."
fi
# The pins of the extra are constraints too: else pip loads the newest torch as well, before it
# reads that the tests run with another one.
.venv/bin/python - "$build" >.venv/constraints.txt <<'PYTHON'
import sys
import tomllib

with open("pyproject.toml", "rb") as file:
    for pin in tomllib.load(file)["project"]["optional-dependencies"]["dev"]:
        is_torch = sys.argv[1] and pin.startswith("torch==")
        print(f"{pin}+{sys.argv[1]}" if is_torch else pin)
PYTHON
what=(--constraint .venv/constraints.txt --editable '.[train,dev]')
with_uv() {
    [[ -n ${UV-} && -z $build ]] &&
        "$UV" pip install ${quiet[@]+"${quiet[@]}"} --python .venv/bin/python "${what[@]}"
}
with_uv || "${install[@]}" "${what[@]}"
echo "$wanted" >"$STAMP"
echo "Installed."
