"""objectives.py: the numbers several implementations agree on, hand-computed ones, and invariance of everything in the dicts."""

import doctest
import importlib.util
import inspect
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loss_helpers import CORRECTIONS, KL_GRADIENTS, OBJECTIVES, Ranks, coefficients_of, f64, reduce_metrics, run

import loss
import objectives
from loss import StepValues, Tokens

near = pytest.approx
EXACT = dict(abs=1e-6, rel=0)
VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text())
LENGTHS = VECTORS["lengths"]
ROW_IDS = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
A, C, P, G = [1.0, -1.0, 2.0], [-1.69315, -1.0, -0.59453], [-1.0] * 3, [-0.5, -1.5, -0.8]
PRODUCT = dict(level="sequence", reduction="sequence_mean", correction="sequence_truncate")


def tokens_of(logprobs, advantages, old=None, gen=None, entropy=None, lengths=None, weights=None) -> Tokens:
    logprobs = f64(logprobs)
    lengths = [len(logprobs)] if lengths is None else lengths
    row_ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    old = logprobs if old is None else f64(old)
    gen = old if gen is None else f64(gen)
    trained = (f64([1.0] * len(lengths) if weights is None else weights) != 0)[row_ids]
    return Tokens(logprobs, old, gen, f64(advantages), row_ids, len(lengths), trained, None if entropy is None else f64(entropy))


def prepare(tokens: Tokens, **changes) -> StepValues:
    return objectives.prepare(
        tokens, **(dict(objective="ppo", clip_low=0.2, clip_high=0.2, correction="none", correction_low=0.0, correction_high=math.inf) | changes)
    )


# ------------------------------------------------------------------------------------------------ numbers several implementations agree on

WIDE = dict(clip_low=0.2, clip_high=0.28)
SEQ = dict(reduction="sequence_mean")
CASES = {
    "ppo_token_mean": WIDE,
    "ppo_sequence_mean": WIDE | SEQ,
    "ppo_constant": WIDE | dict(reduction="constant", max_tokens=12.0),
    "gspo_sequence_mean": WIDE | SEQ | dict(level="sequence"),
    "gspo_token_mean": WIDE | dict(level="sequence"),
    "cispo_both_bounds": WIDE | dict(objective="cispo"),
    "cispo_no_lower_bound": dict(objective="cispo", clip_low=1.0, clip_high=0.28),
    "cispo_cap_.28": dict(objective="cispo_cap", params=dict(cap=0.28)),
    "sapo_sequence_mean": SEQ | dict(objective="sapo"),
    "sapo_token_mean": dict(objective="sapo"),
    "dppo_token_mean": dict(objective="dppo_tv"),
    "tis_cap_1.2": WIDE | dict(correction="truncate", correction_high=1.2),
    "icepop_.85_1.2": WIDE | dict(correction="mask", correction_low=0.85, correction_high=1.2),
    "geometric_mask_token_weight": WIDE | dict(correction="sequence_mask", correction_low=0.95, correction_high=1.08),
    "geometric_mask_geometric_weight": WIDE | dict(correction="sequence_geometric", correction_low=0.95, correction_high=1.08),
    "opsm_.02": WIDE | dict(rejection="opsm", params=dict(delta=0.02)),
    "kl_k3_naive": WIDE | dict(kl_coef=0.1, kl_gradient="naive"),
    "kl_k3_true": WIDE | dict(kl_coef=0.1),
    "kl_k3_ratio": WIDE | dict(kl_coef=0.1, kl_gradient="ratio"),
    "luspo": WIDE | dict(level="sequence", reduction="sequence_sum"),
    "vespo": dict(objective="vespo"),
    "gmpo": SEQ | WIDE | dict(objective="gmpo"),
    "kl_cov": dict(objective="kl_cov"),
    "kl_cov_unscaled_penalty": dict(objective="kl_cov", params=dict(coef=39.0)),  # a penalty that was summed where the rest was averaged over 39 tokens
    "dro": dict(objective="dro"),
}
SAME = {  # other settings with the same loss and gradient on these inputs
    "ppo_token_mean": [
        WIDE | dict(objective="dual_clip"), WIDE | dict(objective="two_sided", params=dict(delta=1.5)), WIDE | dict(objective="clip_cov"),
    ],
    "kl_k3_true": [WIDE | dict(kl_coef=0.1, kl_gradient="score")],
    "cispo_no_lower_bound": [dict(objective="cispo_cap", params=dict(cap=1.28))],
    "dppo_token_mean": [dict(objective="dppo_kl")],
}  # fmt: skip


def outcome_of_case(case):
    advantages = f64(VECTORS["advantages"])[ROW_IDS]
    step = StepValues()
    if case.get("objective") in ("clip_cov", "kl_cov"):
        tokens = tokens_of(VECTORS["logprobs"], advantages, VECTORS["logprobs_old"], VECTORS["logprobs_gen"], lengths=LENGTHS)
        step = prepare(tokens, objective=case["objective"], uniform=torch.rand(39, dtype=torch.float64))
    ref = VECTORS["logprobs_ref"] if "kl_coef" in case else None
    return run(advantages, VECTORS["logprobs"], VECTORS["logprobs_old"], VECTORS["logprobs_gen"], ref, lengths=LENGTHS, step=step, **case)


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: case["name"])
def test_loss_and_gradient_are_those_of_other_implementations(case):
    for settings_ in [CASES[case["name"]], *SAME.get(case["name"], [])]:
        outcome = outcome_of_case(settings_)
        assert outcome.loss == near(case["loss"], **EXACT)
        assert outcome.gradient.tolist() == near(case["gradient"], **EXACT)


def test_every_stored_case_is_tested():
    assert set(CASES) == {case["name"] for case in VECTORS["cases"]} and len(CASES) == 25


# ------------------------------------------------------------------------------------------------ objectives by hand


def test_dual_clip_bounds_the_loss_of_a_bad_token():
    case = dict(advantages=[1, -1, -4], logprobs=[-1.69315, -1, -0.69741], old=[-1, -1, -3])
    assert run(**case, objective="dual_clip").loss == near(4.1666671, **EXACT)
    assert run(**case).loss == near(13.5000659, **EXACT)
    assert run(**case, objective="dual_clip").gradient[2] == 0


def test_product_weights_go_with_sequence_ratios():
    assert run(A, C, P, G, **PRODUCT).loss == near(-0.4959112, **EXACT)
    truncated = run(A, C, P, G, **PRODUCT, correction_high=0.8)
    assert truncated.loss == near(-0.4845658, **EXACT)
    assert truncated.metrics["correction_changed_fraction"] == 1.0 and truncated.metrics["correction_weight"] == near(0.8)
    two = run(A + A, C + C, P + P, P + P, lengths=[3, 3], **PRODUCT)
    assert two.metrics["correction_weight"] == 1.0  # not 2, as a (2, 1) by (2,) product would report


