"""Against vLLM's real server, on CPU, with a tiny random Llama: one server for all tests of the refit, one more for the command line."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch

import cluster
import policy as policies
from cluster import EngineConfig
from rollout import DeadlineConfig, EngineError, Request, Rollout, VLLMEngine

pytestmark = pytest.mark.skipif(not cluster.vllm_installed(), reason="vLLM is not installed")
ROOT = Path(__file__).resolve().parent.parent
PROMPTS = [tuple((7 * i + k) % 100 + 3 for k in range(40)) for i in range(8)]  # longer than a cache block of 32 tokens, so they are cached


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """(policy, refit, engine) around one running server whose worker can be told to forget the tied head."""
    folder = tmp_path_factory.mktemp("served")
    model = tiny.save_model(folder / "model")
    plan = cluster.make_plan("vllm", 0, 1, True)
    os.environ["PYTHONPATH"] = str(ROOT / "tests")  # where the server's worker finds the extension
    config = EngineConfig(max_num_seqs=64, cpu_cache_gb=1)
    server, key = cluster.start_vllm(model, plan, config, "float32", 256, folder / "engine.log", extension="leaky_transfer.Extension")
    with server:
        policy = policies.load_policy(model, policies.PolicyConfig(), 1.0, torch.device("cpu"))
        server.wait_until_healthy(300)
        refit = cluster.Refit(server.url, policy, torch.float32, "gloo", DeadlineConfig())
        yield policy, refit, VLLMEngine(server.url, key, 60, server.check_alive)


def perturb(policy, seed=0):
    """Weights move as in a few hundred optimizer steps: enough to be seen in every log-probability."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=generator))


def generate(engine, temperature=1.0, seed=0, n=4, max_tokens=16, prompts=PROMPTS):
    async def all_prompts():
        async with engine:
            requests = [Request(p, n, max_tokens, temperature, seed + 100 * i, stop_ids=(2,)) for i, p in enumerate(prompts)]
            return await asyncio.gather(*(engine.generate(r) for r in requests))

    return asyncio.run(all_prompts())


def disagreement(policy, completions, temperature=1.0, prompts=PROMPTS):
    """Largest difference between the engine's log-probabilities and the trainer's, and the number of tokens compared."""
    rollouts = [
        Rollout(i, s, list(p), c.ids, [True] * len(c.ids), c.logprobs, c.versions) for i, (p, group) in enumerate(zip(prompts, completions)) for s, c in enumerate(group)
    ]
    policy.temperature = temperature
    worst, count = 0.0, 0
    for batch in policies.pack(rollouts, 4096):
        (logprobs,) = policies.score(policy, [batch])
        worst, count = max(worst, (logprobs - batch.logprobs_gen).abs().max().item()), count + len(logprobs)
    policy.temperature = 1.0
    return worst, count


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_engine_and_trainer_agree_after_a_refit_on_prompts_cached_before_it(served, temperature):
    policy, refit, engine = served
    refit(1)
    generate(engine)  # fills the prefix cache with keys of the weights before the update
    perturb(policy, seed=int(10 * temperature))
    refit(2)
    completions = generate(engine, temperature)
    worst, count = disagreement(policy, completions, temperature)
    assert count > 300
    assert worst < 1e-3
    assert all(v == 2 for group in completions for c in group for v in c.versions)


@pytest.mark.parametrize("left_out", ["transfer", "packing", "cache", "version"])
def test_leaving_out_any_part_of_a_refit_is_seen(served, left_out):
    policy, refit, engine = served
    refit(1)
    generate(engine)
    perturb(policy, seed=3)
    if left_out == "transfer":
        refit.transfer = lambda: None
    if left_out == "cache":
        refit.pause = lambda: refit.call("POST", "pause?mode=keep&clear_cache=false")
    if left_out == "version":
        refit.set_version = lambda version: None
    if left_out == "packing":
        refit.call("POST", "collective_rpc", {"method": "leave_out_packing", "args": [True]})
    try:
        refit(2)
        completions = generate(engine)
    finally:
        for name in ("transfer", "pause", "set_version"):
            refit.__dict__.pop(name, None)
        refit.call("POST", "collective_rpc", {"method": "leave_out_packing", "args": [False]})
    worst, _ = disagreement(policy, completions)
    versions = {v for group in completions for c in group for v in c.versions}
    if left_out == "version":
        assert versions == {1}
    else:
        assert worst > 1e-2


def test_a_seed_repeats_its_samples_and_samples_of_a_group_differ(served):
    policy, refit, engine = served
    refit(5)
    first, again, other = generate(engine, seed=7), generate(engine, seed=7), generate(engine, seed=8)
    assert [[c.ids for c in g] for g in first] == [[c.ids for c in g] for g in again]
    assert [[c.ids for c in g] for g in first] != [[c.ids for c in g] for g in other]
    assert len({tuple(c.ids) for c in first[0]}) > 1


def test_more_prompts_at_once_than_one_engine_step_takes_do_not_end_the_server(served):
    """Seeded requests prefilled in two parts kill vLLM's CPU worker: it rewinds a generator that cannot be rewound."""
    policy, refit, engine = served
    refit(6)
    prompts = [tuple((11 * i + 5 * k) % 97 + 3 for k in range(60 + i % 7)) for i in range(90)]  # 5,600 tokens, 2,048 a step
    completions = generate(engine, n=1, max_tokens=4, prompts=prompts)
    worst, count = disagreement(policy, completions, prompts=prompts)
    assert count > 90 and worst < 1e-3


def test_a_prompt_beyond_the_context_is_refused_at_once_with_the_servers_reason(served):
    _, refit, engine = served
    refit(6)
    with pytest.raises(EngineError, match="refused a request of 300 tokens"):
        generate(engine, prompts=[tuple([5] * 300)])


def test_a_tiny_model_learns_through_the_command_line_and_leaves_what_transformers_loads(tmp_path):
    model = tiny.save_model(tmp_path / "model")
    out = tmp_path / "run"
    command = [sys.executable, "grpo.py", "--model", model, "--task", f"{ROOT}/tests/toy_tasks.py:digits", "--engine", "vllm", "--out", str(out)]
    command += "--steps 6 --prompts-per-step 8 --samples-per-prompt 8 --sampling.max-completion-tokens 8 --sampling.max-prompt-tokens 64".split()
    command += "--optim.lr 1e-2 --optim.warmup 1 --eval.every 3 --eval.samples 4 --engine.cpu-cache-gb 1 --policy.threads 1".split()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.1
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows] == list(range(7))
    assert max(r["mismatch_k3"] for r in rows[1:]) < 1e-5
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = out / "checkpoints" / "step_6" / "model"
    assert AutoModelForCausalLM.from_pretrained(folder).num_parameters() > 0
    assert AutoTokenizer.from_pretrained(folder).chat_template == tiny.CHATML
    assert not [p for p in Path("/proc").glob("[0-9]*/cmdline") if str(out) in p.read_bytes().decode(errors="replace") or model in p.read_bytes().decode(errors="replace")]
