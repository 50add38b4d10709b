"""The policy: a transformers model, trained on packed tokens without padding, each shared prompt computed once.

    pack       rollouts of a group become one stretch of tokens: the prompt once, then every completion (its positions continue
               after the prompt; its tokens attend to themselves and to the prompt, never to a sibling)
    forward    backbone over the packed tokens, then the head on the N sampled tokens alone, in chunks: no (N, V) tensor of a batch
    step       sum of micro-batch gradients, one global norm, one clip, AdamW on float32 master weights

    T packed tokens, N sampled tokens, R rollouts of a micro-batch, V vocabulary, D hidden size, H heads

The shift by one (the hidden state at t predicts token t + 1) happens once, in `pack`: `source[n]` is the position whose hidden
state predicts target n.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sharding
from ranks import Ranks, balance
from rollout import Rollout
from task import UserError

PACKED = "grpo_packed"  # the name under which our attention is registered with transformers


@dataclass
class PolicyConfig:
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of the computation; auto: bfloat16 on CUDA, float32 on CPU; master weights are float32
    micro_batch_tokens: int = 16384  # packed tokens per forward and backward; results do not depend on it, memory does
    head_chunk: int = 2**24  # logits held at once (tokens x vocabulary); 2^24 in float32 are 64 MB
    shard: bool = True  # with several processes: parameters, gradients and optimizer state in shards (FSDP2); off: a whole copy on each (DDP)
    offload: bool = False  # shards wait on the CPU and visit the device layer by layer; the optimizer steps on the CPU
    checkpointing: bool = False  # recompute activations in the backward pass: about 30 % more compute, much less memory
    threads: int = 0  # CPU threads of the trainer; 0: all cores of this process


@dataclass
class OptimConfig:
    lr: float = 1e-6  # peak learning rate of AdamW
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    warmup: int = 10  # optimizer steps of linear warm-up
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # after the warm-up; linear and cosine reach 0 after the last step
    clip_norm: float = 1.0  # global gradient norm is clipped to this; 0: never


# ------------------------------------------------------------------------------------------------ packing


@dataclass(frozen=True)
class Segment:
    """A stretch of packed tokens. Each attends to its own past, and to all of the segment [prompt_start, prompt_end) before it."""

    start: int
    end: int
    prompt_start: int = 0
    prompt_end: int = 0  # equal to prompt_start: no prompt of its own


@dataclass
class Batch:
    """One micro-batch. `rows` says which rollout of the optimizer step each of its R rows is."""

    input_ids: Tensor  # (T,)
    position_ids: Tensor  # (T,) position inside its own sequence
    segments: list[Segment]
    source: Tensor  # (N,) index into T of the hidden state that predicts target n
    target_ids: Tensor  # (N,)
    row_ids: Tensor  # (N,) 0..R-1
    rows: list[int]  # R
    logprobs_gen: Tensor  # (N,)
    versions: Tensor  # (N,)
    logprobs_old: Tensor | None = None  # (N,) filled in by the step
    logprobs_ref: Tensor | None = None  # (N,)

    def to(self, device: torch.device) -> "Batch":
        return Batch(**{k: v.to(device) if isinstance(v, Tensor) else v for k, v in self.__dict__.items()})


def pack(rollouts: Sequence[Rollout], budget: int) -> list[Batch]:
    """Micro-batches of at most `budget` packed tokens (one rollout alone may exceed it), neighbours of one group sharing their prompt.

    Args:
        rollouts: the rows of an optimizer step, members of a group next to each other.

    Two completions [7, 8] and [9] of the prompt [1, 2, 3]:

    >>> a = Rollout(0, 0, [1, 2, 3], [7, 8], [True, True], [-1.0, -2.0], [0, 0])
    >>> b = Rollout(0, 1, [1, 2, 3], [9], [True], [-3.0], [0])
    >>> (batch,) = pack([a, b], 100)
    >>> batch.input_ids.tolist(), batch.position_ids.tolist()
    ([1, 2, 3, 7, 8, 9], [0, 1, 2, 3, 4, 3])
    >>> batch.source.tolist(), batch.target_ids.tolist(), batch.row_ids.tolist()
    ([2, 3, 2], [7, 8, 9], [0, 0, 1])
    >>> batch.segments
    [Segment(start=0, end=3, prompt_start=0, prompt_end=0), Segment(start=3, end=5, prompt_start=0, prompt_end=3), Segment(start=5, end=6, prompt_start=0, prompt_end=3)]
    """
    families: list[list[int]] = []  # rows that share one prompt, within the budget
    for row, rollout in enumerate(rollouts):
        family = families[-1] if families else []
        joined = family and rollouts[family[0]].index == rollout.index and rollouts[family[0]].prompt_ids == rollout.prompt_ids
        size = len(rollout.prompt_ids) + sum(len(rollouts[r].completion_ids) for r in [*family, row])
        if joined and size <= budget:
            family.append(row)
        else:
            families.append([row])
    sizes = [len(rollouts[f[0]].prompt_ids) + sum(len(rollouts[r].completion_ids) for r in f) for f in families]
    bins: list[tuple[int, list[int]]] = []  # first-fit decreasing: (tokens, families)
    for i in sorted(range(len(families)), key=lambda i: -sizes[i]):
        b = next((b for b, (used, _) in enumerate(bins) if used + sizes[i] <= budget), None)
        if b is None:
            bins.append((sizes[i], [i]))
        else:
            bins[b] = (bins[b][0] + sizes[i], [*bins[b][1], i])
    return [_lay_out(rollouts, [families[i] for i in sorted(members)]) for _, members in bins]


def pack_share(rollouts: Sequence[Rollout], budget: int, ranks: Ranks, hidden: int) -> tuple[list[Batch], float]:
    """This rank's micro-batches of an optimizer step's rows, as many as on every other rank, and the imbalance: largest share over the mean.

    Whole groups are dealt out by their work: packed tokens, and the pairs of tokens that attend to each other, of which a layer's
    attention makes as much work as 1 / (6 hidden) tokens. A rank with fewer micro-batches adds idle ones: one token that is in nobody's
    loss, so that every forward and backward has its counterpart on every rank.
    """
    if ranks.size == 1:
        return pack(rollouts, budget), 1.0
    groups: dict[int, list[int]] = {}
    for row, rollout in enumerate(rollouts):
        groups.setdefault(rollout.index, []).append(row)
    members, costs = list(groups.values()), []
    for rows in members:
        prompt, lengths = len(rollouts[rows[0]].prompt_ids), [len(rollouts[r].completion_ids) for r in rows]
        pairs = prompt**2 / 2 + sum(n * (prompt + n / 2) for n in lengths)
        costs.append(prompt + sum(lengths) + pairs / (6 * hidden))
    shares = balance(costs, ranks.size)
    own = [row for g in shares[ranks.rank] for row in members[g]]
    batches = pack([rollouts[r] for r in own], budget)
    for batch in batches:
        batch.rows = [own[r] for r in batch.rows]  # rows of the optimizer step, not of the share
    idle = _lay_out([Rollout(-1, 0, [0])], [[0]])
    idle.rows = []
    batches += [idle] * (max(ranks.gather(len(batches))) - len(batches))
    loads = [sum(costs[g] for g in share) for share in shares]
    return batches, max(loads) * ranks.size / sum(loads)


def _lay_out(rollouts: Sequence[Rollout], families: list[list[int]]) -> Batch:
    input_ids: list[int] = []
    position_ids: list[int] = []
    source: list[int] = []
    target_ids: list[int] = []
    row_ids: list[int] = []
    rows: list[int] = []
    logprobs_gen: list[float] = []
    versions: list[int] = []
    segments: list[Segment] = []
    for family in families:
        prompt = rollouts[family[0]].prompt_ids
        start, prompt_end = len(input_ids), len(input_ids) + len(prompt)
        input_ids += prompt
        position_ids += range(len(prompt))
        if len(family) > 1:
            segments.append(Segment(start, prompt_end))
        for row in family:
            r = rollouts[row]
            first = len(input_ids)
            input_ids += r.completion_ids
            position_ids += range(len(prompt), len(prompt) + len(r.completion_ids))
            if len(family) > 1:
                segments.append(Segment(first, len(input_ids), start, prompt_end))
            for k, sampled in enumerate(r.sampled):
                if sampled:
                    source.append(first + k - 1 if k else prompt_end - 1)  # the shift by one
                    target_ids.append(r.completion_ids[k])
                    row_ids.append(len(rows))
                    logprobs_gen.append(r.logprobs_gen[k])
                    versions.append(r.versions[k])
            rows.append(row)
        if len(family) == 1:  # nothing is shared: prompt and completion are one causal stretch
            segments.append(Segment(start, len(input_ids)))
    t = torch.tensor
    long = torch.int64
    return Batch(
        t(input_ids, dtype=long), t(position_ids, dtype=long), [s for s in segments if s.end > s.start], t(source, dtype=long),
        t(target_ids, dtype=long), t(row_ids, dtype=long), rows, t(logprobs_gen, dtype=torch.float32), t(versions, dtype=long),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ attention


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *, scaling: float, segments: list[Segment],
    block_mask: Any = None, sliding_window: int | None = None, dropout: float = 0.0, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention over packed segments, in transformers' AttentionInterface signature.

    Args:
        query: (1, H, T, D); key, value: (1, H_kv, T, D). attention_mask is None: segments say it all.

    Returns:
        (1, T, H, D) and None (no attention weights).

    Raises:
        UserError: the model asks for something that would be ignored here (soft-capped scores, attention sinks).
    """
    for name in ("softcap", "s_aux", "sinks"):
        if options.get(name) is not None:
            raise UserError(f"this model's attention uses {name}, which packed attention does not compute")
    if block_mask is not None:
        return flex(query, key, value, block_mask, scaling).transpose(1, 2), None
    repeats = query.shape[1] // key.shape[1]
    q, k, v = query[0], key[0].repeat_interleave(repeats, 0), value[0].repeat_interleave(repeats, 0)  # (H, T, D)
    families: list[list[Segment]] = []
    for segment in segments:
        if families and _batches_with(families[-1], segment):
            families[-1].append(segment)
        else:
            families.append([segment])
    # split rather than sliced: the gradient of every slice would be a tensor of all T tokens
    parts = [x.split([family[-1].end - family[0].start for family in families], 1) for x in (q, k, v)]
    prompts = {family[0].start: (k_own, v_own) for family, k_own, v_own in zip(families, parts[1], parts[2])}
    pieces = []
    for family, *own in zip(families, *parts):
        prompt = prompts[family[0].prompt_start] if family[0].prompt_end > family[0].prompt_start else None
        pieces.append(_family_attention(*own, prompt, [s.end - s.start for s in family], scaling, sliding_window))
    return torch.cat(pieces, 1).transpose(0, 1)[None], None