def test_an_unbounded_product_that_overflows_is_dropped_and_counted():
    outcome = run([1.0, 1.0], [-1.0, -1.0], [-1.0, -1.0], [-400.0, -400.0], **PRODUCT)
    assert outcome.loss == 0 and (outcome.gradient == 0).all()
    assert outcome.metrics["correction_dropped_rows"] == 1.0
    assert run([1.0, 1.0], [-1.0, -1.0], gen=[-400.0, -400.0], **PRODUCT, correction_high=3.0).loss == near(-3.0)  # a bound needs no such rule


def test_dppo_drops_what_leaves_the_trust_region_in_probability():
    # .5 -> .75: moved by .25. .01 -> .03: tripled, moved by .02
    old, new = [math.log(0.5), math.log(0.01)], [math.log(0.75), math.log(0.03)]
    assert run([1, 1], new, old, objective="dppo_tv").gradient.tolist() == near([0, -1.5], **EXACT)  # second: -3 / 2 tokens
    assert run([-1, -1], new, old, objective="dppo_tv").gradient.tolist() == near([0.75, 1.5], **EXACT)  # it returns: kept
    assert run([-1, -1], old, new, objective="dppo_tv").gradient[0] == 0
    assert run([1, 1], new, old, objective="probability_mask").gradient.tolist() == near([0, -1.5], **EXACT)
    assert run([-1, -1], new, old, objective="probability_mask").gradient.tolist() == near([0, 1.5], **EXACT)  # whatever the sign
    # binary KL of (.5 -> .75) is .5 log(2/3) + .5 log 2 = .1438
    assert run([1, 1], new, old, objective="dppo_kl", clip_high=0.14).gradient.tolist() == near([0, -1.5], **EXACT)
    assert run([1, 1], new, old, objective="dppo_kl", clip_high=0.15).gradient.tolist() == near([-0.75, -1.5], **EXACT)


def test_the_pull_of_prime_rl_acts_on_dropped_tokens_too():
    old, new = [math.log(0.5)], [math.log(0.75)]
    assert run([1], new, old, objective="dppo_pull", params=dict(tau=0.1)).gradient.item() == near(0.2 * math.log(1.5), **EXACT)


def test_masked_reinforce_drops_where_cispo_clamps():
    outcome = run(A, C, P, objective="masked_reinforce")
    assert outcome.gradient.tolist() == near([0, 1 / 3, 0], **EXACT)


def test_vespo_weighs_by_the_product_of_a_rollouts_ratios():
    log_weight = 0.2
    for advantage, k, decay in ((1.0, 2, 3), (-1.0, 3, 2)):
        phi = math.exp(decay + k * log_weight - decay * math.exp(log_weight))
        outcome = run([advantage] * 2, [-1.0, -1.0], [-1.1, -1.1], objective="vespo")
        assert outcome.gradient.tolist() == near([-advantage * phi / 2] * 2, **EXACT)


def test_clip_cov_and_kl_cov_without_their_choice_raise():
    for name in ("clip_cov", "kl_cov"):
        with pytest.raises(ValueError, match="prepare"):
            run(A, C, P, objective=name)
    for settings_ in (dict(correction="batch_normalized"), dict(rejection="m2po")):
        with pytest.raises(ValueError, match="prepare"):
            run(A, C, P, **settings_)


def on_policy_step(n: int) -> StepValues:
    ones = torch.ones(n, dtype=torch.float64)
    return StepValues(objective=0 * ones, correction=ones, rejection=ones, entropy=ones)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_on_policy_every_objective_has_the_policy_gradient(objective):
    advantages = f64([1.0, 1.0, 1.0, -0.5, -0.5])
    reduction = "sequence_mean" if objective == "gmpo" else "token_mean"
    outcome = run(advantages, [-1.0, -0.2, -3.0, -0.7, -1.1], objective=objective, lengths=[3, 2], reduction=reduction, step=on_policy_step(5))
    coefficients = coefficients_of([3, 2], [1, 1], reduction)[torch.tensor([0, 0, 0, 1, 1])]
    assert outcome.gradient.tolist() == near((-advantages * coefficients).tolist(), **EXACT)


@pytest.mark.parametrize("preset", loss.PRESETS | objectives.PRESETS)
def test_on_policy_every_preset_has_the_policy_gradient_of_its_reduction(preset):
    chosen = {k: v for k, v in (loss.PRESETS | objectives.PRESETS)[preset].items() if k not in ("baseline", "scale", "whiten")}
    advantages = f64([1.0, 1.0, 1.0, -0.5, -0.5])
    outcome = run(advantages, [-1.0, -0.2, -3.0, -0.7, -1.1], lengths=[3, 2], max_tokens=8.0, step=on_policy_step(5), **chosen)
    coefficients = coefficients_of([3, 2], [1, 1], chosen["reduction"], 8.0)[torch.tensor([0, 0, 0, 1, 1])]
    assert outcome.gradient.tolist() == near((-advantages * coefficients).tolist(), **EXACT)


DIFFERENTIABLE = ("ppo", "reinforce", "dual_clip", "two_sided", "unclipped", "gmpo", "sapo", "probability_mask", "dro", "clip_cov", "kl_cov")


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("objective", DIFFERENTIABLE)
def test_gradients_are_those_of_finite_differences(objective, level):
    generator = torch.Generator().manual_seed(3)
    old = -torch.rand(7, generator=generator, dtype=torch.float64) - 0.3
    start = (old + 0.3 * torch.randn(7, generator=generator, dtype=torch.float64)).clamp(max=-0.05).requires_grad_()
    advantages = torch.randn(2, generator=generator, dtype=torch.float64)[torch.tensor([0, 0, 0, 1, 1, 1, 1])]
    row_ids = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    step = StepValues(objective=f64([0, 1, 0, 0, 1, 0, 0]))

    def value(logprobs):
        return loss.policy_loss(
            logprobs, old, old - 0.1, old + 0.1, None, advantages, f64([0.2, 0.3]), row_ids, objective=OBJECTIVES[objective], level=level,
            clip_low=0.2, clip_high=0.28, correction=loss.truncate, correction_low=0.0, correction_high=2.0, kl="k3", kl_coef=0.1,
            entropy_coef=0.0, kl_gradient=loss.naive_gradient, step=step,
        )[0]  # fmt: skip

    assert torch.autograd.gradcheck(value, (start,))


DETACHED = {  # weight w of -w A log pi at ratio 1.25, .8 with clip .2 / .28 and probabilities below .5
    "cispo": (1.25, 0.8), "cispo_cap": (1.25, 0.8), "masked_reinforce": (1.25, 0.0), "dppo_tv": (1.25, 0.8), "dppo_kl": (1.25, 0.8),
}  # fmt: skip


