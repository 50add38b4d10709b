"""The maths of GRPO: advantages, objective, train-inference correction, KL, reduction. Pure functions of flat tensors.

For every sampled token t of rollout i, with advantage A and log-probabilities under four policies

    logprobs      pi_theta  the policy being trained (the only one with a gradient)
    logprobs_old  pi_old    the trainer's weights when the batch arrived
    logprobs_gen  mu        the engine that sampled the token
    logprobs_ref  pi_ref    the frozen start

the loss is five independent choices:

    (1) log-ratio    l = log pi_theta - log anchor (pi_old or mu), per token or its mean over the rollout      ANCHORS, LEVELS
    (2) objective    L(l, A), for example -min(r A, clip(r, 1-low, 1+high) A) with r = exp(l)                  OBJECTIVES
    (3) correction   w(log pi_old - log mu), a constant that multiplies L                                      CORRECTIONS
    (4) KL           k(log pi_theta - log pi_ref), times a coefficient, and how it is differentiated           KL_ESTIMATORS, KL_GRADIENTS
    (5) reduction    c_i, one number per rollout; loss = sum over tokens of c_i (w L + beta k - alpha H)       REDUCTIONS

The caller counts tokens, rollouts and prompts over the whole optimizer step, all micro-batches and ranks, before the first
backward. So sums of micro-batches are the loss: nothing here divides by what happens to be in a micro-batch. A formula that
needs statistics of the whole step finds them ready in `Tokens.step`. More of every axis, one paper a section: objectives.py.

Broken numbers. Rows of weight 0 may hold anything, nan included: inputs are masked before any exp. At a trained token a positive,
nan or infinite log-probability raises, with one exception: the engine's -inf says "I could not have sampled this". Such a token
gets weight 0 wherever mu enters the loss (a correction, or mu as the anchor) and is counted in `engine_zero_fraction`.

Papers: GRPO arXiv 2402.03300 sec. 4.1; PPO 1707.06347 eq. 7; DAPO 2503.14476 sec. 3; Dr. GRPO 2503.20783 sec. 3.2; GSPO 2507.18071
sec. 4; CISPO 2506.13585 sec. 3.1; RLOO 2402.14740; IcePop 2510.18855; KL gradient 2506.09477.

Shapes: R rollouts, N sampled tokens over all rollouts; row_ids (N,) says which rollout a token belongs to. Rollouts are whole:
all tokens of one are in the same call.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0  # log-ratios are clamped to this before exp: exp(20) is 5e8, and a clamp after exp would give nan gradients
KL_INPUT_LIMIT = 80.0  # no setting lets a larger log-ratio into a KL estimator: exp(80) is the last round number float32 holds

Metrics = dict[str, tuple[str, Tensor | float, Tensor | float]]  # name -> (kind, value, count); kinds: mean (sum and count), max, min, sum


# ------------------------------------------------------------------------------------------------ advantages


def baseline_and_std(
    rewards: np.ndarray, groups: np.ndarray, leave_one_out: bool = False, population: bool = False, valid: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Baseline and standard deviation of each rollout's group.

    Args:
        rewards: (R,) one number per rollout.
        groups: (R,) group ids, in any order; groups may differ in size.
        leave_one_out: both are computed over the *other* members (RLOO, arXiv 2402.14740).
        population: divide squared deviations by n rather than n - 1.
        valid: (R,) bool; a rollout that is not valid (failed, no reward) has a baseline but is in nobody's.

    Returns:
        baseline (R,) and std (R,), float64. A rollout without valid peers has its own reward as baseline and std 0. Variances are
        centred (two passes), and exactly 0 for equal rewards: E[r^2] - E[r]^2 would leave rounding noise that dividing amplifies.

    >>> baseline_and_std(np.array([1.0, 2.0, 3.0]), np.zeros(3))
    (array([2., 2., 2.]), array([1., 1., 1.]))
    >>> baseline_and_std(np.array([1.0, 2.0, 3.0]), np.zeros(3), leave_one_out=True)[0]
    array([2.5, 2. , 1.5])
    """
    rewards, groups = np.asarray(rewards, dtype=np.float64), np.asarray(groups)
    valid = np.ones(len(rewards), dtype=bool) if valid is None else np.asarray(valid, dtype=bool)
    baseline, std = rewards.copy(), np.zeros_like(rewards)
    for group in np.unique(groups):
        members = groups == group
        rows, counted = np.flatnonzero(members), np.flatnonzero(members & valid)
        for targets in ([i] for i in rows) if leave_one_out else (rows,):
            peers = rewards[counted[counted != targets[0]]] if leave_one_out else rewards[counted]
            if len(peers) == 0:
                continue
            if peers.max() == peers.min():
                baseline[targets] = peers[0]  # not the mean: three times .1 has a mean that is not .1
                continue
            mean = peers.mean()
            baseline[targets] = mean
            std[targets] = np.sqrt(((peers - mean) ** 2).sum() / (len(peers) if population else len(peers) - 1))
    return baseline, std