SHORT = 256  # completions up to this long are padded to their group's longest and attended in one call; longer ones go one by one


def _batches_with(family: list[Segment], segment: Segment) -> bool:
    first = family[0]
    same_prompt = (first.prompt_start, first.prompt_end) == (segment.prompt_start, segment.prompt_end)
    return same_prompt and first.prompt_end > first.prompt_start and max(first.end - first.start, segment.end - segment.start) <= SHORT


def _family_attention(
    q: Tensor, k: Tensor, v: Tensor, prompt: tuple[Tensor, Tensor] | None, lengths: list[int], scaling: float, window: int | None
) -> Tensor:
    """Segments of `lengths`, one after the other in q, k, v (H, L, D), behind one prompt's keys and values (H, P, D), or one alone. -> (H, L, D)."""
    if prompt is None and (window is None or lengths[0] <= window):
        return F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, scale=scaling)[0]
    longest, heads, size = max(lengths), q.shape[0], q.shape[-1]
    index = None
    if min(lengths) < longest:
        # (G, longest) positions, the end of a short one repeating its last token: later than every query that counts, so never seen
        starts = [sum(lengths[:g]) for g in range(len(lengths))]
        index = torch.tensor([[s + min(i, n - 1) for i in range(longest)] for s, n in zip(starts, lengths)], device=q.device)

    def apart(x: Tensor) -> Tensor:  # (H, L, D) -> (G, H, longest, D)
        own = x if index is None else x[:, index.flatten()]
        return own.reshape(heads, len(lengths), longest, size).transpose(0, 1)

    keys, values, behind = apart(k), apart(v), 0
    if prompt is not None:
        behind = prompt[0].shape[1]
        keys, values = (torch.cat([p.expand(len(lengths), -1, -1, -1), own], 2) for p, own in zip(prompt, (keys, values)))
    at = torch.arange(behind + longest, device=q.device)
    allowed = at[None, :] <= at[behind:, None]  # (longest, P + longest)
    if window is not None:
        allowed &= at[behind:, None] - at[None, :] < window
    out = F.scaled_dot_product_attention(apart(q), keys, values, attn_mask=allowed, scale=scaling)
    if index is None:
        return out.transpose(0, 1).reshape(heads, -1, size)
    return torch.cat([o[:, :n] for o, n in zip(out, lengths)], 1)