@pytest.mark.parametrize("objective", DETACHED)
def test_weights_without_gradient_multiply_the_log_probability(objective):
    outcome = run([1.0, -1.0], [-1.5 + math.log(1.25), -1.5 + math.log(0.799999)], [-1.5, -1.5], objective=objective, **WIDE)
    up, down = DETACHED[objective]
    assert outcome.gradient.tolist() == near([-up / 2, down / 2], abs=1e-5)


# ------------------------------------------------------------------------------------------------ rejections


def test_rejections_by_hand():
    # rho: 1, e^.2 in the first rollout, 1, 1 in the second
    case = dict(advantages=[1.0] * 4, logprobs=[-1.0] * 4, old=[-1.0] * 4, gen=[-1.0, -1.2, -1.0, -1.0], lengths=[2, 2])
    k3 = math.exp(0.2) - 1.2
    for rejection, threshold, kept in (
        ("k3_token", k3 / 2, [1, 0, 1, 1]), ("k3_sum", k3 * 0.99, [0, 0, 1, 1]), ("k3_sum", k3 * 1.01, [1, 1, 1, 1]),
        ("k3_mean", k3 * 0.51, [1, 1, 1, 1]), ("k3_mean", k3 * 0.49, [0, 0, 1, 1]), ("k3_max", k3 * 0.99, [0, 0, 1, 1]),
        ("k2_token", 0.0199, [1, 0, 1, 1]), ("k2_sum", 0.0201, [1, 1, 1, 1]), ("k2_mean", 0.0099, [0, 0, 1, 1]), ("k2_max", 0.0199, [0, 0, 1, 1]),
    ):  # fmt: skip
        outcome = run(**case, rejection=rejection, params=dict(threshold=threshold))
        assert (outcome.gradient * -4).tolist() == near(kept), (rejection, threshold)


def test_k1_rejection_bounds_mu_over_pi_and_not_pi_over_mu():
    case = dict(advantages=[1.0, 1.0], logprobs=[-1.0, -1.0], gen=[-1.0 - math.log(2.5), -1.0 - math.log(0.4)])
    kept = run(**case, rejection="k1_token", params=dict(ratio_low=0.5, ratio_high=3.0)).gradient
    assert (kept != 0).tolist() == [False, True]  # rho 2.5 goes, rho .4 stays


def test_one_token_vetoes_its_rollout():
    case = dict(advantages=[1.0] * 4, logprobs=[-1.0] * 4, gen=[-1.0, -1 - math.log(101), -1.0, -1.0], lengths=[2, 2])
    assert (run(**case, rejection="veto").gradient != 0).tolist() == [False, False, True, True]
    assert (run(**case, rejection="veto", params=dict(veto_high=102.0)).gradient != 0).all()


def test_opsm_drops_only_bad_rollouts_that_the_policy_has_left():
    gone = dict(logprobs=[-1.5, -1.5], old=[-1.2, -1.2], gen=[-1.0, -1.0])
    assert (run([-1, -1], **gone, rejection="opsm", params=dict(delta=0.4)).gradient == 0).all()
    assert (run([-1, -1], **gone, rejection="opsm_old", params=dict(delta=0.4), objective="unclipped").gradient != 0).all()
    assert (run([1, 1], **gone, rejection="opsm", params=dict(delta=0.4), objective="unclipped").gradient != 0).all()


def test_vaco_drops_tokens_that_move_further_away():
    case = dict(logprobs=[-1.0, -1.0], gen=[-1.5, -0.5])
    assert (run([1, 1], **case, rejection="vaco").gradient != 0).tolist() == [False, True]
    assert (run([-1, -1], **case, rejection="vaco").gradient != 0).tolist() == [True, False]
    assert (run([1, 1], **case, rejection="vaco", params=dict(bound=1.0)).gradient != 0).all()


def test_a_rejection_multiplies_the_correction_beside_it():
    case = dict(advantages=[1.0] * 4, logprobs=[-1.0] * 4, gen=[-1.0, -1 - math.log(101), -1.1, -1.2], lengths=[2, 2])
    outcome = run(**case, correction="truncate", correction_high=1.15, rejection="veto")
    assert (outcome.gradient * -4).tolist() == near([0, 0, math.exp(0.1), 1.15])


# ------------------------------------------------------------------------------------------------ the whole optimizer step


def test_m2po_drops_the_largest_until_the_mean_of_the_rest_is_small():
    log_weight = np.array([0.1, 0.5, -0.1, 1.0, 0.3])  # squares .01 .25 .01 1 .09: mean of the first four kept in order .01 .01 .09 -> .0367
    tokens = tokens_of([-1.0] * 5, [1.0] * 5, gen=-1.0 - log_weight)
    assert prepare(tokens, rejection="m2po", rejection_params=dict(everywhere=1)).rejection.tolist() == [1, 0, 1, 0, 1]
    assert prepare(tokens, rejection="m2po").rejection.tolist() == [1, 0, 1, 0, 0]  # .01 and .09 alone average .05: only tokens gone too far count
    assert prepare(tokens, rejection="m2po", rejection_params=dict(tau=0.06)).rejection.tolist() == [1, 0, 1, 0, 1]


def test_batch_normalised_weights_average_one():
    tokens = tokens_of([-1.0] * 4, [1.0] * 4, gen=[-1.0, -1.5, -0.8, -3.0], lengths=[2, 2])
    weights = prepare(tokens, correction="batch_normalized", correction_high=2.0).correction
    assert weights.mean().item() == near(1.0) and (weights[3] / weights[0]).item() == near(2.0)  # truncated first


def test_kl_cov_takes_the_largest_covariances():
    logprobs, advantages = [-1.0, -2.0, -3.0, -0.1], [1.0, 1.0, -1.0, -1.0]  # means -1.525 and 0; products .525 -.475 1.475 -1.425
    chosen = prepare(tokens_of(logprobs, advantages), objective="kl_cov", objective_params=dict(share=0.5)).objective
    assert chosen.tolist() == [1, 0, 1, 0]
    assert prepare(tokens_of(logprobs, advantages), objective="kl_cov").objective.tolist() == [0, 0, 1, 0]  # at least one
    outcome = run(advantages, logprobs, [-1.1] + logprobs[1:], objective="kl_cov", params=dict(coef=0.5), step=StepValues(objective=chosen))
    assert outcome.gradient[0].item() == near((-math.exp(0.1) + 0.5) / 4)


