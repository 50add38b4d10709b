"""The long tail of the GRPO family: one short section per paper, and dicts that join those of loss.py.

loss.py is the frame and what people reach for daily; nothing there imports this file. A run uses it through one flag, for example
`--loss.objective sapo --loss.objective-params tau_negative 1.1`. Every function is pure and has the signature of its axis; settings of
its own are keyword arguments whose default is the paper's (or is said to be someone else's). The dicts:

    OBJECTIVES, CORRECTIONS, KL_GRADIENTS, PRESETS    more of loss.py's
    REJECTIONS       0 or 1 per token; multiplies whatever correction was chosen
    BASELINES, SCALES, ESTIMATORS    advantages = (reward - baseline) / scale, or one estimator
    PREPARATIONS     what a choice must know about the whole optimizer step, computed once, before the micro-batches, over all ranks

Notation of loss.py: l the log-ratio to the anchor, r = exp(l), A the advantage, rho = pi_old / mu, sg = no gradient.
Shapes: R rollouts, N sampled tokens.

To add an objective: write one function, add it to OBJECTIVES. docs/objectives.md, its plot and the invariance tests pick it up.
"""

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import loss
from loss import Correction, KLGradient, Objective, StepValues, Tokens, bounded_weight, mean_per_row, ppo, ratio_of, sum_per_row

SumOverRanks = Callable[[Tensor], Tensor]  # float64 tensor -> its sum over all ranks, the same on each


def one_rank(values: Tensor) -> Tensor:
    return values


# ------------------------------------------------------------------------------------------------ objectives: another clip


def dual_clip(log_ratio: Tensor, tokens: Tokens, clip_low: float, clip_high: float, cap: float = 3.0) -> Tensor:
    """PPO-clip whose loss is at most cap |A| where A < 0 (arXiv 1912.09729, c = 3; on by default in verl)."""
    clipped = ppo(log_ratio, tokens, clip_low, clip_high)
    return torch.where(tokens.advantages < 0, torch.minimum(clipped, -tokens.advantages * cap), clipped)


def two_sided(log_ratio: Tensor, tokens: Tokens, clip_low: float, clip_high: float, delta: float = 4.0) -> Tensor:
    """PPO-clip with r <= delta in the unclipped branch (INTELLECT-2, arXiv 2505.07291, delta 4; TRL's delta).
    For delta > 1 + high it acts only where A < 0 and is dual_clip with cap = delta."""
    ratio = ratio_of(log_ratio)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(-tokens.advantages * ratio.clamp(max=delta), -tokens.advantages * clipped)


def unclipped(log_ratio: Tensor, tokens: Tokens, clip_low: float, clip_high: float) -> Tensor:
    """-r A: importance sampling without a trust region (SkyRL's importance_sampling)."""
    return -ratio_of(log_ratio) * tokens.advantages


def cispo_cap(log_ratio: Tensor, tokens: Tokens, clip_low: float, clip_high: float, cap: float = 5.0) -> Tensor:
    """-sg(min(r, cap)) A log pi: CISPO in TRL's dialect, where the bound is the largest weight itself (ScaleRL, arXiv 2510.13786, cap 5).
    clip_low and clip_high are not read: a bound of .28 taken from them would only scale every gradient by .28."""
    return -ratio_of(log_ratio).clamp(max=cap).detach() * tokens.advantages * tokens.logprobs


def masked_reinforce(log_ratio: Tensor, tokens: Tokens, clip_low: float, clip_high: float) -> Tensor:
    """-sg(r 1[1-low < r < 1+high]) A log pi: CISPO's form, but outside the bounds a token is dropped rather than clamped (GLM-5, arXiv
    2602.15763, with the sampler as anchor; SkyRL's rollout_is)."""
    ratio = ratio_of(log_ratio).detach()
    inside = (ratio > 1 - clip_low) & (ratio < 1 + clip_high)
    return torch.where(inside, -ratio * tokens.advantages * tokens.logprobs, 0.0)


# ------------------------------------------------------------------------------------------------ objectives: GMPO, arXiv 2507.20673


def gmpo(log_ratio: Tensor, tokens: Tokens, clip_low: float, clip_high: float) -> Tensor:
    """-A exp(mean over the rollout of m), the geometric mean of clipped token ratios (arXiv 2507.20673).

    m = min(l, high) where A > 0, max(l, -low) where A < 0: the bounds are those of l itself, and the paper's are .4 and .4. Every
    token of a rollout carries the rollout's loss, so the reduction is sequence_mean. Dialect: verl's geo_mean and the paper are this.
    """
    clipped = torch.where(tokens.advantages > 0, log_ratio.clamp(max=clip_high), log_ratio.clamp(min=-clip_low))
    return -tokens.advantages * ratio_of(mean_per_row(clipped, tokens.row_ids, tokens.rows))[tokens.row_ids]


# ------------------------------------------------------------------------------------------------ objectives: SAPO, arXiv 2511.20347


