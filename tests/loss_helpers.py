"""What the tests of loss.py and objectives.py share: one call of policy_loss from plain lists, and ranks played by threads."""

import threading
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import loss
import objectives

torch.set_num_threads(1)

OBJECTIVES = loss.OBJECTIVES | objectives.OBJECTIVES
CORRECTIONS = loss.CORRECTIONS | objectives.CORRECTIONS
KL_GRADIENTS = loss.KL_GRADIENTS | objectives.KL_GRADIENTS


def f64(values) -> Tensor:
    return torch.as_tensor(np.asarray(values, dtype=np.float64))


@dataclass
class Outcome:
    loss: float
    gradient: Tensor  # (N,)
    metrics: dict[str, float]


def reduce_metrics(*found: loss.Metrics) -> dict[str, float]:
    """Add metrics up as their kinds say. A mean of nothing is nan."""
    total: dict[str, list] = {}
    for metrics in found:
        for name, (kind, value, count) in metrics.items():
            total.setdefault(name, []).append((kind, float(value), float(count)))
    numbers = {}
    for name, entries in total.items():
        kind, values = entries[0][0], [value for _, value, _ in entries]
        if kind == "mean":
            count = sum(count for _, _, count in entries)
            numbers[name] = sum(values) / count if count else float("nan")
        else:
            numbers[name] = {"max": max, "min": min, "sum": sum}[kind](values)
    return numbers


def coefficients_of(lengths, weights, reduction: str, max_tokens: float = 1.0, groups=None) -> Tensor:
    """(R,) counting the whole step, as the caller of policy_loss does."""
    weights = f64(weights)
    row_tokens = f64(lengths) * (weights != 0)
    groups = torch.arange(len(lengths)) if groups is None else torch.as_tensor(groups)
    group_tokens = torch.zeros(int(groups.max()) + 1, dtype=torch.float64).index_add(0, groups, row_tokens)
    counts = loss.Counts(float(row_tokens.sum()), float((row_tokens > 0).sum()), float((group_tokens > 0).sum()), max_tokens)
    if counts.tokens == 0:
        return torch.zeros(len(lengths), dtype=torch.float64)
    return loss.REDUCTIONS[reduction](row_tokens, group_tokens[groups], counts) * weights


def run(
    advantages,
    logprobs,
    old=None,
    gen=None,
    ref=None,
    entropy=None,
    lengths=None,
    weights=None,
    reduction="token_mean",
    max_tokens=1.0,
    objective="ppo",
    correction="none",
    rejection="none",
    kl_gradient="true",
    params=None,
    likelihood=None,
    **settings,
) -> Outcome:
    """One call on whole rows. advantages: (N,). old None: the policy itself, detached; gen None: old."""
    current = f64(logprobs).clone().requires_grad_()
    lengths = [len(current)] if lengths is None else lengths
    row_ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    old = current.detach() if old is None else f64(old)
    gen = old if gen is None else f64(gen)
    params = params or {}
    value, metrics = loss.policy_loss(
        current, old, gen, None if ref is None else f64(ref), None if entropy is None else f64(entropy), f64(advantages),
        coefficients_of(lengths, [1.0] * len(lengths) if weights is None else weights, reduction, max_tokens), row_ids,
        objective=objectives.bind(OBJECTIVES[objective], params),
        correction=objectives.combine(CORRECTIONS[correction], objectives.bind(objectives.REJECTIONS[rejection], params)),
        kl_gradient=KL_GRADIENTS[kl_gradient],
        likelihood=None if likelihood is None else f64(likelihood),
        **(dict(level="token", clip_low=0.2, clip_high=0.2, correction_low=0.0, correction_high=torch.inf, kl="k3", kl_coef=0.0, entropy_coef=0.0)
           | settings),
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(value, current)
    return Outcome(value.item(), gradient, reduce_metrics(metrics, loss.mismatch(old, gen, f64(weights or [1.0] * len(lengths))[row_ids] != 0)))


class Ranks:
    """sum_over_ranks for functions run in as many threads as there are ranks."""

    def __init__(self, count: int):
        self.barrier, self.parts, self.local = threading.Barrier(count), [None] * count, threading.local()

    def __call__(self, values: Tensor) -> Tensor:
        self.parts[self.local.rank] = values
        self.barrier.wait(20)
        total = torch.stack(self.parts).sum(0)
        self.barrier.wait(20)
        return total

    def run(self, functions) -> list:
        """The results of one function per rank, at the same time."""
        results: list = [None] * len(functions)
        failures: list[BaseException] = []

        def work(rank: int) -> None:
            self.local.rank = rank
            try:
                results[rank] = functions[rank]()
            except BaseException as error:
                failures.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(functions))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return results
