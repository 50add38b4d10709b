"""The packed policy computes what a plain padded batch does, and its optimizer steps are whole steps."""

import copy
import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tiny import CHATML, llama, save_model, tokenizer

import grpo
import loss
import policy as policies
import shards
from config import Config, LossConfig
from log import Timer
from policy import Batch, ChunkedLogprobs, OptimConfig, Policy, PolicyConfig, learning_rate, load_policy, make_optimizer, optimizer_step, pack, score
from rollout import Rollout
from shaping import Rows
from task import UserError

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rollout(index: int, sample: int, prompt: list[int], completion: list[int], sampled: list[bool] | None = None) -> Rollout:
    """A rollout whose engine log-probabilities are made up."""
    sampled = sampled or [True] * len(completion)
    logprobs = [-4.0 - 0.1 * k if s else math.nan for k, s in enumerate(sampled)]
    return Rollout(index, sample, prompt, completion, sampled, logprobs, [0 if s else -1 for s in sampled])


def groups(*shapes: tuple[int, list[int]], vocabulary: int = 128, seed: int = 0) -> list[Rollout]:
    """Random rollouts: for each (prompt length, completion lengths) one group."""
    draw = np.random.default_rng(seed)
    ids = lambda n: draw.integers(3, vocabulary, n).tolist()
    return [rollout(i, s, prompt, ids(n)) for i, (p, lengths) in enumerate(shapes) for prompt in [ids(p)] for s, n in enumerate(lengths)]


def mixed() -> list[Rollout]:
    """Several groups: uneven lengths, one token as prompt, one token as completion, environment tokens in the middle and at an end, a row by itself."""
    rows = groups((1, [1, 4]), (7, [5, 1, 9]), (3, [6]), (5, [4, 4]))
    rows[4].sampled = [True, True, False, False, True, True, False, True, True]
    rows[3].sampled = [True]
    rows[2].sampled = [True, True, True, False, False]
    return [rollout(r.index, r.sample, r.prompt_ids, r.completion_ids, r.sampled) for r in rows]


def model_of(name: str):
    """Tiny random models, each with something of its own."""
    import transformers as t

    common = dict(vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                  max_position_embeddings=1024, initializer_range=0.15, pad_token_id=2, bos_token_id=1, eos_token_id=2)  # fmt: skip
    torch.manual_seed(0)
    if name == "llama":
        return llama(tied=True)
    if name == "llama untied":
        return llama(tied=False)
    if name == "qwen2":  # biases on queries, keys and values
        return t.Qwen2ForCausalLM(t.Qwen2Config(**common))
    if name == "qwen3":  # norms on queries and keys, a head size of its own
        return t.Qwen3ForCausalLM(t.Qwen3Config(**common, head_dim=12))
    if name == "mistral sliding":
        return t.MistralForCausalLM(t.MistralConfig(**common, sliding_window=4))
    if name == "gemma2":  # sliding and full layers in turn, soft-capped logits
        return t.Gemma2ForCausalLM(t.Gemma2Config(**common, head_dim=8, sliding_window=4, final_logit_softcapping=3.0, attn_logit_softcapping=None))
    if name == "phi":  # a head with bias
        common.pop("num_key_value_heads")
        model = t.PhiForCausalLM(t.PhiConfig(**common))
        torch.nn.init.normal_(model.lm_head.bias)
        return model
    if name == "gpt2":  # learned positions, dropout
        return t.GPT2LMHeadModel(t.GPT2Config(vocab_size=128, n_positions=1024, n_embd=32, n_layer=2, n_head=4, initializer_range=0.15))
    if name == "opt":  # dropout as a plain number, not as a module
        config = dict(vocab_size=128, hidden_size=32, word_embed_proj_dim=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, init_std=0.15)
        return t.OPTForCausalLM(t.OPTConfig(**config))
    raise KeyError(name)


MODELS = ["llama", "llama untied", "qwen2", "qwen3", "mistral sliding", "gemma2", "phi", "gpt2", "opt"]


def load(folder: Path, name: str = "llama", temperature: float = 1.0, double: bool = True, **config) -> Policy:
    if not (folder / "config.json").exists():
        model_of(name).save_pretrained(folder)
    policy = load_policy(str(folder), PolicyConfig(**config), temperature, CPU)
    return exact(policy.double()) if double else policy


def exact(policy: Policy) -> Policy:
    """transformers' RMS norms round to float32 whatever the model's type; equality to 1e-9 needs theirs without that."""
    for module in policy.modules():
        if type(module).__name__.endswith("RMSNorm"):
            eps = module.eps if hasattr(module, "eps") else module.variance_epsilon
            plus = float("Gemma" in type(module).__name__)  # Gemma multiplies by 1 + weight
            module.forward = lambda x, m=module, eps=eps, plus=plus: x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (m.weight + plus)
    return policy


