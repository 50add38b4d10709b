"""Every kind of loss setting through grpo.py itself: a tiny model trains, and nothing depends on how a step is cut into micro-batches."""

import dataclasses
import math

import numpy as np
import pytest
import tiny
from test_grpo import rollouts, run, untimed

import config as config_module
import grpo
from grpo import LossConfig, make_rows

SETTINGS = [
    "--loss.preset vespo",
    "--loss.preset prime_rl --passes 2",
    "--loss.preset gspo --loss.correction sequence_truncate",
    "--loss.preset luspo --passes 2",
    "--loss.preset gmpo --passes 2",
    "--loss.preset scale_rl --loss.objective-params cap 2.0",
    "--loss.preset clip_cov --loss.objective-params share 0.2 cov_low -9 cov_high 9 --passes 2",
    "--loss.preset kl_cov --loss.objective-params share 0.2 coef 0.5 --updates-per-batch 2",
    "--loss.preset m2po --loss.rejection-params tau 0.1 --updates-per-batch 2",
    "--loss.correction batch_normalized --loss.rejection veto --updates-per-batch 2",
    "--loss.entropy-share 0.2 --loss.entropy-coef 0.01",
    "--loss.preset reinforce_pp --loss.kl-in return --loss.kl-coef 0.1 --loss.kl k1",
    "--loss.whiten --loss.kl-in advantage --loss.kl-coef 0.1 --passes 2",
    "--loss.kl-in reward --loss.kl-coef 0.1 --loss.kl k1 --loss.scale batch_std",
    "--loss.sequence-error-limit 1.5 --loss.likelihood-coef 0.1",
    "--loss.kl-coef 0.1 --loss.kl-gradient ratio_gen --loss.entropy-target 9.0",
    "--loss.overlong-buffer 4 --loss.overlong-penalty 0.5 --loss.advantage-clip-high 1.0",
    "--loss.reward-from 0 1 --loss.reward-to -1 1 --loss.stop-properly 0.5 --loss.baseline length_weighted",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_setting_trains_the_same_in_any_micro_batches(model, tmp_path, settings):
    common = [*settings.split(), "--eval.every", "0", "--prompts-per-step", "2", "--optim.lr", "1e-3"]
    whole = run(model, tmp_path / "a", *common, steps=1)
    split = run(model, tmp_path / "b", *common, "--policy.micro-batch-tokens", "30", steps=1)
    for name in ("loss", "grad_norm", "ratio", "correction_weight", "effective_sample_size", "trained_tokens"):
        assert [r[name] for r in whole] == pytest.approx([r[name] for r in split], rel=1e-3, abs=1e-6), name
    assert all(math.isfinite(r["loss"]) and r["grad_norm"] > 0 for r in whole)


def test_the_sampler_as_anchor_needs_no_pass_for_the_old_policy(model, tmp_path):
    rows = run(model, tmp_path / "a", "--loss.preset", "dppo_tv", "--passes", "2", "--eval.every", "0", steps=1)
    assert "time/old_logprobs" not in rows[0] and rows[0]["ratio_max"] > 1.01


def test_the_adaptive_entropy_coefficient_grows_and_survives_a_resume(model, tmp_path):
    flags = "--loss.entropy-target 9.0 --loss.entropy-delta 0.01 --eval.every 0".split()
    whole = run(model, tmp_path / "a", *flags, steps=4)
    assert [r["entropy_coef"] for r in whole] == pytest.approx([0, 0.01, 0.02, 0.03])
    run(model, tmp_path / "b", *flags, steps=2)
    assert untimed(run(model, tmp_path / "b", *flags, "--resume", steps=4)) == untimed(whole)


def test_a_sequence_error_limit_drops_rollouts_from_the_counts(model, tmp_path):
    rows = run(model, tmp_path / "a", "--loss.sequence-error-limit", "1.0", "--eval.every", "0", "--max-empty-steps", "9", steps=1)
    assert rows[0]["dropped_by_sequence_error"] > 0  # engine and trainer differ in the last digit


def test_signal_is_judged_before_shaping():
    solved = rollouts([1.0] * 4)
    for i, r in enumerate(solved):
        r.sampled = [True] * (5 + i)
    config = LossConfig(overlong_buffer=4)
    assert make_rows([solved], config, {}, longest=8)[0].rollouts == []
    kept, _ = make_rows([solved], dataclasses.replace(config, no_signal="keep"), {}, longest=8)
    assert kept.rewards.tolist() == pytest.approx([0.75, 0.5, 0.25, 0.0]) and kept.advantages[0] > 0 > kept.advantages[3]
    tied = rollouts([1.0, 0.75, 0.5, 0.25])
    for r, length in zip(tied, (8, 7, 6, 5)):
        r.sampled = [True] * length
    rows, metrics = make_rows([tied], config, {}, longest=8)
    assert len(rows.rollouts) == 4 and (rows.advantages == 0).all() and metrics.result()["groups/signal"] == 1.0


def test_gdpo_normalises_named_rewards_apart():
    group = rollouts([0.0] * 4)
    for r, right, form in zip(group, (10.0, 0.0, 0.0, 0.0), (0.0, 0.1, 0.1, 0.1)):
        r.rewards = {"right": right, "form": form}
    rows, _ = make_rows([group], LossConfig(gdpo=True), {})
    assert rows.advantages.tolist() == [0.0] * 4  # equal and opposite once each is normalised
    weighted, _ = make_rows([group], LossConfig(gdpo=True), {"form": 0.5})
    assert weighted.advantages.tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5])
    summed, _ = make_rows([group], LossConfig(), {})
    assert summed.advantages[0] > 1


@pytest.mark.parametrize("reduction", grpo.loss.REDUCTIONS)
def test_the_denominator_counts_the_rows_of_one_optimizer_step_only(reduction):
    a, b = rollouts([1.0, 0.0], tokens=3), rollouts([1.0, 0.0], index=1, tokens=5)
    config = grpo.Config(loss=LossConfig(reduction=reduction))
    both, alone = make_rows([a, b], config.loss, {})[0], make_rows([a], config.loss, {})[0]
    assert (grpo.row_coefficients(both.take([0, 1]), config) == grpo.row_coefficients(alone, config)).all()


def test_old_presets_and_new_ones_are_flags():
    config = config_module.parse("--loss.preset dr_grpo".split(), "")
    assert (config.loss.scale, config.loss.reduction) == ("none", "constant")
    config = config_module.parse("--loss.preset sapo --loss.objective-params tau_negative 1.1".split(), "")
    assert config.loss.objective_params == {"tau_negative": 1.1}
    for name in config_module.PRESETS:
        config_module.check(dataclasses.replace(config_module.parse(["--loss.preset", name], ""), model="hub/model"))


def test_likelihood_counts_the_positive_tokens_of_the_whole_step():
    rows, _ = make_rows([rollouts([1.0, 0.0, -1.0], tokens=3), rollouts([1.0, 0.0], index=1, tokens=2)], LossConfig(), {})
    assert grpo.likelihood_coefficients(rows, 0.1) == pytest.approx(np.array([1, 0, 0, 1, 0]) * 0.1 / 5)
