"""Packed attention by FlexAttention equals plain attention, values and gradients, with vLLM's compiler settings in place."""

import dataclasses

import pytest
import tiny
import torch

import policy as policies
from bench.gpu import SHAPES, make_policy, parity
from policy import PACKED, Policy
from rollout import Rollout

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def rollouts(lengths=((40, 9), (40, 33), (130, 200), (5, 1)), vocabulary=100):
    made = []
    for index, (prompt, completion) in enumerate(lengths):
        ids = [(7 * i + index) % vocabulary + 1 for i in range(prompt + 3 * completion)]
        for s in range(3):
            own = ids[prompt + s * completion : prompt + (s + 1) * completion]
            made.append(Rollout(index, s, ids[:prompt], own, [True] * len(own), [0.0] * len(own), [0] * len(own)))
    return made


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2), (14, 2), (12, 2)])  # Qwen2.5 0.5B and 1.5B have no power of two
def test_flex_attention_equals_plain_attention(heads, kv_heads):
    import vllm.distributed.weight_transfer  # noqa: F401

    shape = dataclasses.replace(SHAPES["0.5B"], hidden=64 * heads, heads=heads, kv_heads=kv_heads, head=64, layers=2, intermediate=128, vocabulary=256)
    policy = make_policy(shape, torch.device("cuda"), torch.float32, checkpointing=False)
    torch.backends.cuda.matmul.allow_tf32 = False
    assert parity(policy, rollouts()) < 1e-3


def test_gradients_equal_those_of_the_cpu():
    gradients = []
    for device in ("cpu", "cuda"):
        torch.backends.cuda.matmul.allow_tf32 = False
        policy = Policy(tiny.llama(hidden=64).to(device))
        from transformers import AttentionInterface

        AttentionInterface.register(PACKED, policies.packed_attention)
        policy.set_sampling(False)
        (batch,) = policies.pack(rollouts(), 10**6)
        policy(batch.to(torch.device(device)))[0].mean().backward()
        gradients.append({name: p.grad.cpu() for name, p in policy.named_parameters()})
    for name, gradient in gradients[0].items():
        assert (gradient - gradients[1][name]).norm() <= 1e-3 * gradient.norm() + 1e-6, name


def test_new_batch_lengths_do_not_compile_without_end():
    policy = Policy(tiny.llama(hidden=64).cuda(), compute_dtype=torch.bfloat16)
    policy.set_sampling(False)
    torch._dynamo.config.recompile_limit = 16
    for completion in range(3, 60, 4):
        assert parity(policy, rollouts(((20, completion),))) < 0.3
