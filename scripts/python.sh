#!/usr/bin/env bash
# Print the path of a Python that can carry this project, or one error that says what was found.
#
# Tried in order: what .python-version names under pyenv, pyenv's others, uv's, what it names on the
# PATH, python3.12, python3.13, python3. megatron-core has wheels for 3.12 and 3.13.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly NEEDED="3.12" NEWEST="3.13"

candidates() {
    local prefix
    if command -v pyenv >/dev/null; then
        prefix=$(pyenv prefix 2>/dev/null) && echo "${prefix%%:*}/bin/python"
        # Whatever else pyenv has; its shims only reach the versions that are set.
        compgen -G "$(pyenv root)/versions/3.1[2-9]*/bin/python" || true
    fi
    if command -v uv >/dev/null; then
        uv python find --system --no-python-downloads ">=$NEEDED,<=$NEWEST.99" 2>/dev/null || true
    fi
    for name in "python$(<.python-version)" python3.12 python3.13 python3 python; do
        command -v "$name" || true
    done
}

# The version of an interpreter, followed by what it lacks; nothing, and a failure, if it won't run.
inspect() {
    "$1" - "$NEEDED" "$NEWEST" 2>/dev/null <<'PYTHON'
import sys

version = sys.version_info[:3]
lacks = []
needed, newest = (tuple(int(part) for part in word.split(".")) for word in sys.argv[1:])
if version < needed:
    lacks.append("older than " + sys.argv[1])
elif version[:2] > newest:
    lacks.append("newer than " + sys.argv[2])
else:
    for module in ("venv", "ensurepip", "ssl", "ctypes"):
        try:
            __import__(module)
        except ImportError:
            lacks.append("without the module " + module)
print(".".join(map(str, version)) + "".join(", " + lack for lack in lacks))
PYTHON
}

found=""
while IFS= read -r python; do
    report=$(inspect "$python") || report="does not run"
    if [[ $report =~ ^[0-9.]+$ ]]; then
        echo "$python"
        exit 0
    fi
    found+="  $python: $report"$'\n'
done < <(candidates)

cat >&2 <<EOM
error: no Python $NEEDED or $NEWEST found. Looked at:
${found:-  nothing: neither pyenv nor uv nor any python is on the PATH
}Install one, then run the same command again; any of these will do:
  pyenv install $NEEDED
  uv python install $NEEDED
  apt install python$NEEDED python$NEEDED-venv      (Debian, Ubuntu)
EOM
exit 1
