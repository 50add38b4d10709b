"""loss.py: hand-computed numbers, and what must never happen. All float64, CPU."""

import doctest
import math

import numpy as np
import pytest
import torch
from loss_helpers import KL_GRADIENTS, coefficients_of, f64, reduce_metrics, run

import loss
from loss import Tokens, baseline_and_std, group_advantages, has_signal

near = pytest.approx
EXACT = dict(abs=1e-6, rel=0)

# one row of three tokens; ratios .5, 1, 1.5
A = [1.0, -1.0, 2.0]
C = [-1.69315, -1.0, -0.59453]
P = [-1.0, -1.0, -1.0]
G = [-0.5, -1.5, -0.8]


def has(outcome, **expected):
    for name, value in expected.items():
        assert outcome.metrics[name] == near(value, **EXACT), name
    return True


# ------------------------------------------------------------------------------------------------ objectives


def test_ppo_clips_both_sides_and_the_clipped_token_has_no_gradient():
    outcome = run(A, C, P)
    assert outcome.loss == near(-0.6333329, **EXACT)
    assert outcome.gradient.tolist() == near([-0.1666662, 1 / 3, 0.0], **EXACT)
    assert has(outcome, ratio=1.000002, ratio_clamped=1.0, approx_entropy=0.9127907, ratio_min=math.exp(-0.69315), ratio_max=math.exp(0.40547))


def test_ppo_bounds_are_asymmetric():
    outcome = run(A, C, P, clip_low=0.3, clip_high=0.1)
    assert outcome.loss == near(-0.5666662, **EXACT)
    assert has(outcome, ratio_clamped=0.9333333)


def test_clip_fractions_count_only_tokens_whose_gradient_the_clip_removes():
    low = run([-1.0, 1.0, -1.0], C, P)  # .5 with A < 0; 1.5 with A < 0 keeps its gradient
    assert has(low, clip_low_fraction=1 / 3, clip_high_fraction=0.0)
    assert (low.gradient == 0).tolist() == [True, False, False]
    assert has(run([1.0, 1.0, 1.0], C, P), clip_low_fraction=0.0, clip_high_fraction=1 / 3)


def test_reinforce_has_no_ratio():
    outcome = run(A, [-0.5, -1, -1.5], P, objective="reinforce")
    assert outcome.loss == near(0.8333333, **EXACT) and has(outcome, logprob=-1.0)


def test_on_policy_the_gradient_is_minus_the_advantage_and_every_ratio_is_one():
    outcome = run(A, C)
    assert outcome.loss == near(-2 / 3, **EXACT)
    assert outcome.gradient.tolist() == near([-1 / 3, 1 / 3, -2 / 3], **EXACT)
    assert has(outcome, ratio=1.0, ratio_clamped=1.0, ratio_min=1.0, ratio_max=1.0)


def test_cispo_keeps_the_gradient_of_a_clipped_token():
    outcome = run(A, C, P, objective="cispo")
    assert outcome.loss == near(0.5937973, **EXACT)
    assert outcome.gradient.tolist() == near([-0.2666667, 1 / 3, -0.8], **EXACT)


def test_gspo_uses_the_geometric_mean_of_a_rollout_and_its_gradient_reaches_every_token():
    outcome = run(A, C, P, level="sequence", reduction="sequence_mean")
    assert outcome.loss == near(-0.6057073, **EXACT)
    assert outcome.gradient.tolist() == near([-0.2019024] * 3, **EXACT)
    assert has(outcome, ratio=0.9085609)


def test_gspo_clips_each_rollout_by_its_own_ratio():
    outcome = run(A + A, C + C, P + [-2, -2, -2], lengths=[3, 3], level="sequence", reduction="sequence_mean")
    assert outcome.loss == near(-0.4912329, **EXACT)


def test_two_reductions_weigh_a_short_bad_rollout_differently():
    case = dict(advantages=[1, 1, 1, -2], logprobs=[-1.0] * 4, lengths=[3, 1])
    assert run(**case).loss == near(-0.25, **EXACT)
    assert run(**case, reduction="sequence_mean").loss == near(0.5, **EXACT)


def test_five_reductions_by_hand():
    # rows of 2 and 8 tokens in one group of two, one of 5 in another; per-token losses 1, 4, 2
    case = dict(lengths=[2, 8, 5], weights=[1, 1, 1], max_tokens=10.0, groups=[0, 0, 1])
    losses = np.array([2 * 1.0, 8 * 4.0, 5 * 2.0])
    for reduction, expected in {
        "token_mean": 44 / 15,
        "sequence_mean": 7 / 3,
        "constant": 44 / 30,
        "prompt_mean": (34 / 10 + 2) / 2,
        "sequence_sum": 44 / 3,
    }.items():
        assert (coefficients_of(reduction=reduction, **case).numpy() * losses).sum() == near(expected, **EXACT), reduction