def plain_scores(policy: Policy, rollouts: list[Rollout]) -> tuple[torch.Tensor, torch.Tensor]:
    """log-probabilities and entropies of the sampled tokens, row after row: one padded batch, an attention mask, the model's own logits."""
    policy.set_sampling(True)
    width = max(len(r.prompt_ids) + len(r.completion_ids) for r in rollouts)
    ids, mask = torch.zeros(len(rollouts), width, dtype=torch.long), torch.zeros(len(rollouts), width, dtype=torch.long)
    for i, r in enumerate(rollouts):
        sequence = r.prompt_ids + r.completion_ids
        ids[i, : len(sequence)], mask[i, : len(sequence)] = torch.tensor(sequence), 1
    logits = policy.model(ids, attention_mask=mask, use_cache=False).logits / policy.temperature
    policy.set_sampling(False)
    logp = torch.log_softmax(logits, -1)
    where = [(i, len(r.prompt_ids) + k) for i, r in enumerate(rollouts) for k, s in enumerate(r.sampled) if s]
    chosen = torch.stack([logp[i, t - 1, ids[i, t]] for i, t in where])
    entropy = torch.stack([-(logp[i, t - 1].exp() * logp[i, t - 1]).sum() for i, t in where])
    return chosen, entropy


def flat_index(batch: Batch, rollouts: list[Rollout]) -> torch.Tensor:
    """(N,) where each token of a micro-batch stands among the sampled tokens of all rollouts, row after row."""
    offsets = np.cumsum([0, *(sum(r.sampled) for r in rollouts)])
    return torch.tensor([offsets[row] + k for row in batch.rows for k in range(sum(rollouts[row].sampled))])


def packed_scores(policy: Policy, rollouts: list[Rollout], budget: int = 10**6) -> tuple[torch.Tensor, torch.Tensor]:
    total = sum(sum(r.sampled) for r in rollouts)
    logprobs, entropy = torch.full((total,), math.nan, dtype=torch.float64), torch.full((total,), math.nan, dtype=torch.float64)
    for batch in pack(rollouts, budget):
        where = flat_index(batch, rollouts)
        logprobs[where], entropy[where] = (x.double() for x in policy(batch))
    return logprobs, entropy


def loss_of(logprobs, entropy, where, row_ids, coefficients, advantages) -> torch.Tensor:
    """A loss with every term: ratios away from 1, truncated correction, KL to a reference, entropy. `where`: see flat_index."""
    made_up = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)[:, where]
    old, gen, ref = logprobs.detach().clamp(max=-1) + 0.3 * made_up.abs().neg()
    value, _ = loss.policy_loss(
        logprobs, old, gen, ref, entropy, advantages[row_ids], coefficients, row_ids, objective=loss.ppo, level="token", clip_low=0.2, clip_high=0.28,
        correction=loss.truncate, correction_low=0.0, correction_high=1.5, kl="k3", kl_coef=0.1, entropy_coef=0.05,
    )  # fmt: skip
    return value


def coefficients_of(rollouts: list[Rollout], reduction: str) -> torch.Tensor:
    tokens = torch.tensor([float(sum(r.sampled)) for r in rollouts], dtype=torch.float64)
    of_group = torch.stack([sum(n for n, other in zip(tokens, rollouts) if other.index == r.index) for r in rollouts])
    counts = loss.Counts(tokens.sum().item(), len(rollouts), len({r.index for r in rollouts}), 16)
    return loss.REDUCTIONS[reduction](tokens, of_group, counts)


def advantages_of(rollouts: list[Rollout]) -> torch.Tensor:
    return torch.tensor([math.sin(7 * r.index + 3 * r.sample + 1) for r in rollouts], dtype=torch.float64)


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
    policy.zero_grad(set_to_none=True)
    return found


def packed_loss(policy: Policy, rollouts: list[Rollout], budget: int = 10**6, reduction: str = "token_mean"):
    """Loss and gradients of an optimizer step, one backward per micro-batch."""
    total, coefficients, advantages = 0.0, coefficients_of(rollouts, reduction), advantages_of(rollouts)
    for batch in pack(rollouts, budget):
        logprobs, entropy = policy(batch)
        value = loss_of(logprobs, entropy, flat_index(batch, rollouts), batch.row_ids, coefficients[batch.rows], advantages[batch.rows])
        value.backward()
        total += value.item()
    return total, gradients(policy)


def plain_loss(policy: Policy, rollouts: list[Rollout], reduction: str = "token_mean"):
    logprobs, entropy = plain_scores(policy, rollouts)
    row_ids = torch.tensor([i for i, r in enumerate(rollouts) for _ in range(sum(r.sampled))])
    value = loss_of(logprobs, entropy, torch.arange(len(logprobs)), row_ids, coefficients_of(rollouts, reduction), advantages_of(rollouts))
    value.backward()
    return value.item(), gradients(policy)


