#!/bin/sh
# Print the path of a Python that can create jaxpar's virtual environment: 3.12 or newer, with venv and
# ensurepip. If $PYTHON is set, only it is tried; otherwise PATH, then pyenv. Every candidate is run,
# since a pyenv shim on PATH may have no interpreter.
set -u

tried=""

# usable COMMAND: prints the interpreter's path, or records in $tried why it is unsuitable.
usable() {
    if ! version=$("$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null); then
        reason="does not run"
    elif ! "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
        reason="is Python $version"
    elif ! "$1" -c 'import ensurepip, venv' 2>/dev/null; then
        reason="is Python $version without venv or ensurepip (Debian: apt install python${version%.*}-venv)"
    else
        "$1" -c 'import sys; print(sys.executable)'
        return 0
    fi
    tried="$tried  $1 $reason
"
    return 1
}

if [ -n "${PYTHON:-}" ]; then
    usable "$PYTHON" && exit 0
    printf 'PYTHON is set, but is not Python 3.12 or newer with venv:\n%s' "$tried" >&2
    exit 1
fi

for name in python3.14 python3.13 python3.12 python3 python; do
    if command -v "$name" >/dev/null 2>&1; then
        usable "$name" && exit 0
    fi
done

if command -v pyenv >/dev/null 2>&1; then
    pyenv_root=$(pyenv root)
else
    pyenv_root=${PYENV_ROOT:-${HOME:-}/.pyenv}
fi
for minor in 14 13 12; do
    for python in "$pyenv_root"/versions/3."$minor"*/bin/python; do
        if [ -x "$python" ]; then
            usable "$python" && exit 0
        fi
    done
done

[ -n "$tried" ] || tried="  no python3 on PATH
"
cat >&2 <<END
jaxpar needs Python 3.12 or newer, but none was found:
$tried
Install one in any way and run make again:
  Debian, Ubuntu   sudo apt install python3.12 python3.12-venv
  Fedora           sudo dnf install python3.12
  macOS            brew install python@3.12
  pyenv            pyenv install 3.12
  conda            conda create -n jaxpar python=3.12 && conda activate jaxpar
  uv               uv python install 3.12, then PYTHON=\$(uv python find 3.12) make install
For an interpreter elsewhere: PYTHON=/path/to/python make install
END
exit 1