# ------------------------------------------------------------------------------------------------ corrections


def test_importance_weights_multiply_the_loss_of_their_token():
    outcome = run(A, C, P, G, correction="truncate")
    assert outcome.loss == near(-0.2064990, **EXACT)
    assert has(
        outcome, correction_weight=1.0246609, token_mult_prob_error=1.5062818, mismatch_k3=0.0913276, mismatch_k3_reverse=0.0922182,
        mismatch_js=0.0222838, approx_entropy=0.9641124, correction_changed_fraction=0.0, mismatch_max=0.5,
    )  # fmt: skip


def test_importance_weights_multiply_cispo_too():
    assert run(A, C, P, G, objective="cispo", correction="truncate").loss == near(0.1136869, **EXACT)


def test_truncation_bounds_the_weight_on_both_sides_and_counts_what_it_changed():
    outcome = run(A, C, P, G, correction="truncate", correction_high=0.8)
    assert outcome.loss == near(-0.4744215, **EXACT)
    assert has(outcome, correction_changed_fraction=2 / 3, correction_weight=0.7355102)
    outcome = run(A, C, P, G, correction="truncate", correction_low=0.7, correction_high=1.5)
    assert outcome.loss == near(-0.2716509, **EXACT)
    assert has(outcome, correction_changed_fraction=2 / 3, correction_weight=1.0062436)


def test_icepop_drops_tokens_outside_the_bounds():
    outcome = run(A, C, P, G, correction="mask", correction_low=0.5, correction_high=1.5)
    assert outcome.loss == near(-0.7560728, **EXACT)
    assert has(outcome, correction_changed_fraction=1 / 3, correction_dropped_fraction=1 / 3, correction_dropped_rows=0.0)
    outcome = run(A, P, P, [-0.5, -3.5, -0.8], correction="mask", correction_low=0.5, correction_high=5.0)
    assert outcome.loss == near(-0.7479974, **EXACT)
    assert has(outcome, correction_changed_fraction=1 / 3)


def test_a_sequence_mask_keeps_token_weights_or_drops_the_rollout():
    bounds = dict(correction="sequence_mask", correction_low=0.999, correction_high=1.002)
    kept = run(A, P, P, [-1.0005] * 3, **bounds)
    assert kept.loss == near(-0.6670001, **EXACT)
    assert has(kept, correction_dropped_rows=0.0)
    dropped = run(A, P, P, [-1.5] * 3, **bounds)
    assert dropped.loss == 0.0
    assert has(dropped, correction_dropped_rows=1.0)


def test_a_token_the_engine_gave_no_probability_has_weight_zero_and_the_loss_is_finite():
    outcome = run(A, P, P, [-1.0005, -math.inf, -1.0005], correction="sequence_mask", correction_low=0.999, correction_high=1.002)
    assert outcome.loss == near(-1.0005001, **EXACT)
    assert outcome.gradient.tolist() == near([-1.0005001 / 3, 0, -2.0010003 / 3], **EXACT)
    assert has(outcome, engine_zero_fraction=1 / 3)
    assert math.isfinite(outcome.metrics["mismatch_k3"]) and math.isfinite(outcome.metrics["approx_entropy"])
    assert outcome.metrics["mismatch_k3"] > 1e6  # but the canary must see it


@pytest.mark.parametrize("settings", [dict(correction="truncate"), dict(correction="mask", correction_low=0.5), dict(anchor="gen")])
def test_no_correction_trains_on_a_token_without_engine_probability(settings):
    outcome = run(A, C, P, [-1.0, -math.inf, -1.0], **settings)
    assert outcome.gradient[1] == 0 and torch.isfinite(outcome.gradient).all()


def test_without_a_correction_the_engines_number_is_not_used():
    assert run(A, C, P, [-1.0, -math.inf, -1.0]).loss == near(-0.6333329, **EXACT)


def test_force_on_policy_with_truncation():
    # probabilities .1, 1, 3 times the engine's
    c = [math.log(x) - 2 for x in (0.1, 1, 3)]
    case = dict(advantages=[1, 1, 1], logprobs=c, gen=[-2.0] * 3, correction="truncate", correction_high=2.0)
    outcome = run(**case)
    assert outcome.loss == near(-1.0333333, **EXACT) and has(outcome, correction_changed_fraction=1 / 3)
    outcome = run(**case, correction_low=0.5)
    assert outcome.loss == near(-1.1666667, **EXACT) and has(outcome, correction_changed_fraction=2 / 3)
    outcome = run([1, 1, 1], [math.log(x) - 2 for x in (1, 3, 0.5)], gen=[-2.0] * 3, correction="truncate", correction_high=2.0)
    assert outcome.loss == near(-1.1666667, **EXACT) and has(outcome, correction_changed_fraction=1 / 3)