def assert_same(found, expected, tolerance: float = 1e-9) -> None:
    assert found[0] == pytest.approx(expected[0], rel=tolerance, abs=1e-12)
    assert found[1].keys() == expected[1].keys()
    scale = max(g.abs().max() for g in expected[1].values())
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=tolerance, atol=tolerance * scale.item(), msg=lambda text, name=name: f"{name}: {text}")


# ------------------------------------------------------------------------------------------------ packed equals padded


@pytest.mark.parametrize("name", MODELS)
def test_packed_loss_and_gradient_equal_the_padded_computation(tmp_path, name):
    policy = load(tmp_path, name)
    rows = mixed()
    torch.testing.assert_close(packed_scores(policy, rows)[0], plain_scores(policy, rows)[0], rtol=1e-10, atol=1e-10)
    assert_same(packed_loss(policy, rows), plain_loss(policy, rows))


@pytest.mark.parametrize("name", ["llama", "mistral sliding", "gemma2"])
def test_completions_longer_than_short_go_one_by_one_to_the_same_result(tmp_path, name, monkeypatch):
    policy, rows = load(tmp_path, name), groups((5, [9, 3, 12]), (2, [4, 4, 5]))
    expected = plain_loss(policy, rows)
    for short in (1, 4, 10):
        monkeypatch.setattr(policies, "SHORT", short)
        assert_same(packed_loss(policy, rows), expected)


