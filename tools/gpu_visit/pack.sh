#!/usr/bin/env bash
# Packs wheels into .gpu-visit/, for a GPU machine that has no network and lacks these packages. git
# ignores this folder. Copy it to the machine together with the repository. The machine must have
# Python 3.12 on x86_64, torch 2.11 and transformers.
#   bash tools/gpu_visit/pack.sh                   # .gpu-visit/wheels, about 5 MB
#   bash tools/gpu_visit/pack.sh --engine FOLDER   # also .gpu-visit/engine-0, -1, ...: the wheels of
#       Transformer Engine in FOLDER (docs/gpu.md says how they are made), with kernels for Hopper
#       only (ARCH=100: for Blackwell only), in parts of 50 MB
# Each part can be copied separately. PYTHON=python3.12 names the interpreter whose pip downloads
# the wheels.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-python3}
most=$((60 * 1024 * 1024)) part=$((50 * 1000 * 1000))
wheels=(megatron-core==0.19.2 pydantic==2.14.3 pydantic-core==2.50.4 annotated-types==0.8.0 typing-inspection)
folder=.gpu-visit/wheels

engine=
case ${1:-} in
"") ;;
--engine) engine=${2:?pack.sh: --engine needs the folder with the wheels} ;;
*)
    echo "pack.sh: unknown argument $1; allowed: --engine FOLDER" >&2
    exit 2
    ;;
esac

rm -rf .gpu-visit
mkdir -p "$folder"
for wheel in "${wheels[@]}"; do
    "$python" -m pip download -qq --disable-pip-version-check --no-deps --only-binary=:all: \
        --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64 \
        --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --platform any \
        -d "$folder" "$wheel" || {
        echo "pack.sh: $wheel could not be downloaded; the visit goes on without it" >&2
    }
done

if [ -n "$engine" ]; then
    shopt -s nullglob
    names=("$engine"/transformer_engine*.whl "$engine"/nvdlfw_inspect*.whl)
    if [ ${#names[@]} -eq 0 ]; then
        echo "pack.sh: no transformer_engine*.whl in $engine" >&2
        exit 2
    fi
    mkdir .gpu-visit/engine
    for name in "${names[@]}"; do
        case ${name##*/} in
        transformer_engine_cu*) "$python" tools/gpu_visit/thin.py "$name" .gpu-visit/engine "${ARCH:-90}" ;;
        *) cp "$name" .gpu-visit/engine/ ;;
        esac
    done
    tar -C .gpu-visit/engine -cf .gpu-visit/engine.tar .
    rm -r .gpu-visit/engine
    split -b "$part" -d -a 2 .gpu-visit/engine.tar .gpu-visit/part-
    sha256sum <.gpu-visit/engine.tar | cut -d ' ' -f 1 >.gpu-visit/sum
    rm .gpu-visit/engine.tar
    number=0
    for piece in .gpu-visit/part-*; do
        mkdir ".gpu-visit/engine-$number"
        mv "$piece" ".gpu-visit/engine-$number/"
        cp .gpu-visit/sum ".gpu-visit/engine-$number/sum"
        number=$((number + 1))
    done
    rm .gpu-visit/sum
fi

for each in .gpu-visit/*; do
    size=$(du -sb "$each" | cut -f 1)
    echo "$each: $((size / 1000000)) MB"
    if [ "$size" -gt "$most" ]; then
        echo "pack.sh: $each is larger than one transfer of 60 MiB" >&2
        exit 1
    fi
done