def test_the_correction_weight_is_a_constant_in_the_gradient():
    outcome = run([1.0], [-1.0], gen=[-1.2], correction="truncate")
    assert outcome.gradient.item() == near(-1.2214028, **EXACT)  # with the graph kept it would be twice that


def test_only_the_policys_own_log_probabilities_carry_a_gradient():
    logprobs = f64(C).requires_grad_()
    value, _ = loss.policy_loss(
        logprobs, logprobs * 1.0, logprobs - 0.1, None, None, f64(A), torch.ones(1, dtype=torch.float64), torch.zeros(3, dtype=torch.long),
        objective=loss.ppo, level="token", clip_low=0.2, clip_high=0.2, correction=loss.truncate, correction_low=0.0, correction_high=2.0, kl="k3",
        kl_coef=0.0, entropy_coef=0.0,
    )  # fmt: skip
    value.backward()
    assert logprobs.grad.tolist() == near([-math.exp(0.1) * a for a in A])


def test_with_the_sampler_as_anchor_the_ratio_is_pi_over_mu():
    outcome = run([1.0, 1.0], [-1.0, -1.0], [-1.1, -1.1], [-1.1, -1.05], anchor="gen")
    assert outcome.loss == near(-(math.exp(0.1) + math.exp(0.05)) / 2, **EXACT)


# ------------------------------------------------------------------------------------------------ KL


def test_kl_is_added_beside_the_corrected_objective_and_not_multiplied_by_its_weight():
    outcome = run(A, C, P, G, [-1.0] * 3, correction="truncate", kl_coef=0.1, kl_gradient="ratio_gen")
    assert outcome.loss == near(-0.2004441, **EXACT) and has(outcome, kl=0.0605485)
    outcome = run(A, C, P, ref=[-1.0] * 3, kl_coef=0.1)
    assert outcome.loss == near(-0.6206999, **EXACT) and has(outcome, kl=0.1263297)


@pytest.mark.parametrize("kl, expected, mean", [("k1", 0.0, 0.0), ("k2", 0.0333333, 1 / 3), ("k3", 0.0362054, 0.3620538)])
def test_kl_alone(kl, expected, mean):
    outcome = run([0, 0, 0], [0.0, -1, -2], ref=[-1.0] * 3, kl=kl, kl_coef=0.1)
    assert outcome.loss == near(expected, **EXACT) and has(outcome, kl=mean)


def kl_of(kl, gradient, logprobs, ref, input_clamp=math.inf, output_clamp=math.inf, old=None, gen=None):
    c = f64(logprobs).requires_grad_()
    rows = torch.zeros(len(c), dtype=torch.long)
    old, gen = (c.detach() if x is None else f64(x) for x in (old, gen))
    tokens = Tokens(c, old, gen, torch.zeros(len(c)), rows, 1, rows == 0)
    value = loss.kl_penalty(tokens, f64(ref), kl, KL_GRADIENTS[gradient], input_clamp, output_clamp)
    return value.tolist(), torch.autograd.grad(value.sum(), c)[0].tolist()


@pytest.mark.parametrize(
    "kl, unclamped, clamped",
    [("k1", [-1, 14, 29], [-1, 10, 10]), ("k2", [0.5, 98, 420.5], [0.5, 10, 10]), ("k3", [0.7182818, 13.0000008, 28], [0.7182818, 10, 10])],
)
def test_kl_estimators_and_their_clamps(kl, unclamped, clamped):
    for gradient in KL_GRADIENTS:
        assert kl_of(kl, gradient, [-1, -1, -1], [0, -15, -30])[0] == near(unclamped, **EXACT)
        assert kl_of(kl, gradient, [-1, -1, -1], [0, -15, -30], 20, 10)[0] == near(clamped, **EXACT)


@pytest.mark.parametrize(
    "kl, value, gradient",
    [("k3", [4.3890562, 0.7182818], [0, -1]), ("k2", [2, 0.5], [0, -0.5]), ("k1", [-2, -1], [0, 0])],
)
def test_the_score_function_gradient_is_zero_where_the_input_clamp_acts(kl, value, gradient):
    assert kl_of(kl, "score", [-3, -1], [0, 0], input_clamp=2) == (near(value, **EXACT), near(gradient, abs=1e-6))


@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
def test_the_true_gradient_is_the_log_ratio_whatever_the_estimator(kl):
    assert kl_of(kl, "true", [-1.0, -0.2], [0, -1.0])[1] == near([-1.0, 0.8], **EXACT)