def test_clip_cov_chooses_at_random_within_the_band_and_not_among_clipped_tokens():
    generator = torch.Generator().manual_seed(0)
    logprobs = -torch.rand(400, generator=generator, dtype=torch.float64) * 4 - 0.01
    advantages = torch.randn(400, generator=generator, dtype=torch.float64)
    old = (logprobs - 0.3 * torch.randn(400, generator=generator, dtype=torch.float64)).clamp(max=0)
    tokens = tokens_of(logprobs, advantages, old)
    covariance = objectives.token_covariance(tokens, objectives.one_rank)
    ratio = (logprobs - old).exp()
    clipped = torch.where(advantages > 0, ratio > 1.2, ratio < 0.8)
    band = (covariance > 1) & (covariance < 5) & ~clipped
    seen = torch.zeros(400, dtype=torch.bool)
    for step in range(20):
        uniform = objectives.keyed_uniform(0, step, torch.zeros(400, dtype=torch.long), torch.arange(400))
        chosen = prepare(tokens, objective="clip_cov", objective_params=dict(share=0.02), uniform=uniform).objective.bool()
        assert chosen.sum() == 8 and not (chosen & ~band).any()
        seen |= chosen
    assert seen.sum() > 30  # another choice every step
    outcome = run(advantages, logprobs, old, objective="clip_cov", step=StepValues(objective=chosen.double()))
    assert (outcome.gradient[chosen] == 0).all()


@pytest.mark.parametrize("objective", ["clip_cov", "kl_cov"])
def test_tokens_that_are_not_trained_are_never_chosen(objective):
    params = dict(share=1.0) | (dict(cov_low=-9.0, cov_high=9.0) if objective == "clip_cov" else {})
    tokens = tokens_of([-1.0, -2.0, -3.0, -0.5], [1.0, 2.0, -1.0, 3.0], lengths=[2, 2], weights=[1, 0])
    assert prepare(tokens, objective=objective, objective_params=params).objective.tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("nonsense", [math.nan, math.inf, -math.inf])
def test_nonsense_in_a_row_of_weight_zero_reaches_no_gradient(objective, nonsense):
    bad = [nonsense] * 2
    outcome = run(
        A + bad, C + bad, P + bad, G + bad, P + bad, C + bad, lengths=[3, 2], weights=[1, 0], objective=objective, rejection="opsm", kl_coef=0.1,
        entropy_coef=0.1, correction="sequence_geometric", kl_gradient="ratio_gen", step=StepValues(objective=f64([0, 1, 0, 1, 1])),
    )  # fmt: skip
    alone = run(
        A, C, P, G, P, C, objective=objective, rejection="opsm", kl_coef=0.1, entropy_coef=0.1, correction="sequence_geometric",
        kl_gradient="ratio_gen", step=StepValues(objective=f64([0, 1, 0])),
    )  # fmt: skip
    assert outcome.loss == near(alone.loss) and outcome.gradient.tolist() == near(alone.gradient.tolist() + [0, 0])
    assert all(map(math.isfinite, outcome.metrics.values()))


def test_float32_stays_float32():
    tokens = Tokens(*(torch.tensor(x, dtype=torch.float32) for x in (C, P, G, A)), torch.zeros(3, dtype=torch.long), 1, torch.ones(3, dtype=torch.bool))
    for objective, correction, rejection in (("clip_cov", "batch_normalized", "m2po"), ("kl_cov", "sequence_truncate", "k3_max"), ("sapo", "none", "veto")):
        step = prepare(tokens, objective=objective, correction=correction, rejection=rejection, uniform=torch.rand(3, dtype=torch.float64))
        value, _ = loss.policy_loss(
            tokens.logprobs, tokens.logprobs_old, tokens.logprobs_gen, None, None, tokens.advantages, torch.ones(1), tokens.row_ids,
            objective=OBJECTIVES[objective], level="token", clip_low=0.2, clip_high=0.2, correction_low=0.0, correction_high=2.0, kl="k3", kl_coef=0.0,
            correction=objectives.combine(CORRECTIONS[correction], objectives.REJECTIONS[rejection]), entropy_coef=0.0, step=step,
        )  # fmt: skip
        assert value.dtype == torch.float32, objective


def test_the_entropy_filter_keeps_the_most_uncertain_tokens_and_the_denominator():
    entropy = [0.1, 2.0, 0.5, 1.5, 0.2]
    tokens = tokens_of([-1.0] * 5, [1.0] * 5, entropy=entropy)
    step = prepare(tokens, entropy_share=0.4)
    assert step.entropy.tolist() == [0, 1, 0, 1, 0]
    outcome = run([1.0] * 5, [-1.0] * 5, ref=[-1.5] * 5, kl_coef=0.1, step=step)
    assert outcome.gradient.tolist() == near([0.01, -0.19, 0.01, -0.19, 0.01])  # the KL term stays everywhere; divided by 5
    assert outcome.metrics["entropy_kept_fraction"] == near(0.4)
    with pytest.raises(ValueError, match="entropy-share"):
        prepare(tokens_of([-1.0], [1.0]), entropy_share=0.5)


def test_step_values_are_sliced_like_stored_tensors():
    step = StepValues(objective=torch.arange(4), entropy=torch.arange(4, 8))
    assert step[1:3].objective.tolist() == [1, 2] and step[torch.tensor([3, 0])].entropy.tolist() == [7, 4] and step[1:3].correction is None


def test_nothing_is_prepared_where_nothing_needs_the_step():
    assert prepare(tokens_of(C, A)) == StepValues()
    assert not objectives.needs_step("ppo", "truncate") and objectives.needs_step("clip_cov", "none") and objectives.needs_step("ppo", "none", "m2po")
    assert objectives.needs_step("ppo", "none", entropy_share=0.2) and objectives.needs_step("ppo", "batch_normalized")


def test_the_largest_values_over_ranks_are_exact():
    values = f64([-3.0, -0.0, 0.0, 1e-300, -1e-300, 7.5, 2.0, -math.inf])
    eligible = torch.tensor([True] * 7 + [False])
    for count in range(1, 8):
        chosen = objectives.largest(values, eligible, count, objectives.one_rank)
        expected = set(torch.sort(values[:7], descending=True).values[:count].tolist())
        assert set(values[chosen].tolist()) == expected
    assert objectives.largest(values, eligible, 20, objectives.one_rank).tolist() == eligible.tolist()


def test_random_keys_depend_on_seed_step_rollout_and_position_alone():
    rollouts, positions = torch.arange(50).repeat_interleave(40), torch.arange(40).repeat(50)
    uniform = objectives.keyed_uniform(5, 2, rollouts, positions)
    assert (uniform[77:91] == objectives.keyed_uniform(5, 2, rollouts[77:91], positions[77:91])).all()
    assert uniform.unique().numel() == 2000 and 0 <= uniform.min() and uniform.max() < 1
    assert uniform.mean().item() == near(0.5, abs=0.03) and uniform.var().item() == near(1 / 12, abs=0.01)
    for other in (objectives.keyed_uniform(6, 2, rollouts, positions), objectives.keyed_uniform(5, 3, rollouts, positions)):
        assert (uniform == other).sum() == 0
        assert abs(np.corrcoef(uniform, other)[0, 1]) < 0.1