def test_a_completion_longer_than_the_real_limit_scores_as_in_the_padded_computation(tmp_path):
    policy, rows = load(tmp_path), groups((4, [policies.SHORT + 3, 2, policies.SHORT]))
    with torch.no_grad():
        torch.testing.assert_close(packed_scores(policy, rows)[0], plain_scores(policy, rows)[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_the_temperature_divides_the_logits_after_the_soft_cap(tmp_path, name):
    policy, rows = load(tmp_path, name, temperature=0.6), mixed()
    assert_same(packed_loss(policy, rows), plain_loss(policy, rows))


def test_checkpointed_activations_give_the_same_gradient(tmp_path):
    rows = mixed()
    expected = packed_loss(load(tmp_path), rows)
    assert_same(packed_loss(load(tmp_path, checkpointing=True), rows), expected)


def test_a_head_chunk_of_one_token_changes_nothing(tmp_path):
    rows = mixed()
    expected = packed_loss(load(tmp_path), rows)
    for chunk in (1, 3 * 128, 5 * 128 + 7):
        assert_same(packed_loss(load(tmp_path, head_chunk=chunk), rows), expected)


@pytest.mark.parametrize("name", ["llama", "phi", "gemma2"])
def test_bfloat16_computes_close_scores_and_float32_gradients(tmp_path, name):
    rows = mixed()
    exact = packed_scores(load(tmp_path, name), rows)[0]
    policy = load(tmp_path, name, double=False, dtype="bfloat16")
    (batch,) = pack(rows, 1000)
    logprobs, entropy = policy(batch)
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert (logprobs - exact).abs().max() < 0.15
    logprobs.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in policy.parameters())


def test_each_token_scores_as_the_last_of_its_own_forward_pass(tmp_path):
    policy = load(tmp_path)
    rows = groups((1, [3, 2]), (7, [4]))
    expected = []
    policy.set_sampling(True)
    with torch.no_grad():
        for r in rows:
            for k, token in enumerate(r.completion_ids):
                logits = policy.model(torch.tensor([r.prompt_ids + r.completion_ids[:k]])).logits[0, -1]
                expected.append(torch.log_softmax(logits, -1)[token])
    policy.set_sampling(False)
    torch.testing.assert_close(packed_scores(policy, rows)[0], torch.stack(expected), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("prompt", [1, 7])
def test_a_model_that_counts_is_sure_of_every_token_of_a_count(tmp_path, prompt):
    model = llama(tied=False, hidden=64, vocabulary=64)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(64))
        model.lm_head.weight.copy_(100 * torch.eye(64).roll(1, 0))  # id v predicts v + 1
    model.save_pretrained(tmp_path)
    policy = load(tmp_path)
    count = list(range(3, 30))
    rows = [rollout(0, s, count[:prompt], count[prompt : prompt + n]) for s, n in enumerate((5, 1, 8))]
    assert packed_scores(policy, rows)[0].abs().max() < 1e-6
    wrong = [rollout(0, 0, count[:prompt], count[prompt + 1 : prompt + 4])]  # one too far at its first token, then counting on
    scores = packed_scores(policy, wrong)[0]
    assert scores[0] < -100 and scores[1:].abs().max() < 1e-6


def test_a_row_is_not_changed_by_what_is_packed_beside_it(tmp_path):
    policy = load(tmp_path)
    rows = groups((4, [4, 4, 3]), (4, [4]))
    before = packed_scores(policy, rows)[0]
    changed = copy.deepcopy(rows)
    changed[1].completion_ids = [5, 5, 5, 5]  # a sibling
    changed[3].prompt_ids = [9, 9, 9, 9]  # another group
    after = packed_scores(policy, changed)[0]
    same = torch.tensor([True] * 4 + [False] * 4 + [True] * 3 + [False] * 4)
    torch.testing.assert_close(after[same], before[same], rtol=1e-12, atol=1e-12)
    assert (after[~same] - before[~same]).abs().min() > 1e-6


def test_the_end_token_is_trained_where_it_was_sampled_although_it_is_also_the_padding_token(tmp_path):
    policy, end = load(tmp_path, "llama untied"), 2
    rows = [rollout(0, 0, [5, end, 6], [7, 8, end]), rollout(0, 1, [5, end, 6], [7, 8, 9, 10])]  # an end inside the prompt; a row cut by length
    (batch,) = pack(rows, 100)
    assert batch.target_ids.tolist() == [7, 8, end, 7, 8, 9, 10] and len(batch.input_ids) == 3 + 3 + 4
    logprobs, _ = policy(batch)
    logprobs[2].backward()
    assert gradients(policy)["model.lm_head.weight"][end].abs().max() > 1e-3
    torch.testing.assert_close(packed_scores(policy, rows)[0], plain_scores(policy, rows)[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("window", [None, 5])
def test_the_block_mask_of_flex_attention_says_what_the_segments_say(window):
    torch.manual_seed(0)
    (batch,) = pack(mixed(), 1000)
    total = len(batch.input_ids)
    mask, padding = policies.block_mask_of(batch, window)
    assert (total + padding) % 128 == 0
    query, key, value = (torch.randn(1, h, total + padding, 16) for h in (4, 2, 2))
    found = policies.flex(query, key, value, mask, 0.25).transpose(1, 2)[:, :total]
    own = [x[:, :, :total].double() for x in (query, key, value)]
    expected, _ = policies.packed_attention(None, *own, None, scaling=0.25, segments=batch.segments, sliding_window=window)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------------ packing


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.lists(st.lists(st.booleans(), min_size=1, max_size=7), min_size=1, max_size=4)), min_size=1, max_size=5),
    st.integers(1, 60),
)
def test_every_sampled_token_is_packed_exactly_once_behind_its_own_past(shapes, budget):
    rows, token = [], iter(range(10**6))  # every token is another, so that a wrong neighbour shows
    for index, (size, masks) in enumerate(shapes):
        prompt = [next(token) for _ in range(size)]
        rows += [rollout(index, s, prompt, [next(token) for _ in sampled], sampled) for s, sampled in enumerate(masks)]
    batches = pack(rows, budget)
    assert sorted(row for b in batches for row in b.rows) == list(range(len(rows)))
    for b in batches:
        assert len(b.input_ids) <= budget or len(b.rows) == 1
        assert [s.start for s in b.segments] == [0, *(s.end for s in b.segments[:-1])] and b.segments[-1].end == len(b.input_ids)
        for n, row in enumerate(b.rows):
            r, mine = rows[row], b.row_ids == n
            sequence = r.prompt_ids + r.completion_ids
            expected = [(len(r.prompt_ids) + k, t) for k, (t, s) in enumerate(zip(r.completion_ids, r.sampled)) if s]
            assert list(zip((b.position_ids[b.source[mine]] + 1).tolist(), b.target_ids[mine].tolist())) == expected
            assert b.input_ids[b.source[mine]].tolist() == [sequence[position - 1] for position, _ in expected]
            assert b.logprobs_gen[mine].isfinite().all() and (b.versions[mine] == 0).all()


def test_a_shared_prompt_is_stored_once_and_rows_of_other_groups_never_share():
    rows = [rollout(0, 0, [5, 6], [7]), rollout(0, 1, [5, 6], [8]), rollout(1, 0, [5, 6], [9])]
    (batch,) = pack(rows, 100)
    assert batch.input_ids.tolist() == [5, 6, 7, 8, 5, 6, 9]


# ------------------------------------------------------------------------------------------------ invariance


@pytest.mark.parametrize("reduction", loss.REDUCTIONS)
def test_loss_and_gradient_do_not_depend_on_micro_batches_or_row_order(tmp_path, reduction):
    policy, rows = load(tmp_path), mixed()
    expected = plain_loss(policy, rows, reduction)
    for budget in (1, 9, 14, 30, 10**6):
        assert_same(packed_loss(policy, rows, budget, reduction), expected)