def flex(query: Tensor, key: Tensor, value: Tensor, block_mask: Any, scaling: float) -> Tensor:
    """torch's FlexAttention, not transformers' wrapper, which copies keys for head counts that are no power of two."""
    from torch.nn.attention.flex_attention import flex_attention

    function = _compiled(flex_attention) if query.is_cuda else flex_attention
    return function(query, key, value, block_mask=block_mask, scale=scaling, enable_gqa=query.shape[1] != key.shape[1])


_compiled_functions: dict[Any, Any] = {}


def _compiled(function: Any) -> Any:
    if function not in _compiled_functions:
        _compiled_functions[function] = torch.compile(function, dynamic=False)
    return _compiled_functions[function]


def block_mask_of(batch: Batch, window: int | None = None, multiple: int = 128) -> tuple[Any, int]:
    """FlexAttention's block mask for a batch padded to a multiple of `multiple` tokens, and how many were added.

    Token k is seen by token q when k is not later and in q's segment or in its prompt's. Padding tokens see themselves.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    device, total = batch.input_ids.device, len(batch.input_ids)
    padding = -total % multiple
    segment = torch.full((total + padding,), -1, device=device)
    parent = torch.full((total + padding,), -2, device=device)
    starts = {s.start: i for i, s in enumerate(batch.segments)}
    for i, s in enumerate(batch.segments):
        segment[s.start : s.end] = i
        parent[s.start : s.end] = starts[s.prompt_start] if s.prompt_end > s.prompt_start else -2
    position = F.pad(batch.position_ids, (0, padding))

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        near = (segment[q] == segment[k]) | (parent[q] == segment[k])
        if window is not None:
            near = near & (position[q] - position[k] < window)
        return (k <= q) & near

    make = _compiled(create_block_mask) if device.type == "cuda" else create_block_mask  # uncompiled it builds a dense T x T mask
    return make(visible, None, None, total + padding, total + padding, device=device), padding


# ------------------------------------------------------------------------------------------------ the head


class ChunkedLogprobs(torch.autograd.Function):
    """log-softmax at the targets, and the entropy, from hidden states; logits exist for one chunk at a time, in float32.

    hidden (N, D), weight (V, D), bias (V,) or None, targets (N,) -> logprobs (N,), entropy (N,). The backward pass computes each
    chunk's logits again; with p = softmax(z), z the logits over the temperature, upstream gradients g and h:
    d/dz = g (onehot - p) - h p (log p + entropy).
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, softcap, chunk):  # type: ignore[no-untyped-def]
        logprobs = torch.empty(len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
        entropy, lse = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for i in range(0, len(hidden), chunk):
            part = slice(i, i + chunk)
            z, _ = _scaled_logits(hidden[part], weight, bias, temperature, softcap)
            lse[part] = z.logsumexp(-1)
            logprobs[part] = z.gather(-1, targets[part, None])[:, 0] - lse[part]
            entropy[part] = lse[part] - ((z - lse[part, None]).exp_() * z).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropy)
        ctx.settings = temperature, softcap, chunk
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):  # type: ignore[no-untyped-def]
        hidden, weight, bias, targets, lse, entropy = ctx.saved_tensors
        temperature, softcap, chunk = ctx.settings
        grad_hidden = torch.empty_like(hidden)
        # summed over chunks in float32, since adding many small bfloat16 numbers loses them
        wide = torch.promote_types(weight.dtype, torch.float32)
        grad_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=lse.dtype) if bias is not None and ctx.needs_input_grad[2] else None
        for i in range(0, len(hidden), chunk):
            part = slice(i, i + chunk)
            z, slope = _scaled_logits(hidden[part], weight, bias, temperature, softcap)
            logp = z.sub_(lse[part, None])
            p = logp.exp()
            grad = logp.add_(entropy[part, None]).mul_(-grad_entropy[part, None]).sub_(grad_logprobs[part, None]).mul_(p)
            grad.scatter_add_(-1, targets[part, None], grad_logprobs[part, None])
            grad.mul_(1 / temperature)
            if slope is not None:
                grad.mul_(slope)
            grad_low = grad.to(hidden.dtype)
            grad_hidden[part] = grad_low @ weight
            if grad_weight is not None:
                if grad_low.dtype == grad_weight.dtype:
                    grad_weight.addmm_(grad_low.T, hidden[part])  # no (V, D) product beside the sum
                else:
                    grad_weight += grad_low.T @ hidden[part]
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        cast = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, cast, None if grad_bias is None else grad_bias.to(bias.dtype), None, None, None, None