def has_signal(rewards: np.ndarray, groups: np.ndarray, valid: np.ndarray | None = None) -> np.ndarray:
    """(R,) bool: whether the (valid) rewards of a rollout's group differ at all. Decided exactly, by max == min, never by a small std.

    Dynamic sampling keeps or drops whole groups by this, asked of the rewards *before* shaping: a length penalty is not a signal.
    """
    rewards, groups = np.asarray(rewards), np.asarray(groups)
    valid = np.ones(len(rewards), dtype=bool) if valid is None else np.asarray(valid, dtype=bool)
    spread = {g: np.ptp(rewards[(groups == g) & valid]) > 0 if (valid & (groups == g)).any() else False for g in np.unique(groups)}
    return np.array([spread[g] for g in groups], dtype=bool)


def group_advantages(
    rewards: np.ndarray,
    groups: np.ndarray,
    leave_one_out: bool = False,
    divide_by_std: bool = True,
    population: bool = False,
    valid: np.ndarray | None = None,
) -> np.ndarray:
    """A = (r - baseline) / std, per group (arXiv 2402.03300 sec. 4.1.2; without division: Dr. GRPO, 2503.20783 sec. 3.2).

    Dialects: std divides by n - 1 as in TRL, verl, OpenRLHF, SkyRL, slime and AReaL; population=True divides by n (open-instruct). No
    small number is added to the std. With leave_one_out the std leaves the rollout out as well (NeMo-RL); RLOO divides by nothing.

    Returns:
        (R,) float64. Groups without signal and rows that are not valid get exactly 0. A row whose own leave-one-out std is 0 inside a
        group with signal stays undivided, so [0, .94, .94, .94] gives the loser -.94 and not minus thousands.
    """
    baseline, std = baseline_and_std(rewards, groups, leave_one_out, population, valid)
    advantages = np.asarray(rewards, dtype=np.float64) - baseline
    if divide_by_std:
        advantages = advantages / np.where(std > 0, std, 1.0)
    usable = has_signal(rewards, groups, valid) & (True if valid is None else np.asarray(valid, dtype=bool))
    return np.where(usable, advantages, 0.0)


# ------------------------------------------------------------------------------------------------ (5) reductions


@dataclass(frozen=True)
class Counts:
    """What one optimizer step trains on, over all micro-batches and ranks. Rows of weight 0 count nowhere.

    A token whose correction weight is 0 still counts: the size of the step must not depend on what a filter found (AReaL, slime, SkyRL,
    TRL; verl takes such tokens out of the denominator)."""

    tokens: float  # sampled tokens
    rows: float  # rollouts with at least one sampled token
    prompts: float  # groups
    max_tokens: float  # the configured longest completion (Dr. GRPO's constant), not a measured one


def token_mean(row_tokens: Tensor, group_tokens: Tensor, counts: Counts) -> Tensor:
    """Every token of the step weighs the same: c = 1 / tokens (DAPO, arXiv 2503.14476 sec. 3.3)."""
    return torch.full_like(row_tokens, 1 / counts.tokens)


def sequence_mean(row_tokens: Tensor, group_tokens: Tensor, counts: Counts) -> Tensor:
    """Every rollout weighs the same, its tokens share: c_i = 1 / (rows * tokens_i) (GRPO, arXiv 2402.03300 eq. 3).

    Dialect: rollouts without tokens are not counted in rows (verl, OpenRLHF); TRL and SkyRL count them."""
    return 1 / (counts.rows * row_tokens.clamp(min=1))


