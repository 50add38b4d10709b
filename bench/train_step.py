"""Forward, loss and backward of an optimizer step: packed policy against a plain padded computation, on SmolLM2-135M's shape.

    .venv/bin/python bench/train_step.py

Plain: transformers' model with sdpa on one right-padded batch with its attention mask, full logits, log_softmax over the
vocabulary, the same loss. Both run the same weights on the same rollouts, take turns, and must agree in loss and gradient.

    speedup_shared      4 prompts of 53 tokens, 8 completions of 16 each. Packed: 4 (53 + 128) = 724 positions, 512 logits;
                        padded: 32 x 69 = 2,208 positions, as many logits. Predicted 3, more where the head counts.
    speedup_packed      12 rollouts, each with its own prompt of 16..64 tokens and completion of 8..96. Predicted: padding over tokens,
                        about 1.6, a little more for logits of prompt tokens that are never computed.
    head_memory_ratio   peak memory of log-probabilities and their gradients beyond the inputs, chunked over dense, each in its own
                        process, for 4,096 tokens x 49,152 of vocabulary. Dense holds 805 MB of logits several times over;
                        chunked the gradient of the head (113 MB) and a few 64 MB chunks. Predicted under 0.2.
"""

import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from smollm2 import random_model
from torch import Tensor
from transformers import AttentionInterface

import cluster
import loss
from policy import PACKED, ChunkedLogprobs, Policy, PolicyConfig, pack, packed_attention
from rollout import Rollout

REPEATS = 3
HEAD = 4096, 49152, 576  # tokens, vocabulary, hidden size


def make_rollouts(shapes: list[tuple[int, list[int]]]) -> list[Rollout]:
    """Random rollouts: for each (prompt length, completion lengths) one group."""
    draw, rollouts = random.Random(0), []
    for index, (prompt, completions) in enumerate(shapes):
        prompt_ids = [draw.randrange(3, 49152) for _ in range(prompt)]
        for sample, n in enumerate(completions):
            ids = [draw.randrange(3, 49152) for _ in range(n)]
            rollouts.append(Rollout(index, sample, prompt_ids, ids, [True] * n, [-10.0] * n, [0] * n))
    return rollouts


def policy_loss(logprobs: Tensor, logprobs_gen: Tensor, row_ids: Tensor, rows: list[int]) -> Tensor:
    """PPO-clip, token mean, with advantages that alternate in sign."""
    advantages = torch.tensor([1.0 if row % 2 else -0.5 for row in rows])
    value, _ = loss.policy_loss(
        logprobs, logprobs.detach(), logprobs_gen, None, None, advantages[row_ids], torch.full((len(rows),), 1 / len(logprobs)), row_ids,
        objective=loss.ppo, level="token", clip_low=0.2, clip_high=0.28, correction=loss.no_correction, correction_low=0.0, correction_high=2.0,
        kl="k3", kl_coef=0.0, entropy_coef=0.0,
    )  # fmt: skip
    return value


def packed_step(policy: Policy, rollouts: list[Rollout]) -> float:
    (batch,) = pack(rollouts, PolicyConfig.micro_batch_tokens)
    logprobs, _ = policy(batch)
    value = policy_loss(logprobs, batch.logprobs_gen, batch.row_ids, batch.rows)
    value.backward()
    return value.item()


def plain_step(model: Any, rollouts: list[Rollout]) -> float:
    lengths = [len(r.prompt_ids) + len(r.completion_ids) for r in rollouts]
    rows, width = len(rollouts), max(lengths)
    input_ids, attention_mask = torch.zeros(rows, width, dtype=torch.long), torch.zeros(rows, width, dtype=torch.long)
    completion = torch.zeros(rows, width, dtype=torch.bool)
    for i, (r, n) in enumerate(zip(rollouts, lengths)):
        input_ids[i, :n], attention_mask[i, :n] = torch.tensor(r.prompt_ids + r.completion_ids), 1
        completion[i, len(r.prompt_ids) : n] = True
    logits = model(input_ids, attention_mask=attention_mask, use_cache=False).logits[:, :-1]  # (R, S - 1, V)
    logprobs = torch.log_softmax(logits, -1).gather(-1, input_ids[:, 1:, None])[..., 0][completion[:, 1:]]  # (N,)
    row_ids = torch.arange(rows).repeat_interleave(torch.tensor([len(r.completion_ids) for r in rollouts]))
    value = policy_loss(logprobs, torch.full_like(logprobs, -10.0), row_ids, list(range(rows)))
    value.backward()
    return value.item()