# ------------------------------------------------------------------------------------------------ invariance of everything in the dicts

ALL = (
    [dict(objective=name) for name in OBJECTIVES]
    + [dict(objective=name, level="sequence") for name in OBJECTIVES if name not in objectives.TOKEN_OBJECTIVES]
    + [dict(correction=name, correction_low=0.7, correction_high=1.5) for name in CORRECTIONS]
    + [dict(rejection=name) for name in objectives.REJECTIONS]
    + [dict(reduction=name) for name in loss.REDUCTIONS]
    + [dict(kl=kl, kl_gradient=gradient, kl_coef=0.3) for kl in loss.KL_ESTIMATORS for gradient in KL_GRADIENTS]
    + [dict(entropy_share=0.3, entropy_coef=0.1), dict(anchor="gen"), dict(positive_likelihood=0.1)]
)


DEFAULT = dict(
    objective="ppo", level="token", anchor="old", reduction="token_mean", correction="none", correction_low=0.0, correction_high=math.inf,
    rejection="none", kl="k3", kl_gradient="true", kl_coef=0.0, entropy_coef=0.0, entropy_share=1.0, positive_likelihood=0.0,
)  # fmt: skip


@st.composite
def steps(draw):
    """Rows of an optimizer step, how they are split into micro-batches, and how those are dealt to ranks."""
    rows = draw(st.integers(2, 6))
    split = draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows))  # micro-batch of each row
    order = draw(st.permutations(range(rows)))
    weights = draw(st.lists(st.sampled_from([1.0, 1.0, 1.0, 0.5, 0.0]), min_size=rows, max_size=rows))
    return draw(st.integers(0, 2**31)), rows, split, order, weights, draw(st.integers(1, 3))


def data_of(seed: int, rows: int):
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 6, rows)
    n = int(lengths.sum())
    old = -random.uniform(0.05, 3, n)
    per_token = dict(
        logprobs=np.minimum(old + random.normal(0, 0.3, n), -0.01), logprobs_old=old, logprobs_gen=np.minimum(old + random.normal(0, 0.2, n), -0.01),
        logprobs_ref=np.minimum(old + random.normal(0, 0.5, n), -0.01), entropy=random.uniform(0, 3, n),
        advantages=np.repeat(random.normal(size=rows), lengths),
    )  # fmt: skip
    return lengths, per_token


def whole_step(chosen, seed, lengths, per_token, weights, ranks):
    """Loss, gradient per (row, position) and metrics, with micro-batches `ranks[rank] = [[row, ...], ...]`."""
    chosen = DEFAULT | chosen
    starts = np.concatenate([[0], np.cumsum(lengths)])
    groups = np.arange(len(lengths)) // 2
    coefficients = coefficients_of(lengths, weights, chosen["reduction"], 6.0, groups).numpy()
    positive = (np.arange(len(lengths)) % 2 == 0) * (np.array(weights) != 0)
    likelihood = chosen["positive_likelihood"] * positive / max(1, (positive * lengths).sum())
    share = dict(rejection_params=dict(tau=0.02)) if chosen["rejection"] == "m2po" else dict(objective_params=dict(share=0.3))
    if chosen["objective"] == "clip_cov":
        share["objective_params"] |= dict(cov_low=0.0)
    sum_over_ranks = Ranks(len(ranks))

    def tensors(rows):
        index = np.concatenate([np.arange(starts[r], starts[r + 1]) for r in rows] + [np.zeros(0, dtype=int)]).astype(int)
        row_ids = torch.as_tensor(np.repeat(np.arange(len(rows)), lengths[list(rows)].astype(int)))
        return index, row_ids, {k: f64(v[index]) for k, v in per_token.items()}

    def one_rank(batches):
        rows = [r for batch in batches for r in batch]
        index, row_ids, values = tensors(rows)
        trained = torch.as_tensor(coefficients[rows] != 0)[row_ids]
        names = ("logprobs", "logprobs_old", "logprobs_gen", "advantages")
        tokens = Tokens(*(values[k] for k in names), row_ids, len(rows), trained, values["entropy"])
        of_token = np.array(rows, dtype=np.int64)[row_ids.numpy()]
        uniform = objectives.keyed_uniform(1, 2, torch.as_tensor(of_token), torch.as_tensor(index - starts[of_token]))
        step = objectives.prepare(
            tokens, clip_low=0.2, clip_high=0.28, uniform=uniform, sum_over_ranks=sum_over_ranks, **share,
            **{k: chosen[k] for k in ("objective", "correction", "correction_low", "correction_high", "rejection", "entropy_share")},
        )  # fmt: skip
        results, at = [], 0
        for batch in batches:
            index, row_ids, values = tensors(batch)
            values["logprobs"].requires_grad_()
            value, metrics = loss.policy_loss(
                **values, coefficients=f64(coefficients[batch]), row_ids=row_ids, objective=OBJECTIVES[chosen["objective"]],
                correction=objectives.combine(CORRECTIONS[chosen["correction"]], objectives.REJECTIONS[chosen["rejection"]]), clip_low=0.2, clip_high=0.28,
                kl_gradient=KL_GRADIENTS[chosen["kl_gradient"]], step=step[at : at + len(index)], likelihood=f64(likelihood[batch]),
                **{k: chosen[k] for k in ("level", "correction_low", "correction_high", "kl", "kl_coef", "entropy_coef", "anchor")},
            )  # fmt: skip
            at += len(index)
            gradient = torch.autograd.grad(value, values["logprobs"])[0].numpy()
            metrics |= loss.mismatch(values["logprobs_old"], values["logprobs_gen"], f64(coefficients[batch])[row_ids] != 0)
            results.append((index, value.item(), gradient, metrics))
        return results

    total, gradients, found = 0.0, np.zeros(starts[-1]), []
    for results in sum_over_ranks.run([lambda batches=batches: one_rank(batches) for batches in ranks]):
        for index, value, gradient, metrics in results:
            total += value
            gradients[index] = gradient
            found.append(metrics)
    return total, gradients, reduce_metrics(*found)


