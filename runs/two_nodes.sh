#!/usr/bin/env bash
# hardware: 2 nodes, 8 GPUs (80 GB) each; colocated. run on each node: FIRST_NODE=10.0.0.1 RANK_OF_NODE=0 runs/two_nodes.sh (and 1 on the other)
set -euo pipefail
cd "$(dirname "$0")/.."
accelerate launch --num_processes 16 --num_machines 2 --machine_rank "$RANK_OF_NODE" --main_process_ip "$FIRST_NODE" --main_process_port 29500 \
  grpo.py --model Qwen/Qwen2.5-14B --task gsm8k \
  --prompts-per-step 256 --samples-per-prompt 8 --policy.checkpointing --engine.gpu-memory-utilization 0.6 "$@"