def test_loss_and_gradient_do_not_depend_on_the_order_of_rows(tmp_path):
    policy, rows = load(tmp_path), groups((3, [1, 2, 3]), (5, [4, 9]), (1, [7, 5]))
    advantages = advantages_of(rows)

    def run(order: list[int], budget: int):
        total = 0.0
        for batch in pack([rows[i] for i in order], budget):
            logprobs, entropy = policy(batch)
            mine = torch.tensor([order[row] for row in batch.rows])
            where = torch.cat([torch.arange(len(rows[i].completion_ids)) + 20 * i for i in mine.tolist()])
            value = loss_of(logprobs, entropy, where, batch.row_ids, coefficients_of(rows, "sequence_mean")[mine], advantages[mine])
            value.backward()
            total += value.item()
        return total, gradients(policy)

    expected = run([0, 1, 2, 3, 4, 5, 6], 1000)
    for order in ([6, 5, 4, 3, 2, 1, 0], [3, 0, 5, 1, 6, 2, 4], [2, 1, 0, 5, 6, 4, 3]):
        for budget in (8, 1000):
            assert_same(run(order, budget), expected)


@pytest.mark.parametrize("budget", [1, 8, 20, 1000])
def test_token_means_of_lengths_one_to_nine_divide_by_the_tokens_of_the_step(tmp_path, budget):
    policy, rows = load(tmp_path), groups(*[(2, [n]) for n in range(1, 10)])
    total = 0.0
    for batch in pack(rows, budget):
        total += (policy(batch)[0].sum() / 45).item()
    assert total == pytest.approx(plain_scores(policy, rows)[0].mean().item(), rel=1e-12)


# ------------------------------------------------------------------------------------------------ the head


def dense(hidden, weight, bias, targets, temperature, softcap):
    logits = torch.nn.functional.linear(hidden, weight, bias)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logp = torch.log_softmax(logits / temperature, -1)
    return logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


HEADS = [(1.0, None, False), (0.7, None, True), (1.3, 2.0, False), (1.0, 2.0, True)]


@pytest.mark.parametrize("temperature, softcap, has_bias", HEADS)
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_the_chunked_head_equals_the_dense_one_in_values_and_gradients(temperature, softcap, has_bias, chunk):
    torch.manual_seed(0)
    hidden, weight, bias, targets = torch.randn(7, 5).double(), torch.randn(11, 5).double(), torch.randn(11).double(), torch.randint(11, (7,))
    g, h = torch.randn(2, 7).double()
    results = []
    for function in (lambda *x: ChunkedLogprobs.apply(*x, chunk), dense):
        inputs = [x.clone().requires_grad_() for x in ([hidden, weight, bias] if has_bias else [hidden, weight])]
        logprobs, entropy = function(*inputs[:2], inputs[2] if has_bias else None, targets, temperature, softcap)
        (g * logprobs + h * entropy).sum().backward()
        results.append([logprobs.detach(), entropy.detach(), *(x.grad for x in inputs)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("temperature, softcap, has_bias", HEADS)
def test_the_chunked_head_passes_gradcheck(temperature, softcap, has_bias):
    torch.manual_seed(0)
    hidden, weight, bias = (torch.randn(*shape).double().requires_grad_() for shape in ((5, 3), (7, 3), (7,)))
    function = lambda *x: ChunkedLogprobs.apply(x[0], x[1], x[2] if has_bias else None, torch.tensor([0, 6, 3, 3, 1]), temperature, softcap, 2)
    assert torch.autograd.gradcheck(function, (hidden, weight, bias) if has_bias else (hidden, weight))


def test_a_frozen_head_gets_no_gradient_and_hidden_states_do():
    hidden, weight = torch.randn(4, 3).requires_grad_(), torch.randn(6, 3)
    logprobs, _ = ChunkedLogprobs.apply(hidden, weight, None, torch.tensor([0, 1, 2, 3]), 1.0, None, 2)
    logprobs.sum().backward()
    assert hidden.grad is not None and weight.grad is None


def test_scores_of_extreme_logits_are_finite():
    hidden, weight = torch.eye(3).requires_grad_(), (1e4 * torch.eye(3)).requires_grad_()
    logprobs, entropy = ChunkedLogprobs.apply(hidden, weight, None, torch.tensor([0, 1, 0]), 1.0, None, 2)
    (logprobs + entropy).sum().backward()
    assert logprobs.tolist() == [0.0, 0.0, -1e4] and entropy.tolist() == [0.0, 0.0, 0.0]
    assert hidden.grad.isfinite().all() and weight.grad.isfinite().all()


HEAD_MEMORY = """
import torch
from pathlib import Path
from policy import ChunkedLogprobs, PolicyConfig

def peak():
    return next(int(line.split()[1]) * 1024 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))

torch.set_num_threads(1)
hidden, weight, targets = torch.randn(4096, 32, requires_grad=True), torch.randn(32768, 32, requires_grad=True), torch.randint(32768, (4096,))

def run(tokens):
    logprobs, entropy = ChunkedLogprobs.apply(hidden[:tokens], weight, None, targets[:tokens], 1.0, None, PolicyConfig.head_chunk // 4 // 32768)
    (logprobs + entropy).sum().backward()

run(2)  # libraries' own buffers
start = peak()
run(4096)
print(peak() - start)
"""


def test_log_probabilities_and_their_gradients_never_hold_the_logits_of_a_batch():
    done = subprocess.run([sys.executable, "-c", HEAD_MEMORY], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    logits = 4096 * 32768 * 4  # 537 MB
    assert int(done.stdout) < 0.6 * logits  # a chunk is 1/32; the dense computation needs three times the logits


# ------------------------------------------------------------------------------------------------ models


def test_models_with_other_than_full_or_sliding_attention_are_refused_by_the_layer_name(tmp_path):
    from transformers import Lfm2Config, Lfm2ForCausalLM

    config = Lfm2Config(vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                        layer_types=["conv", "full_attention"])  # fmt: skip
    Lfm2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="Lfm2ForCausalLM.*conv"):
        load(tmp_path)


def test_state_space_models_are_refused(tmp_path):
    from transformers import MambaConfig, MambaForCausalLM

    MambaForCausalLM(MambaConfig(vocab_size=128, hidden_size=32, num_hidden_layers=1, state_size=4)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="MambaForCausalLM"):
        load(tmp_path)


def test_soft_capped_attention_scores_are_refused(tmp_path):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="softcap"):
        load(tmp_path)


def test_a_head_that_scales_its_logits_is_refused_and_not_scored_wrongly(tmp_path):
    from transformers import GraniteConfig, GraniteForCausalLM

    config = GraniteConfig(vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
                           logits_scaling=4.0, initializer_range=0.3)  # fmt: skip
    GraniteForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="GraniteForCausalLM scores packed tokens differently"):
        load(tmp_path)