@pytest.mark.parametrize("kl, gradient", [("k1", [1, 1]), ("k2", [-1, 0.8]), ("k3", [1 - math.e, 1 - math.exp(-0.8)])])
def test_the_naive_gradient_is_the_derivative_of_the_expression(kl, gradient):
    assert kl_of(kl, "naive", [-1.0, -0.2], [0, -1.0])[1] == near(gradient, **EXACT)


def test_the_true_gradient_is_that_of_the_divergence_itself():
    logits = f64([0.3, -1.0, 0.8]).requires_grad_()
    ref = f64([0.1, 0.5, -0.2]).log_softmax(0)
    logp = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((logp.exp() * (logp - ref)).sum(), logits, retain_graph=True)
    tokens = Tokens(logp, logp.detach(), logp.detach(), torch.zeros(3), torch.arange(3), 3, torch.ones(3, dtype=torch.bool))
    for kl in loss.KL_ESTIMATORS:
        estimate = loss.kl_penalty(tokens, ref, kl, loss.true_gradient, math.inf, math.inf)
        (expected,) = torch.autograd.grad((logp.detach().exp() * estimate).sum(), logits, retain_graph=True)  # expectation over samples
        assert expected.tolist() == near(exact.tolist(), **EXACT)
    naive = loss.kl_penalty(tokens, ref, "k3", loss.naive_gradient, math.inf, math.inf)
    assert torch.autograd.grad((logp.detach().exp() * naive).sum(), logits)[0].tolist() != near(exact.tolist(), abs=1e-3)


def test_the_output_clamp_removes_value_and_gradient():
    assert kl_of("k3", "ratio", [-1.0], [0.0], output_clamp=1, old=[-1 - math.log(100)]) == ([1.0], [0.0])


def test_kl_gradient_inside_the_loss():
    case = dict(advantages=[0.4, -0.2], logprobs=[-1.2, -0.7], old=[-1, -0.8], gen=[-1.5, -0.4], ref=[-0.9, -1.1])
    outcome = run(**case, kl_coef=0.3)
    assert outcome.loss == near(-0.0352022, **EXACT)
    assert outcome.gradient.tolist() == near([-0.2087461, 0.1705171], **EXACT)
    outcome = run(**case, kl_coef=0.3, kl_gradient="ratio_gen")
    assert outcome.loss == near(-0.0353196, **EXACT)
    assert outcome.gradient.tolist() == near([-0.2244898, 0.1549662], **EXACT)
    outcome = run(**case)
    assert outcome.loss == near(-0.0532291, **EXACT)
    assert outcome.gradient.tolist() == near([-0.1637461, 0.1105171], **EXACT)
    # differentiated as it stands, k3 misses the score-function term
    assert run(**case, kl_coef=0.3, kl_gradient="naive").gradient.tolist() == near([-0.2162250, 0.1599691], **EXACT)


# ------------------------------------------------------------------------------------------------ other terms


def test_entropy_bonus_lowers_the_loss_by_its_coefficient():
    assert run([0.0] * 3, C, entropy=[0.5, 1.0, 1.5], entropy_coef=0.1).loss == near(-0.1, **EXACT)


def test_approximate_entropy_is_weighted_by_pi_over_mu():
    c = [-0.5, -1, -1.5]
    assert has(run([0] * 3, c, P, [x - 0.1 for x in c]), approx_entropy=1.1051709)


def test_likelihood_of_positive_rows_is_added():
    outcome = run(A, [-0.5, -1, -1.5], P, likelihood=[0.1 / 3])
    assert outcome.loss == near(-0.3710204, **EXACT) and has(outcome, likelihood_nll=1.0)


def test_effective_sample_size():
    # weights 1 and .5: (1.5)^2 / (2 * 1.25)
    metrics = run([1, 1], [-1.0, -1.0], gen=[-1.0, -1.0 + math.log(2)], correction="truncate").metrics
    assert loss.derived_metrics(metrics)["effective_sample_size"] == near(0.9, **EXACT)


# ------------------------------------------------------------------------------------------------ what must never happen


def test_no_tokens_no_loss_and_extremes_that_any_value_beats():
    for outcome in (run([], [], lengths=[0]), run(A, C, P, weights=[0.0])):
        assert outcome.loss == 0.0 and (outcome.gradient == 0).all()
        assert outcome.metrics["ratio_max"] == -math.inf and outcome.metrics["ratio_min"] == math.inf
        assert math.isnan(outcome.metrics["ratio"])  # nothing to average


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("nonsense", [math.nan, math.inf, -math.inf, 700.0])
def test_a_row_of_weight_zero_may_hold_nonsense_everywhere(reduction, nonsense):
    outcome = run(
        A + [nonsense] * 3, C + [nonsense] * 3, P + [nonsense] * 3, P + [nonsense] * 3, P + [nonsense] * 3, [0.5] * 3 + [nonsense] * 3,
        lengths=[3, 3], weights=[1, 0], reduction=reduction, kl_coef=1e-9, entropy_coef=1e-9, correction="truncate",
    )  # fmt: skip
    assert outcome.loss == near(-0.6333329, **EXACT)
    assert outcome.gradient.tolist() == near([-0.1666662, 1 / 3, 0, 0, 0, 0], **EXACT)
    assert all(math.isfinite(v) for v in outcome.metrics.values())