@pytest.mark.parametrize("chosen", ALL, ids=lambda chosen: "-".join(map(str, chosen.values())))
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(drawn=steps())
def test_nothing_depends_on_micro_batches_row_order_or_ranks(chosen, drawn):
    seed, rows, split, order, weights, ranks = drawn
    lengths, per_token = data_of(seed, rows)
    expected = whole_step(chosen, seed, lengths, per_token, weights, [[list(range(rows))]])
    batches = [[r for r in order if split[r] == b] for b in range(4)]
    dealt = [[batch for b, batch in enumerate(batches) if b % ranks == rank and batch] for rank in range(ranks)]
    found = whole_step(chosen, seed, lengths, per_token, weights, dealt)
    assert found[0] == near(expected[0], abs=1e-9)
    assert found[1].tolist() == near(expected[1].tolist(), abs=1e-9)
    assert found[2] == near(expected[2], abs=1e-9, nan_ok=True)
    assert loss.derived_metrics(found[2]) == near(loss.derived_metrics(expected[2]), nan_ok=True)


# ------------------------------------------------------------------------------------------------ advantages


def test_baseline_and_scale_compose_to_the_functions_of_loss():
    rewards, groups = np.array([1, 0, 0, 1, 0.5, 0.5, 0.2]), np.array([0, 0, 0, 1, 1, 2, 2])
    for population in (False, True):
        named = objectives.advantages(rewards, groups, population=population)
        assert (named == loss.group_advantages(rewards, groups, population=population)).all()
        named = objectives.advantages(rewards, groups, baseline="leave_one_out", scale="leave_one_out_std", population=population)
        assert (named == loss.group_advantages(rewards, groups, True, True, population)).all()
    assert (objectives.advantages(rewards, groups, scale="none") == loss.group_advantages(rewards, groups, divide_by_std=False)).all()


def test_rloo_is_the_centred_reward_times_n_over_n_minus_one():
    rewards = np.array([1, 0, 0, 0.5])
    expected = 4 / 3 * (rewards - rewards.mean())
    assert objectives.advantages(rewards, np.zeros(4), baseline="leave_one_out", scale="none").tolist() == near(expected.tolist())


def test_maxrl_divides_by_the_success_rate():
    assert objectives.advantages(np.array([1, 0, 0, 0]), np.zeros(4), scale="mean").tolist() == near([3, -1, -1, -1])
    assert (objectives.advantages(np.zeros(4), np.zeros(4), scale="mean") == 0).all()
    with pytest.raises(ValueError, match="scale mean"):
        objectives.advantages(np.array([1, -1]), np.zeros(2), scale="mean")


def test_opo_weighs_its_baseline_by_length():
    advantages = objectives.advantages(np.array([1, 0]), np.zeros(2), baseline="length_weighted", scale="none", row_tokens=np.array([10, 30]))
    assert advantages.tolist() == near([0.75, -0.25])
    same = objectives.advantages(np.full(3, 0.1), np.zeros(3), baseline="length_weighted", scale="none", row_tokens=np.array([3, 7, 11]))
    assert (same == 0).all()


def test_pass_at_k_rewards_only_the_lead_of_the_best():
    rewards, groups = np.array([0.2, 0.9, 0.5, 1, 1, 0]), np.array([0, 0, 0, 1, 1, 1])
    assert objectives.advantages(rewards, groups, baseline="pass_at_k", scale="none").tolist() == near([0, 0.4, 0, 0, 0, 0])


def test_batch_statistics_use_every_rank():
    rewards, groups = np.array([1, 0, 0, 3, 1, 1.0]), np.array([0, 0, 0, 1, 1, 1])
    names = [(b, s) for b in objectives.BASELINES for s in objectives.SCALES]
    for baseline, scale in names:
        whole = objectives.advantages(rewards, groups, baseline=baseline, scale=scale)
        ranks = Ranks(3)
        parts = [slice(0, 3), slice(3, 6), slice(6, 6)]  # the third rank has no rollouts
        found = ranks.run(
            [lambda p=p: objectives.advantages(rewards[p], groups[p], baseline=baseline, scale=scale, sum_over_ranks=ranks) for p in parts]
        )
        assert np.concatenate(found).tolist() == near(whole.tolist()), (baseline, scale)
    batch = objectives.advantages(rewards, groups, baseline="none", scale="batch_std")
    assert batch.tolist() == near((rewards / rewards.std(ddof=1)).tolist())
    assert objectives.advantages(rewards, groups, baseline="batch_mean", scale="none").sum() == near(0)


def test_advantages_are_clipped_after_normalisation_on_either_side():
    rewards, groups = np.array([1, 0, 0, 0.0]), np.zeros(4)
    assert objectives.advantages(rewards, groups, clip_high=1.0).tolist() == near([1.0, -0.5, -0.5, -0.5])
    assert objectives.advantages(rewards, groups, clip_low=-0.1).tolist() == near([1.5, -0.1, -0.1, -0.1])


def test_gdpo_normalises_each_reward_before_it_sums():
    components = {"correctness": np.array([1.0, 1]), "integer": np.array([1.0, -1]), "format": np.array([1.0, 0])}
    expected = [math.sqrt(0.5), -math.sqrt(0.5)]
    assert objectives.gdpo(components, np.zeros(2)).tolist() == near(expected, **EXACT)
    assert objectives.gdpo(components, np.zeros(2), dict.fromkeys(components, 2.0)).tolist() == near(expected, **EXACT)
    one_sided = objectives.gdpo({k: components[k] for k in ("integer", "format")}, np.zeros(2), {"integer": 1.0, "format": -1.0})
    assert one_sided.tolist() == [0, 0]  # they cancel, and a std of 0 divides nothing
    uneven = {"right": np.array([10.0, 0, 0, 0]), "form": np.array([0.0, 0.1, 0.1, 0.1])}  # +1.5 and -1.5 but for the last digit
    assert (objectives.gdpo(uneven, np.zeros(4)) == 0).all()
    with pytest.raises(ValueError, match="two rewards"):
        objectives.gdpo({"correctness": np.ones(2)}, np.zeros(2))
    with pytest.raises(ValueError, match="one weight for each"):
        objectives.gdpo(components, np.zeros(2), {"format": 1.0})


def test_reinforce_plus_plus_whitens_over_the_tokens_of_the_step():
    advantages = objectives.advantages(np.array([0, 1, 2, 3.0]), np.zeros(4), scale="none")
    assert objectives.whiten(f64(advantages), torch.ones(4, dtype=torch.bool)).tolist() == near([-1.3416408, -0.4472136, 0.4472136, 1.3416408], **EXACT)
    constant = objectives.whiten(f64([2.0, 2.0, 9.0]), torch.tensor([True, True, False]))
    assert constant.tolist() == [0, 0, 0]
    ranks = Ranks(2)
    values, trained = f64([0, 1, 2, 3, 5.0]), torch.ones(5, dtype=torch.bool)
    halves = ranks.run([lambda p=p: objectives.whiten(values[p], trained[p], ranks) for p in (slice(0, 2), slice(2, 5))])
    assert torch.cat(halves).tolist() == near(objectives.whiten(values, trained).tolist())