def sapo(
    log_ratio: Tensor, tokens: Tokens, clip_low: float, clip_high: float, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> Tensor:
    """-(4 / tau) sigmoid(tau (r - 1)) A: a soft gate in place of the clip (arXiv 2511.20347; tau 1 where A > 0, else 1.05).
    The paper reduces by sequence_mean (verl, SkyRL, TRL); AReaL by token_mean."""
    tau = torch.where(tokens.advantages > 0, tau_positive, tau_negative)
    return -(4 / tau) * torch.sigmoid(tau * (ratio_of(log_ratio) - 1)) * tokens.advantages


# ------------------------------------------------------------------------------------------------ objectives: VESPO, arXiv 2602.10693


def vespo(
    log_ratio: Tensor,
    tokens: Tokens,
    clip_low: float,
    clip_high: float,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
) -> Tensor:
    """-sg(phi(W)) A log pi with phi(W) = W^k exp(lambda (1 - W)), W = exp(sum over the rollout of l) (arXiv 2602.10693; TRL).

    (k, lambda) is (2, 3) where A >= 0 and (3, 2) where A < 0; log W is clamped to [log 1e-8, 20]. With the sampler as anchor, W is the
    product of pi / mu, as in the paper; a token whose mu is unknown is left out of the product, and does not end it.
    """
    log_weight = sum_per_row(log_ratio.detach(), tokens.row_ids, tokens.rows).clamp(math.log(1e-8), 20.0)[tokens.row_ids]
    k = torch.where(tokens.advantages >= 0, k_positive, k_negative)
    decay = torch.where(tokens.advantages >= 0, lambda_positive, lambda_negative)
    return -(k * log_weight + decay * (1 - log_weight.exp())).exp() * tokens.advantages * tokens.logprobs


# ------------------------------------------------------------------------------------------------ objectives: DPPO, arXiv 2602.04879


def probability_and_anchor(log_ratio: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """(N,), (N,): pi and the anchor's probability of each token, without gradient, both inside (0, 1)."""
    logprobs = tokens.logprobs.detach()
    return tuple(values.exp().clamp(1e-12, 1 - 1e-7) for values in (logprobs, logprobs - log_ratio.detach()))


def dppo_tv(log_ratio: Tensor, tokens: Tokens, clip_low: float, clip_high: float, cap: float = 20.0) -> Tensor:
    """-sg(min(r, cap)) A log pi, and 0 where pi - mu > high with A > 0 or pi - mu < -low with A < 0: a trust region in probability, not in
    ratio (arXiv 2602.04879, binary total variation; .2 and .2; prime-rl's default). verl's form and cap; -A r has the same gradient."""
    pi, mu = probability_and_anchor(log_ratio, tokens)
    leaving = torch.where(tokens.advantages > 0, pi - mu > clip_high, pi - mu < -clip_low)
    return torch.where(leaving, 0.0, -ratio_of(log_ratio).clamp(max=cap).detach() * tokens.advantages * tokens.logprobs)


def dppo_kl(log_ratio: Tensor, tokens: Tokens, clip_low: float, clip_high: float, cap: float = 20.0) -> Tensor:
    """dppo_tv with the binary KL mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi)) as distance (arXiv 2602.04879). The bounds of verl's
    clip_ratio_low and _high: above low while pi falls with A < 0, above high while pi rises with A > 0."""
    pi, mu = probability_and_anchor(log_ratio, tokens)
    distance = mu * (mu / pi).log() + (1 - mu) * ((1 - mu) / (1 - pi)).log()
    rising = (tokens.advantages > 0) & (pi > mu) & (distance > clip_high)
    falling = (tokens.advantages < 0) & (pi < mu) & (distance > clip_low)
    return torch.where(rising | falling, 0.0, -ratio_of(log_ratio).clamp(max=cap).detach() * tokens.advantages * tokens.logprobs)


# ------------------------------------------------------------------------------------------------ objectives: prime-rl


def probability_mask(log_ratio: Tensor, tokens: Tokens, clip_low: float, clip_high: float, delta: float = 0.1) -> Tensor:
    """-r A, and 0 where |pi - mu| > delta, whatever the sign of A (prime-rl's symmetric mask, delta .1)."""
    pi, mu = probability_and_anchor(log_ratio, tokens)
    return torch.where((pi - mu).abs() > delta, 0.0, -ratio_of(log_ratio) * tokens.advantages)


def dppo_pull(log_ratio: Tensor, tokens: Tokens, clip_low: float, clip_high: float, tau: float = 1e-3) -> Tensor:
    """dppo_tv + tau l^2, the pull acting on dropped tokens too (prime-rl's default loss; Kimi K2.5, arXiv 2602.02276; tau 1e-3)."""
    return dppo_tv(log_ratio, tokens, clip_low, clip_high, cap=math.inf) + tau * log_ratio**2


# ------------------------------------------------------------------------------------------------ objectives: DRO, arXiv 2405.19107


def dro(log_ratio: Tensor, tokens: Tokens, clip_low: float, clip_high: float, beta: float = 0.1) -> Tensor:
    """-(A log pi - beta / 2 l^2): a quadratic pull to the anchor in place of a clip (arXiv 2405.19107; verl, beta .1)."""
    return -(tokens.advantages * tokens.logprobs - beta / 2 * log_ratio**2)


# ------------------------------------------------------------------------------------------------ objectives: covariance, arXiv 2505.22617


def clip_cov(log_ratio: Tensor, tokens: Tokens, clip_low: float, clip_high: float) -> Tensor:
    """PPO-clip without the tokens that clip_cov_choice picked (Clip-Cov, arXiv 2505.22617)."""
    return ppo(log_ratio, tokens, clip_low, clip_high) * (1 - chosen(tokens))


def kl_cov(log_ratio: Tensor, tokens: Tokens, clip_low: float, clip_high: float, coef: float = 1.0) -> Tensor:
    """-r A + coef |l| on the tokens that kl_cov_choice picked, unclipped (KL-Cov, arXiv 2505.22617, coef 1)."""
    return -ratio_of(log_ratio) * tokens.advantages + coef * chosen(tokens) * log_ratio.abs()


def chosen(tokens: Tokens) -> Tensor:
    if tokens.step.objective is None:
        raise ValueError("clip_cov and kl_cov choose tokens over the whole step: pass step=objectives.prepare(...)")
    return tokens.step.objective


def clip_cov_choice(
    tokens: Tokens,
    clip_low: float,
    clip_high: float,
    uniform: Tensor,
    sum_over_ranks: SumOverRanks,
    share: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
) -> Tensor:
    """A random share of the step's tokens, from those not clipped whose covariance (A - mean A)(log pi - mean log pi) is in (low, high)
    (arXiv 2505.22617; share 2e-4, bounds 1 and 5; at least one). Means are over the step. verl takes them over a micro-batch."""
    ratio = ratio_of(tokens.logprobs - tokens.logprobs_old)
    clipped = torch.where(tokens.advantages > 0, ratio > 1 + clip_high, ratio < 1 - clip_low)
    covariance = token_covariance(tokens, sum_over_ranks)
    eligible = tokens.trained & ~clipped & (covariance > cov_low) & (covariance < cov_high)
    return largest(uniform, eligible, share_of_step(share, tokens, sum_over_ranks), sum_over_ranks).to(tokens.logprobs.dtype)


def kl_cov_choice(
    tokens: Tokens, clip_low: float, clip_high: float, uniform: Tensor, sum_over_ranks: SumOverRanks, share: float = 2e-4
) -> Tensor:
    """The share of the step's tokens with the largest covariance, at least one (arXiv 2505.22617; 2e-4, verl; SkyRL's default is .2)."""
    count = share_of_step(share, tokens, sum_over_ranks)
    return largest(token_covariance(tokens, sum_over_ranks), tokens.trained, count, sum_over_ranks).to(tokens.logprobs.dtype)


def token_covariance(tokens: Tokens, sum_over_ranks: SumOverRanks) -> Tensor:
    """(N,): (A - mean A)(log pi - mean log pi), means over the step."""
    advantages, logprobs = tokens.advantages.double(), tokens.logprobs.double()
    return (advantages - step_mean(advantages, tokens.trained, sum_over_ranks)) * (logprobs - step_mean(logprobs, tokens.trained, sum_over_ranks))


# ------------------------------------------------------------------------------------------------ corrections: a weight per token


def sequence_geometric(log_weight: Tensor, tokens: Tokens, low: float, high: float) -> Tensor:
    """w = g, the rollout's geometric mean of rho, inside [low, high], else 0: loss.sequence_mask in the dialect of AReaL and open-instruct."""
    mean = ratio_of(mean_per_row(log_weight, tokens.row_ids, tokens.rows))[tokens.row_ids]
    return torch.where((mean >= low) & (mean <= high), mean, 0.0)


def sequence_truncate(log_weight: Tensor, tokens: Tokens, low: float, high: float) -> Tensor:
    """w = clip(product of rho over the rollout, low, high) (TRL's sequence_truncate, bound 3; with 0 and inf NeMo-RL's weight for GSPO).
    A length trap: .012 nats of bias per token are e^1.2 = 3.3 after 100 tokens."""
    return bounded_weight(sum_per_row(log_weight, tokens.row_ids, tokens.rows), low, high)[tokens.row_ids]


def sequence_product(log_weight: Tensor, tokens: Tokens, low: float, high: float) -> Tensor:
    """w = the product of rho over the rollout inside [low, high], else 0 (TRL's default, sequence_mask, bound 3; verl, SkyRL)."""
    product = bounded_weight(sum_per_row(log_weight, tokens.row_ids, tokens.rows), 0.0, torch.inf)[tokens.row_ids]
    return torch.where((product >= low) & (product <= high), product, 0.0)


def batch_normalized(log_weight: Tensor, tokens: Tokens, low: float, high: float) -> Tensor:
    """w = truncated rho divided by its mean over the step, so weights average 1 (verl's and slime's batch normalisation)."""
    return prepared(tokens.step.correction, "batch_normalized")


def batch_normalized_weights(tokens: Tokens, low: float, high: float, uniform: Tensor, sum_over_ranks: SumOverRanks) -> Tensor:
    """The mean is over trained tokens, of all ranks; SkyRL's also averages the padding."""
    weight = bounded_weight(tokens.logprobs_old - tokens.logprobs_gen, low, high)
    return weight / step_mean(weight.double(), tokens.trained, sum_over_ranks).clamp(min=1e-8).to(weight.dtype)


# ------------------------------------------------------------------------------------------------ rejections: 0 or 1 per token
# signature of a correction; low and high belong to the correction beside it and are not read


def keep_all(log_weight: Tensor, tokens: Tokens, low: float, high: float) -> Tensor:
    """1."""
    return torch.ones_like(log_weight)


def per_rollout(values: Tensor, tokens: Tokens, aggregate: str) -> Tensor:
    """(N,) -> (N,): token (itself), or the rollout's sum, mean or max at each of its tokens."""
    if aggregate == "token":
        return values
    if aggregate == "max":
        lowest = torch.full((tokens.rows,), -torch.inf, dtype=values.dtype, device=values.device)
        return lowest.scatter_reduce(0, tokens.row_ids, values, "amax")[tokens.row_ids]
    return (sum_per_row if aggregate == "sum" else mean_per_row)(values, tokens.row_ids, tokens.rows)[tokens.row_ids]


def rejection(estimator: str, aggregate: str, ratio_low: float = 0.5, ratio_high: float = 2.0, threshold: float = 0.01) -> Correction:
    """Keeps what the sampler and pi_old agree on, per token or whole rollout (verl's rollout rejection; AReaL).

    k1 = -log rho keeps ratio_low <= exp(k1) <= ratio_high. That is a bound on mu / pi_old, as in verl: 2.5 rejects rho < .4, not
    rho > 2.5. k2 = (log rho)^2 / 2 and k3 = rho - 1 - log rho keep what is <= threshold. The thresholds are ours; neither has a paper.
    """

    def reject_k1(log_weight: Tensor, tokens: Tokens, low: float, high: float, ratio_low=ratio_low, ratio_high=ratio_high) -> Tensor:
        value = per_rollout(-log_weight, tokens, aggregate)
        return ((value >= math.log(ratio_low)) & (value <= math.log(ratio_high))).to(log_weight.dtype)

    def reject(log_weight: Tensor, tokens: Tokens, low: float, high: float, threshold=threshold) -> Tensor:
        per_token = loss.KL_ESTIMATORS[estimator](-log_weight.clamp(-loss.LOG_RATIO_LIMIT, loss.LOG_RATIO_LIMIT))
        return (per_rollout(per_token, tokens, aggregate) <= threshold).to(log_weight.dtype)

    return reject_k1 if estimator == "k1" else reject


def veto(log_weight: Tensor, tokens: Tokens, low: float, high: float, veto_low: float = 1e-4, veto_high: float = 100.0) -> Tensor:
    """0 for a rollout with a single rho outside [veto_low, veto_high] (SkyRL, 1e-4 and 100; slime's mis helper has the lower bound only)."""
    outside = (log_weight < math.log(veto_low)) | (log_weight > math.log(veto_high))
    return (per_rollout(outside.to(log_weight.dtype), tokens, "max") == 0).to(log_weight.dtype)


def opsm(log_weight: Tensor, tokens: Tokens, low: float, high: float, delta: float = 1e-4) -> Tensor:
    """0 for a rollout with A < 0 that the policy has left: mean of log mu - log pi > delta (off-policy sequence mask, DeepSeek-V3.2, arXiv
    2512.02556 eq. 9; TRL's choice of mu). The paper gives no delta; 1e-4 is slime's. Costs nothing: pi is the micro-batch's own."""
    gone = per_rollout(tokens.logprobs_gen - tokens.logprobs.detach(), tokens, "mean")
    return (~((tokens.advantages < 0) & (gone > delta))).to(log_weight.dtype)


def opsm_old(log_weight: Tensor, tokens: Tokens, low: float, high: float, delta: float = 1e-4) -> Tensor:
    """opsm with pi_old in place of mu (slime's default): blind to the difference between engine and trainer."""
    gone = per_rollout(tokens.logprobs_old - tokens.logprobs.detach(), tokens, "mean")
    return (~((tokens.advantages < 0) & (gone > delta))).to(log_weight.dtype)


def vaco(log_weight: Tensor, tokens: Tokens, low: float, high: float, bound: float = 0.1) -> Tensor:
    """0 for a token that still moves away, log rho A > 0, in a rollout whose mean |rho - 1| exceeds the bound (arXiv 2603.01365;
    open-instruct's TV mask). The bound is ours."""
    distance = per_rollout((ratio_of(log_weight) - 1).abs(), tokens, "mean")
    return (~((distance > bound) & (log_weight * tokens.advantages > 0))).to(log_weight.dtype)


def m2po(log_weight: Tensor, tokens: Tokens, low: float, high: float) -> Tensor:
    """0 for the tokens whose (log rho)^2 is the largest of the step, until the mean of the others is below tau (m2po_keep)."""
    return prepared(tokens.step.rejection, "m2po")


def m2po_keep(
    tokens: Tokens, low: float, high: float, uniform: Tensor, sum_over_ranks: SumOverRanks, tau: float = 0.04, everywhere: float = 0
) -> Tensor:
    """1 where (log rho)^2 <= the largest bound under which the mean of what stays is < tau (M2PO, arXiv 2510.01161, tau .04).

    Dialects: the paper judges and drops only tokens already on the far side, log rho A > 0, where PPO would clip; AReaL all tokens
    (everywhere = 1). Equal values stay or go together; nothing judged stays when its smallest value is not below tau.
    """
    log_weight = (tokens.logprobs_old - tokens.logprobs_gen).double()
    squares, keys = log_weight**2, ordered_keys(log_weight**2)
    judged = tokens.trained & (torch.ones_like(tokens.trained) if everywhere else log_weight * tokens.advantages > 0)

    def small_enough(bound: int) -> bool:
        kept = judged & (keys <= bound)
        total, count = sum_over_ranks(torch.stack([torch.where(kept, squares, 0.0).sum(), kept.double().sum()])).tolist()
        return total < tau * count or count == 0

    return (~judged | (keys <= largest_integer(small_enough))).to(tokens.logprobs_old.dtype)


def prepared(values: Tensor | None, name: str) -> Tensor:
    if values is None:
        raise ValueError(f"{name} is computed over the whole step: pass step=objectives.prepare(...)")
    return values


def combine(correction: Correction, rejected: Correction) -> Correction:
    """The product of a weight and a rejection, itself a correction."""
    if rejected is keep_all:
        return correction

    def both(log_weight: Tensor, tokens: Tokens, low: float, high: float) -> Tensor:
        return correction(log_weight, tokens, low, high) * rejected(log_weight, tokens, low, high)

    return both


def interpolated_anchor(logprobs: Tensor, logprobs_gen: Tensor, version: Tensor, version_old: float, version_now: float) -> Tensor:
    """(N,) a stand-in for log pi_old without its forward pass: log mu + alpha (log pi - log mu), alpha = (v_old - v_mu) / (v_now - v_mu)
    (AReaL's log-linear approximation). version (N,) is the one that sampled each token; where it is the current one, log mu. No gradient."""
    span = version_now - version
    alpha = torch.where(span > 0, (version_old - version) / span.clamp(min=1), 0.0).clamp(0, 1)
    return (logprobs_gen + alpha * (logprobs - logprobs_gen)).detach()


# ------------------------------------------------------------------------------------------------ KL: other gradients


def score_gradient(value: Tensor, x: Tensor, tokens: Tokens) -> Tensor:
    """exp(log pi - sg(log pi)) value: the derivative plus its score-function term, the gradient of the estimator's expectation (NeMo-RL).
    For k3 this is loss.true_gradient; k1 gets a term of mean zero more, k2 x^2 / 2 more."""
    return value * ratio_of(tokens.logprobs - tokens.logprobs.detach())


def ratio_gradient(value: Tensor, x: Tensor, tokens: Tokens) -> Tensor:
    """(pi / pi_old) value, differentiated through both factors (DeepSeek-V3.2, arXiv 2512.02556; TRL's and slime's unbiased option)."""
    return value * ratio_of(tokens.logprobs - tokens.logprobs_old)


def ratio_gen_gradient(value: Tensor, x: Tensor, tokens: Tokens) -> Tensor:
    """(pi / mu) value, differentiated through both factors: counts the sampler's difference too (NeMo-RL's on-policy KL approximation)."""
    return value * ratio_of(tokens.logprobs - tokens.logprobs_gen)


# ------------------------------------------------------------------------------------------------ KL in the reward


def kl_in_reward(logprobs_old: Tensor, logprobs_ref: Tensor, row_ids: Tensor, rows: int, kl: str = "k1", to: str = "reward") -> Tensor:
    """What kl_coef multiplies and is subtracted, without gradient; the loss has no KL term then. Needs pi_old's own forward pass.

    reward: (R,) sum over the rollout, from the reward, before the baseline (verl, OpenRLHF and SkyRL with group advantages);
    advantage: (N,) each token's own, from its advantage, before whitening (NeMo-RL);
    return: (N,) the rest of the rollout's, own token included, from the advantage (REINFORCE++, arXiv 2501.03262).
    """
    x = (logprobs_old - logprobs_ref).detach().clamp(-loss.LOG_RATIO_LIMIT, loss.LOG_RATIO_LIMIT)
    per_token = loss.KL_ESTIMATORS[kl](x)
    if to == "advantage":
        return per_token
    totals = sum_per_row(per_token, row_ids, rows)
    if to == "reward":
        return totals
    order = torch.argsort(row_ids, stable=True)  # rollouts together, their tokens in order
    before_rows = totals.cumsum(0) - totals  # (R,) everything in earlier rollouts
    before_tokens = torch.empty_like(per_token)
    before_tokens[order] = per_token[order].cumsum(0) - per_token[order]
    return totals[row_ids] - (before_tokens - before_rows[row_ids])


# ------------------------------------------------------------------------------------------------ advantages: baseline and scale


@dataclass(frozen=True)
class Rewards:
    """What an advantage may read about the rollouts of one step that this rank holds, groups whole."""

    rewards: np.ndarray  # (R,) float64
    groups: np.ndarray  # (R,) ids, unique over ranks
    row_tokens: np.ndarray  # (R,) sampled tokens
    valid: np.ndarray  # (R,) bool
    population: bool = False  # standard deviations divide by n
    sum_over_ranks: SumOverRanks = one_rank


def group_mean(step: Rewards) -> np.ndarray:
    """The mean of the group (GRPO, arXiv 2402.03300 sec. 4.1.2)."""
    return loss.baseline_and_std(step.rewards, step.groups, valid=step.valid)[0]


def leave_one_out(step: Rewards) -> np.ndarray:
    """The mean of the other members (RLOO, arXiv 2402.14740): r - baseline is n / (n - 1) times r - group mean."""
    return loss.baseline_and_std(step.rewards, step.groups, leave_one_out=True, valid=step.valid)[0]


def length_weighted(step: Rewards) -> np.ndarray:
    """sum of tokens times reward over sum of tokens, in the group: the variance-optimal baseline when the gradient's squared norm grows
    with the length (OPO, arXiv 2505.23585)."""
    baseline = step.rewards.copy()
    for group in np.unique(step.groups):
        rows = (step.groups == group) & step.valid
        if (total := step.row_tokens[rows].sum()) > 0:
            baseline[step.groups == group] = (step.row_tokens[rows] * step.rewards[rows]).sum() / total
    return baseline


def batch_mean(step: Rewards) -> np.ndarray:
    """The mean of the whole step."""
    return np.full_like(step.rewards, batch_mean_and_std(step.rewards, step.valid, step.sum_over_ranks)[0])


def no_baseline(step: Rewards) -> np.ndarray:
    """0: the advantage is the reward."""
    return np.zeros_like(step.rewards)


def unscaled(step: Rewards) -> np.ndarray:
    """1 (Dr. GRPO, arXiv 2503.20783 sec. 3.2)."""
    return np.ones_like(step.rewards)


def group_std(step: Rewards) -> np.ndarray:
    """The standard deviation of the group (GRPO, arXiv 2402.03300 sec. 4.1.2)."""
    return loss.baseline_and_std(step.rewards, step.groups, population=step.population, valid=step.valid)[1]


def leave_one_out_std(step: Rewards) -> np.ndarray:
    """The standard deviation of the other members (NeMo-RL's default with its leave-one-out baseline)."""
    return loss.baseline_and_std(step.rewards, step.groups, leave_one_out=True, population=step.population, valid=step.valid)[1]


def batch_std(step: Rewards) -> np.ndarray:
    """The standard deviation of all rewards of the step (arXiv 2508.08221; TRL's scale_rewards=batch, AReaL, SkyRL)."""
    return np.full_like(step.rewards, batch_mean_and_std(step.rewards, step.valid, step.sum_over_ranks, step.population)[1])


def group_mean_scale(step: Rewards) -> np.ndarray:
    """The mean of the group: with its mean as baseline (r - mean) / mean (MaxRL, arXiv 2602.02710; prime-rl, SkyRL). Rewards >= 0 only."""
    if (step.rewards[step.valid] < 0).any():
        raise ValueError("--loss.scale mean divides by the mean reward: rewards must not be negative")
    return group_mean(step)


def batch_mean_and_std(values: np.ndarray, valid: np.ndarray, sum_over_ranks: SumOverRanks, population: bool = False) -> tuple[float, float]:
    """Mean and standard deviation over the valid values of all ranks, in two passes."""
    included, tensor = torch.from_numpy(np.asarray(valid, dtype=bool)), torch.from_numpy(np.asarray(values, dtype=np.float64))
    mean = step_mean(tensor, included, sum_over_ranks)
    squares = torch.where(included, (tensor - mean) ** 2, 0.0).sum()
    total, count = sum_over_ranks(torch.stack([squares, included.double().sum()])).tolist()
    return mean.item(), math.sqrt(total / max(count if population else count - 1, 1))


BASELINES: dict[str, Callable[[Rewards], np.ndarray]] = {
    "mean": group_mean, "leave_one_out": leave_one_out, "length_weighted": length_weighted, "batch_mean": batch_mean, "none": no_baseline,
}  # fmt: skip
GROUP_BASELINES = ("mean", "leave_one_out", "length_weighted")  # a group without signal has advantage exactly 0
SCALES: dict[str, Callable[[Rewards], np.ndarray]] = {
    "std": group_std, "leave_one_out_std": leave_one_out_std, "batch_std": batch_std, "mean": group_mean_scale, "none": unscaled,
}  # fmt: skip


def pass_at_k(step: Rewards) -> np.ndarray:
    """The best rollout of a group gets its lead over the second best, the others 0 (arXiv 2503.19595; verl's grpo_passk)."""
    advantages = np.zeros_like(step.rewards)
    for group in np.unique(step.groups):
        rows = np.flatnonzero((step.groups == group) & step.valid)
        if len(rows) > 1:
            first, second = rows[np.argsort(-step.rewards[rows], kind="stable")[:2]]
            advantages[first] = step.rewards[first] - step.rewards[second]
    return advantages


ESTIMATORS: dict[str, Callable[[Rewards], np.ndarray]] = {"pass_at_k": pass_at_k}  # in place of a baseline; SCALES divide them too


def advantages(
    rewards: np.ndarray,
    groups: np.ndarray,
    *,
    baseline: str = "mean",
    scale: str = "std",
    row_tokens: np.ndarray | None = None,
    population: bool = False,
    valid: np.ndarray | None = None,
    clip_low: float = -math.inf,
    clip_high: float = math.inf,
    sum_over_ranks: SumOverRanks = one_rank,
) -> np.ndarray:
    """A = clip((r - baseline) / scale): loss.group_advantages with every baseline (or estimator) and scale there is.

    Args:
        rewards, groups, row_tokens, valid: (R,), whole groups. row_tokens is read by length_weighted alone.
        clip_low, clip_high: bounds on the result, each for itself (NeMo-RL).

    Returns:
        (R,) float64; 0 for rows that are not valid, and for groups without signal unless the baseline is not the group's. Where a scale is
        0 the advantage is not divided.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    valid = np.ones(len(rewards), dtype=bool) if valid is None else np.asarray(valid, dtype=bool)
    row_tokens = np.ones(len(rewards)) if row_tokens is None else np.asarray(row_tokens)
    step = Rewards(np.where(valid, rewards, 0.0), np.asarray(groups), row_tokens, valid, population, sum_over_ranks)
    values = ESTIMATORS[baseline](step) if baseline in ESTIMATORS else step.rewards - BASELINES[baseline](step)
    divisor = SCALES[scale](step)
    values = values / np.where(divisor > 0, divisor, 1.0)
    usable = valid & (loss.has_signal(rewards, groups, valid) if baseline in GROUP_BASELINES else True)
    return np.clip(np.where(usable, values, 0.0), clip_low, clip_high)


def gdpo(
    components: Mapping[str, np.ndarray],
    groups: np.ndarray,
    weights: Mapping[str, float] | None = None,
    valid: np.ndarray | None = None,
    sum_over_ranks: SumOverRanks = one_rank,
    **settings,
) -> np.ndarray:
    """Several rewards, each normalised in its group, then weighted, summed and whitened over the step (GDPO, arXiv 2601.05242).

    Args:
        components: name -> (R,); at least two. weights: name -> weight, 1 by default. settings: those of `advantages`.

    Returns:
        (R,) float64: (A - mean) / std over the step, std dividing by n - 1; all 0 where the sum is constant.
    """
    if len(components) < 2:
        raise ValueError(f"gdpo needs at least two rewards, got {sorted(components)}")
    if weights is not None and set(weights) != set(components):
        raise ValueError(f"gdpo needs one weight for each of {sorted(components)}, got {sorted(weights)}")
    weights = dict.fromkeys(components, 1.0) if weights is None else weights
    total = sum(
        weights[name] * advantages(components[name], groups, valid=valid, sum_over_ranks=sum_over_ranks, **settings) for name in sorted(components)
    )
    included = np.ones(len(total), dtype=bool) if valid is None else np.asarray(valid, dtype=bool)
    mean, std = batch_mean_and_std(total, included, sum_over_ranks)
    if std < 1e-12 * sum(map(abs, weights.values())):  # rewards that cancel leave rounding noise, and dividing it by itself gives 1
        return np.zeros_like(total)
    return np.where(included, (total - mean) / std, 0.0)


def whiten(values: Tensor, trained: Tensor, sum_over_ranks: SumOverRanks = one_rank) -> Tensor:
    """(A - mean) / sqrt(max(var, 1e-8)), (N,), over the trained tokens of the step (REINFORCE++, arXiv 2501.03262; NeMo-RL).
    Dialect: the variance divides by n; verl's by n - 1. Token-weighted, so a long rollout counts for more than a short one."""
    doubles = values.double()
    mean = step_mean(doubles, trained, sum_over_ranks)
    variance = step_mean((doubles - mean) ** 2, trained, sum_over_ranks)
    return torch.where(trained, (doubles - mean) * variance.clamp(min=1e-8).rsqrt(), 0.0).to(values.dtype)


# ------------------------------------------------------------------------------------------------ rewards before advantages
# order: scale, shape, then advantages; dynamic sampling asks loss.has_signal about the rewards before shaping


def scale_rewards(rewards: np.ndarray, source: tuple[float, float], target: tuple[float, float]) -> tuple[np.ndarray, int]:
    """Clamps to the source interval and maps it linearly onto the target interval; also how many rewards lay outside.

    >>> scale_rewards(np.array([-2.8, 0.5, 2.0]), (-2, 2), (-1, 1))
    (array([-1.  ,  0.25,  1.  ]), 1)
    """
    (low, high), (target_low, target_high) = source, target
    if not low < high:
        raise ValueError(f"rewards are scaled from an interval, got {source}")
    rewards = np.asarray(rewards, dtype=np.float64)
    outside = int(((rewards < low) | (rewards > high)).sum())
    return target_low + (rewards.clip(low, high) - low) * (target_high - target_low) / (high - low), outside


def soft_overlong_penalty(lengths: np.ndarray, max_length: int, buffer: int, penalty: float = 1.0, capped: bool = True) -> np.ndarray:
    """What to add to the reward: 0 up to max_length - buffer, then linearly down to -penalty at max_length (DAPO, arXiv 2503.14476 eq. 13,
    penalty 1). lengths (R,) are sampled tokens. Beyond max_length the paper, verl and OpenRLHF stay at -penalty; NeMo-RL goes on down
    (capped=False).

    >>> soft_overlong_penalty(np.array([10, 22, 25, 30]), 25, 5, 0.5)
    array([ 0. , -0.2, -0.5, -0.5])
    """
    if buffer <= 0 or penalty < 0 or buffer > max_length:
        raise ValueError(f"soft overlong: 0 < buffer <= max_length and penalty >= 0, got {buffer}, {max_length}, {penalty}")
    over = (np.asarray(lengths, dtype=np.float64) - (max_length - buffer)) / buffer
    return -penalty * over.clip(0.0, 1.0 if capped else None) + 0.0


def stop_properly(rewards: np.ndarray, truncated: np.ndarray, coef: float) -> np.ndarray:
    """reward * coef for rollouts cut off by the length limit (ProRLv2's stop-properly coefficient; OpenRLHF, NeMo-RL), coef in [0, 1]."""
    if not 0 <= coef <= 1:
        raise ValueError(f"the stop-properly coefficient is a share of the reward, got {coef}")
    return np.where(truncated, np.asarray(rewards, dtype=np.float64) * coef, rewards)


# ------------------------------------------------------------------------------------------------ rollouts the engine scored too differently


def sequence_error(logprobs_old: Tensor, logprobs_gen: Tensor, row_ids: Tensor, rows: int) -> Tensor:
    """(R,) float64: mean over the rollout of exp |log pi_old - log mu|; 1 is perfect, 0 for a rollout without tokens."""
    difference = (logprobs_old - logprobs_gen).double().abs().clamp(max=loss.LOG_RATIO_LIMIT)
    return mean_per_row(difference.exp(), row_ids, rows)


def drop_by_sequence_error(error: np.ndarray, counted: np.ndarray, rewards: np.ndarray, threshold: float) -> tuple[np.ndarray, loss.Metrics]:
    """Which rollouts keep their weight: error <= threshold (NeMo-RL's seq_logprob_error_threshold, for example 1.5). A dropped rollout
    leaves the counts too, so this comes before Counts, and needs pi_old's own forward pass.

    Args:
        error (R,) from sequence_error; counted (R,) bool, rollouts that have a weight; rewards (R,).
    """
    error, counted = np.asarray(error), np.asarray(counted, dtype=bool)
    keep = counted & (error <= threshold)
    dropped = counted & ~keep
    metrics: loss.Metrics = {
        "dropped_by_sequence_error": ("sum", float(dropped.sum()), 1.0),
        "dropped_correct": ("mean", float((np.asarray(rewards)[dropped] == 1).sum()), float(dropped.sum())),
    }
    for suffix, rows in (("", counted), ("_kept", keep)):
        metrics["sequence_error" + suffix] = ("mean", float(error[rows].sum()), float(rows.sum()))
        metrics["sequence_error_max" + suffix] = ("max", float(error[rows].max(initial=-math.inf)), 1.0)
        metrics["sequence_error_min" + suffix] = ("min", float(error[rows].min(initial=math.inf)), 1.0)
    return keep, metrics


# ------------------------------------------------------------------------------------------------ entropy


def entropy_top_share(tokens: Tokens, share: float, sum_over_ranks: SumOverRanks = one_rank) -> Tensor:
    """1 for the share of the step's tokens with the highest entropy (arXiv 2506.01939, share .2), (N,): the others lose their policy
    gradient, and stay in the denominator (the paper, TRL). Needs tokens.entropy from a pass without gradient over the whole step."""
    if tokens.entropy is None:
        raise ValueError("--loss.entropy-share needs the entropy of every token before the step")
    count = share_of_step(share, tokens, sum_over_ranks)
    return largest(tokens.entropy, tokens.trained, count, sum_over_ranks).to(tokens.logprobs.dtype)


def adaptive_entropy_coef(
    coef: float, entropy: float, target: float = 0.2, delta: float = 0.005, low: float = 0.0, high: float = 1.0
) -> tuple[float, float]:
    """The next entropy coefficient, and the one to apply now. The coefficient grows by delta while the entropy is at most the target, and then acts;
    above the target it shrinks and the bonus is off (Skywork-OR1, arXiv 2505.22312; target .2, delta .005, TRL's [0, 1]).

    Dialect: TRL applies the coefficient after its own update, as here; the paper the one before it. entropy is the mean of a whole
    step: measured by the previous step at no cost, or of this one where a pass without gradient gives it.

    >>> adaptive_entropy_coef(0.01, 0.15)
    (0.015, 0.015)
    >>> adaptive_entropy_coef(0.01, 0.25)
    (0.005, 0.0)
    """
    below = entropy <= target
    coef = min(max(coef + (delta if below else -delta), low), high)
    return coef, coef if below else 0.0


# ------------------------------------------------------------------------------------------------ the whole optimizer step


def ordered_keys(values: Tensor) -> Tensor:
    """(N,) int64 in the order of the float64 values, so that a threshold can be found bit by bit."""
    bits = (values.double() + 0.0).view(torch.int64)  # + 0: -0 becomes 0
    return torch.where(bits >= 0, bits, bits ^ (2**63 - 1))


def largest_integer(holds: Callable[[int], bool]) -> int:
    """The largest int64 for which `holds`, true up to some point and false after it, is true. 64 questions."""
    low, high = -(2**63), 2**63 - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def largest(values: Tensor, eligible: Tensor, count: float, sum_over_ranks: SumOverRanks) -> Tensor:
    """(N,) bool: the `count` largest eligible values over all ranks (all eligible ones if fewer; equals of the last are in). Exact, by
    asking 64 times how many lie above a threshold: 64 sums of one number in place of gathering every token."""
    keys = ordered_keys(values)

    def enough(bound: int) -> bool:
        return sum_over_ranks((eligible & (keys >= bound)).double().sum().reshape(1)).item() >= count

    return eligible & (keys >= largest_integer(enough))


def share_of_step(share: float, tokens: Tokens, sum_over_ranks: SumOverRanks) -> int:
    """How many tokens a share of the step is, at least one."""
    return max(1, int(share * sum_over_ranks(tokens.trained.double().sum().reshape(1)).item()))


def step_mean(values: Tensor, included: Tensor, sum_over_ranks: SumOverRanks) -> Tensor:
    """Mean over the included values of all ranks; 0 of none."""
    total, count = sum_over_ranks(torch.stack([torch.where(included, values, 0.0).sum(), included.double().sum()]))
    return total / count.clamp(min=1)


def keyed_uniform(seed: int, step: int, rollouts: Tensor, positions: Tensor) -> Tensor:
    """(N,) in [0, 1), a function of (seed, step, rollout, position) alone: the same token is chosen whatever the rank and micro-batch it
    is in. rollouts (N,) are ids that are unique over ranks. A splitmix64 finaliser per key.

    >>> keyed_uniform(0, 3, torch.tensor([7, 7]), torch.tensor([0, 1]))
    tensor([0.8799, 0.4431], dtype=torch.float64)
    """
    state = np.zeros(len(positions), dtype=np.uint64)
    for key in (np.uint64(seed % 2**64), np.uint64(step), rollouts.cpu().numpy().astype(np.uint64), positions.cpu().numpy().astype(np.uint64)):
        state = state + key + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return torch.from_numpy((state >> np.uint64(11)).astype(np.float64) / 2**53).to(positions.device)


def prepare(
    tokens: Tokens,
    *,
    objective: str,
    clip_low: float,
    clip_high: float,
    correction: str,
    correction_low: float,
    correction_high: float,
    objective_params: Mapping[str, float] = {},
    correction_params: Mapping[str, float] = {},
    rejection: str = "none",
    rejection_params: Mapping[str, float] = {},
    entropy_share: float = 1.0,
    uniform: Tensor | None = None,
    sum_over_ranks: SumOverRanks = one_rank,
) -> StepValues:
    """What the chosen objective, correction, rejection and entropy filter must know about the whole optimizer step.

    Args:
        tokens: every token this rank trains on in the step, all micro-batches; logprobs are those of the weights before the step
            (pi_old with one step per batch; else a pass without gradient, one more forward, which yields the entropy as well).
        uniform: (N,) from keyed_uniform, for choices at random.
        sum_over_ranks: called equally often on every rank, the ones without tokens included.

    Returns:
        StepValues for the same tokens; slice it like any other stored (N,) tensor. All None where nothing needs the step.
    """
    uniform = torch.zeros_like(tokens.logprobs) if uniform is None else uniform

    def run(axis: str, name: str, low: float, high: float, params: Mapping[str, float]) -> Tensor | None:
        if (axis, name) not in PREPARATIONS:
            return None
        function = PREPARATIONS[axis, name]
        return function(tokens, low, high, uniform, sum_over_ranks, **{k: v for k, v in params.items() if k in settings_of(function)})

    with torch.no_grad():
        return StepValues(
            objective=run("objective", objective, clip_low, clip_high, objective_params),
            correction=run("correction", correction, correction_low, correction_high, correction_params),
            rejection=run("rejection", rejection, correction_low, correction_high, rejection_params),
            entropy=entropy_top_share(tokens, entropy_share, sum_over_ranks) if entropy_share < 1 else None,
        )


def needs_step(objective: str, correction: str, rejection: str = "none", entropy_share: float = 1.0) -> bool:
    """Whether prepare has anything to do."""
    return entropy_share < 1 or any(key in PREPARATIONS for key in (("objective", objective), ("correction", correction), ("rejection", rejection)))


# ------------------------------------------------------------------------------------------------ the dicts

OBJECTIVES: dict[str, Objective] = {
    f.__name__: f
    for f in (dual_clip, two_sided, unclipped, cispo_cap, masked_reinforce, gmpo, sapo, vespo, dppo_tv, dppo_kl, probability_mask,
              dppo_pull, dro, clip_cov, kl_cov)
}  # fmt: skip
CORRECTIONS: dict[str, Correction] = {f.__name__: f for f in (sequence_geometric, sequence_truncate, sequence_product, batch_normalized)}
REJECTIONS: dict[str, Correction] = {
    "none": keep_all, "veto": veto, "opsm": opsm, "opsm_old": opsm_old, "vaco": vaco, "m2po": m2po,
    **{f"{k}_{over}": rejection(k, over) for k in ("k1", "k2", "k3") for over in ("token", "sum", "mean", "max")},
}  # fmt: skip
KL_GRADIENTS: dict[str, KLGradient] = {"score": score_gradient, "ratio": ratio_gradient, "ratio_gen": ratio_gen_gradient}
PREPARATIONS: dict[tuple[str, str], Callable[..., Tensor]] = {
    ("objective", "clip_cov"): clip_cov_choice,
    ("objective", "kl_cov"): kl_cov_choice,
    ("correction", "batch_normalized"): batch_normalized_weights,
    ("rejection", "m2po"): m2po_keep,
}

TOKEN_PPO = dict(objective="ppo", level="token", reduction="token_mean")
PRESETS: dict[str, dict[str, str | float | bool]] = {
    "rloo": dict(objective="reinforce", level="token", reduction="sequence_sum", baseline="leave_one_out", scale="none"),
    "reinforce_pp": dict(TOKEN_PPO, clip_low=0.2, clip_high=0.2, baseline="none", scale="none", whiten=True),
    "reinforce_pp_baseline": dict(TOKEN_PPO, clip_low=0.2, clip_high=0.2, baseline="mean", scale="none", whiten=True),
    "opo": dict(objective="reinforce", level="token", reduction="token_mean", baseline="length_weighted", scale="none"),
    "maxrl": dict(objective="reinforce", level="token", reduction="token_mean", baseline="mean", scale="mean"),
    "pass_at_k": dict(TOKEN_PPO, clip_low=0.2, clip_high=0.28, baseline="pass_at_k", scale="none"),
    "intellect2": dict(objective="two_sided", level="token", reduction="token_mean", clip_low=0.2, clip_high=0.2),
    "scale_rl": dict(objective="cispo_cap", level="token", reduction="prompt_mean", scale="batch_std"),
    "gmpo": dict(objective="gmpo", level="token", reduction="sequence_mean", clip_low=0.4, clip_high=0.4),
    "sapo": dict(objective="sapo", level="token", reduction="sequence_mean"),
    "luspo": dict(objective="ppo", level="sequence", reduction="sequence_sum", clip_low=2e-3, clip_high=2.5e-3),  # 2602.05261 sec. 5.1
    "vespo": dict(objective="vespo", level="token", anchor="gen", reduction="token_mean"),
    "dppo_tv": dict(objective="dppo_tv", level="token", anchor="gen", reduction="token_mean", clip_low=0.2, clip_high=0.2),
    "dppo_kl": dict(objective="dppo_kl", level="token", anchor="gen", reduction="token_mean", clip_low=0.2, clip_high=0.2),
    "prime_rl": dict(objective="dppo_pull", level="token", anchor="gen", reduction="token_mean", clip_low=0.2, clip_high=0.2, scale="none"),
    "glm5": dict(objective="masked_reinforce", level="token", anchor="gen", reduction="token_mean", clip_low=0.2, clip_high=0.28),
    "dro": dict(objective="dro", level="token", reduction="token_mean"),
    "clip_cov": dict(objective="clip_cov", level="token", reduction="token_mean", clip_low=1.0, clip_high=1.0),
    "kl_cov": dict(objective="kl_cov", level="token", reduction="token_mean"),
    "m2po": dict(objective="unclipped", level="token", anchor="gen", reduction="token_mean", rejection="m2po"),
    "tis": dict(TOKEN_PPO, clip_low=0.2, clip_high=0.28, correction="truncate", correction_low=0.0, correction_high=2.0),
    "icepop": dict(TOKEN_PPO, clip_low=0.2, clip_high=0.28, correction="mask", correction_low=0.5, correction_high=5.0),
}


# ------------------------------------------------------------------------------------------------ configuration


def settings_of(function: Callable) -> dict[str, float]:
    """The settings of its own that a function of one of the dicts takes, with the paper's defaults.

    >>> settings_of(sapo)
    {'tau_positive': 1.0, 'tau_negative': 1.05}
    """
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}


def bind(function: Callable, params: Mapping[str, float]) -> Callable:
    """The function with those of params that are its own."""
    own = {name: value for name, value in params.items() if name in settings_of(function)}
    return functools.partial(function, **own) if own else function


# a formula per token: each needs the token's own log-ratio, for a probability, for the log pi it multiplies, or for its own mean
TOKEN_OBJECTIVES = ("cispo", "cispo_cap", "masked_reinforce", "gmpo", "vespo", "dppo_tv", "dppo_kl", "probability_mask", "dppo_pull", "dro",
                    "clip_cov", "kl_cov")  # fmt: skip
MASKS = ("mask", "sequence_mask", "sequence_geometric", "sequence_product")
KL_PLACES = ("loss", "reward", "advantage", "return")


def validate(settings: Mapping[str, object], samples_per_prompt: int | None = None, max_completion_tokens: int | None = None) -> None:
    """Raises ValueError for a combination that cannot mean what it says, naming both flags and the way out. Absent settings are not checked.

    Combinations that the axes cannot even express (a clip beside `reinforce`, a dual clip inside cispo) need no rule.
    """
    objectives, corrections = loss.OBJECTIVES | OBJECTIVES, loss.CORRECTIONS | CORRECTIONS
    choices = dict(
        objective=objectives, level=loss.LEVELS, anchor=loss.ANCHORS, reduction=loss.REDUCTIONS, correction=corrections, rejection=REJECTIONS,
        kl=loss.KL_ESTIMATORS, kl_gradient=loss.KL_GRADIENTS | KL_GRADIENTS, kl_in=KL_PLACES, baseline=BASELINES | ESTIMATORS, scale=SCALES,
    )  # fmt: skip
    for name, known in choices.items():
        if name in settings and settings[name] not in known:
            raise ValueError(f"--loss.{name.replace('_', '-')} {settings[name]}: give one of {', '.join(known)}")

    def get(name: str, default: object = None) -> object:
        return settings.get(name, default)

    def refuse(condition: bool, first: str, second: str, why: str) -> None:
        if condition:
            flags = (f"--loss.{name.replace('_', '-')} {get(name)}" for name in (first, second))
            raise ValueError(f"{' with '.join(flags)}: {why}")

    objective, level, anchor, reduction = get("objective", "ppo"), get("level", "token"), get("anchor", "old"), get("reduction")
    sequence = level == "sequence"
    refuse(sequence and objective in TOKEN_OBJECTIVES, "objective", "level", "its formula is per token; use level token")
    long = "long rollouts would dominate; add --loss.reduction sequence_mean (LUSPO: sequence_sum)"
    refuse(sequence and reduction == "token_mean", "level", "reduction", long)
    refuse(objective == "gmpo" and reduction not in ("sequence_mean", None), "objective", "reduction", "one loss per rollout; use sequence_mean")
    refuse(objective in ("cispo", "cispo_cap") and reduction == "sequence_mean", "objective", "reduction", "it is a mean over tokens; use token_mean")

    correction, low, high = get("correction", "none"), get("correction_low", 0.0), get("correction_high", math.inf)
    if correction != "none":
        refuse(anchor == "gen", "anchor", "correction", "pi / mu already contains the correction; use correction none")
        refuse(low is None or high is None, "correction", "correction_low" if low is None else "correction_high", "it needs both bounds")
        refuse(high <= 0, "correction", "correction_high", "every weight would be 0; give a bound above 0")
        refuse(low > high, "correction_low", "correction_high", "no weight lies between; give low <= high")
        refuse(correction in MASKS and low <= 0, "correction", "correction_low", "a mask needs a lower bound above 0: .5, or .999 for sequences")
        refuse(sequence and correction == "sequence_mask", "level", "correction", "its weights differ inside one ratio; use sequence_geometric")

    share = get("entropy_share", 1.0)
    refuse(not 0 < share <= 1, "entropy_share", "objective", "it is a share of the tokens, above 0 and at most 1")
    refuse(share < 1 and sequence, "entropy_share", "level", "the ratio of a rollout cannot leave tokens out; use level token")
    refuse(share < 1 and objective == "gmpo", "entropy_share", "objective", "the ratio of a rollout cannot leave tokens out")
    refuse(get("kl_in", "loss") != "loss" and not get("kl_coef", 1.0), "kl_in", "kl_coef", "nothing would be subtracted; set kl_coef")
    refuse(get("kl_input_clamp", 1.0) <= 0 or get("kl_output_clamp", 1.0) <= 0, "kl_input_clamp", "kl_output_clamp", "both are above 0; inf is off")
    bounds = get("advantage_clip_low"), get("advantage_clip_high")
    refuse(None not in bounds and bounds[0] > bounds[1], "advantage_clip_low", "advantage_clip_high", "no advantage lies between; give low <= high")
    refuse(get("clip_low", 0.0) < 0 or get("clip_high", 0.0) < 0, "clip_low", "clip_high", "both are distances from 1, at least 0")

    for name, off in (("reward_from", None), ("overlong_buffer", 0), ("stop_properly", 1.0)):
        refuse(bool(get("gdpo")) and get(name, off) != off, "gdpo", name, "each reward is normalised by itself, there is no total to shape")
    refuse((get("reward_from") is None) != (get("reward_to") is None), "reward_from", "reward_to", "an interval is mapped onto another; give both")
    if max_completion_tokens is not None and get("overlong_buffer", 0) > max_completion_tokens:
        raise ValueError(f"--loss.overlong-buffer {get('overlong_buffer')} exceeds --sampling.max-completion-tokens {max_completion_tokens}")
    refuse(not 0 <= get("stop_properly", 1.0) <= 1, "stop_properly", "overlong_buffer", "it is the share of its reward a truncated rollout keeps")
    refuse(bool(get("overlong_buffer", 0)) and get("stop_properly", 1.0) < 1, "stop_properly", "overlong_buffer", "give one of the two")

    for axis, functions in (("objective", objectives), ("correction", corrections), ("rejection", REJECTIONS)):
        name, params = get(axis), get(f"{axis}_params") or {}
        own = settings_of(functions[name]) if name in functions else {}
        own = own | (settings_of(PREPARATIONS[axis, name]) if (axis, name) in PREPARATIONS else {})
        unknown = sorted(set(params) - set(own))
        refuse(bool(unknown), axis, f"{axis}_params", f"it has no setting {', '.join(unknown)}; it has {', '.join(own) or 'none'}")
    cap = (get("objective_params") or {}).get("cap", math.inf)
    refuse(objective == "dual_clip" and cap <= 1, "objective", "objective_params", "cap must be above 1: at 1 it acts on tokens that have not moved")
    baseline = get("baseline", "mean")
    if samples_per_prompt == 1 and (baseline in GROUP_BASELINES or baseline in ESTIMATORS):
        raise ValueError(f"--samples-per-prompt 1 with --loss.baseline {baseline}: every advantage would be 0; use 2 or more, or baseline none")
    if reduction == "constant" and max_completion_tokens is not None and max_completion_tokens <= 0:
        raise ValueError(f"--loss.reduction constant with --sampling.max-completion-tokens {max_completion_tokens}: that number is its divisor")
