#!/usr/bin/env bash
# hardware: 1 node, 1 GPU (80 GB); colocated: vLLM sleeps while the policy trains
set -euo pipefail
cd "$(dirname "$0")/.."
accelerate launch --num_processes 1 grpo.py --model Qwen/Qwen2.5-1.5B --task gsm8k \
  --policy.checkpointing --engine.gpu-memory-utilization 0.6 "$@"
