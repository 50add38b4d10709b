"""The maths of GRPO: advantages, objective, train-inference correction, KL, reduction. Pure functions of flat tensors.

For every sampled token t of rollout i, with advantage A and log-probabilities under four policies

    logprobs      pi_theta  the policy being trained (the only one with a gradient)
    logprobs_old  pi_old    the trainer's weights when the batch arrived
    logprobs_gen  mu        the engine that sampled the token
    logprobs_ref  pi_ref    the frozen start

the loss is five independent choices:

    (1) log-ratio    l = log pi_theta - log pi_old, per token or its mean over the rollout             LEVELS
    (2) objective    L(l, A), for example -min(r A, clip(r, 1-low, 1+high) A) with r = exp(l)          OBJECTIVES
    (3) correction   w(log pi_old - log mu), a constant that multiplies L                              CORRECTIONS
    (4) KL           k(log pi_ref - log pi_theta), times a coefficient                                 KL_ESTIMATORS
    (5) reduction    c_i, one coefficient per rollout; loss = sum over tokens of c_i (w L + beta k)    REDUCTIONS

The caller counts tokens, rollouts and prompts over the whole optimizer step, all micro-batches and ranks, before the first
backward. So sums of micro-batches are the loss: nothing here divides by what happens to be in a micro-batch.

Papers: GRPO arXiv 2402.03300 sec. 4.1; PPO 1707.06347 eq. 7; DAPO 2503.14476 sec. 3; Dr. GRPO 2503.20783 sec. 3.2; GSPO 2507.18071
sec. 4; CISPO 2506.13585 sec. 3.1; RLOO 2402.14740; IcePop 2510.18855; KL gradient 2506.09477.

Shapes: R rollouts, N sampled tokens over all rollouts; row_ids (N,) says which rollout a token belongs to. Rollouts are whole:
all tokens of one are in the same call.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0  # log-ratios are clamped to this before exp: exp(20) is 5e8, and a clamp after exp would give nan gradients

Metrics = dict[str, tuple[str, Tensor | float, Tensor | float]]  # name -> (kind, value, count); kinds: mean (sum and count), max, min, sum


# ------------------------------------------------------------------------------------------------ advantages


def baseline_and_std(rewards: np.ndarray, groups: np.ndarray, leave_one_out: bool = False, population: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Baseline and standard deviation of each rollout's group.

    Args:
        rewards: (R,) one number per rollout.
        groups: (R,) group ids, in any order.
        leave_one_out: both are computed over the *other* members (RLOO, arXiv 2402.14740).
        population: divide squared deviations by n rather than n - 1.

    Returns:
        baseline (R,) and std (R,), float64. A group of one has its own reward as baseline and std 0. Variances are centred
        (two passes), and exactly 0 for equal rewards: E[r^2] - E[r]^2 would leave rounding noise that dividing amplifies.

    >>> baseline_and_std(np.array([1.0, 2.0, 3.0]), np.zeros(3))
    (array([2., 2., 2.]), array([1., 1., 1.]))
    >>> baseline_and_std(np.array([1.0, 2.0, 3.0]), np.zeros(3), leave_one_out=True)[0]
    array([2.5, 2. , 1.5])
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    baseline, std = rewards.copy(), np.zeros_like(rewards)
    for group in np.unique(groups):
        rows = np.flatnonzero(np.asarray(groups) == group)
        for i in rows if leave_one_out else rows[:1]:
            peers = rewards[rows[rows != i] if leave_one_out else rows]
            targets = [i] if leave_one_out else rows
            if len(peers) == 0 or len(rows) == 1:
                continue
            mean, n = peers.mean(), len(peers)
            baseline[targets] = mean
            if peers.max() > peers.min() and (population or n > 1):
                std[targets] = np.sqrt(((peers - mean) ** 2).sum() / (n if population else n - 1))
    return baseline, std


def has_signal(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """(R,) bool: whether the rewards of a rollout's group differ at all. Decided exactly, by max == min, never by a small std."""
    rewards, groups = np.asarray(rewards), np.asarray(groups)
    spread = {g: rewards[groups == g].max() > rewards[groups == g].min() for g in np.unique(groups)}
    return np.array([spread[g] for g in groups], dtype=bool)