def test_a_missing_model_is_an_error_that_names_the_flag(tmp_path):
    with pytest.raises(UserError, match="--model"):
        load_policy(str(tmp_path / "nothing"), PolicyConfig(), 1.0, CPU)


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
def test_dropout_is_zero_so_that_the_first_ratio_is_one(tmp_path, name):
    model = model_of(name)
    for key in ("attention_dropout", "dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "activation_dropout"):
        if hasattr(model.config, key):
            setattr(model.config, key, 0.5)
    model.save_pretrained(tmp_path)
    policy, rows = load(tmp_path), mixed()
    (batch,) = pack(rows, 1000)
    assert policy.model.training
    (old,) = score(policy, [batch])
    assert policy.model.training and not old.requires_grad
    assert ((policy(batch)[0] - old).exp() - 1).abs().max() == 0
    torch.testing.assert_close(packed_scores(policy, rows)[0], plain_scores(policy, rows)[0], rtol=1e-10, atol=1e-10)


def test_sampling_and_training_modes_alternate(tmp_path):
    policy = load(tmp_path)
    assert policy.model.training and policy.model.config._attn_implementation == policies.PACKED
    policy.set_sampling(True)
    assert not policy.model.training and policy.model.config._attn_implementation == "sdpa"
    policy.set_sampling(False)
    assert policy.model.training and policy.model.config._attn_implementation == policies.PACKED


# ------------------------------------------------------------------------------------------------ optimizer


def test_learning_rates_warm_up_and_follow_their_schedule():
    rates = lambda total, **c: [round(learning_rate(s, total, OptimConfig(lr=1.0, **c)), 6) for s in range(total)]
    assert rates(6, warmup=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert rates(3, warmup=0) == [1.0, 1.0, 1.0]
    assert rates(6, warmup=2, schedule="linear") == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert rates(6, warmup=2, schedule="cosine") == [0.5, 1.0, 1.0, round(0.5 + math.sqrt(0.125), 6), 0.5, round(0.5 - math.sqrt(0.125), 6)]
    assert rates(3, warmup=10) == [0.1, 0.2, 0.3]  # a run shorter than its warm-up
    assert learning_rate(99, 6, OptimConfig(lr=1.0, warmup=2, schedule="linear")) == 0.0
    assert learning_rate(99, 6, OptimConfig(lr=1.0, warmup=2, schedule="cosine")) == 0.0


def update(policy: Policy, rows: list[Rollout], advantages: list[float], weights: list[float] | None = None, **settings):
    """grpo's own update on given rows, with plain gradient descent of rate 1; returns the changes of the parameters and the metrics."""
    budget = settings.pop("micro_batch_tokens", 10**6)
    split = {k: settings.pop(k) for k in ("updates_per_batch", "passes") if k in settings}
    clip_norm = settings.pop("clip_norm", 0.0)
    config = Config(
        loss=LossConfig(mismatch_limit=1e9, **settings), optim=OptimConfig(lr=1.0, warmup=0, clip_norm=clip_norm),
        policy=PolicyConfig(micro_batch_tokens=budget), **split,
    )  # fmt: skip
    before = {n: p.detach().clone() for n, p in policy.named_parameters()}
    unused = {f.name: None for f in dataclasses.fields(grpo.Run) if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING}
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    run = grpo.Run(**unused | dict(config=config, policy=policy, optimizer=optimizer, timer=Timer(), total=10))
    zeros = np.zeros(len(rows))
    metrics = grpo.update(run, Rows(rows, zeros, np.array(advantages), np.array(weights or zeros + 1)))
    return {n: p.detach() - before[n] for n, p in policy.named_parameters()}, metrics.result()


def assert_equal_changes(found, expected, tolerance: float = 1e-6) -> None:
    scale = max(c.abs().max().item() for c in expected.values())
    assert scale > 0
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=tolerance * scale)


def test_micro_batches_that_cancel_are_clipped_once_on_their_sum(tmp_path):
    rows = groups((3, [4]), (3, [4]), (3, [4]), (3, [4]), (2, [3]))
    for r in rows[1:4]:
        r.prompt_ids, r.completion_ids = rows[0].prompt_ids, rows[0].completion_ids
    advantages = [100.0, -100.0, 100.0, -100.0, 1.0]  # the first four cancel
    free, _ = update(load(tmp_path), rows, advantages, micro_batch_tokens=7)
    norm = math.sqrt(sum(c.double().square().sum().item() for c in free.values()))
    found, metrics = update(load(tmp_path), rows, advantages, micro_batch_tokens=7, clip_norm=norm / 3)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-6)  # before clipping
    assert_equal_changes(found, {n: c / 3 for n, c in free.items()}, 1e-5)
    loose, _ = update(load(tmp_path), rows, advantages, micro_batch_tokens=7, clip_norm=2 * norm)
    assert_equal_changes(loose, free)