def test_kl_in_the_reward_by_token_by_rollout_and_to_the_end():
    old, ref = f64([-1.0, -2.0, -1.0, -1.0, -0.5]), f64([-1.1, -1.8, -1.4, -2.0, -0.5])
    row_ids = torch.tensor([1, 1, 0, 0, 0])
    per_token = [0.1, -0.2, 0.4, 1.0, 0.0]
    assert objectives.kl_in_reward(old, ref, row_ids, 3, to="advantage").tolist() == near(per_token)
    assert objectives.kl_in_reward(old, ref, row_ids, 3, to="reward").tolist() == near([1.4, -0.1, 0.0])
    assert objectives.kl_in_reward(old, ref, row_ids, 3, to="return").tolist() == near([-0.1, -0.2, 1.4, 1.0, 0.0])
    assert objectives.kl_in_reward(old[:0], ref[:0], row_ids[:0], 2, to="return").tolist() == []
    assert not objectives.kl_in_reward(old.requires_grad_(), ref, row_ids, 3).requires_grad


# ------------------------------------------------------------------------------------------------ rewards


@pytest.mark.parametrize(
    "rewards, source, target, expected, outside",
    [([1, 0.5, 0.8], (0, 1), (0, 0.7), [0.7, 0.35, 0.56], 0), ([0, 1], (0, 1), (-1, 1), [-1, 1], 0),
     ([-2.8, -0.25, 1.5, 0.5, 2, 2.5], (-2, 2), (-1, 1), [-1, -0.125, 0.75, 0.25, 1, 1], 2)],
)  # fmt: skip
def test_reward_scaling(rewards, source, target, expected, outside):
    scaled, found = objectives.scale_rewards(np.array(rewards), source, target)
    assert scaled.tolist() == near(expected, **EXACT) and found == outside


def test_soft_overlong_penalty_in_both_dialects():
    lengths, rewards = np.array([10, 22, 25, 30]), np.array([1, 0.8, 0.6, 0.4])
    assert (rewards + objectives.soft_overlong_penalty(lengths, 25, 5, 0.5, capped=False)).tolist() == near([1, 0.6, 0.1, -0.6], **EXACT)
    assert objectives.soft_overlong_penalty(lengths[[0, 1, 3]], 25, 5, 0.5, capped=False).tolist() == near([0, -0.2, -1], **EXACT)
    assert objectives.soft_overlong_penalty(lengths, 25, 5).tolist() == near([0, -0.4, -1, -1])
    for bad in (dict(buffer=0), dict(buffer=30), dict(buffer=5, penalty=-1)):
        with pytest.raises(ValueError, match="buffer"):
            objectives.soft_overlong_penalty(lengths, 25, **bad)


def test_truncated_rollouts_keep_a_share_of_their_reward():
    truncated = np.array([False, True, False, True])
    assert objectives.stop_properly(np.array([1, 0.8, 0.6, 0.4]), truncated, 0.5).tolist() == near([1, 0.4, 0.6, 0.2], **EXACT)
    with pytest.raises(ValueError, match="share"):
        objectives.stop_properly(np.ones(4), truncated, 1.5)


def test_rollouts_the_engine_scored_differently_lose_their_weight():
    offsets = [0.1, 0.1, 0.5, 1.0]
    gen = f64([[-2.0 - x] * 4 + [-2.0] * 5 for x in offsets]).flatten()
    row_ids = torch.arange(4).repeat_interleave(9)
    error = objectives.sequence_error(torch.full((36,), -2.0, dtype=torch.float64), gen, row_ids, 4).numpy()
    assert error.tolist() == near([1.047, 1.047, 1.288, 1.764], abs=5e-4)
    keep, metrics = objectives.drop_by_sequence_error(error, np.ones(4, dtype=bool), np.array([1, 0, 1, 0]), 1.2)
    assert keep.tolist() == [True, True, False, False]
    assert reduce_metrics(metrics)["dropped_correct"] == 0.5 and reduce_metrics(metrics)["dropped_by_sequence_error"] == 2
    # one token off by log 2, one by log 4, one by log 16 in a row that already has no weight
    error = objectives.sequence_error(f64([-1.0] * 3), f64([-1.0]) - f64([2, 4, 16]).log(), torch.arange(3), 3).numpy()
    keep, metrics = objectives.drop_by_sequence_error(error, np.array([True, True, False]), np.ones(3), 3.0)
    numbers = reduce_metrics(metrics)
    assert keep.tolist() == [True, False, False]
    assert [numbers["sequence_error" + s] for s in ("_max", "", "_min")] == near([4, 3, 2])
    assert [numbers["sequence_error" + s + "_kept"] for s in ("_max", "", "_min")] == near([2, 2, 2])
    assert numbers["dropped_by_sequence_error"] == 1 and numbers["dropped_correct"] == 1.0
    seven = f64([-1.0] * 7), f64([-2.0] * 5 + [-1.0] * 2)
    assert objectives.sequence_error(*seven, torch.zeros(7, dtype=torch.long), 1).item() == near(2.227, abs=1e-3)
    keep, metrics = objectives.drop_by_sequence_error(np.zeros(0), np.zeros(0, dtype=bool), np.zeros(0), 1.2)
    assert len(keep) == 0 and reduce_metrics(metrics)["dropped_by_sequence_error"] == 0


def test_the_adaptive_entropy_coefficient_acts_below_its_target_only():
    coef, applied = 0.0, []
    for entropy in (0.1, 0.2, 0.3, 0.3, 0.3, 0.1):
        coef, now = objectives.adaptive_entropy_coef(coef, entropy, delta=0.25)
        applied.append(now)
    assert applied == near([0.25, 0.5, 0, 0, 0, 0.25])
    assert objectives.adaptive_entropy_coef(0.999, 0.0) == (1.0, 1.0) and objectives.adaptive_entropy_coef(0.001, 1.0) == (0.0, 0.0)


def test_an_anchor_between_sampler_and_policy():
    anchor = objectives.interpolated_anchor(f64([-1.0] * 3), f64([-2.0] * 3), torch.tensor([0, 3, 4]), 3, 4)
    assert anchor.tolist() == near([-1.25, -2.0, -2.0])


# ------------------------------------------------------------------------------------------------ configuration