@pytest.mark.parametrize("where", ["logprobs", "old", "gen"])
@pytest.mark.parametrize("bad", [1.0, math.nan, math.inf])
def test_a_placeholder_at_a_trained_token_raises_and_names_the_token(where, bad):
    case = dict(advantages=A, logprobs=C, old=list(P), gen=list(G))
    case[where] = case[where][:1] + [bad] + case[where][2:]
    with pytest.raises(ValueError, match="token 1 .*row 0"):
        run(**case)


@pytest.mark.parametrize("where", ["logprobs", "old"])
def test_minus_infinity_is_an_error_in_the_trainers_own_numbers(where):
    with pytest.raises(ValueError, match="-inf"):
        run(**(dict(advantages=A, logprobs=C, old=P, gen=G) | {where: [-1.0, -math.inf, -1.0]}))


@pytest.mark.parametrize("log_ratio", [-700.0, -100.0, 0.0, 100.0, 700.0])
def test_extreme_log_ratios_have_finite_values_and_gradients(log_ratio):
    other = -1.0 - abs(log_ratio)
    c, old = (-1.0, other) if log_ratio > 0 else (other, -1.0)
    for gradient in KL_GRADIENTS:
        for kl in loss.KL_ESTIMATORS:
            outcome = run([1.0, -1.0], [c, c], [old, old], [old, c], [old, old], kl=kl, kl_coef=1.0, kl_gradient=gradient, correction="truncate")
            assert math.isfinite(outcome.loss) and torch.isfinite(outcome.gradient).all()
            values, gradients = kl_of(kl, gradient, [c], [old])
            assert all(map(math.isfinite, values + gradients))


def test_a_missing_input_raises_where_its_term_is_configured():
    with pytest.raises(ValueError, match="kl_coef"):
        run(A, C, kl_coef=0.1)
    with pytest.raises(ValueError, match="entropy_coef"):
        run(A, C, entropy_coef=0.1)


def test_inputs_of_another_shape_raise_instead_of_broadcasting():
    column = torch.zeros(3, 1, dtype=torch.float64)
    good = dict(logprobs=f64(C), logprobs_old=f64(P), logprobs_gen=f64(P), logprobs_ref=f64(P), entropy=f64(P), advantages=f64(A))
    settings = dict(objective=loss.ppo, level="token", clip_low=0.2, clip_high=0.2, correction=loss.truncate, correction_low=0.0,
                    correction_high=2.0, kl="k3", kl_coef=0.1, entropy_coef=0.1)  # fmt: skip
    for name in good:
        with pytest.raises(ValueError, match=name):
            loss.policy_loss(**(good | {name: column}), coefficients=torch.ones(1), row_ids=torch.zeros(3, dtype=torch.long), **settings)
    with pytest.raises(ValueError, match="objective returned"):
        bad = dict(settings, objective=lambda log_ratio, tokens, low, high: log_ratio[:, None] - log_ratio)
        loss.policy_loss(**good, coefficients=torch.ones(1), row_ids=torch.zeros(3, dtype=torch.long), **bad)


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
@pytest.mark.parametrize("correction", ["none", "truncate", "sequence_truncate", "sequence_mask", "sequence_geometric"])
def test_the_mean_weight_of_weights_one_is_one_for_square_batches_too(rows, correction):
    n = rows * rows
    outcome = run([1.0] * n, [-1.0] * n, lengths=[rows] * rows, correction=correction, correction_low=0.5)
    assert has(outcome, correction_weight=1.0, ratio=1.0)
    assert loss.derived_metrics(outcome.metrics)["effective_sample_size"] == near(1.0)


def test_row_means_are_taken_along_rows():
    values = f64([0.0, 1.0, 2.0, 3.0])
    row_ids = torch.tensor([0, 0, 1, 1])
    centred = values - loss.mean_per_row(values, row_ids, 2)[row_ids]
    assert centred.tolist() == [-0.5, 0.5, -0.5, 0.5]


def test_microbatches_of_unequal_length_add_up_to_the_whole_batch():
    # per-token losses 1 x 2 tokens and 4 x 8 tokens: 3.4, where a mean of means gives 2.5
    whole = run([-1.0] * 2 + [-4.0] * 8, [-1.0] * 10, lengths=[2, 8])
    assert whole.loss == near(3.4, **EXACT)
    coefficients = coefficients_of([2, 8], [1, 1], "token_mean")
    parts = [float(coefficients[0]) * 2 * 1.0, float(coefficients[1]) * 8 * 4.0]
    assert sum(parts) == near(3.4, **EXACT)