def test_every_micro_batch_counts_even_where_the_last_is_masked(tmp_path):
    rows, advantages = groups((3, [4]), (3, [2]), (3, [6]), (3, [1])), [1.0, -0.5, 0.7, 2.0]
    for weights in ([1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 0.0], [0.0, 1.0, 1.0, 1.0]):
        whole, _ = update(load(tmp_path), rows, advantages, weights)
        for budget in (1, 10):
            parts, _ = update(load(tmp_path), rows, advantages, weights, micro_batch_tokens=budget)
            assert_equal_changes(parts, whole)
        kept = [i for i, w in enumerate(weights) if w]
        alone, _ = update(load(tmp_path), [rows[i] for i in kept], [advantages[i] for i in kept])
        assert_equal_changes(whole, alone)


def test_each_of_two_updates_divides_by_its_own_rows(tmp_path):
    rows, advantages = groups((3, [4, 2]), (3, [2, 9]), (2, [6, 1]), (5, [1, 1])), [1.0, -1.0, 0.3, -0.4, 2.0, -2.0, 1.0, 0.5]
    first, _ = update(load(tmp_path), rows[:4], advantages[:4])
    for budget in (1, 12, 1000):
        policy = load(tmp_path)
        both, _ = update(policy, rows, advantages, updates_per_batch=2, micro_batch_tokens=budget, objective="reinforce")
        then = load(tmp_path)
        update(then, rows[:4], advantages[:4], objective="reinforce")
        second, _ = update(then, rows[4:], advantages[4:], objective="reinforce")
        assert_equal_changes(both, {n: first[n] + second[n] for n in first}, 1e-5)


def test_the_second_pass_measures_its_ratio_from_log_probabilities_frozen_before_the_first(tmp_path):
    rows, advantages = groups((3, [4, 2]), (2, [3, 5])), [3.0, -3.0, 2.0, -2.0]
    policy = load(tmp_path)
    (batch,) = pack(rows, 1000)
    (old,) = score(policy, [batch])
    first, _ = update(policy, rows, advantages)
    logprobs, _ = policy(batch)  # by hand: gradient of the clipped objective against the stored ones
    ratio, a = (logprobs - old).exp(), torch.tensor(advantages, dtype=torch.float64)[batch.row_ids]
    by_hand = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.28) * a).sum() / len(old)
    by_hand.backward()
    second = gradients(policy)
    found, metrics = update(load(tmp_path), rows, advantages, passes=2)
    assert metrics["ratio_max"] > 1.28 and metrics["clip_high_fraction"] + metrics["clip_low_fraction"] > 0
    assert_equal_changes(found, {n: first[n] - second[n] for n in first}, 1e-5)