IMPOSSIBLE = [
    (dict(objective="dual_clip", objective_params=dict(cap=1.0)), ("objective", "objective-params")),
    (dict(level="sequence", reduction="token_mean"), ("level", "reduction")),
    (dict(objective="cispo", level="sequence"), ("objective", "level")),
    (dict(objective="cispo", reduction="sequence_mean"), ("objective", "reduction")),
    (dict(objective="gmpo", reduction="token_mean"), ("objective", "reduction")),
    (dict(correction="truncate", correction_low=3.0, correction_high=2.0), ("correction-low", "correction-high")),
    (dict(correction="truncate", correction_high=0.0), ("correction", "correction-high")),
    (dict(correction="mask", correction_low=0.0, correction_high=5.0), ("correction", "correction-low")),
    (dict(correction="mask", correction_low=None, correction_high=5.0), ("correction", "correction-low")),
    (dict(correction="sequence_mask", correction_low=0.0, correction_high=1.1), ("correction", "correction-low")),
    (dict(correction="sequence_mask", correction_low=0.9, correction_high=1.1, level="sequence"), ("level", "correction")),
    (dict(correction="truncate", anchor="gen"), ("anchor", "correction")),
    (dict(correction="icepop"), ("correction",)),
    (dict(rejection="vetoes"), ("rejection",)),
    (dict(kl_in="reward", kl_coef=0.0), ("kl-in", "kl-coef")),
    (dict(kl_in="everywhere"), ("kl-in",)),
    (dict(kl_input_clamp=0.0), ("kl-input-clamp", "kl-output-clamp")),
    (dict(entropy_share=0.0), ("entropy-share", "objective")),
    (dict(entropy_share=0.2, level="sequence"), ("entropy-share", "level")),
    (dict(advantage_clip_low=1.0, advantage_clip_high=0.0), ("advantage-clip-low", "advantage-clip-high")),
    (dict(clip_low=-0.1), ("clip-low", "clip-high")),
    (dict(objective="sapo", objective_params=dict(tau=1.0)), ("objective", "objective-params")),
    (dict(rejection="veto", rejection_params=dict(low=1.0)), ("rejection", "rejection-params")),
    (dict(kl="k3_naive"), ("kl",)),
    (dict(gdpo=True, overlong_buffer=8), ("gdpo", "overlong-buffer")),
    (dict(reward_from=(0.0, 1.0), reward_to=None), ("reward-from", "reward-to")),
    (dict(stop_properly=1.5), ("stop-properly", "overlong-buffer")),
    (dict(stop_properly=0.5, overlong_buffer=8), ("stop-properly", "overlong-buffer")),
]


@pytest.mark.parametrize("chosen, flags", IMPOSSIBLE, ids=lambda x: "-".join(map(str, x)) if isinstance(x, tuple) else None)
def test_impossible_combinations_name_both_flags(chosen, flags):
    with pytest.raises(ValueError) as error:
        objectives.validate(chosen)
    for flag in flags:
        assert f"--loss.{flag} " in str(error.value), error.value


def test_names_that_nobody_knows_raise_with_the_choices():
    with pytest.raises(ValueError, match="--loss.objective grpo: give one of ppo, cispo, reinforce, dual_clip"):
        objectives.validate(dict(objective="grpo"))


def test_a_group_of_one_needs_a_baseline_that_is_not_the_groups():
    with pytest.raises(ValueError, match="--samples-per-prompt 1 with --loss.baseline mean"):
        objectives.validate({}, samples_per_prompt=1)
    objectives.validate(dict(baseline="none"), samples_per_prompt=1)
    with pytest.raises(ValueError, match="--loss.reduction constant"):
        objectives.validate(dict(reduction="constant"), max_completion_tokens=0)
    with pytest.raises(ValueError, match="--loss.overlong-buffer 64 exceeds --sampling.max-completion-tokens 32"):
        objectives.validate(dict(overlong_buffer=64), max_completion_tokens=32)


@pytest.mark.parametrize("preset", loss.PRESETS | objectives.PRESETS)
def test_every_preset_is_possible(preset):
    objectives.validate((loss.PRESETS | objectives.PRESETS)[preset], samples_per_prompt=8, max_completion_tokens=1024)


def test_settings_of_a_function_are_its_own_keywords():
    assert objectives.settings_of(loss.ppo) == {} and objectives.bind(loss.ppo, dict(tau=1.0)) is loss.ppo
    assert objectives.bind(objectives.dro, dict(beta=0.7, share=0.1)).keywords == dict(beta=0.7)
    objectives.validate(dict(objective="clip_cov", objective_params=dict(share=1e-3, cov_low=0.5)))


def test_no_name_is_in_two_dicts_and_everything_is_documented():
    for ours, theirs in ((loss.OBJECTIVES, objectives.OBJECTIVES), (loss.CORRECTIONS, objectives.CORRECTIONS), (loss.PRESETS, objectives.PRESETS),
                         (loss.KL_GRADIENTS, objectives.KL_GRADIENTS)):  # fmt: skip
        assert not set(ours) & set(theirs)
    dicts = (OBJECTIVES, CORRECTIONS, KL_GRADIENTS, loss.KL_ESTIMATORS, loss.REDUCTIONS, loss.LEVELS, objectives.BASELINES, objectives.SCALES,
             objectives.ESTIMATORS)  # fmt: skip
    for name, function in itertools.chain.from_iterable(d.items() for d in dicts):
        assert inspect.getdoc(function), name


def test_the_examples_in_the_docstrings_hold():
    assert doctest.testmod(objectives).failed == 0


# ------------------------------------------------------------------------------------------------ the page


def docs():
    spec = importlib.util.spec_from_file_location("make_objectives", Path(__file__).parent.parent / "docs" / "make_objectives.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_objectives_is_the_one_the_code_generates():
    made = docs()
    assert (made.HERE / "objectives.md").read_text() == made.page(), "run: python docs/make_objectives.py"
    for name in [*OBJECTIVES, *CORRECTIONS, *KL_GRADIENTS, *loss.REDUCTIONS, *objectives.BASELINES, *objectives.SCALES, *made.PRESETS]:
        assert f"`{name}`" in made.page(), name


def test_the_recipe_adds_an_objective_with_one_function_and_one_entry():
    example = docs().RECIPE.split("```python\n")[1].split("```")[0]
    names = dict(vars(objectives))
    exec(example, names)
    spo = names["spo"]
    assert objectives.settings_of(spo) == dict(epsilon=0.2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(OBJECTIVES, "spo", spo)
        patch.setitem(objectives.OBJECTIVES, "spo", spo)
        objectives.validate(dict(objective="spo", objective_params=dict(epsilon=0.3)))
        test_on_policy_every_objective_has_the_policy_gradient("spo")
        test_nonsense_in_a_row_of_weight_zero_reaches_no_gradient("spo", math.nan)
        # at r = 1.1 and A = 1: -(r - (r - 1) r / epsilon) = -1.1 (1 - .1 / .2)
        assert run([1.0], [-1.0], [-1.0 - math.log(1.1)], objective="spo").gradient.item() == near(-0.55)
