#!/usr/bin/env bash
# Makes the virtual environment from the pins of this folder; prints one line for each stage:
#
#     install.sh VENV [PYTHON]
#
# PYTHON is an interpreter of Python 3.10 to 3.13. Without it: VENV's own interpreter, python3.11 or
# python3. If VENV is up to date, nothing happens. If it has another Python version, it is made anew. If
# the pins or the package's metadata changed, it is updated. Where the program uv is installed, it does
# the work, with the same pins; GSPO_UV=0 forbids it.
set -euo pipefail

venv=$1
python=${2:-}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case $venv in
/*) place=$venv ;;
*) place=$PWD/$venv ;;
esac

fail() {
    echo "install: $*" >&2
    exit 1
}

version_of() { # INTERPRETER: prints "3.11", fails when there is no such interpreter
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null
}

# pyenv's python3.12 on the PATH runs only if that version is selected. This finds the interpreter
# itself.
from_pyenv() { # NAME, such as python3.12
    local name
    command -v pyenv >/dev/null || return 1
    name=$(pyenv versions --bare 2>/dev/null | grep -E "^${1#python}\.[0-9]+$" | tail -n 1) || return 1
    echo "$(pyenv root)/versions/$name/bin/python"
}

choose_python() {
    if [ -n "$python" ]; then
        local asked=$python
        version_of "$asked" >/dev/null || python=$(from_pyenv "$asked") ||
            fail "PYTHON=$asked does not run; name an interpreter of Python 3.10 to 3.13"
    elif version_of "$venv/bin/python" >/dev/null; then
        # The interpreter that VENV links to: it stays when VENV is made anew.
        python=$("$venv/bin/python" -c 'import os, sys; print(os.path.realpath(sys.executable))')
    elif version_of python3.11 >/dev/null; then
        python=python3.11
    else
        python=python3
    fi
    version=$(version_of "$python") ||
        fail "no Python found; name one: make setup PYTHON=/path/to/python3.11"
    case $version in
    3.10) pins=requirements/cpu-py310.txt ;;
    3.11) pins=requirements/cpu-py311.txt ;;
    3.12 | 3.13) pins=requirements/cpu-py312.txt ;;
    *) fail "$python is Python $version; this project needs 3.10 to 3.13 (make setup PYTHON=python3.11)" ;;
    esac
}

# Whether uv does the work; sets the options that tell it the indexes and folders of pip's configuration,
# which uv does not read (uv_options).
uses_uv() {
    local key value word
    [ "${GSPO_UV:-1}" != 0 ] && command -v uv >/dev/null || return 1
    uv_options=(--index-strategy unsafe-best-match)
    while IFS='=' read -r key value; do
        value=${value//[\'\"]/}
        # pip separates values by blanks or by line breaks, which it prints as \n.
        for word in ${value//\\n/ }; do
            case $key in
            *.find-links) uv_options+=(--find-links "$word") ;;
            *.index-*) uv_options+=(--default-index "$word") ;;
            *.extra-index-*) [[ $word == file://* && ! -d ${word#file://} ]] || uv_options+=(--index "$word") ;;
            esac
        done
    done < <("$python" -m pip config list 2>/dev/null)
}

quiet_uv() {
    uv pip install --quiet --python "$venv/bin/python" "${uv_options[@]}" "$@"
}

quiet_pip() {
    "$venv/bin/python" -m pip "$1" -qq --disable-pip-version-check --no-input "${@:2}"
}

make_venv() {
    # Two kinds of VENV are unusable: one without pip, because its installation was interrupted, and
    # one whose folder was moved, because its scripts contain the old path.
    local made_at
    made_at=$(cat "$venv"/.stamp-* 2>/dev/null || true)
    if [ "$(version_of "$venv/bin/python" || true)" = "$version" ] &&
        "$venv/bin/python" -c 'import pip' 2>/dev/null &&
        { [ -z "$made_at" ] || [ "$made_at" = "$place" ]; }; then
        echo "updating $venv (Python $version)"
    else
        # Anything else is not ours: VENV may come from the caller's environment.
        if [ -e "$venv" ] && [ ! -f "$venv/pyvenv.cfg" ] && [ -n "$(ls -A "$venv")" ]; then
            fail "$venv is not empty and is no virtual environment; remove it, or give another VENV"
        fi
        echo "creating $venv with Python $version"
        rm -rf "$venv"
        if $with_uv; then
            uv venv --quiet --seed "${uv_options[@]}" --python "$python" "$venv" || fail "uv cannot make $venv"
        else
            "$python" -m venv "$venv" || fail "cannot make $venv: is the venv module of $python installed?"
        fi
    fi
    rm -f "$venv"/.stamp-*
}

choose_python
torch=$(grep -E '^torch==' "$pins")
cuda_pins=requirements/cuda-torch-${torch#torch==}.txt
sum=$(cat "$pins" "$cuda_pins" pyproject.toml requirements/install.sh | cksum | cut -d ' ' -f 1)
stamp=$venv/.stamp-$version-$sum
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$place" ]; then
    exit 0
fi

with_uv=false
! uses_uv || with_uv=true
make_venv
if $with_uv; then
    echo "installing the pinned requirements of $pins by uv (torch: 200 MB for a CPU build, 5 GB for a CUDA build) ..."
    quiet_uv --constraint "$cuda_pins" --requirement "$pins"
    quiet_uv --no-deps --no-build-isolation --editable .
    echo "$place" >"$stamp"
    echo "$venv is ready after $SECONDS s"
    exit 0
fi
# torch is installed first, by its version, with the other pins as constraints. Its build for this
# platform decides on the CUDA packages; no later package installs them.
echo "installing $torch (200 MB for a CPU build, 5 GB for a CUDA build) ..."
quiet_pip install --constraint "$pins" --constraint "$cuda_pins" "$torch"
echo "installing the pinned requirements of $pins (about 1 minute) ..."
quiet_pip install --requirement "$pins"
echo "installing gspo-megatron (editable)"
quiet_pip install --no-deps --no-build-isolation --editable .
echo "$place" >"$stamp"
echo "$venv is ready after $SECONDS s"