def test_a_gradient_that_is_not_finite_changes_nothing(tmp_path):
    policy = load(tmp_path, double=False)
    optimizer = make_optimizer(policy, OptimConfig(lr=0.1))
    before = copy.deepcopy(policy.state_dict())
    for bad in (math.inf, math.nan):
        for p in policy.parameters():
            p.grad = torch.ones_like(p)
        next(policy.parameters()).grad[0, 0] = bad
        with pytest.raises(FloatingPointError, match="no optimizer step"):
            optimizer_step(policy, optimizer, 0.1, 1.0)
        assert not optimizer.state and all(torch.equal(before[n], t) for n, t in policy.state_dict().items())


def test_a_loss_that_is_not_finite_stops_before_the_optimizer_step(tmp_path):
    policy, rows = load(tmp_path), groups((3, [2, 2]))
    before = copy.deepcopy(policy.state_dict())
    with pytest.raises(FloatingPointError, match="no optimizer step"):
        update(policy, rows, [math.inf, -1.0])
    assert all(torch.equal(before[n], t) for n, t in policy.state_dict().items())


def test_master_weights_are_float32_and_move_at_small_learning_rates(tmp_path):
    model_of("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    policy = load(tmp_path, double=False, dtype="bfloat16")
    assert all(p.dtype == torch.float32 for p in policy.parameters())
    optimizer = make_optimizer(policy, OptimConfig())
    norm = policy.model.model.norm.weight  # all ones, where half a unit of bfloat16 is 4e-3
    for _ in range(50):
        for p in policy.parameters():
            p.grad = torch.ones_like(p)
        optimizer_step(policy, optimizer, 1e-6, 1.0)
    torch.testing.assert_close(norm.detach(), torch.full_like(norm, 1 - 5e-5), rtol=0, atol=5e-6)
    assert all(state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32 for state in optimizer.state.values())


def test_one_step_of_the_optimizer_is_adamw_by_hand_with_decay_on_matrices_alone(tmp_path):
    policy = load(tmp_path)
    optimizer = make_optimizer(policy, OptimConfig(lr=1.0, weight_decay=0.1, betas=(0.9, 0.95)))
    before = {n: p.detach().clone() for n, p in policy.named_parameters()}
    for p in policy.parameters():
        p.grad = torch.full_like(p, 0.5)
    count = sum(p.numel() for p in policy.parameters())
    assert optimizer_step(policy, optimizer, 0.01, 0.0) == pytest.approx(0.5 * math.sqrt(count))
    for name, p in policy.named_parameters():
        decayed = before[name] * (1 - 0.01 * 0.1) if p.ndim >= 2 else before[name]
        torch.testing.assert_close(p.detach(), decayed - 0.01 * 0.5 / (0.5 + 1e-8), rtol=0, atol=1e-12)  # first step: m / sqrt(v) = g / |g|
        assert p.grad is None
        assert optimizer.state[p]["step"] == 1 and optimizer.state[p]["exp_avg"].allclose(torch.tensor(0.05, dtype=p.dtype))


def test_a_bfloat16_gradient_is_clipped_in_place_to_the_norm():
    module = torch.nn.Linear(100, 100, bias=False, dtype=torch.bfloat16)
    before = module.weight.detach().clone()
    module.weight.grad = torch.ones_like(module.weight)  # norm 100
    assert optimizer_step(module, torch.optim.SGD(module.parameters(), lr=1.0), 1.0, 1.0) == pytest.approx(100, rel=1e-2)
    assert (before - module.weight.detach()).float().norm().item() == pytest.approx(1.0, rel=0.05)


# ------------------------------------------------------------------------------------------------ export


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_exported_model_loads_anywhere_with_equal_logits(tmp_path, tied, dtype):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy = load_policy(save_model(tmp_path / "start", tied), PolicyConfig(), 1.0, CPU)
    optimizer, rows = make_optimizer(policy, OptimConfig()), mixed()
    for _ in range(2):
        (batch,) = pack(rows, 1000)
        policy(batch)[0].sum().backward()
        optimizer_step(policy, optimizer, 1e-3, 1.0)
    for write in shards.snapshot(policy.model, optimizer, {}, dtype, copied=False):
        write(tmp_path)
    (tmp_path / "model").rename(tmp_path / "out")
    for name, data in shards.side_files(policy.model, tokenizer(), dtype).items():
        (tmp_path / "out" / name).write_bytes(data)

    assert policy.model.config._attn_implementation == policies.PACKED  # training goes on as before
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and policies.PACKED not in json.dumps(config)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert ("lm_head.weight" in stored) == (not tied) and {t.dtype for t in stored.values()} == {dtype}
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == dtype and (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert model.generation_config.eos_token_id == 2
    policy.set_sampling(True)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        for p in policy.model.parameters():
            p.copy_(p.to(dtype))
    torch.testing.assert_close(model.float().eval()(ids).logits, policy.model(ids).logits, rtol=0, atol=1e-6)
    again = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert again.chat_template == CHATML and again.eos_token_id == 2
    assert load_policy(str(tmp_path / "out"), PolicyConfig(), 1.0, CPU).model.dtype == torch.float32
