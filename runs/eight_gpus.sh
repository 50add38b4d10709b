#!/usr/bin/env bash
# hardware: 1 node, 8 GPUs (80 GB); colocated: every GPU trains its shard and samples with an engine of its own, in turn
set -euo pipefail
cd "$(dirname "$0")/.."
accelerate launch --num_processes 8 grpo.py --model Qwen/Qwen2.5-7B --task gsm8k \
  --prompts-per-step 128 --samples-per-prompt 8 --policy.checkpointing --engine.gpu-memory-utilization 0.6 "$@"