def test_doubling_the_constant_halves_the_loss_exactly():
    case = dict(advantages=[1, 2, 3], logprobs=[-1.0] * 3, lengths=[1, 2], reduction="constant")
    assert run(**case, max_tokens=10.0).loss == 2 * run(**case, max_tokens=20.0).loss


def test_microbatches_add_up_with_every_term_on():
    g2 = [-2.2, -1.9]
    rows = [(A, C, P, G, [-1.0] * 3), (A[:2], C[:2], [-2.0] * 2, g2, [-2.0] * 2)]
    whole = run(*(x + y for x, y in zip(*rows)), lengths=[3, 2], correction="truncate", kl_coef=0.1)
    assert whole.loss == near(0.0906741, **EXACT)
    coefficients = coefficients_of([3, 2], [1, 1], "token_mean")
    found, parts = [], []
    for i, (a, c, p, g, ref) in enumerate(rows):
        value, metrics = loss.policy_loss(
            f64(c), f64(p), f64(g), f64(ref), None, f64(a), coefficients[i : i + 1], torch.zeros(len(c), dtype=torch.long),
            objective=loss.ppo, level="token", clip_low=0.2, clip_high=0.2, correction=loss.truncate, correction_low=0.0,
            correction_high=math.inf, kl="k3", kl_coef=0.1, entropy_coef=0.0,
        )  # fmt: skip
        parts.append(value.item())
        found += [metrics, loss.mismatch(f64(p), f64(g), torch.ones(len(c), dtype=torch.bool))]
    assert parts == near([-0.1163196, 0.2069938], **EXACT)
    assert reduce_metrics(*found) == near(whole.metrics, abs=1e-9)


def test_frozen_old_log_probabilities_make_the_second_pass_clip():
    old = f64(P)
    current = old.clone().requires_grad_()
    step = torch.optim.SGD([current], lr=1.0)
    ones, row_ids = torch.ones(1, dtype=torch.float64), torch.zeros(3, dtype=torch.long)
    settings = dict(objective=loss.ppo, level="token", clip_low=0.2, clip_high=0.2, correction=loss.no_correction, correction_low=0.0,
                    correction_high=1.0, kl="k3", kl_coef=0.0, entropy_coef=0.0)  # fmt: skip
    for expected_clipped, expected_gradient in ((0.0, [-1.0, 1.0, -2.0]), (1.0, [0.0, 0.0, 0.0])):
        step.zero_grad()
        value, metrics = loss.policy_loss(current - 2, old - 2, old - 2, None, None, f64(A), ones, row_ids, **settings)
        value.backward()
        numbers = reduce_metrics(metrics)
        assert numbers["clip_low_fraction"] + numbers["clip_high_fraction"] == near(expected_clipped)
        assert current.grad.tolist() == near(expected_gradient)
        step.step()


def test_a_dropped_group_leaves_no_trace_and_a_kept_one_dilutes():
    # one useful group and three constant ones, two rows of two tokens each
    useful, advantages = [-1.0, -1.2, -0.8, -0.9], [1.0, 1.0, -1.0, -1.0]
    alone = run(advantages, useful, ref=[-1.0] * 4, lengths=[2, 2], kl_coef=0.1)
    dropped = run(advantages + [0.0] * 12, useful + [-0.5] * 12, ref=[-1.0] * 16, lengths=[2] * 8, weights=[1, 1] + [0] * 6, kl_coef=0.1)
    kept = run(advantages + [0.0] * 12, useful + [-0.5] * 12, ref=[-1.0] * 16, lengths=[2] * 8, kl_coef=0.1)
    assert dropped.loss == near(alone.loss) and dropped.gradient[:4].tolist() == near(alone.gradient.tolist()) and (dropped.gradient[4:] == 0).all()
    assert kept.gradient[:4].tolist() == near((alone.gradient / 4).tolist())
    assert (kept.gradient[4:] != 0).all()  # the KL term acts on them


# ------------------------------------------------------------------------------------------------ advantages

