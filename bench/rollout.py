"""Tokens per second of our rollouts against `vllm.LLM.generate`: same model, prompts, seeds, stop ids, engine settings, machine.

    .venv/bin/python bench/rollout.py

Ours: Sampler and VLLMEngine over HTTP to the server that cluster.py starts, token ids in and out with log-probabilities, through
to finished Rollouts. Theirs: the engine inside one process, given the same requests as one list. The engines are never alive
at the same time; each samples one batch as warm-up, then the same batches of prompts neither has seen. Tokens per second are
the median over batches.

    rollout_vs_generate   predicted 0.95 to 1.05: HTTP and JSON cost about 1 ms a request, and a step of the engine 100 ms.
"""

import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from smollm2 import folder

import cluster
from grpo import load_tokenizer
from rollout import DeadlineConfig, Renderer, Sampler, SamplingConfig, VLLMEngine, sample_groups, seed_of
from task import Example, SingleTurn, Task

PROMPTS, SAMPLES, TOKENS, BATCHES = 8, 8, 32, 4  # per batch; the first batch is the warm-up
LENGTH = 256  # of prompt and completion, at most


def make_examples() -> list[Example]:
    """Prompts of about 50 tokens that share no beginning."""
    draw = random.Random(0)
    contents = ["".join(f"{draw.randrange(10)} + {draw.randrange(10)}, " for _ in range(8)) for _ in range(PROMPTS * BATCHES)]
    return [Example([{"role": "user", "content": content}]) for content in contents]


def ours(model: str, aside: Path, renderer: Renderer) -> list[float]:
    import requests

    plan = cluster.make_plan("vllm", 0, 1, cluster.vllm_installed())
    server, key = cluster.start_vllm(model, plan, cluster.EngineConfig(), "float32", LENGTH, aside / "engine.log")
    examples, speeds = make_examples(), []
    task = Task("silent", examples, lambda: SingleTurn(lambda text, example: 0.0))
    with server:
        server.wait_until_healthy(600)
        requests.post(f"{server.url}/update_weight_version", json={"new_version": "0"}, timeout=60).raise_for_status()  # tokens carry it
        engine = VLLMEngine(server.url, key, 600, server.check_alive)
        sampler = Sampler(engine, renderer, task, SamplingConfig(max_completion_tokens=TOKENS), DeadlineConfig(), seed=0)
        for batch in range(BATCHES):
            prompts = [(i, examples[i]) for i in range(batch * PROMPTS, (batch + 1) * PROMPTS)]
            start = time.perf_counter()
            groups = asyncio.run(sample_groups(sampler, prompts, SAMPLES))
            speeds.append(sum(len(r.completion_ids) for group in groups for r in group) / (time.perf_counter() - start))
    return speeds


def theirs(request: dict[str, Any]) -> list[float]:
    """In a process of its own."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        request["model"], dtype="float32", max_model_len=LENGTH, max_num_seqs=cluster.EngineConfig.max_num_seqs, enforce_eager=True, block_size=32,
        logprobs_mode="processed_logprobs", generation_config="vllm",
    )  # fmt: skip
    speeds = []
    for batch in range(BATCHES):
        part = range(batch * PROMPTS, (batch + 1) * PROMPTS)
        settings = [
            SamplingParams(n=SAMPLES, max_tokens=TOKENS, temperature=1.0, seed=request["seeds"][i], stop_token_ids=request["stop_ids"], logprobs=0,
                           skip_special_tokens=False)
            for i in part
        ]  # fmt: skip
        start = time.perf_counter()
        answers = engine.generate([{"prompt_token_ids": request["prompts"][i]} for i in part], settings, use_tqdm=False)
        speeds.append(sum(len(c.token_ids) for a in answers for c in a.outputs) / (time.perf_counter() - start))
    return speeds


def main() -> None:
    cluster.set_threads(0)
    with tempfile.TemporaryDirectory() as name:
        aside = Path(name)
        model = folder(aside / "model")
        renderer = Renderer(load_tokenizer(model)[0], "text")
        prompts = [renderer.prompt(e.messages) for e in make_examples()]
        request = {"model": model, "prompts": prompts, "stop_ids": renderer.stop_ids, "seeds": [seed_of(0, "train", i, 0, 0) for i in range(len(prompts))]}
        (aside / "request.json").write_text(json.dumps(request))
        print(f"{PROMPTS} prompts of about {len(prompts[0])} tokens x {SAMPLES} samples of {TOKENS} tokens, {BATCHES} batches; vllm.LLM.generate", flush=True)
        environment = cluster.engine_environment(os.environ, "", cluster.EngineConfig(), cpu=True)
        with (aside / "generate.log").open("w") as log:
            command = [sys.executable, __file__, str(aside / "request.json"), str(aside / "speeds.json")]
            if subprocess.run(command, env=environment, stdout=log, stderr=log).returncode:
                sys.exit("vllm.LLM.generate failed:\n" + (aside / "generate.log").read_text()[-3000:])
        generate = json.loads((aside / "speeds.json").read_text())
        print("our rollouts, over HTTP", flush=True)
        rollouts = ours(model, aside, renderer)
    for what, speeds in (("LLM.generate", generate), ("rollouts", rollouts)):
        print(f"{what}: {statistics.median(speeds[1:]):.0f} tokens/s (warm-up {speeds[0]:.0f}; {', '.join(f'{s:.0f}' for s in speeds[1:])})")
    print(json.dumps({"rollout_vs_generate": round(statistics.median(rollouts[1:]) / statistics.median(generate[1:]), 3)}))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[2]).write_text(json.dumps(theirs(json.loads(Path(sys.argv[1]).read_text()))))
    else:
        main()
