#!/usr/bin/env bash
# hardware: 1 node, 8 GPUs (80 GB); disaggregated: 6 train, the last 2 generate, weights by NCCL
set -euo pipefail
cd "$(dirname "$0")/.."
accelerate launch --num_processes 6 grpo.py --model Qwen/Qwen2.5-7B --task gsm8k --cluster.generation-devices 2 \
  --prompts-per-step 96 --samples-per-prompt 8 --policy.checkpointing --engine.gpu-memory-utilization 0.9 "$@"