def constant(row_tokens: Tensor, group_tokens: Tensor, counts: Counts) -> Tensor:
    """c = 1 / (rows * max_tokens): no length bias (Dr. GRPO, arXiv 2503.20783 sec. 3.2; verl's seq-mean-token-sum-norm)."""
    return torch.full_like(row_tokens, 1 / (counts.rows * counts.max_tokens))


def prompt_mean(row_tokens: Tensor, group_tokens: Tensor, counts: Counts) -> Tensor:
    """Every prompt weighs the same, the tokens of its group share: c_i = 1 / (prompts * tokens of the group) (SkyRL)."""
    return 1 / (counts.prompts * group_tokens.clamp(min=1))


def sequence_sum(row_tokens: Tensor, group_tokens: Tensor, counts: Counts) -> Tensor:
    """The mean over rollouts of the sum over their tokens: c = 1 / rows. With level sequence this is LUSPO (arXiv 2602.05261)."""
    return torch.full_like(row_tokens, 1 / counts.rows)


Reduction = Callable[[Tensor, Tensor, Counts], Tensor]  # (R,) tokens per row, (R,) tokens per row's group, counts -> (R,)
REDUCTIONS: dict[str, Reduction] = {f.__name__: f for f in (token_mean, sequence_mean, constant, prompt_mean, sequence_sum)}


# ------------------------------------------------------------------------------------------------ what every axis may read


@dataclass(frozen=True)
class StepValues:
    """Per-token constants that needed the whole optimizer step (objectives.prepare), (N,) each; None where no setting asks for one."""

    objective: Tensor | None = None  # 1 where the objective's selection chose the token (clip_cov, kl_cov)
    correction: Tensor | None = None  # a finished correction weight (batch_normalized)
    rejection: Tensor | None = None  # 1 where the token stays (m2po)
    entropy: Tensor | None = None  # 1 where the entropy is among the highest of the step; multiplies the objective

    def __getitem__(self, index) -> "StepValues":
        """The same for some of the tokens: a slice, or any index of an (N,) tensor."""
        values = (getattr(self, field.name) for field in fields(self))
        return StepValues(*(None if value is None else value[index] for value in values))


@dataclass(frozen=True)
class Tokens:
    """The sampled tokens of some whole rollouts, all (N,). Rows of weight 0 hold zeros; every number is finite."""

    logprobs: Tensor  # the only one with a gradient
    logprobs_old: Tensor
    logprobs_gen: Tensor
    advantages: Tensor
    row_ids: Tensor  # in 0..rows-1
    rows: int
    trained: Tensor  # bool, the row's weight is not 0
    entropy: Tensor | None = None
    step: StepValues = StepValues()


def mean_per_row(values: Tensor, row_ids: Tensor, rows: int) -> Tensor:
    """(N,) -> (R,): mean over the tokens of each rollout; 0 for a rollout without tokens."""
    return sum_per_row(values, row_ids, rows) / torch.bincount(row_ids, minlength=rows).clamp(min=1)


def sum_per_row(values: Tensor, row_ids: Tensor, rows: int) -> Tensor:
    """(N,) -> (R,)."""
    return torch.zeros(rows, dtype=values.dtype, device=values.device).index_add(0, row_ids, values)


