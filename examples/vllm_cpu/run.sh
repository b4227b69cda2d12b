#!/usr/bin/env bash
# Runs examples/tiny_cpu with a vLLM server. The first time, the script makes an environment with
# vLLM for CPUs (2.4 GB). Then it runs all stages. Arguments are overrides of the GSPO run:
#   bash examples/vllm_cpu/run.sh                                   # runs/vllm_cpu
#   bash examples/vllm_cpu/run.sh training.seed=2 logging.dir=runs/vllm_cpu-seed=2
#   bash examples/vllm_cpu/run.sh routing.replay=r3 logging.dir=runs/vllm_cpu-r3
#   ENGINE=megatron bash examples/vllm_cpu/run.sh logging.dir=runs/vllm_cpu-megatron
# With ENGINE=megatron the trained model itself generates the responses, for comparison.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
export CONFIG=$here/config.yaml START=runs/vllm_cpu_start
export PRETRAIN="model.megatron.kv_channels=32 ${PRETRAIN:-}"
export SFT="model.megatron.kv_channels=32 ${SFT:-}"
if [ "${ENGINE:-vllm}" = megatron ]; then
    words=(rollout.engine=megatron rollout.vllm={})
else
    words=("rollout.vllm.python=$(bash "$here/../../requirements/install_vllm_cpu.sh" | tail -n 1)")
fi
exec bash "$here/../tiny_cpu/run.sh" logging.dir=runs/vllm_cpu "${words[@]}" "$@"