def group_advantages(
    rewards: np.ndarray, groups: np.ndarray, leave_one_out: bool = False, divide_by_std: bool = True, population: bool = False
) -> np.ndarray:
    """A = (r - baseline) / std, per group (arXiv 2402.03300 eq. 3; without division: Dr. GRPO, 2503.20783).

    Returns:
        (R,) float64. Groups without signal get exactly 0. A row whose own leave-one-out std is 0 inside a group with signal
        stays undivided, so [0, .94, .94, .94] gives the loser -.94 and not minus thousands.
    """
    baseline, std = baseline_and_std(rewards, groups, leave_one_out, population)
    advantages = np.asarray(rewards, dtype=np.float64) - baseline
    if divide_by_std:
        advantages = advantages / np.where(std > 0, std, 1.0)
    return np.where(has_signal(rewards, groups), advantages, 0.0) if len(advantages) else advantages


# ------------------------------------------------------------------------------------------------ (5) reductions


@dataclass(frozen=True)
class Counts:
    """What one optimizer step trains on, over all micro-batches and ranks. Rows of weight 0 count nowhere."""

    tokens: float  # sampled tokens
    rows: float  # rollouts with at least one sampled token
    prompts: float  # groups
    max_tokens: float  # the configured longest completion (Dr. GRPO's constant), not a measured one


def token_mean(row_tokens: Tensor, group_tokens: Tensor, counts: Counts) -> Tensor:
    """Every token of the step weighs the same: c = 1 / tokens (DAPO, arXiv 2503.14476 sec. 3.3)."""
    return torch.full_like(row_tokens, 1 / counts.tokens)


def sequence_mean(row_tokens: Tensor, group_tokens: Tensor, counts: Counts) -> Tensor:
    """Every rollout weighs the same, its tokens share: c_i = 1 / (rows * tokens_i) (GRPO, arXiv 2402.03300 eq. 3)."""
    return 1 / (counts.rows * row_tokens.clamp(min=1))


def constant(row_tokens: Tensor, group_tokens: Tensor, counts: Counts) -> Tensor:
    """c = 1 / (rows * max_tokens): no length bias (Dr. GRPO, arXiv 2503.20783 sec. 3.2)."""
    return torch.full_like(row_tokens, 1 / (counts.rows * counts.max_tokens))


def prompt_mean(row_tokens: Tensor, group_tokens: Tensor, counts: Counts) -> Tensor:
    """Every prompt weighs the same, the tokens of its group share: c_i = 1 / (prompts * tokens of the group)."""
    return 1 / (counts.prompts * group_tokens.clamp(min=1))


def sequence_sum(row_tokens: Tensor, group_tokens: Tensor, counts: Counts) -> Tensor:
    """The mean over rollouts of the sum over their tokens: c = 1 / rows."""
    return torch.full_like(row_tokens, 1 / counts.rows)


Reduction = Callable[[Tensor, Tensor, Counts], Tensor]  # (R,) tokens per row, (R,) tokens per row's group, counts -> (R,)
REDUCTIONS: dict[str, Reduction] = {f.__name__: f for f in (token_mean, sequence_mean, constant, prompt_mean, sequence_sum)}


# ------------------------------------------------------------------------------------------------ (1) log-ratio


def mean_per_row(values: Tensor, row_ids: Tensor, rows: int) -> Tensor:
    """(N,) -> (R,): mean over the tokens of each rollout; 0 for a rollout without tokens."""
    total = torch.zeros(rows, dtype=values.dtype, device=values.device).index_add(0, row_ids, values)
    return total / torch.bincount(row_ids, minlength=rows).clamp(min=1)


def token_level(log_ratio: Tensor, row_ids: Tensor, rows: int) -> Tensor:
    """The ratio of each token by itself."""
    return log_ratio