GROUPS_OF_THREE = [0, 0, 0, 1, 1, 1]
s2 = math.sqrt(0.5)
TABLE = [  # rewards, groups, leave-one-out: (baseline, sample std, population std), the same of the group mean
    ([1, 2, 3, 4, 5, 6], GROUPS_OF_THREE, ([2.5, 2, 1.5, 5.5, 5, 4.5], [s2, 2 * s2, s2] * 2, [0.5, 1, 0.5] * 2),
     ([2] * 3 + [5] * 3, [1] * 6, [0.8164966] * 6)),
    ([1, 0, 0, 1], [0] * 4, ([1 / 3, 2 / 3, 2 / 3, 1 / 3], [0.5773503] * 4, [0.4714045] * 4), ([0.5] * 4, [0.5773503] * 4, [0.5] * 4)),
    ([1, 0, 0, 0], [0] * 4, ([0, 1 / 3, 1 / 3, 1 / 3], [0] + [0.5773503] * 3, [0] + [0.4714045] * 3), ([0.25] * 4, [0.5] * 4, [0.4330127] * 4)),
    ([1, 0], [0, 0], ([0, 1], [0, 0], [0, 0]), ([0.5] * 2, [2 * s2 / 2] * 2, [0.5] * 2)),
    ([1, 2, 3], [0, 1, 2], ([1, 2, 3], [0] * 3, [0] * 3), ([1, 2, 3], [0] * 3, [0] * 3)),
    ([3, 3, 3, 7, 7, 7], GROUPS_OF_THREE, ([3] * 3 + [7] * 3, [0] * 6, [0] * 6), ([3] * 3 + [7] * 3, [0] * 6, [0] * 6)),
    ([1, 2, 4, 5, 6], [0, 0, 1, 1, 1], ([2, 1, 5.5, 5, 4.5], [0, 0, s2, 2 * s2, s2], [0, 0, 0.5, 1, 0.5]),
     ([1.5, 1.5, 5, 5, 5], [s2, s2, 1, 1, 1], [0.5, 0.5] + [0.8164966] * 3)),
    ([1, 2, 3, 6], [1, 0, 1, 0], ([3, 6, 1, 2], [0] * 4, [0] * 4), ([2, 4, 2, 4], [2 * s2, 4 * s2] * 2, [1, 2, 1, 2])),
    ([], [], ([], [], []), ([], [], [])),
    ([0.3] * 16, [0] * 16, ([0.3] * 16, [0] * 16, [0] * 16), ([0.3] * 16, [0] * 16, [0] * 16)),
]  # fmt: skip


@pytest.mark.parametrize("rewards, groups, left_out, mean", TABLE)
def test_baselines_and_standard_deviations(rewards, groups, left_out, mean):
    for leave_one_out, (baseline, sample, population) in ((True, left_out), (False, mean)):
        for divisor, std in ((False, sample), (True, population)):
            found = baseline_and_std(np.array(rewards, dtype=np.float32), np.array(groups), leave_one_out, divisor)
            assert found[0].tolist() == near(baseline, abs=1e-6)
            assert found[1].tolist() == near(std, abs=1e-6)


def test_baselines_of_very_small_and_very_large_rewards():
    rewards, groups = np.array([1e-8, 2e-8, 3e-8, 1e8, 2e8, 3e8]), np.array(GROUPS_OF_THREE)
    baseline, std = baseline_and_std(rewards, groups)
    assert baseline.tolist() == near([2e-8] * 3 + [2e8] * 3, rel=1e-9) and std.tolist() == near([1e-8] * 3 + [1e8] * 3, rel=1e-9)
    baseline, std = baseline_and_std(rewards, groups, leave_one_out=True)
    assert baseline.tolist() == near([2.5e-8, 2e-8, 1.5e-8, 2.5e8, 2e8, 1.5e8], rel=1e-9)
    assert std.tolist() == near([0.7071068e-8, 1.4142136e-8, 0.7071068e-8, 0.7071068e8, 1.4142136e8, 0.7071068e8], rel=1e-6)


def test_a_large_common_offset_costs_no_precision():
    rewards = np.array([0, 1, 1, 0.0])
    assert baseline_and_std(rewards + 1e8, np.zeros(4))[1].tolist() == near([0.5773503] * 4, rel=1e-6)


def test_a_rollout_that_is_not_valid_is_in_nobodys_baseline():
    rewards, groups, valid = np.array([1, 999, 3, 4, 5, 6.0]), np.array(GROUPS_OF_THREE), np.array([1, 0, 1, 1, 1, 1], dtype=bool)
    baseline, std = baseline_and_std(rewards, groups, valid=valid)
    assert baseline.tolist() == near([2, 2, 2, 5, 5, 5]) and std.tolist() == near([2 * s2] * 3 + [1] * 3)
    assert baseline_and_std(rewards, groups, population=True, valid=valid)[1].tolist() == near([1] * 3 + [0.8164966] * 3)
    baseline, std = baseline_and_std(rewards, groups, leave_one_out=True, valid=valid)
    assert baseline.tolist() == near([3, 2, 1, 5.5, 5, 4.5]) and std.tolist() == near([0, 2 * s2, 0, s2, 2 * s2, s2])
    nan = np.where(valid, rewards, np.nan)
    assert group_advantages(nan, groups, valid=valid).tolist() == near([-s2, 0, s2, -1, 0, 1])


