#!/usr/bin/env bash
# A visit of at most ten minutes to a GPU machine without a network. Run pack.sh first: it makes .gpu-visit/.
#   bash tools/gpu_visit/visit.sh [OUT] [arguments of run.py, such as --only tests verify]
# OUT (default gpu_visit) gets visit.json, visit.txt and logs.txt. Wheels are installed below
# .gpu-visit/, and the machine's own Python is not changed. The script names missing or damaged wheels;
# only the checks that need them fail. PYTHON names the interpreter.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
python=${PYTHON:-python3}
out=gpu_visit
if [ $# -gt 0 ] && [[ $1 != --* ]]; then
    out=$1
    shift
fi
site=$PWD/.gpu-visit/site
mkdir -p "$out" "$site"

install() { # WHEELS: all in one call, because another call would replace folders that wheels share
    timeout 90 "$python" -m pip install -qq --disable-pip-version-check --no-index --no-deps --upgrade \
        --target "$site" "$@" 2>>"$out/install.txt"
}

join_engine() { # join the wheels of Transformer Engine from their parts, if all parts are here
    local sum
    [ -e .gpu-visit/engine-0/sum ] && [ ! -d .gpu-visit/engine ] || return 0
    cat .gpu-visit/engine-*/part-* >.gpu-visit/engine.tar
    sum=$(sha256sum <.gpu-visit/engine.tar | cut -d ' ' -f 1)
    if [ "$sum" != "$(cat .gpu-visit/engine-0/sum)" ]; then
        echo "install: not all parts of Transformer Engine are here; left out"
        return 0
    fi
    mkdir .gpu-visit/engine && tar -C .gpu-visit/engine -xf .gpu-visit/engine.tar
    rm .gpu-visit/engine.tar
}

started=$SECONDS
join_engine
shopt -s nullglob
wheels=(.gpu-visit/wheels/*.whl .gpu-visit/engine/*.whl)
[ ${#wheels[@]} -gt 0 ] || echo "install: no wheels in .gpu-visit; run tools/gpu_visit/pack.sh first"
sum=$(cat "${wheels[@]}" /dev/null | sha256sum)
if [ "$(cat "$site/.done" 2>/dev/null)" != "$sum" ]; then
    if [ ${#wheels[@]} -eq 0 ] || install "${wheels[@]}"; then
        echo "$sum" >"$site/.done"
    else # one wheel is damaged: install each wheel by itself
        for wheel in "${wheels[@]}"; do
            install "$wheel" || echo "install: $wheel failed, see $out/install.txt"
        done
    fi
fi
echo "installed ${#wheels[@]} wheels in $((SECONDS - started)) s"
# Transformer Engine looks for the CUDA libraries of torch's packages only by name, without their folders.
libraries=$("$python" -c 'import glob, nvidia; print(":".join(glob.glob(nvidia.__path__[0] + "/*/lib")))' 2>/dev/null)
export LD_LIBRARY_PATH=${libraries:+$libraries:}${LD_LIBRARY_PATH:-}
export PYTHONPATH=$site:$PWD${PYTHONPATH:+:$PYTHONPATH}
exec "$python" tools/gpu_visit/run.py "$out" "$@"
