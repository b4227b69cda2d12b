#!/usr/bin/env bash
# Makes a small image for apptainer (a folder) from files of this machine: some programs, the Python
# installation on which an environment is based, and the libraries that both need.
#
#     make_image.sh IMAGE PYTHON
set -euo pipefail

image=$1 python=$2
base=$("$python" -c 'import sys; print(sys.base_prefix)')
name=$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')

mkdir -p "$image"/{etc,proc,sys,dev,tmp,root,home,var/tmp,usr/bin,usr/lib,usr/lib64}
for folder in bin lib lib64; do
    ln -s "usr/$folder" "$image/$folder"
done
for program in bash sh cat env date sed grep awk sleep rm; do
    cp "$(readlink -f "$(type -P "$program")")" "$image/usr/bin/$program"
done
mkdir -p "$image$base/bin" "$image$base/lib"
cp "$(readlink -f "$base/bin/$name")" "$image$base/bin/$name"
tar -C "$base/lib" --exclude test --exclude site-packages --exclude 'config-*' \
    --exclude __pycache__ -c "$name" | tar -x -C "$image$base/lib"

# Copies the libraries that the dynamic loader would load, and the parts of the C library that torch
# loads by name.
{
    # ldd fails on scripts
    { find "$image" -type f \( -perm /111 -o -name '*.so*' \) -exec ldd {} + 2>/dev/null || true; } |
        sed -nE 's/.*(=> |^[[:space:]]+)(\/[^ ]+).*/\2/p'
    for library in libpthread.so.0 libdl.so.2 librt.so.1 libutil.so.1 libm.so.6 libresolv.so.2 \
        libnss_files.so.2 libstdc++.so.6 libgcc_s.so.1 libz.so.1; do
        ldconfig -p | awk -v name="$library" '$1 == name { print $NF }'
    done
} | sort -u | while read -r file; do
    mkdir -p "$image$(dirname "$file")"
    [ -e "$image$file" ] || cp -L "$file" "$image$file"
done

echo 'root:x:0:0:root:/root:/bin/bash' >"$image/etc/passwd"
echo 'root:x:0:' >"$image/etc/group"
echo '127.0.0.1 localhost' >"$image/etc/hosts"
: >"$image/etc/gspo-test-image"
# In the image, variables that the job also sets have other values.
mkdir -p "$image/.singularity.d/env"
echo 'export PYTHONPATH=/of/the/image OMP_NUM_THREADS=77' >"$image/.singularity.d/env/90-environment.sh"
# Each image that apptainer builds has this file. Variables from outside are set after it.
echo '#!/bin/sh' >"$image/.singularity.d/env/99-base.sh"
chmod +x "$image"/.singularity.d/env/*.sh
