"""What one GPU does: the policy samples itself and trains on what it sampled, for random-weight Qwen2 models of two sizes.

    python bench/gpu.py                     # 0.5B and 1.5B; the last line is JSON
    python bench/gpu.py --sizes 0.5B --steps 5

For each size: packed attention by FlexAttention against plain attention, one sequence at a time; tokens per second of sampling (no vLLM:
the policy's own loop) and of training (forward, backward, optimizer step); model flops utilisation, with the flops of bench/plan.py;
peak memory, beside what bench/plan.py expects. vLLM's classes are imported first, since they change torch's compiler.
"""

import asyncio
import dataclasses
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import policy as policies
from bench.plan import GB, SHAPES, Shape, training_bytes, training_flops
from policy import PACKED, Policy
from rollout import HFEngine, Request, Rollout

PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0, "L40S": 362.0, "4090": 165.0}  # dense bfloat16


@dataclass
class BenchConfig:
    sizes: tuple[str, ...] = ("0.5B", "1.5B")  # of Qwen2.5, random weights
    steps: int = 3  # timed, after one that compiles
    prompts: int = 8
    samples: int = 8
    prompt_tokens: int = 256
    completion_tokens: int = 256
    tflops: float = 0.0  # peak of this GPU in bfloat16; 0: by its name


def random_qwen2(shape: Shape) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.intermediate, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, tie_word_embeddings=shape.tied, max_position_embeddings=4096,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


def make_policy(shape: Shape, device: torch.device, dtype: torch.dtype, checkpointing: bool = True) -> Policy:
    from transformers import AttentionInterface

    torch.manual_seed(0)
    AttentionInterface.register(PACKED, policies.packed_attention)
    with torch.device(device):
        model = random_qwen2(shape).float()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy = Policy(model, compute_dtype=dtype)
    policy.set_sampling(False)
    return policy


@torch.no_grad()
def parity(policy: Policy, rollouts: list[Rollout]) -> float:
    """Largest difference between packed log-probabilities, prompts shared, and the plain forward pass of each sequence alone."""
    plain = []
    policy.set_sampling(True)
    for r in rollouts:
        sequence = torch.tensor([r.prompt_ids + r.completion_ids], device=policy.device)
        with torch.autocast(policy.device.type, policy.compute_dtype, enabled=policy.compute_dtype != torch.float32):
            logits = policy.model(sequence, use_cache=False).logits[0, len(r.prompt_ids) - 1 : -1]
        logprobs = torch.log_softmax(logits.float() / policy.temperature, -1)
        plain.append(logprobs.gather(-1, torch.tensor(r.completion_ids, device=policy.device)[:, None])[:, 0])
    policy.set_sampling(False)
    (batch,) = policies.pack(rollouts, 10**9)
    return (policy(batch.to(policy.device))[0] - torch.cat(plain)).abs().max().item()


def sample(policy: Policy, config: BenchConfig) -> tuple[list[Rollout], float]:
    """Rollouts of random prompts, and the seconds they took. The policy samples itself."""
    generator = torch.Generator().manual_seed(1)
    vocabulary = policy.model.config.vocab_size
    prompts = torch.randint(0, vocabulary, (config.prompts, config.prompt_tokens), generator=generator).tolist()
    engine = HFEngine(policy.model, None, policy.set_sampling, max_batch=config.prompts * config.samples)

    async def all_prompts() -> Any:
        async with engine:
            requests = [Request(tuple(p), config.samples, config.completion_tokens, 1.0, seed=1000 * i) for i, p in enumerate(prompts)]
            return await asyncio.gather(*(engine.generate(r) for r in requests))

    began = time.perf_counter()
    groups = asyncio.run(all_prompts())
    seconds = time.perf_counter() - began
    rollouts = [Rollout(i, s, prompts[i], c.ids, [True] * len(c.ids), c.logprobs, c.versions) for i, group in enumerate(groups) for s, c in enumerate(group)]
    return rollouts, seconds


def measure(shape: Shape, config: BenchConfig, device: torch.device, dtype: torch.dtype, peak_tflops: float) -> dict[str, float]:
    """One size on one device. Times include everything between the first kernel and the last."""
    cuda = device.type == "cuda"
    policy = make_policy(shape, device, dtype)
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    rollouts, generation = sample(policy, config)
    difference = parity(policy, rollouts[: 2 * config.samples])
    optimizer = policies.make_optimizer(policy, policies.OptimConfig())
    batches = [b.to(device) for b in policies.pack(rollouts, 16384)]

    def step() -> None:
        for batch in batches:
            (policy(batch)[0].sum() / len(rollouts)).backward()
        policies.optimizer_step(policy, optimizer, 1e-6, 1.0)
        if cuda:
            torch.cuda.synchronize(device)

    step()  # compiles, and makes the optimizer's state
    began = time.perf_counter()
    for _ in range(config.steps):
        step()
    seconds = (time.perf_counter() - began) / config.steps
    sampled = sum(len(r.completion_ids) for r in rollouts)
    flops = training_flops(shape, config.prompts, config.samples, config.prompt_tokens, config.completion_tokens, checkpointing=True)
    expected = sum(training_bytes(shape, 1, max(len(b.input_ids) for b in batches), True, compute=dtype.itemsize).values())
    found = {
        "parameters": float(sum(p.numel() for p in policy.parameters())),
        "parity": difference,
        "mismatch": max((policies.score(policy, [b])[0] - b.logprobs_gen).abs().max().item() for b in batches[:1]),
        "sampling tokens/s": sampled / generation,
        "training tokens/s": sampled / seconds,
        "packed tokens/s": sum(len(b.input_ids) for b in batches) / seconds,
        "model flops utilisation": flops * 3 / 4 / seconds / (peak_tflops * 1e12),  # recomputation is no useful work
        "peak GB": torch.cuda.max_memory_allocated(device) / GB if cuda else float("nan"),
        "peak GB by formula": expected / GB,
    }
    return {name: round(value, 4) for name, value in found.items()}


def main(arguments: list[str]) -> None:
    import tyro

    config = tyro.cli(BenchConfig, args=arguments, description=__doc__)
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to measure here")
        print(json.dumps({"device": None}))
        return
    import vllm.distributed.weight_transfer  # noqa: F401

    device, name = torch.device("cuda", 0), torch.cuda.get_device_name(0)
    peak = config.tflops or next((t for key, t in PEAK_TFLOPS.items() if key in name), 0.0)
    if not peak:
        sys.exit(f"error: {name}: its bfloat16 peak is not known here, give it with --tflops")
    results = {}
    for size in config.sizes:
        results[size] = measure(SHAPES[size], config, device, torch.bfloat16, peak)
        print(size, *(f"{key} {value}" for key, value in results[size].items()), sep="\n    ")
        torch.cuda.empty_cache()
    print(json.dumps({"device": name, "peak_tflops": peak, "config": dataclasses.asdict(config), "results": results}))


if __name__ == "__main__":
    main(sys.argv[1:])