def sequence_level(log_ratio: Tensor, row_ids: Tensor, rows: int) -> Tensor:
    """The geometric mean of a rollout's ratios, at each of its tokens (GSPO, arXiv 2507.18071 eq. 7). Gradient reaches every token."""
    return mean_per_row(log_ratio, row_ids, rows)[row_ids]


LEVELS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {"token": token_level, "sequence": sequence_level}


def ratio_of(log_ratio: Tensor) -> Tensor:
    """exp, with the log clamped first so that neither value nor gradient overflows."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


# ------------------------------------------------------------------------------------------------ (2) objectives


def ppo(log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """-min(r A, clip(r, 1-low, 1+high) A) (PPO, arXiv 1707.06347 eq. 7, .2/.2; clip-higher .2/.28: DAPO, 2503.14476 sec. 3.1)."""
    ratio = ratio_of(log_ratio)
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))


def cispo(log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """-sg(clip(r, 1-low, 1+high)) A log pi (CISPO, arXiv 2506.13585 eq. 4): the weight is clipped, every token keeps its gradient.

    Dialect: both bounds are offsets from 1, as in verl, slime, SkyRL and NeMo-RL; TRL's `epsilon_high` is the bound itself.
    """
    return -ratio_of(log_ratio).clamp(1 - clip_low, 1 + clip_high).detach() * advantages * logprobs


def reinforce(log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """-A log pi: no ratio, no clip (REINFORCE; GPG, arXiv 2504.02546)."""
    return -advantages * logprobs


Objective = Callable[[Tensor, Tensor, Tensor, float, float], Tensor]  # log_ratio, logprobs, advantages (N,), clip_low, clip_high -> (N,)
OBJECTIVES: dict[str, Objective] = {f.__name__: f for f in (ppo, cispo, reinforce)}


# ------------------------------------------------------------------------------------------------ (3) corrections


def no_correction(log_weight: Tensor, row_ids: Tensor, rows: int, low: float, high: float) -> Tensor:
    return torch.ones_like(log_weight)


def truncate(log_weight: Tensor, row_ids: Tensor, rows: int, low: float, high: float) -> Tensor:
    """Truncated importance sampling, per token: w = clip(pi_old / mu, low, high); usual bounds 0 and 2."""
    return ratio_of(log_weight).clamp(low, high)


def mask(log_weight: Tensor, row_ids: Tensor, rows: int, low: float, high: float) -> Tensor:
    """IcePop, per token: w = pi_old / mu inside [low, high], 0 outside; usual bounds .5 and 5 (arXiv 2510.18855)."""
    weight = ratio_of(log_weight)
    return torch.where((weight >= low) & (weight <= high), weight, 0.0)


def sequence_mask(log_weight: Tensor, row_ids: Tensor, rows: int, low: float, high: float) -> Tensor:
    """A rollout whose geometric mean of pi_old / mu leaves [low, high] is dropped whole; others keep their token weights.
    Usual bounds .999 and 1.002. Dialect: OpenRLHF, NeMo-RL and SkyRL; AReaL and open-instruct keep the geometric mean as weight."""
    mean = ratio_of(mean_per_row(log_weight, row_ids, rows))[row_ids]
    return torch.where((mean >= low) & (mean <= high), ratio_of(log_weight), 0.0)


Correction = Callable[[Tensor, Tensor, int, float, float], Tensor]  # log(pi_old / mu) (N,), row_ids, rows, low, high -> (N,)
CORRECTIONS: dict[str, Correction] = {"none": no_correction, "truncate": truncate, "mask": mask, "sequence_mask": sequence_mask}


# ------------------------------------------------------------------------------------------------ (4) KL to the reference


def k1(logprobs: Tensor, logprobs_ref: Tensor) -> Tensor:
    """log pi - log ref: unbiased, high variance; used as a loss its gradient has mean zero, so it belongs in the reward."""
    return logprobs - logprobs_ref


def k2(logprobs: Tensor, logprobs_ref: Tensor) -> Tensor:
    """(log pi - log ref)^2 / 2: biased value, but on-policy its gradient is that of KL(pi || ref) (arXiv 2506.09477)."""
    return (logprobs - logprobs_ref).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT) ** 2 / 2


def k3(logprobs: Tensor, logprobs_ref: Tensor) -> Tensor:
    """exp(x) - x - 1 with x = log ref - log pi: unbiased, never negative. Value of k3, gradient of k2, which on-policy is the true
    gradient of KL(pi || ref); the derivative of the expression itself is not (arXiv 2506.09477). For that one: k3_naive."""
    gradient = k2(logprobs, logprobs_ref)
    return k3_naive(logprobs, logprobs_ref).detach() + gradient - gradient.detach()


def k3_naive(logprobs: Tensor, logprobs_ref: Tensor) -> Tensor:
    """exp(x) - x - 1 differentiated as it stands, as GRPO's paper and TRL, verl's `low_var_kl` and slime do (arXiv 2402.03300 eq. 4)."""
    x = (logprobs_ref - logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return x.exp() - x - 1


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {f.__name__: f for f in (k1, k2, k3, k3_naive)}


# ------------------------------------------------------------------------------------------------ the frame

PRESETS: dict[str, dict[str, str | float | bool]] = {
    "grpo": dict(objective="ppo", level="token", reduction="sequence_mean", clip_low=0.2, clip_high=0.2),
    "dr_grpo": dict(objective="ppo", level="token", reduction="constant", clip_low=0.2, clip_high=0.2, divide_by_std=False),
    "dapo": dict(objective="ppo", level="token", reduction="token_mean", clip_low=0.2, clip_high=0.28),
    "gspo": dict(objective="ppo", level="sequence", reduction="sequence_mean", clip_low=3e-4, clip_high=4e-4),
    "cispo": dict(objective="cispo", level="token", reduction="token_mean", clip_low=1.0, clip_high=0.28),
    "reinforce": dict(objective="reinforce", level="token", reduction="token_mean"),
}


def policy_loss(
    logprobs: Tensor,
    logprobs_old: Tensor,
    logprobs_gen: Tensor,
    logprobs_ref: Tensor | None,
    entropy: Tensor | None,
    advantages: Tensor,
    coefficients: Tensor,
    row_ids: Tensor,
    *,
    objective: Objective,
    level: str,
    clip_low: float,
    clip_high: float,
    correction: Correction,
    correction_low: float,
    correction_high: float,
    kl: str,
    kl_coef: float,
    entropy_coef: float,
) -> tuple[Tensor, Metrics]:
    """The loss of some whole rollouts: their share of the optimizer step's loss, so shares add up.

    Args:
        logprobs, logprobs_old, logprobs_gen, logprobs_ref, entropy, advantages: (N,). logprobs_ref is needed when kl_coef is not 0,
            entropy when entropy_coef is not 0.
        coefficients: (R,) from a reduction, times the row's weight; a row of weight 0 leaves loss, gradient and metrics.
        row_ids: (N,) in 0..R-1.

    Returns:
        The loss (scalar), and its metrics, additive over calls.

    Raises:
        ValueError: an input is missing that a configured term needs; a log-probability at a trained token is positive, nan or infinite.
    """
    if kl_coef and logprobs_ref is None:
        raise ValueError("loss.kl_coef is set but there are no reference log-probabilities")
    if entropy_coef and entropy is None:
        raise ValueError("loss.entropy_coef is set but there is no entropy")
    rows = len(coefficients)
    weights = coefficients[row_ids]  # (N,)
    trained = weights != 0
    check_logprobs(logprobs_gen, trained, row_ids, "the engine")
    check_logprobs(logprobs_old, trained, row_ids, "the trainer")
    log_ratio = LEVELS[level](logprobs - logprobs_old, row_ids, rows)  # (1)
    per_token = objective(log_ratio, logprobs, advantages, clip_low, clip_high)  # (2)
    log_weight = (logprobs_old - logprobs_gen).detach()
    correction_weight = correction(log_weight, row_ids, rows, correction_low, correction_high).detach()  # (3)
    per_token = per_token * correction_weight
    if kl_coef:
        per_kl = KL_ESTIMATORS[kl](logprobs, logprobs_ref)  # (4)
        per_token = per_token + kl_coef * per_kl
    if entropy_coef:
        per_token = per_token - entropy_coef * entropy
    loss = torch.where(trained, weights * per_token, 0.0).sum()  # (5); where, since nan * 0 is nan

    with torch.no_grad():
        tokens = trained.sum()
        ratio = ratio_of(log_ratio)
        low, high = ratio < 1 - clip_low, ratio > 1 + clip_high

        def mean(values: Tensor) -> tuple[str, Tensor, Tensor]:
            return "mean", torch.where(trained, values.double(), 0.0).sum(), tokens

        metrics: Metrics = {
            "loss": ("sum", loss.detach().double(), 1.0),
            "ratio": mean(ratio),
            "ratio_max": ("max", extreme(ratio, trained, -1), 1.0),
            "ratio_min": ("min", extreme(ratio, trained, 1), 1.0),
            "clip_low_fraction": mean((low & (advantages < 0)).double()),  # tokens whose gradient the clip removes
            "clip_high_fraction": mean((high & (advantages > 0)).double()),
            "correction_weight": mean(correction_weight),
        }
        if correction is not no_correction:
            metrics["correction_changed_fraction"] = mean((correction_weight != ratio_of(log_weight)).double())
        if kl_coef:
            metrics["kl"] = mean(per_kl)
        if entropy is not None:
            metrics["entropy"] = mean(entropy)
    return loss, metrics


def extreme(values: Tensor, trained: Tensor, sign: int) -> Tensor:
    """The largest (sign -1) or smallest (sign 1) trained value; an infinity that any other value beats where there is none."""
    empty = torch.full_like(values, sign * torch.inf)
    candidates = torch.where(trained, values, empty)
    if len(candidates) == 0:
        return torch.tensor(sign * torch.inf)
    return candidates.min() if sign > 0 else candidates.max()


def check_logprobs(logprobs: Tensor, trained: Tensor, row_ids: Tensor, source: str) -> None:
    """A placeholder (0 is allowed, a sure token has it; anything above is not) must never be trained on as if it had been measured."""
    bad = trained & ~((logprobs <= 1e-4) & torch.isfinite(logprobs))
    if bad.any():
        at = int(bad.nonzero()[0])
        raise ValueError(f"log-probability {float(logprobs[at])} from {source} at token {at} of the micro-batch, row {int(row_ids[at])}")


def mismatch(logprobs: Tensor, logprobs_gen: Tensor, included: Tensor) -> Metrics:
    """How far the trainer and the engine disagree about tokens that both scored with the same weights.

    With d = log pi - log mu: mismatch_k3 = E[e^d - d - 1], an estimate of KL(mu || pi); mismatch_k3_reverse the same with -d;
    token_mult_prob_error = E[e^|d|], 1 when perfect; mismatch_max = max |d|. (NeMo-RL's names where it has them.)

    Args:
        logprobs, logprobs_gen: (N,). included: (N,) bool.
    """
    difference = torch.where(included, (logprobs - logprobs_gen).detach(), 0.0).double()
    count = included.sum()
    clamped = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

    def mean(values: Tensor) -> tuple[str, Tensor, Tensor]:
        return "mean", torch.where(included, values, 0.0).sum(), count

    return {
        "mismatch_k3": mean(clamped.expm1() - clamped),
        "mismatch_k3_reverse": mean((-clamped).expm1() + clamped),
        "token_mult_prob_error": mean(clamped.abs().exp()),
        "mismatch_max": ("max", extreme(difference.abs(), included, -1), 1.0),
    }


def check_names(settings: Mapping[str, str], objectives: Mapping[str, Objective], corrections: Mapping[str, Correction]) -> None:
    """Raises ValueError for a name that none of the dicts knows."""
    for flag, known in (("objective", objectives), ("level", LEVELS), ("correction", corrections), ("kl", KL_ESTIMATORS), ("reduction", REDUCTIONS)):
        if settings[flag] not in known:
            raise ValueError(f"--loss.{flag} {settings[flag]}: give one of {', '.join(known)}")