@pytest.mark.parametrize(
    "rewards, groups, expected",
    [([2, 2, 1, 3], [0, 0, 1, 1], [0, 0, -s2, s2]), ([1, 1.01], [0, 0], [-s2, s2]), ([0, 2, 4], [0] * 3, [-1, 0, 1]), ([5] * 4, [0] * 4, [0] * 4)],
)
def test_normalised_advantages(rewards, groups, expected):
    assert group_advantages(np.array(rewards), np.array(groups)).tolist() == near(expected, abs=1e-6)


@pytest.mark.parametrize(
    "rewards, sample, population",
    [([1, 0, 0, 0], [1] + [-0.5773503] * 3, [1] + [-0.7071068] * 3), ([1, 1, 1, 0], [0.5773503] * 3 + [-1], [0.7071068] * 3 + [-1]),
     ([1, 1, 0, 0], [1.1547005, 1.1547005, -1.1547005, -1.1547005], [math.sqrt(2)] * 2 + [-math.sqrt(2)] * 2)],
)  # fmt: skip
def test_leave_one_out_advantages_do_not_split_a_group(rewards, sample, population):
    rewards, groups = np.array(rewards), np.zeros(4)
    assert group_advantages(rewards, groups, True).tolist() == near(sample, **EXACT)
    assert group_advantages(rewards, groups, True, population=True).tolist() == near(population, **EXACT)
    assert has_signal(rewards, groups).all()  # the lone winner has a leave-one-out std of 0, its group a signal


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_one_loser_among_equals_is_not_blown_up(dtype):
    assert group_advantages(np.array([0] + [0.94] * 7, dtype=dtype), np.zeros(8), True)[0] == near(-0.94, abs=1e-6)
    assert group_advantages(np.array([0] + [0.98] * 15, dtype=dtype), np.zeros(16), True)[0] == near(-0.98, abs=1e-6)


@pytest.mark.parametrize("value", [0.1, 0.3, 0.7, 1 / 3, 0.9, 10.1])
def test_equal_rewards_give_advantages_of_exactly_zero(value):
    for size in range(3, 17):
        for dtype in (np.float32, np.float64):
            rewards, groups = np.full(size, value, dtype=dtype), np.zeros(size)
            assert not has_signal(rewards, groups).any()
            for leave_one_out in (False, True):
                for divide in (False, True):
                    assert (group_advantages(rewards, groups, leave_one_out, divide) == 0).all()
                assert (baseline_and_std(rewards, groups, leave_one_out)[1] == 0).all()


def test_almost_equal_rewards_are_a_signal():
    assert has_signal(np.array([1, 1.0001, 1, 1.0001], dtype=np.float32), np.zeros(4)).all()


def test_a_leftover_group_of_one_gets_zero_and_changes_no_other_group():
    rewards = np.array([1.0, 0.0, 0.5, 7.0])
    for leave_one_out in (False, True):
        advantages = group_advantages(rewards, np.array([0, 0, 0, 1]), leave_one_out)
        assert np.isfinite(advantages).all() and advantages[3] == 0
        assert (advantages[:3] == group_advantages(rewards[:3], np.zeros(3), leave_one_out)).all()


def test_a_missing_row_shrinks_its_own_group_only():
    rewards, groups = np.array([1, 0, 0, 1, 0, 1, 1, 1, 0, 0, 0, 1.0]), np.repeat([0, 1, 2], 4)
    complete = group_advantages(rewards, groups)
    keep = np.array([True] * 5 + [False] + [True] * 6)
    partial = group_advantages(rewards[keep], groups[keep])
    assert (partial[:4] == complete[:4]).all() and (partial[7:] == complete[8:]).all()
    assert partial[4:7].tolist() == near(group_advantages(np.array([0, 1, 1.0]), np.zeros(3)).tolist())
    eight = keep & ~np.isin(np.arange(12), [0, 1, 2])  # 8 rows left: a reshape to (2, 4) would not even raise
    assert (group_advantages(rewards[eight], groups[eight])[-4:] == complete[8:]).all()


def test_dynamic_sampling_asks_the_reward_before_shaping():
    groups = np.zeros(4)
    assert not has_signal(np.ones(4), groups).any()  # solved, though a length penalty would make the totals differ
    assert has_signal(np.ones(4) + np.array([0, -0.1, -0.2, -0.3]), groups).all()
    assert has_signal(np.array([1, 0, 0, 0.0]), groups).all()  # kept, though shaped totals might tie


def test_the_examples_in_the_docstrings_hold():
    assert doctest.testmod(loss).failed == 0
