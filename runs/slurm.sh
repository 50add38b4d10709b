#!/usr/bin/env bash
#SBATCH --nodes=4 --ntasks-per-node=1 --gpus-per-node=8 --exclusive
# hardware: 4 nodes, 8 GPUs (80 GB) each, on a private network; 3 nodes train, the last one generates (2 engines of 4 GPUs). sbatch runs/slurm.sh
set -euo pipefail
VLLM_API_KEY=$(openssl rand -hex 16)
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
address=$(getent hosts "${nodes[3]}" | awk '{ print $1; exit }')
export VLLM_API_KEY address first="${nodes[0]}"

srun --nodes=1 --nodelist="${nodes[3]}" python cluster.py serve --model Qwen/Qwen2.5-32B --host "$address" --port 8000 \
  --engine.tensor-parallel 4 --engine.gpu-memory-utilization 0.9 --engine.extra="--data-parallel-size 2" &

srun --nodes=3 --exclude="${nodes[3]}" bash -c 'accelerate launch \
  --num_processes 24 --num_machines 3 --machine_rank "$SLURM_NODEID" --main_process_ip "$first" --main_process_port 29500 \
  grpo.py --model Qwen/Qwen2.5-32B --task gsm8k --cluster.engine-urls "http://$address:8000" \
  --prompts-per-step 256 --samples-per-prompt 8 --policy.checkpointing'