def compare(policy: Policy, name: str, rollouts: list[Rollout]) -> float:
    """How many times faster the packed step is; raises AssertionError where the two disagree."""

    def run(packed: bool) -> tuple[float, float]:
        policy.set_sampling(not packed)  # packed attention, or transformers' sdpa
        policy.zero_grad(set_to_none=True)
        start = time.perf_counter()
        value = packed_step(policy, rollouts) if packed else plain_step(policy.model, rollouts)
        return time.perf_counter() - start, value

    _, expected = run(packed=False)  # also the warm-up of both
    gradients = [p.grad.clone() for p in policy.parameters()]
    _, value = run(packed=True)
    scale = max(g.abs().max().item() for g in gradients)
    error = max((g - p.grad).abs().max().item() for g, p in zip(gradients, policy.parameters()))
    assert abs(value - expected) < 1e-5 and error < 1e-4 * scale, f"loss {value} and {expected}; gradients differ by {error}, the largest is {scale}"
    del gradients
    packed, plain = [], []
    for _ in range(REPEATS):
        packed.append(run(packed=True)[0])
        plain.append(run(packed=False)[0])
    ratio = statistics.median(plain) / statistics.median(packed)
    print(f"{name}: packed {statistics.median(packed):.2f} s, plain {statistics.median(plain):.2f} s, {ratio:.2f}x;"
          f" losses differ by {abs(value - expected):.0e}, gradients by {error / scale:.0e} of the largest", flush=True)  # fmt: skip
    return ratio


def peak_memory() -> int:
    """Bytes, the high-water mark of this program (that of getrusage would include the parent it was forked from)."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def head_memory(kind: str) -> int:
    """Bytes by which one forward and backward of the log-probabilities raises this process's peak. Run once per process."""
    tokens, vocabulary, size = HEAD
    hidden, weight = torch.randn(tokens, size).requires_grad_(), (torch.randn(vocabulary, size) / size**0.5).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,))
    torch.nn.functional.linear(hidden[:8], weight[:8]).sum().backward()  # the matrix library's own buffers
    hidden.grad = weight.grad = None
    before = peak_memory()
    if kind == "chunked":
        logprobs, _ = ChunkedLogprobs.apply(hidden, weight, None, targets, 1.0, None, PolicyConfig.head_chunk // vocabulary)
    else:
        logprobs = torch.log_softmax(hidden @ weight.T, -1).gather(-1, targets[:, None])[:, 0]
    logprobs.mean().backward()
    return peak_memory() - before


def main() -> None:
    cluster.set_threads(0)
    AttentionInterface.register(PACKED, packed_attention)
    policy = Policy(random_model())
    shared = compare(policy, "shared prompts, 4 x 53 tokens x 8 x 16", make_rollouts([(53, [16] * 8)] * 4))
    draw = random.Random(1)
    uneven = make_rollouts([(draw.randint(16, 64), [draw.randint(8, 96)]) for _ in range(12)])
    lengths = [len(r.prompt_ids) + len(r.completion_ids) for r in uneven]
    packed = compare(policy, f"own prompts, {sum(lengths)} tokens in 12 rows of up to {max(lengths)}", uneven)
    del policy
    peaks = {}
    for kind in ("chunked", "dense"):
        done = subprocess.run([sys.executable, __file__, kind], stdout=subprocess.PIPE, text=True, check=True)
        peaks[kind] = int(done.stdout)
        print(f"log-probabilities of {HEAD[0]} x {HEAD[1]}, {kind}: {peaks[kind] / 1e6:.0f} MB at the peak", flush=True)
    ratio = peaks["chunked"] / peaks["dense"]
    print(json.dumps({"speedup_shared": round(shared, 2), "speedup_packed": round(packed, 2), "head_memory_ratio": round(ratio, 3)}))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(head_memory(sys.argv[1]))
    else:
        main()