def ratio_of(log_ratio: Tensor) -> Tensor:
    """exp, with the log clamped first so that neither value nor gradient overflows."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


# ------------------------------------------------------------------------------------------------ (1) log-ratio


ANCHORS: dict[str, Callable[[Tokens], Tensor]] = {
    "old": lambda tokens: tokens.logprobs_old,  # decoupled: trust region around pi_old, the sampler's difference is left to a correction
    "gen": lambda tokens: tokens.logprobs_gen,  # bypass: one ratio pi_theta / mu = r * rho for both, no forward pass for pi_old
}


def token_level(log_ratio: Tensor, row_ids: Tensor, rows: int) -> Tensor:
    """The ratio of each token by itself."""
    return log_ratio


def sequence_level(log_ratio: Tensor, row_ids: Tensor, rows: int) -> Tensor:
    """The geometric mean of a rollout's ratios, at each of its tokens (GSPO, arXiv 2507.18071 eq. 7). Gradient reaches every token;
    the paper's GSPO-token form has the same gradient while a rollout's advantage is one number."""
    return mean_per_row(log_ratio, row_ids, rows)[row_ids]


LEVELS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {"token": token_level, "sequence": sequence_level}


# ------------------------------------------------------------------------------------------------ (2) objectives


def ppo(log_ratio: Tensor, tokens: Tokens, clip_low: float, clip_high: float) -> Tensor:
    """-min(r A, clip(r, 1-low, 1+high) A) (PPO, arXiv 1707.06347 eq. 7, .2/.2; clip-higher .2/.28: DAPO, 2503.14476 sec. 3.1)."""
    ratio = ratio_of(log_ratio)
    return torch.maximum(-tokens.advantages * ratio, -tokens.advantages * ratio.clamp(1 - clip_low, 1 + clip_high))


def cispo(log_ratio: Tensor, tokens: Tokens, clip_low: float, clip_high: float) -> Tensor:
    """-sg(clip(r, 1-low, 1+high)) A log pi (CISPO, arXiv 2506.13585 eq. 4): the weight is clipped, every token keeps its gradient.

    Dialect: both bounds are offsets from 1, as in verl, slime, SkyRL and NeMo-RL; clip_low = 1 is no lower bound, as in
    open-instruct and the paper's experiments. TRL's bound on the weight itself is objectives.cispo_cap.
    """
    return -ratio_of(log_ratio).clamp(1 - clip_low, 1 + clip_high).detach() * tokens.advantages * tokens.logprobs


def reinforce(log_ratio: Tensor, tokens: Tokens, clip_low: float, clip_high: float) -> Tensor:
    """-A log pi: no ratio, no clip (REINFORCE; GPG, arXiv 2504.02546). With a correction, that weight multiplies it."""
    return -tokens.advantages * tokens.logprobs


Objective = Callable[[Tensor, Tokens, float, float], Tensor]  # log_ratio (N,), tokens, clip_low, clip_high -> loss per token (N,)
OBJECTIVES: dict[str, Objective] = {f.__name__: f for f in (ppo, cispo, reinforce)}


# ------------------------------------------------------------------------------------------------ (3) corrections


def bounded_weight(log_weight: Tensor, low: float, high: float) -> Tensor:
    """clip(exp(log_weight), low, high). Where high is inf, a weight of e^20 or more is a broken measurement, and becomes 0."""
    weight = ratio_of(log_weight).clamp(low, high)
    return torch.where(log_weight < LOG_RATIO_LIMIT, weight, 0.0) if math.isinf(high) else weight


def no_correction(log_weight: Tensor, tokens: Tokens, low: float, high: float) -> Tensor:
    """w = 1: pi_old is taken for the sampler."""
    return torch.ones_like(log_weight)


def truncate(log_weight: Tensor, tokens: Tokens, low: float, high: float) -> Tensor:
    """Truncated importance sampling (TIS), per token: w = clip(pi_old / mu, low, high); usual bounds 0 and 2."""
    return bounded_weight(log_weight, low, high)


def mask(log_weight: Tensor, tokens: Tokens, low: float, high: float) -> Tensor:
    """IcePop, per token: w = pi_old / mu inside [low, high], 0 outside; usual bounds .5 and 5 (arXiv 2510.18855)."""
    weight = bounded_weight(log_weight, 0.0, torch.inf)
    return torch.where((weight >= low) & (weight <= high), weight, 0.0)


def sequence_mask(log_weight: Tensor, tokens: Tokens, low: float, high: float) -> Tensor:
    """A rollout whose geometric mean of pi_old / mu leaves [low, high] is dropped whole; others keep their token weights.
    Usual bounds .999 and 1.002. Dialect: OpenRLHF, NeMo-RL and SkyRL; AReaL and open-instruct keep the geometric mean as weight
    (objectives.sequence_geometric)."""
    mean = ratio_of(mean_per_row(log_weight, tokens.row_ids, tokens.rows))[tokens.row_ids]
    return torch.where((mean >= low) & (mean <= high), bounded_weight(log_weight, 0.0, torch.inf), 0.0)


Correction = Callable[[Tensor, Tokens, float, float], Tensor]  # log(pi_old / mu) (N,), tokens, low, high -> weight per token (N,)
CORRECTIONS: dict[str, Correction] = {"none": no_correction, "truncate": truncate, "mask": mask, "sequence_mask": sequence_mask}


# ------------------------------------------------------------------------------------------------ (4) KL to the reference


def k1(x: Tensor) -> Tensor:
    """x = log pi - log ref: unbiased, high variance, can be negative; the one for KL in the reward."""
    return x


def k2(x: Tensor) -> Tensor:
    """x^2 / 2: biased value, low variance; its own derivative, x, is on-policy the gradient of KL(pi || ref) (arXiv 2506.09477)."""
    return x**2 / 2


def k3(x: Tensor) -> Tensor:
    """exp(-x) + x - 1: unbiased and never negative (GRPO, arXiv 2402.03300 eq. 4; verl's low_var_kl)."""
    return torch.expm1(-x) + x


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {f.__name__: f for f in (k1, k2, k3)}


def true_gradient(value: Tensor, x: Tensor, tokens: Tokens) -> Tensor:
    """The estimator's value with the gradient x grad(log pi): on-policy that of KL(pi || ref), for all three (arXiv 2506.09477; verl's k3+)."""
    return value.detach() + k2(x) - k2(x).detach()


def naive_gradient(value: Tensor, x: Tensor, tokens: Tokens) -> Tensor:
    """The expression differentiated as it stands (TRL, verl and slime by default): right for k2 only; for k1 it has mean zero."""
    return value


KLGradient = Callable[[Tensor, Tensor, Tokens], Tensor]  # the estimate, x (N,), tokens -> the estimate with its gradient (N,)
KL_GRADIENTS: dict[str, KLGradient] = {"true": true_gradient, "naive": naive_gradient}


def kl_penalty(tokens: Tokens, logprobs_ref: Tensor, kl: str, gradient: KLGradient, input_clamp: float, output_clamp: float) -> Tensor:
    """(N,): the estimate per token, x clamped to +-input_clamp and the result to +-output_clamp. Gradient exactly 0 where a clamp acts."""
    limit = min(input_clamp, KL_INPUT_LIMIT)
    x = tokens.logprobs - logprobs_ref
    clamped = x.clamp(-limit, limit)
    value = gradient(KL_ESTIMATORS[kl](clamped), clamped, tokens)
    value = torch.where(x.abs() <= limit, value, value.detach())  # or a weight would leak gradient around the input clamp
    return value.clamp(-output_clamp, output_clamp)


# ------------------------------------------------------------------------------------------------ the frame

# what a name stands for; a flag given beside a preset wins
PRESETS: dict[str, dict[str, str | float | bool]] = {
    "grpo": dict(objective="ppo", level="token", reduction="sequence_mean", clip_low=0.2, clip_high=0.2),
    "dr_grpo": dict(objective="ppo", level="token", reduction="constant", clip_low=0.2, clip_high=0.2, scale="none"),
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
    anchor: str = "old",
    kl_gradient: KLGradient = true_gradient,
    kl_input_clamp: float = 20.0,
    kl_output_clamp: float = 10.0,
    likelihood: Tensor | None = None,
    step: StepValues = StepValues(),
) -> tuple[Tensor, Metrics]:
    """The loss of some whole rollouts: their share of the optimizer step's loss, so shares add up.

    Args:
        logprobs, logprobs_old, logprobs_gen, logprobs_ref, entropy, advantages: (N,). logprobs_ref is needed when kl_coef is not 0,
            entropy when entropy_coef is not 0.
        coefficients: (R,) from a reduction, times the row's weight; a row of weight 0 leaves loss, gradient and metrics.
        row_ids: (N,) in 0..R-1.
        kl_input_clamp, kl_output_clamp: bounds on |log pi - log ref| and on the estimate (20 and 10: verl, NeMo-RL); inf is off.
        likelihood: (R,) coefficients of an extra -log pi on some rows, for example mu / tokens of all rows with reward > 0 on
            exactly those (the positive-example likelihood of VAPO, arXiv 2504.05118, mu .1).
        step: what was computed over the whole optimizer step, for these tokens.

    Returns:
        The loss (scalar), and its metrics, additive over calls.

    Raises:
        ValueError: an input is missing that a configured term needs, or has another shape; a log-probability at a trained token is
            positive, nan or infinite (the engine's -inf excepted, see the top).
    """
    if kl_coef and logprobs_ref is None:
        raise ValueError("loss.kl_coef is set but there are no reference log-probabilities")
    if entropy_coef and entropy is None:
        raise ValueError("loss.entropy_coef is set but there is no entropy")
    per_token_inputs = dict(logprobs=logprobs, logprobs_old=logprobs_old, logprobs_gen=logprobs_gen, logprobs_ref=logprobs_ref,
                            entropy=entropy, advantages=advantages, row_ids=row_ids)  # fmt: skip
    for name, values in per_token_inputs.items():
        if values is not None and values.shape != (len(logprobs),):  # (N, 1) and (N,) would broadcast to (N, N) without a word
            raise ValueError(f"{name} has shape {tuple(values.shape)}, not ({len(logprobs)},) like the log-probabilities")
    rows = len(coefficients)
    weights = coefficients[row_ids]  # (N,)
    trained = weights != 0
    check_logprobs(logprobs.detach(), trained, row_ids, "the policy")
    check_logprobs(logprobs_old, trained, row_ids, "the trainer")
    check_logprobs(logprobs_gen, trained, row_ids, "the engine", allow_zero_probability=True)

    def clean(values: Tensor) -> Tensor:
        return torch.where(trained, values, 0.0)  # before any exp: nan * 0 is nan, in the gradient too

    unsampleable = trained & torch.isneginf(logprobs_gen)
    old = clean(logprobs_old.detach())
    tokens = Tokens(
        logprobs=clean(logprobs),
        logprobs_old=old,
        logprobs_gen=torch.where(unsampleable, old, clean(logprobs_gen.detach())),  # neutral in the means over a rollout
        advantages=clean(advantages),
        row_ids=row_ids,
        rows=rows,
        trained=trained,
        entropy=None if entropy is None else clean(entropy),
        step=step,
    )
    log_ratio = LEVELS[level](tokens.logprobs - ANCHORS[anchor](tokens), row_ids, rows)  # (1)
    per_token = objective(log_ratio, tokens, clip_low, clip_high)  # (2)
    if per_token.shape != logprobs.shape:
        raise ValueError(f"the objective returned shape {tuple(per_token.shape)}, not ({len(logprobs)},)")
    log_weight = tokens.logprobs_old - tokens.logprobs_gen
    correction_weight = correction(log_weight, tokens, correction_low, correction_high).detach()  # (3)
    if correction is not no_correction or anchor == "gen":
        correction_weight = torch.where(unsampleable, 0.0, correction_weight)
    per_token = per_token * correction_weight
    if step.entropy is not None:
        per_token = per_token * step.entropy
    if kl_coef:
        per_kl = kl_penalty(tokens, clean(logprobs_ref), kl, kl_gradient, kl_input_clamp, kl_output_clamp)  # (4)
        per_token = per_token + kl_coef * per_kl
    if entropy_coef:
        per_token = per_token - entropy_coef * tokens.entropy
    loss = torch.where(trained, weights * per_token, 0.0).sum()  # (5)
    if likelihood is not None:
        loss = loss - (likelihood[row_ids] * tokens.logprobs).sum()

    with torch.no_grad():
        ratio = ratio_of(log_ratio)

        def mean(values: Tensor, included: Tensor = trained) -> tuple[str, Tensor, Tensor]:
            return "mean", torch.where(included, values.double(), 0.0).sum(), included.sum()

        trained_rows = sum_per_row(trained.double(), row_ids, rows) > 0  # (R,)
        changed = correction_weight != ratio_of(log_weight) if correction is not no_correction else unsampleable
        metrics: Metrics = {
            "loss": ("sum", loss.detach().double(), 1.0),
            "logprob": mean(tokens.logprobs),
            "ratio": mean(ratio),
            "ratio_max": ("max", extreme(ratio, trained, -1), 1.0),
            "ratio_min": ("min", extreme(ratio, trained, 1), 1.0),
            "ratio_clamped": mean(ratio.clamp(1 - clip_low, 1 + clip_high)),
            "clip_low_fraction": mean((ratio < 1 - clip_low) & (tokens.advantages < 0)),  # tokens whose gradient the clip removes
            "clip_high_fraction": mean((ratio > 1 + clip_high) & (tokens.advantages > 0)),
            "correction_weight": mean(correction_weight),
            "correction_weight_squared": mean(correction_weight.double() ** 2),
            "correction_changed_fraction": mean(changed),  # weights that are not pi_old / mu: truncated, dropped or averaged
            "correction_dropped_fraction": mean(correction_weight == 0),
            "correction_dropped_rows": mean(sum_per_row((correction_weight != 0).double(), row_ids, rows) == 0, trained_rows),
            "engine_zero_fraction": mean(unsampleable),
            "approx_entropy": mean(-ratio_of(tokens.logprobs - tokens.logprobs_gen) * tokens.logprobs),  # exact in the mean over mu
        }
        if kl_coef:
            metrics["kl"] = mean(per_kl)
        if entropy is not None:
            metrics["entropy"] = mean(tokens.entropy)
        if step.entropy is not None:
            metrics["entropy_kept_fraction"] = mean(step.entropy)
        if likelihood is not None:
            metrics["likelihood_nll"] = mean(-tokens.logprobs, trained & (likelihood[row_ids] != 0))
    return loss, metrics


def derived_metrics(reduced: Mapping[str, float]) -> dict[str, float]:
    """What only the reduced metrics can tell: the effective sample size (sum w)^2 / (N sum w^2), 1 when all weights are equal."""
    squared = reduced.get("correction_weight_squared", 0.0)
    return {"effective_sample_size": reduced["correction_weight"] ** 2 / squared} if squared > 0 else {}


def extreme(values: Tensor, included: Tensor, sign: int) -> Tensor:
    """The largest (sign -1) or smallest (sign 1) included value; an infinity that any other value beats where there is none."""
    empty = torch.full_like(values, sign * torch.inf)
    candidates = torch.where(included, values, empty)
    if len(candidates) == 0:
        return torch.tensor(sign * torch.inf)
    return candidates.min() if sign > 0 else candidates.max()


def check_logprobs(logprobs: Tensor, trained: Tensor, row_ids: Tensor, source: str, allow_zero_probability: bool = False) -> None:
    """A placeholder (0 is allowed, a sure token has it; anything above is not) must never be trained on as if it had been measured."""
    measured = torch.isfinite(logprobs) | (torch.isneginf(logprobs) if allow_zero_probability else False)
    bad = trained & ~((logprobs <= 1e-4) & measured)
    if bad.any():
        at = int(bad.nonzero()[0])
        raise ValueError(f"log-probability {float(logprobs[at])} from {source} at token {at} of the micro-batch, row {int(row_ids[at])}")


def mismatch(logprobs: Tensor, logprobs_gen: Tensor, included: Tensor) -> Metrics:
    """How far the trainer and the engine disagree about tokens that both scored with the same weights.

    With d = log pi - log mu: mismatch_k3 = E[e^d - d - 1], an estimate of KL(mu || pi); mismatch_k3_reverse the same with -d;
    token_mult_prob_error = E[e^|d|], 1 when perfect; mismatch_js, the Jensen-Shannon divergence by k3 of each to their mixture;
    mismatch_max = max |d|. (NeMo-RL's names where it has them.) Finite for an engine's -inf too, but for mismatch_max.

    Args:
        logprobs, logprobs_gen: (N,). included: (N,) bool.
    """
    difference = torch.where(included, (logprobs - logprobs_gen).detach(), 0.0).double()
    count = included.sum()
    clamped = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    to_mixture = clamped - (clamped.exp() / 2 + 0.5).log()  # log pi - log M, with M = (pi + mu) / 2
    gen_to_mixture = to_mixture - clamped

    def mean(values: Tensor) -> tuple[str, Tensor, Tensor]:
        return "mean", torch.where(included, values, 0.0).sum(), count

    return {
        "mismatch_k3": mean(clamped.expm1() - clamped),
        "mismatch_k3_reverse": mean((-clamped).expm1() + clamped),
        "mismatch_js": mean((to_mixture.expm1() - to_mixture + gen_to_mixture.expm1() - gen_to_mixture) / 2),
        "token_mult_prob_error": mean(clamped.abs().exp()),
        "mismatch_max": ("max", extreme(difference.abs(), included, -1), 1.0),
    }
