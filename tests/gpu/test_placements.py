"""The real thing, small: a tiny model through the command line, colocated on one device and on two, disaggregated on two."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than 2 CUDA devices")
ROOT = Path(__file__).resolve().parent.parent.parent


def train(tmp_path, devices, processes, *more):
    model = tiny.save_model(tmp_path / "model", hidden=128)
    out = tmp_path / "run"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(processes), "--num_machines", "1", "--mixed_precision", "no"]
    command += ["--dynamo_backend", "no", "grpo.py", "--model", model, "--task", f"{ROOT}/tests/toy_tasks.py:digits", "--engine", "vllm", "--out", str(out)]
    command += "--steps 6 --prompts-per-step 8 --samples-per-prompt 8 --sampling.max-completion-tokens 8 --sampling.max-prompt-tokens 64".split()
    command += "--optim.lr 1e-2 --optim.warmup 1 --eval.every 3 --eval.samples 4 --engine.gpu-memory-utilization 0.3".split()
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(str(i) for i in range(devices))}
    done = subprocess.run([*command, *more], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert max(r["mismatch_k3"] for r in rows[1:]) < 0.05  # engine and trainer agree after every refit, in bfloat16
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["accuracy_after"] > summary["accuracy_before"]
    leftovers = subprocess.run(["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"], capture_output=True, text=True).stdout.split()
    ours = [p for p in leftovers if Path(f"/proc/{p}/cmdline").exists() and model in Path(f"/proc/{p}/cmdline").read_text()]
    assert not ours


def test_a_tiny_model_learns_colocated_on_one_device(tmp_path):
    train(tmp_path, 1, 1)


@two_devices
def test_a_tiny_model_learns_colocated_on_two_devices(tmp_path):
    train(tmp_path, 2, 2)


@two_devices
def test_a_tiny_model_learns_with_a_device_of_its_own_for_generation(tmp_path):
    train(tmp_path, 2, 1, "--cluster.generation-devices", "1")
