"""The synchronous run, end to end with a tiny random model that samples itself, and the command line's errors."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file

import grpo
import policy as policies
from config import Config, LossConfig
from grpo import make_rows, row_coefficients, total_steps
from log import read_lines
from rollout import EngineError, Rollout
from task import UserError

ROOT = Path(__file__).resolve().parent.parent
TOY = f"{ROOT}/tests/toy_tasks.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("model") / "tiny")


def flags(model, out, *more, steps=4, task="digits"):
    common = f"--model {model} --task {TOY}:{task} --engine hf --out {out} --steps {steps} --prompts-per-step 4 --samples-per-prompt 4"
    common += " --sampling.max-completion-tokens 8 --sampling.max-prompt-tokens 64 --optim.lr 1e-2 --optim.warmup 1 --eval.every 2 --policy.threads 1"
    return [*common.split(), *more]


def run(model, out, *more, **settings):
    grpo.main(flags(model, out, *more, **settings))
    return read_lines(out / "metrics.jsonl")


def untimed(rows):
    return [{k: v for k, v in r.items() if not k.startswith("time/")} for r in rows]


def weights(out, step):
    return load_file(out / "checkpoints" / f"step_{step}" / "model" / "model.safetensors")


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_a_tiny_model_learns_and_everything_is_written(model, tmp_path, capsys):
    rows = run(model, tmp_path / "run", "--eval.samples", "4", "--prompts-per-step", "8", "--samples-per-prompt", "8", steps=10)
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.3
    assert [r["step"] for r in rows] == list(range(11))
    assert rows[-1]["reward"] > rows[1]["reward"] + 0.3
    assert max(r.get("mismatch_k3", 0.0) for r in rows[1:]) < 1e-8
    names = {p.name for p in (tmp_path / "run").iterdir()}
    assert {"metrics.jsonl", "rollouts.jsonl", "samples.md", "reward.png", "config.json", "checkpoints"} <= names


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(model, tmp_path):
    whole = run(model, tmp_path / "whole", steps=8)
    run(model, tmp_path / "parts", steps=4)
    parts = run(model, tmp_path / "parts", "--resume", steps=8)
    assert untimed(whole) == untimed(parts)
    assert equal(weights(tmp_path / "whole", 8), weights(tmp_path / "parts", 8))
    moments = [load_file(tmp_path / name / "checkpoints" / "step_8" / "optimizer.safetensors") for name in ("whole", "parts")]
    assert equal(*moments)
    assert read_lines(tmp_path / "whole" / "rollouts.jsonl") == read_lines(tmp_path / "parts" / "rollouts.jsonl")


def test_steps_after_the_last_checkpoint_are_taken_again_and_recorded_once(model, tmp_path):
    run(model, tmp_path / "a", "--checkpoint.every", "3", steps=5)
    import shutil

    shutil.rmtree(tmp_path / "a" / "checkpoints" / "step_5")
    before = untimed(read_lines(tmp_path / "a" / "metrics.jsonl"))
    after = untimed(run(model, tmp_path / "a", "--checkpoint.every", "3", "--resume", steps=5))
    assert before == after and [r["step"] for r in after] == list(range(6))


def test_evaluation_logging_and_saving_never_change_training(model, tmp_path):
    watched = run(model, tmp_path / "a", "--eval.every", "1", "--eval.samples", "3", "--checkpoint.every", "1", "--log.samples", "9")
    alone = run(model, tmp_path / "b", "--eval.every", "0", "--log.no-rollouts")
    assert [r["reward"] for r in watched[1:]] == [r["reward"] for r in alone]
    assert equal(weights(tmp_path / "a", 4), weights(tmp_path / "b", 4))


def test_micro_batches_do_not_change_what_is_learned(model, tmp_path):
    whole = run(model, tmp_path / "a")
    split = run(model, tmp_path / "b", "--policy.micro-batch-tokens", "30")
    for name in ("reward", "loss", "grad_norm", "entropy", "ratio", "trained_tokens"):
        assert [r[name] for r in whole[1:]] == pytest.approx([r[name] for r in split[1:]], rel=1e-4, abs=1e-6), name
    a, b = weights(tmp_path / "a", 4), weights(tmp_path / "b", 4)
    assert max((a[k] - b[k]).abs().max() for k in a) < 1e-3


def test_several_updates_per_batch_freeze_the_old_policy_and_the_ratio_moves(model, tmp_path):
    rows = run(model, tmp_path / "a", "--updates-per-batch", "2", "--passes", "2", "--eval.every", "0", steps=2)
    assert [r["updates"] for r in rows] == [4, 4]
    assert all(r["ratio_max"] > 1.01 and r["ratio_min"] < 0.99 for r in rows)
    assert all(r["mismatch_k3"] < 1e-8 for r in rows)  # measured before the first update, against the weights that sampled


def test_with_one_update_the_ratio_is_one_and_no_old_pass_is_made(model, tmp_path):
    rows = run(model, tmp_path / "a", "--eval.every", "0", steps=2)
    assert all(r["ratio_max"] == r["ratio_min"] == 1.0 and "time/old_logprobs" not in r for r in rows)


def test_a_kl_term_holds_the_policy_near_its_start_and_its_reference_survives_a_resume(model, tmp_path):
    free = run(model, tmp_path / "free", "--eval.every", "0", steps=4)
    held = run(model, tmp_path / "held", "--loss.kl-coef", "1.0", "--eval.every", "0", steps=4)
    assert held[0]["kl"] < 1e-9 < held[-1]["kl"]
    assert "kl" not in free[0]
    run(model, tmp_path / "parts", "--loss.kl-coef", "1.0", "--eval.every", "0", steps=2)
    parts = run(model, tmp_path / "parts", "--loss.kl-coef", "1.0", "--eval.every", "0", "--resume", steps=4)
    assert untimed(parts) == untimed(held)


def test_when_no_group_has_signal_no_optimizer_step_is_taken_and_a_run_of_them_is_an_error(model, tmp_path):
    with pytest.raises(UserError, match="--max-empty-steps"):
        run(model, tmp_path / "a", "--max-empty-steps", "3", "--eval.every", "0", task="constant")
    rows = read_lines(tmp_path / "a" / "metrics.jsonl")
    assert [r["empty_steps"] for r in rows] == [1.0, 1.0] and "grad_norm" not in rows[0]


def test_a_step_in_which_every_rollout_fails_is_skipped_and_named(model, tmp_path):
    with pytest.raises(UserError, match="the judge is down"):
        run(model, tmp_path / "a", "--max-empty-steps", "2", "--eval.every", "0", task="failing")


def test_the_canary_stops_a_run_whose_engine_samples_from_other_weights(model, tmp_path, monkeypatch):
    real = policies.Policy.forward

    def shifted(self, batch):
        logprobs, entropy = real(self, batch)
        return logprobs - 0.3, entropy

    monkeypatch.setattr(grpo, "setup", lambda config, setup=grpo.setup: _after(setup(config), lambda: monkeypatch.setattr(policies.Policy, "forward", shifted)))
    with pytest.raises(EngineError, match="--loss.mismatch-limit"):
        run(model, tmp_path / "a", "--eval.every", "0")
    assert not (tmp_path / "a" / "checkpoints").exists()


def _after(value, action):
    action()
    return value


def test_the_last_step_always_evaluates_and_saves_once(model, tmp_path):
    rows = run(model, tmp_path / "a", "--eval.every", "2", "--checkpoint.every", "2", "--checkpoint.keep", "0", steps=5)
    assert [r["step"] for r in rows if "eval/accuracy" in r] == [0, 2, 4, 5]
    assert sorted(p.name for p in (tmp_path / "a" / "checkpoints").iterdir()) == ["step_2", "step_4", "step_5"]


def test_the_exported_model_gives_the_policys_logits(model, tmp_path):
    run(model, tmp_path / "a", steps=2)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "a" / "checkpoints" / "step_2" / "model"
    exported, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    policy = policies.load_policy(str(folder), policies.PolicyConfig(), 1.0, torch.device("cpu"))
    assert policy.model.config.tie_word_embeddings and exported.lm_head.weight is exported.model.embed_tokens.weight
    assert AutoTokenizer.from_pretrained(folder).chat_template == tiny.CHATML
    assert json.loads((folder / "config.json").read_text()).get("dtype") == "float32"


# ------------------------------------------------------------------------------------------------ prompts and rows


def test_every_prompt_is_trained_once_per_epoch_in_an_order_of_its_own(model, tmp_path):
    run(model, tmp_path / "a", "--eval.every", "0", steps=15)  # 60 prompts: three epochs of 20
    prompts = [r["prompt"] for r in read_lines(tmp_path / "a" / "rollouts.jsonl") if r["sample"] == 0]
    epochs = [prompts[i : i + 20] for i in (0, 20, 40)]
    assert len({tuple(sorted(e)) for e in epochs}) == 1 and len(set(epochs[0])) == 20
    assert len({tuple(e) for e in epochs}) == 3


def test_a_refilled_step_has_as_many_groups_with_signal_as_asked_and_none_it_does_not_need(model, tmp_path):
    plain = run(model, tmp_path / "a", "--eval.every", "0", task="sparse")
    refilled = run(model, tmp_path / "b", "--eval.every", "0", "--refill", "20", task="sparse")
    groups = [len({r["index"] for r in read_lines(tmp_path / "b" / "rollouts.jsonl") if r["step"] == s}) for s in range(1, 5)]
    assert min(r["groups/signal"] for r in plain) < 1
    assert [round(r["groups/signal"] * n) for r, n in zip(refilled, groups, strict=True)] == [4] * 4
    indices = sorted({r["index"] for r in read_lines(tmp_path / "b" / "rollouts.jsonl")})
    assert indices == list(range(sum(groups)))  # none skipped, none twice


def test_a_retired_prompt_never_comes_back_also_after_a_resume(model, tmp_path):
    settings = ("--eval.every", "0", "--retire-at", "0.7")
    run(model, tmp_path / "a", *settings, steps=3, task="constant_for_some")
    rows = run(model, tmp_path / "a", *settings, "--resume", steps=8, task="constant_for_some")
    seen = [r["prompt"] for r in read_lines(tmp_path / "a" / "rollouts.jsonl") if r["sample"] == 0]
    solved = [p for p in seen if p.startswith("a")]
    assert len(rows) == 8 and len(solved) == len(set(solved)) == 3


def test_a_run_stops_early_at_the_accuracy_asked_for_and_saves(model, tmp_path):
    rows = run(model, tmp_path / "a", "--eval.every", "1", "--eval.first", "2", "--eval.stop-at", "0.0", steps=6)
    assert [r["step"] for r in rows if "eval/accuracy" in r] == [2]
    assert (tmp_path / "a" / "checkpoints" / "step_2" / "model").exists()


def test_eval_only_scores_a_checkpoint_and_trains_nothing(model, tmp_path, capsys):
    trained = run(model, tmp_path / "a", "--eval.samples", "4", steps=4)
    checkpointed = str(tmp_path / "a" / "checkpoints" / "step_4" / "model")
    capsys.readouterr()
    run(checkpointed, tmp_path / "b", "--eval-only", "--eval.samples", "4")
    table = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert table["eval/accuracy"] == pytest.approx(trained[-1]["eval/accuracy"], abs=1e-3)
    assert not (tmp_path / "b" / "checkpoints").exists()


def test_steps_and_epochs_both_bound_a_run():
    config = Config(steps=10, prompts_per_step=4)
    assert total_steps(config, 10) == 10
    assert total_steps(dataclasses.replace(config, epochs=2.0), 10) == 5
    assert total_steps(dataclasses.replace(config, epochs=100.0), 10) == 10


def rollouts(rewards, index=0, tokens=2, **more):
    return [
        Rollout(index, s, [1], [5] * tokens, [True] * tokens, [-1.0] * tokens, [0] * tokens, rewards={"r": r}, finish="done", **more) for s, r in enumerate(rewards)
    ]


def test_dropped_groups_leave_every_term_and_denominator():
    useful, constant = rollouts([1.0, 0.0]), rollouts([1.0, 1.0], index=1)
    alone, _ = make_rows([useful], LossConfig(), {})
    both, metrics = make_rows([useful, constant], LossConfig(), {})
    kept, _ = make_rows([useful, constant], LossConfig(no_signal="keep"), {})
    assert both.rollouts == alone.rollouts and list(both.advantages) == list(alone.advantages)
    assert list(row_coefficients(both, Config())) == list(row_coefficients(alone, Config())) == [0.25, 0.25]
    assert list(kept.advantages[2:]) == [0.0, 0.0] and list(row_coefficients(kept, Config())) == [0.125] * 4
    assert metrics.result()["groups/signal"] == 0.5


def test_overlong_rows_stay_in_the_baseline_and_leave_the_denominator():
    group = rollouts([1.0, 0.0, 0.0])
    group[2].finish = "length"
    rows, _ = make_rows([group], LossConfig(overlong_filter=True, scale="none"), {})
    assert list(np.round(rows.advantages, 6)) == [0.666667, -0.333333, -0.333333]
    assert list(row_coefficients(rows, Config())) == [0.25, 0.25, 0.0]


def test_failed_rows_shrink_their_own_group_alone():
    a, b = rollouts([1.0, 0.0, 0.5, 0.5]), rollouts([1.0, 0.0, 0.0, 0.0], index=1)
    whole, _ = make_rows([a, b], LossConfig(), {})
    b[3].failure = "judge is down"
    partial, _ = make_rows([a, b], LossConfig(), {})
    assert list(whole.advantages[:4]) == list(partial.advantages[:4])
    assert len(partial.rollouts) == 7 and partial.advantages[4:].sum() == pytest.approx(0)


@pytest.mark.parametrize("reduction, expected", [
    ("token_mean", [1 / 10] * 4), ("sequence_mean", [1 / 8] * 2 + [1 / 12] * 2), ("constant", [1 / (4 * 1024)] * 4),
    ("prompt_mean", [1 / 8] * 2 + [1 / 12] * 2), ("sequence_sum", [1 / 4] * 4),
])  # fmt: skip
def test_a_reduction_is_one_coefficient_per_row_from_the_counts_of_the_whole_step(reduction, expected):
    rows, _ = make_rows([rollouts([1.0, 0.0]), rollouts([1.0, 0.0], index=1, tokens=3)], LossConfig(), {})
    assert row_coefficients(rows, Config(loss=LossConfig(reduction=reduction))) == pytest.approx(expected)


def test_a_reward_that_is_not_finite_stops_the_run():
    with pytest.raises(ValueError, match="not finite"):
        make_rows([rollouts([1.0, float("nan")])], LossConfig(), {})


# ------------------------------------------------------------------------------------------------ the command line


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--task arith", "--model is missing"),
        ("--model /nowhere --task arith", "no config.json"),
        ("--model {model} --task nonsense", "no such task"),
        ("--model {model} --task missing.py:f", "no file missing.py"),
        ("--model {model} --task gsm8k --task.data missing.jsonl", "--task.data"),
        ("--model {model} --task arith --samples-per-prompt 1", "--samples-per-prompt 1"),
        ("--model {model} --task arith --prompts-per-step 100", "--prompts-per-step 100"),
        ("--model {model} --task arith --prompts-per-step 8 --sampling.max-prompt-tokens 5", "--sampling.max-prompt-tokens"),
        ("--model {model} --task arith --prompts-per-step 8 --epochs 0.1", "--epochs"),
        ("--model {model} --task arith --loss.level sequence", "--loss.reduction sequence_mean"),
        ("--model {model} --task arith --loss.objective pppo", "--loss.objective"),
        ("--model {model} --task arith --loss.correction mask", "--loss.correction-low"),
        ("--model {model} --task arith --loss.preset nope", "--loss.preset"),
        ("--model {model} --task arith --sampling.temperature 0", "--sampling.temperature"),
        ("--model {model} --task arith --updates-per-batch 99", "--updates-per-batch"),
        ("--model {model} --task arith --steps 0", "--steps 0"),
        ("--model {model} --task arith --resume", "--resume needs --out"),
        ("--model {model} --task arith --prompts-per-step 8 --out {empty} --resume", "no whole checkpoint"),
        ("--model {model} --task arith --out {used}", "is not empty"),
        ("--model {model} --task {toy}:no_eval --prompts-per-step 4", "no held-out examples"),
    ],
)
def test_bad_input_is_a_short_error_that_names_the_flag_before_anything_heavy(model, tmp_path, monkeypatch, arguments, message):
    monkeypatch.setattr(policies, "load_policy", lambda *a: pytest.fail("the model was loaded"))
    monkeypatch.setattr("cluster.start_vllm", lambda *a: pytest.fail("the engine was started"))
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").write_text("precious")
    text = arguments.format(model=model, used=tmp_path / "used", empty=tmp_path / "empty", toy=TOY)
    with pytest.raises(UserError, match=message):
        grpo.main(text.split())
    assert (tmp_path / "used" / "file").read_text() == "precious"


def test_an_unknown_flag_is_refused_with_the_nearest_one(capsys):
    with pytest.raises(SystemExit) as error:
        grpo.main(["--optim.learning-rate", "1"])
    assert error.value.code != 0
    assert "optim.learning-rate" in capsys.readouterr().err


def test_a_preset_sets_the_loss_and_flags_beside_it_win():
    config = grpo.parse("--loss.preset gspo --loss.clip-high 0.1".split(), "")
    assert (config.loss.level, config.loss.reduction, config.loss.clip_low, config.loss.clip_high) == ("sequence", "sequence_mean", 3e-4, 0.1)


def test_a_resume_that_would_be_another_run_is_refused(model, tmp_path):
    run(model, tmp_path / "a", steps=2)
    with pytest.raises(UserError, match="seed was 0 and is 1"):
        run(model, tmp_path / "a", "--resume", "--seed", "1", steps=4)


def test_the_dry_run_prints_everything_resolved_and_the_script_says_errors_without_a_traceback(model):
    def grpo_py(*arguments):
        return subprocess.run([sys.executable, "grpo.py", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120)

    done = grpo_py("--model", model, "--task", "arith", "--dry-run")
    assert done.returncode == 0 and '"clip_high": 0.28' in done.stdout and "node  device  role" in done.stdout
    failed = grpo_py("--model", model, "--task", "nonsense")
    assert failed.returncode == 1 and failed.stderr.strip().splitlines()[-1].startswith("error: --task nonsense") and "Traceback" not in failed.stderr