def _scaled_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """Logits over the temperature, at least float32, and the soft-cap's slope."""
    z = F.linear(hidden, weight)
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    if bias is not None:
        z += bias
    slope = None
    if softcap:
        z = torch.tanh(z / softcap)
        slope = 1 - z**2
        z = z * softcap
    return z.div_(temperature) if temperature != 1.0 else z, slope


# ------------------------------------------------------------------------------------------------ the model


class Policy(nn.Module):
    """forward(batch) -> logprobs (N,), entropy (N,). One module around the transformers model, so that wrappers' hooks fire.

    Args:
        model: a causal language model whose layers attend through AttentionInterface.
        temperature: of the distribution that is scored; the same as of the one sampled from.
    """

    def __init__(
        self, model: Any, temperature: float = 1.0, head_chunk: int = 2**24, compute_dtype: torch.dtype = torch.float32,
        device: torch.device | None = None, ranks: Ranks = Ranks(), sharded: bool = False,
    ):  # fmt: skip
        super().__init__()
        self.model, self.temperature, self.head_chunk, self.compute_dtype = model, temperature, head_chunk, compute_dtype
        self.softcap = getattr(model.config, "final_logit_softcapping", None)
        self.device = model.device if device is None else device  # of the computation; offloaded parameters are elsewhere
        self.ranks, self.sharded = ranks, sharded
        # FSDP2 averages gradients over ranks, but the loss is divided by the counts of the whole step already: this undoes the average,
        # once. Whole copies are added up by sum_gradients.
        self.gradient_scale = ranks.size if sharded else 1

    def forward(self, batch: Batch | Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(batch, Tensor):  # (1, T) the plain computation, for comparison: logits (T, V) and nothing
            return self.model(batch).logits[0], batch
        ids, positions, attention = batch.input_ids, batch.position_ids, {}
        if ids.is_cuda:
            mask, padding = block_mask_of(batch, getattr(self.model.config, "sliding_window", None))
            ids, positions, attention = F.pad(ids, (0, padding)), F.pad(positions, (0, padding)), {"block_mask": mask}
        with torch.autocast(ids.device.type, self.compute_dtype, enabled=self.compute_dtype != torch.float32):
            out = self.model.get_decoder()(
                input_ids=ids[None], position_ids=positions[None], use_cache=False, segments=batch.segments, **attention
            )
            hidden = out.last_hidden_state[0].index_select(0, batch.source)  # (N, D)
        head = self.model.get_output_embeddings()
        hidden, weight = (x.to(self.compute_dtype) if self.compute_dtype != torch.float32 else x for x in (hidden, head.weight))
        chunk = max(1, self.head_chunk // weight.shape[0])
        return ChunkedLogprobs.apply(hidden, weight, head.bias, batch.target_ids, self.temperature, self.softcap, chunk)

    def set_sampling(self, sampling: bool) -> None:
        """Ordinary attention with a cache for sampling, packed attention for training."""
        self.model.set_attn_implementation("sdpa" if sampling else PACKED)
        self.model.train(not sampling)


def load_policy(path: str, config: PolicyConfig, temperature: float, device: torch.device, ranks: Ranks = Ranks()) -> Policy:
    """A transformers causal language model in float32 master weights, checked to score packed tokens as it scores plain ones.

    With several ranks and --policy.shard each holds a shard, and no process ever holds the whole model.

    Raises:
        UserError: no such model; a layer or head that packed scoring does not cover.
    """
    import transformers
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

    transformers.utils.logging.disable_progress_bar()
    AttentionInterface.register(PACKED, packed_attention)
    sharded = config.shard and ranks.size > 1
    if config.offload and not sharded:
        raise UserError("--policy.offload needs --policy.shard and several trainer processes: offloading is FSDP2's")
    try:
        model_config = AutoConfig.from_pretrained(path)
        for name, value in vars(model_config).items():  # before the layers are made: some copy the number
            if isinstance(value, float) and "drop" in name:
                setattr(model_config, name, 0.0)
        if sharded:
            model = sharding.on_meta(model_config)
        else:
            model = AutoModelForCausalLM.from_pretrained(path, config=model_config, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise UserError(f"--model {path}: cannot load it: {error}") from error
    refuse_unsupported(model)
    (model if sharded else model.to(device)).train()
    if config.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy = Policy(model, temperature, config.head_chunk, compute_dtype(config, device), device, ranks, sharded)
    if sharded:
        sharding.shard(policy, ranks, policy.compute_dtype, config.offload)
        sharding.load_shards(policy, path, ranks, config.offload)
    check_packed_scores(policy)
    sharding.settle(policy)  # an optimizer made now must find shards
    return policy


def compute_dtype(config: PolicyConfig, device: torch.device) -> torch.dtype:
    if config.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, config.dtype)


def refuse_unsupported(model: Any) -> None:
    """Raises UserError for models whose layers would ignore segments: state-space and linear attention layers, old attention code."""
    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    unknown = kinds - {"full_attention", "sliding_attention"}
    if unknown:
        raise UserError(f"{type(model).__name__} has layers of type {', '.join(sorted(unknown))}: only full and sliding causal attention can be packed")
    if "sliding_attention" in kinds and len(kinds) > 1 and next(model.parameters()).is_cuda:
        raise UserError(f"{type(model).__name__} mixes full and sliding attention, which the CUDA path does not cover yet")
    if not model._supports_attention_backend or not model._can_set_attn_implementation():
        raise UserError(f"{type(model).__name__} does not attend through transformers' AttentionInterface: it cannot be packed")


@torch.no_grad()
def check_packed_scores(policy: Policy) -> None:
    """Two completions that share a prompt must score as they do alone, through the model's own attention and head."""
    vocabulary = policy.model.config.get_text_config().vocab_size
    ids = [(7 * i + 3) % min(vocabulary, 1000) for i in range(12)]
    rollouts = [Rollout(0, s, ids[:5], completion, [True] * len(completion), [0.0] * len(completion), [0] * len(completion))
                for s, completion in enumerate((ids[5:9], ids[9:12]))]  # fmt: skip
    expected = []
    policy.set_sampling(True)  # the plain computation: one sequence, the model's own logits
    for r in rollouts:
        sequence = torch.tensor([r.prompt_ids + r.completion_ids], device=policy.device)
        with torch.autocast(policy.device.type, policy.compute_dtype, enabled=policy.compute_dtype != torch.float32):
            logits = policy(sequence)[0][4:-1]
        logp = torch.log_softmax(logits.float() / policy.temperature, -1)
        expected.append(logp.gather(-1, sequence[0, 5:, None])[:, 0])
    policy.set_sampling(False)
    (batch,) = pack(rollouts, 1000)
    difference = (policy(batch.to(policy.device))[0] - torch.cat(expected)).abs().max().item()
    limit = 1e-3 if policy.compute_dtype == torch.float32 else 0.3
    if not difference < limit:
        raise UserError(
            f"{type(policy.model).__name__} scores packed tokens differently (by {difference:.1e}) from its own forward pass:"
            " it has a layer or head this code does not cover"
        )


@torch.no_grad()
def score(policy: nn.Module, batches: Sequence[Batch]) -> list[Tensor]:
    """Log-probabilities (N,) of each micro-batch, without gradient. The policy has no dropout, so train and eval mode agree."""
    found = [policy(batch)[0] for batch in batches]
    sharding.settle(policy)
    return found


# ------------------------------------------------------------------------------------------------ optimizer


def make_optimizer(policy: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101); norms and biases are not decayed."""
    named = [(n, p) for n, p in policy.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for _, p in named if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=config.lr, betas=config.betas)


def learning_rate(step: int, total: int, config: OptimConfig) -> float:
    """Of optimizer step `step` (0-based) out of `total`: linear warm-up, then the schedule.

    >>> [learning_rate(s, 100, OptimConfig(lr=1.0, warmup=4)) for s in (0, 1, 3, 4, 99)]
    [0.25, 0.5, 1.0, 1.0, 1.0]
    >>> [learning_rate(s, 5, OptimConfig(lr=1.0, warmup=1, schedule="linear")) for s in range(5)]
    [1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    progress = (step - config.warmup) / max(1, total - config.warmup)
    if config.schedule == "linear":
        return config.lr * max(0.0, 1 - progress)
    if config.schedule == "cosine":
        return config.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return config.lr


@torch.no_grad()
def sum_gradients(policy: Policy, bucket: int = 2**26) -> None:
    """Whole copies on several ranks: every rank's gradient becomes the sum over ranks, `bucket` numbers at a time, in float32.

    Called once, after the last micro-batch. Sharded policies have reduced theirs during the backward passes.
    """
    if policy.sharded or policy.ranks.size == 1:
        return
    gradients = [p.grad for p in policy.parameters() if p.grad is not None]
    while gradients:
        count, numbers = 0, 0
        while count < len(gradients) and (count == 0 or numbers + gradients[count].numel() <= bucket):
            numbers += gradients[count].numel()
            count += 1
        part, gradients = gradients[:count], gradients[count:]
        flat = torch.cat([g.reshape(-1).float() for g in part])
        with policy.ranks.collective("the sum of gradients"):
            torch.distributed.all_reduce(flat)
        for gradient, total in zip(part, flat.split([g.numel() for g in part])):
            gradient.copy_(total.view_as(gradient))


def optimizer_step(policy: nn.Module, optimizer: torch.optim.Optimizer, lr: float, clip_norm: float) -> float:
    """Clip the accumulated gradient once, step, and clear it.

    Returns:
        The global gradient norm before clipping.

    Raises:
        FloatingPointError: the gradient is not finite; nothing has been changed.
    """
    parameters = [p for p in policy.parameters() if p.grad is not None]
    norm = sharding.whole(torch.nn.utils.get_total_norm([p.grad for p in parameters]))
    if not math.isfinite(norm.item()):
        raise FloatingPointError(f"the gradient norm is {norm.item()}: no optimizer step was taken; the last checkpoint stands")
    if clip_norm and norm > clip_norm:
        torch._foreach_mul_([p.grad for p in parameters], clip_norm / (norm.item() + 1e-6))
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm.item()


@contextlib.contextmanager
def on_device(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Bring a module to a device for a while (the reference model waits on the CPU)."""
    home = next(module.parameters()).device
    module.to(device)
    try:
        yield
    finally:
        module.to(home)
