"""The formulas of bench/plan.py against models as transformers builds them, and against sums done by hand."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch

import policy as policies
from bench.gpu import BenchConfig, make_policy, measure, parity, random_qwen2, sample
from bench.plan import SHAPES, Machine, Shape, engine_bytes, plan, refit_seconds, shape_of, training_bytes, training_flops

ROOT = Path(__file__).resolve().parent.parent
SMALL = Shape(32, 2, 4, 2, 8, 64, 128, tied=True, qkv_bias=True)


@pytest.mark.parametrize("size, expected", [("0.5B", 494032768), ("1.5B", 1543714304), ("7B", 7615616512), ("72B", 72706203648)])
def test_parameters_are_those_transformers_counts(size, expected):
    with torch.device("meta"):
        model = random_qwen2(SHAPES[size])
    assert SHAPES[size].parameters == expected == sum(p.numel() for p in model.parameters())
    assert SHAPES[size].layer == sum(p.numel() for p in model.model.layers[0].parameters())
    assert SHAPES[size].largest == max(p.numel() for p in model.parameters())


def test_a_model_folder_says_its_own_shape(tmp_path):
    for tied in (True, False):
        shape = shape_of(tiny.save_model(tmp_path / str(tied), tied))
        assert shape.parameters == sum(p.numel() for p in tiny.llama(tied).parameters())


def test_training_state_is_16_bytes_per_parameter_over_the_shards():
    shape = SHAPES["7B"]
    for shards in (1, 8, 64):
        memory = training_bytes(shape, shards, 16384, True)
        assert sum(memory[k] for k in ("master weights", "gradients", "optimizer")) == pytest.approx(16 * shape.parameters / shards)
    assert training_bytes(shape, 8, 16384, False)["activations"] > 5 * training_bytes(shape, 8, 16384, True)["activations"]


def test_a_shared_prompt_is_counted_once():
    shape = SHAPES["1.5B"]
    shared, alone = training_flops(shape, 1, 8, 1000, 100, True), training_flops(shape, 8, 1, 1000, 100, True)
    assert 3 < alone / shared < 6
    # by hand: tokens times parameters of the layers times 2 flops times 4 passes, and the head on 800 tokens
    by_hand = 4 * 2 * shape.layers * shape.layer * 1800 + 4 * 2 * shape.embedding * 800
    assert by_hand < shared < 1.1 * by_hand


def test_the_engine_keeps_what_its_share_leaves():
    m = Machine(model="7B", utilization=0.6)
    memory = engine_bytes(SHAPES["7B"], m)
    assert memory["engine weights"] == pytest.approx(15.23e9, rel=1e-3)
    assert sum(memory.values()) == pytest.approx(0.6 * 80e9 - 2e9)


def test_refit_seconds_follow_the_slowest_link():
    shape = SHAPES["7B"]
    near, far = Machine(gpus=8, generation_gpus=2), Machine(gpus=16, generation_gpus=4)
    assert refit_seconds(shape, near, 6)["send"] == pytest.approx(15.23e9 / 300e9, rel=1e-3)
    assert refit_seconds(shape, far, 12)["send"] == pytest.approx(15.23e9 / 45e9, rel=1e-3)


def test_what_does_not_fit_says_so():
    assert plan(Machine(model="7B", gpus=8))["fits"]
    assert not plan(Machine(model="7B", gpus=1))["fits"]
    assert not plan(Machine(model="72B", gpus=64))["fits"]  # an engine on one GPU does not hold it
    assert plan(Machine(model="72B", gpus=64, tensor_parallel=4))["fits"]


def test_more_devices_train_faster_and_a_bottleneck_is_named():
    slow, fast = plan(Machine(gpus=8, prompts=256)), plan(Machine(gpus=64, prompts=256))
    assert fast["training seconds"] == pytest.approx(slow["training seconds"] / 8, abs=0.01)
    assert plan(Machine(gpus=8, generation_gpus=1, prompts=256))["bound by"] == "generation"
    assert plan(Machine(gpus=8, generation_gpus=7, prompts=256))["bound by"] == "training"


def test_the_command_prints_a_table_and_json():
    done = subprocess.run([sys.executable, "bench/plan.py", "--model", "7B", "--gpus", "64"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "64 train and generate in turn" in done.stdout
    assert json.loads(done.stdout.splitlines()[-1])["parameters"] == 7615616512
    wrong = subprocess.run([sys.executable, "bench/plan.py", "--model", "9B"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert wrong.returncode == 1 and "neither a folder with config.json nor one of 0.5B" in wrong.stderr


def test_the_gpu_bench_runs_on_a_cpu_with_a_small_model():
    torch.set_num_threads(1)
    config = BenchConfig(steps=1, prompts=2, samples=2, prompt_tokens=6, completion_tokens=5)
    found = measure(SMALL, config, torch.device("cpu"), torch.float32, peak_tflops=1.0)
    assert found["parameters"] == SMALL.parameters
    assert found["parity"] < 1e-3 and found["mismatch"] < 1e-3
    assert found["sampling tokens/s"] > 0 and found["training tokens/s"] > 0


def test_parity_notices_a_model_that_is_packed_wrongly(monkeypatch):
    policy = make_policy(SMALL, torch.device("cpu"), torch.float32, checkpointing=False)
    rollouts, _ = sample(policy, BenchConfig(prompts=1, samples=2, prompt_tokens=6, completion_tokens=5))
    assert parity(policy, rollouts) < 1e-3
    pack = policies.pack
    monkeypatch.setattr(policies, "pack", lambda rows, budget: [_without_prompt(b) for b in pack(rows, budget)])
    assert parity(policy, rollouts) > 1e-3


def _without_prompt(batch):
    batch.segments = [dataclasses.replace(s, prompt_start=0, prompt_end=0) for s in batch.segments]
    return batch


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_the_bench_says_so_and_succeeds():
    done = subprocess.run([sys.executable, "bench/gpu.py"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.splitlines()[0].startswith("no CUDA device")
    assert json.loads(done.stdout.splitlines()[-1]) == {"device": None}
