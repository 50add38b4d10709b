"""Nothing is lost and nothing repeated, whatever ends a run: kills, signals, a time budget, a full disk, other numbers of processes."""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny
import torch
from fake_run import FakeRun
from safetensors.torch import load_file, save_file
from test_grpo import equal, run, untimed, weights

import checkpoint
import grpo
import shards
from checkpoint import CheckpointConfig, Saver
from log import read_lines
from task import Example, UserError, user

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """The folder of an uninterrupted run of 8 steps."""
    out = tmp_path_factory.mktemp("whole") / "run"
    run(model, out, steps=8)
    return out


def same_runs(a, b, step=8):
    assert equal(weights(a, step), weights(b, step))
    assert equal(*(load_file(out / "checkpoints" / f"step_{step}" / "optimizer.safetensors") for out in (a, b)))
    assert untimed(read_lines(a / "metrics.jsonl")) == untimed(read_lines(b / "metrics.jsonl"))
    assert read_lines(a / "rollouts.jsonl") == read_lines(b / "rollouts.jsonl")


def during(monkeypatch, step, action):
    """Let something happen in the middle of a step."""
    real = grpo.update

    def update(run, rows):
        if run.step == step - 1:
            action()
        return real(run, rows)

    monkeypatch.setattr(grpo, "update", update)


def trained():
    model = tiny.llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.arange(10)[None], labels=torch.arange(10)[None]).loss.backward()
    optimizer.step()
    return model, optimizer


# ------------------------------------------------------------------------------------------------ kills


def test_a_run_killed_at_random_moments_is_the_uninterrupted_one():
    """The short form of bench/crash.py: SIGKILL between and inside saves, resumed until done."""
    done = subprocess.run([sys.executable, "bench/crash.py", "--kills", "8", "--steps", "12"], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["differences"] == 0 and result["kills"] == 8 and result["resumes"] > 0 and result["runs"] > 0


def test_a_run_that_ended_before_its_first_checkpoint_begins_again(model, whole, tmp_path, capsys):
    run(model, tmp_path / "a", steps=1)
    shutil.rmtree(tmp_path / "a" / "checkpoints")
    (tmp_path / "a" / "metrics.jsonl").open("a").write('{"step": 1, "rew')  # a line cut short
    run(model, tmp_path / "a", "--resume", steps=8)
    assert "beginning at step 0 again" in capsys.readouterr().out
    same_runs(whole, tmp_path / "a")


def test_a_crash_between_the_last_save_and_its_pruning_is_put_right_on_resume(model, tmp_path):
    run(model, tmp_path / "a", "--checkpoint.every", "1", "--checkpoint.keep", "0", steps=4)
    run(model, tmp_path / "a", "--checkpoint.every", "1", "--checkpoint.keep", "2", "--resume", steps=4)
    assert checkpoint.steps(tmp_path / "a" / "checkpoints") == [3, 4]


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_again_unseen(model, tmp_path):
    run(model, tmp_path / "a", steps=1)
    (tmp_path / "a" / "checkpoints" / "step_1" / "state.json").write_text("{}")
    with pytest.warns(UserWarning, match="step_1 is damaged"), pytest.raises(UserError, match="no whole checkpoint"):
        run(model, tmp_path / "a", "--resume", steps=2)


# ------------------------------------------------------------------------------------------------ signals and time


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_at_the_end_of_the_step_and_the_resumed_run_is_the_uninterrupted_one(model, whole, tmp_path, monkeypatch, capsys, number):
    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        during(patch, 3, lambda: os.kill(os.getpid(), number))
        run(model, tmp_path / "a", steps=8)  # returns: the exit code is 0
    assert f"{number.name}: saved after step 3 of 8; go on with --resume" in capsys.readouterr().out
    assert checkpoint.steps(tmp_path / "a" / "checkpoints") == [3]
    run(model, tmp_path / "a", "--resume", steps=8)
    same_runs(whole, tmp_path / "a")
    signal.signal(number, before)


def test_a_step_longer_than_the_grace_is_given_up_and_the_checkpoint_before_it_stands(model, tmp_path, monkeypatch, capsys):
    during(monkeypatch, 3, lambda: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(30)))
    start = time.monotonic()
    with pytest.raises(SystemExit) as error:
        run(model, tmp_path / "a", "--checkpoint.grace", "0.3", "--checkpoint.every", "2", steps=8)
    assert error.value.code == 128 + signal.SIGTERM and time.monotonic() - start < 20
    assert "SIGTERM: the step did not end within --checkpoint.grace 0.3 s; the checkpoint of step 2 stands" in capsys.readouterr().out
    assert checkpoint.steps(tmp_path / "a" / "checkpoints") == [2]
    assert checkpoint.damage_of(tmp_path / "a" / "checkpoints" / "step_2") == ""


STUCK = """
import os, signal, sys, time
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/tests"]
import torch
from pathlib import Path
from checkpoint import Saver
from fake_run import FakeRun
Saver.last_resort = 0.3
with Saver(FakeRun(torch.nn.Linear(1, 1), None, Path(sys.argv[2]), grace=0.3)):
    os.kill(os.getpid(), signal.SIGTERM)
    while True:
        try:
            time.sleep(60)
        except SystemExit:
            pass  # as if the main thread were in a call that no signal ends
"""


def test_a_main_thread_that_no_signal_ends_is_ended_all_the_same(tmp_path):
    done = subprocess.run([sys.executable, "-c", STUCK, ROOT, tmp_path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 128 + signal.SIGTERM and "no step had been saved" in done.stdout, done.stderr


def test_a_signal_during_a_save_lets_it_finish_however_short_the_grace(tmp_path, monkeypatch):
    model, optimizer = trained()
    write = shards.write_tensors
    monkeypatch.setattr(shards, "write_tensors", lambda *a: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(0.3), write(*a))[-1])
    with Saver(fake := FakeRun(model, optimizer, tmp_path, step=2, grace=0.05, every=1)) as saver:
        assert saver.after_step({})
    assert checkpoint.steps(tmp_path / "checkpoints") == [2] and "SIGTERM: saved after step 2" in fake.printed[-1]


def test_the_time_budget_looks_ahead_over_the_length_of_steps_and_saves(tmp_path, monkeypatch):
    assert CheckpointConfig(must_save_by="01:02:03:04").deadline == 86400 + 2 * 3600 + 3 * 60 + 4
    assert CheckpointConfig().deadline == float("inf")
    now = 1000.0
    monkeypatch.setattr(checkpoint.time, "time", lambda: now)
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: now)
    for limit, step, expected in (("00:00:00:03", 0.1, 29), ("00:00:00:03", 1.0, 2), ("00:00:00:01", 1.1, 1), ("", 1.0, 50)):
        now = 1000.0
        saver = Saver(fake := FakeRun(None, None, tmp_path, total=1000, every=0, must_save_by=limit))
        saver.patience, saved = checkpoint.threading.Event(), []
        saver.save = lambda numbers, fake=fake, saved=saved: saved.append(fake.step)
        for fake.step in range(1, 51):
            now += step
            if saver.after_step({}):
                break
        assert fake.step == expected and saved == ([expected] if limit else []), (limit, step)


def test_a_run_out_of_time_is_saved_and_its_continuation_is_the_uninterrupted_run(model, whole, tmp_path, capsys):
    run(model, tmp_path / "a", "--checkpoint.must-save-by", "00:00:00:01", "--optim.warmup", "1", steps=8)
    steps = checkpoint.steps(tmp_path / "a" / "checkpoints")
    if steps != [8]:
        assert "leaves no time for another step: saved after step" in capsys.readouterr().out
    run(model, tmp_path / "a", "--resume", steps=8)
    same_runs(whole, tmp_path / "a")


@pytest.mark.parametrize("limit", ["1:00", "00:00:00", "soon"])
def test_a_budget_of_another_form_is_refused(model, tmp_path, limit):
    with pytest.raises(UserError, match="give DD:HH:MM:SS"):
        run(model, tmp_path / "a", "--checkpoint.must-save-by", limit)


# ------------------------------------------------------------------------------------------------ in the background


def test_saving_in_the_background_changes_nothing(model, whole, tmp_path):
    run(model, tmp_path / "a", "--checkpoint.asynchronous", "--checkpoint.every", "1", steps=4)
    run(model, tmp_path / "a", "--checkpoint.asynchronous", "--checkpoint.every", "1", "--resume", steps=8)
    same_runs(whole, tmp_path / "a")


def test_training_goes_on_while_a_save_is_written_and_leaving_waits_for_it(tmp_path, monkeypatch):
    model, optimizer = trained()
    write = shards.write_tensors
    monkeypatch.setattr(shards, "write_tensors", lambda *a: (time.sleep(0.4), write(*a))[1])
    start = time.monotonic()
    with Saver(fake := FakeRun(model, optimizer, tmp_path, asynchronous=True, every=1)) as saver:
        fake.step = 1
        assert not saver.after_step({})
        assert time.monotonic() - start < 0.4 and checkpoint.steps(tmp_path / "checkpoints") == []
        fake.step = 2
        saver.after_step({})  # one at a time: the second waits for the first
        assert checkpoint.steps(tmp_path / "checkpoints") == [1]
    assert checkpoint.steps(tmp_path / "checkpoints") == [1, 2] and checkpoint.damage_of(tmp_path / "checkpoints" / "step_2") == ""


def test_a_failed_save_in_the_background_ends_the_run_at_the_next_step_and_the_one_before_stands(model, tmp_path, monkeypatch):
    write, count = shards.write_tensors, 0

    def full(*arguments):
        nonlocal count
        count += 1
        if count > 2:  # two files a checkpoint
            raise OSError(28, "No space left on device")
        return write(*arguments)

    monkeypatch.setattr(shards, "write_tensors", full)
    with pytest.raises(UserError, match="checkpoint of step 2 .*No space left on device; the previous checkpoint stands"):
        run(model, tmp_path / "a", "--checkpoint.asynchronous", "--checkpoint.every", "1", steps=8)
    assert [p.name for p in (tmp_path / "a" / "checkpoints").iterdir()] == ["step_1"]
    assert max(r["step"] for r in read_lines(tmp_path / "a" / "metrics.jsonl")) <= 3


# ------------------------------------------------------------------------------------------------ what a run goes on with


def test_in_bfloat16_the_float32_masters_are_what_a_run_goes_on_with(model, tmp_path):
    flags = ("--policy.dtype", "bfloat16", "--loss.mismatch-limit", "1")
    run(model, tmp_path / "a", *flags, steps=4)
    run(model, tmp_path / "b", *flags, steps=2)
    run(model, tmp_path / "b", *flags, "--resume", steps=4)
    same_runs(tmp_path / "a", tmp_path / "b", step=4)
    masters = [load_file(tmp_path / name / "checkpoints" / "step_4" / "master" / "model.safetensors") for name in "ab"]
    assert equal(*masters) and all(t.dtype == torch.float32 for t in masters[0].values())
    published = weights(tmp_path / "a", 4)
    assert all(torch.equal(published[n], masters[0][n].to(torch.bfloat16)) for n in masters[0])


def test_changed_settings_are_reported_and_changes_that_would_be_another_run_refused_unless_forced(model, tmp_path, capsys):
    run(model, tmp_path / "a", steps=2)
    run(model, tmp_path / "a", "--resume", "--optim.lr", "0.5", "--loss.clip-high", "0.3", steps=3)
    said = capsys.readouterr().out
    assert "changed since: --optim.lr was 0.01 and is 0.5" in said and "--loss.clip-high was 0.28 and is 0.3" in said and "--steps was 2 and is 3" in said
    assert said.count("changed since") == 3
    with pytest.raises(UserError, match="samples-per-prompt was 4 and is 5.*--resume-force"):
        run(model, tmp_path / "a", "--resume", "--samples-per-prompt", "5", steps=4)
    run(model, tmp_path / "a", "--resume", "--resume-force", "--samples-per-prompt", "5", steps=4)
    assert "changed since: --samples-per-prompt was 4 and is 5" in capsys.readouterr().out


def test_changed_training_prompts_are_refused(tmp_path):
    model, optimizer = trained()
    fake = FakeRun(model, optimizer, tmp_path, step=1)
    fake.examples = [Example([user(text)]) for text in "abc"]
    Saver(fake).save({})
    folder = checkpoint.latest(tmp_path / "checkpoints")
    checkpoint.restore(fake, folder)
    for changed in ("acb", "ab", "abcd"):
        fake.examples = [Example([user(text)]) for text in changed]
        with pytest.raises(UserError, match="training prompts have changed .*--resume-force"):
            checkpoint.restore(fake, folder)
    fake.config.resume_force = True
    checkpoint.restore(fake, folder)
    assert "training prompts have changed" in fake.printed[-1]


def test_the_state_of_a_schedule_goes_along_and_is_not_lost_on_a_script_that_does_not_know_it(tmp_path):
    model, optimizer = trained()
    fake = FakeRun(model, optimizer, tmp_path, step=1)
    fake.schedule_state = lambda: {"in_flight": [3, 4], "versions": {"3": 1}}
    Saver(fake).save({})
    folder = checkpoint.latest(tmp_path / "checkpoints")
    with pytest.raises(UserError, match="another schedule"):
        checkpoint.restore(FakeRun(model, optimizer, tmp_path), folder)
    other, found = FakeRun(model, optimizer, tmp_path), []
    other.restore_schedule = found.append
    checkpoint.restore(other, folder)
    assert found == [{"in_flight": [3, 4], "versions": {"3": 1}}] and other.step == 1


def test_a_checkpoint_says_what_it_was_made_with(whole):
    state = json.loads((whole / "checkpoints" / "step_8" / "state.json").read_text())
    assert state["versions"]["torch"] == torch.__version__ and "transformers" in state["versions"]
    assert state["config"]["prompts_per_step"] == 4 and state["processes"] == 1 and state["cursor"] == 32
    assert state["metrics"]["eval/accuracy"] == read_lines(whole / "metrics.jsonl")[-1]["eval/accuracy"]


def test_the_best_by_a_held_out_metric_is_kept_and_a_metric_that_there_is_not_is_named(model, tmp_path, capsys):
    rows = run(model, tmp_path / "a", "--checkpoint.every", "1", "--checkpoint.keep", "1", "--checkpoint.metric", "val:accuracy", steps=7)
    scores = {r["step"]: r["eval/accuracy"] for r in rows if "eval/accuracy" in r and r["step"] > 0}
    best = max(scores, key=lambda s: (scores[s], s))
    assert checkpoint.steps(tmp_path / "a" / "checkpoints") == sorted({best, 7})
    assert "was not measured at step 1: this checkpoint ranks last" in capsys.readouterr().out
    with pytest.raises(UserError, match="there is no eval/acuracy among .*eval/accuracy"):
        run(model, tmp_path / "b", "--checkpoint.metric", "val:acuracy", steps=4)
    with pytest.raises(UserError, match="--eval.every above 0"):
        run(model, tmp_path / "c", "--checkpoint.metric", "val:accuracy", "--eval.every", "0")


# ------------------------------------------------------------------------------------------------ several processes


def test_two_processes_share_a_checkpoint_and_any_number_resumes_from_it(tmp_path):
    """Everything that needs two ranks is in two_ranks.py; here the ways from and to one process."""
    model, optimizer = trained()
    names = {p: n for n, p in model.named_parameters()}
    state = {n: p.detach() for p, n in names.items()} | {f"{n}/{k}": v for p, n in names.items() for k, v in optimizer.state[p].items()}
    save_file(state, tmp_path / "one.safetensors")
    Saver(FakeRun(model, optimizer, tmp_path / "one", step=1)).save({})
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", ROOT / "tests" / "two_ranks.py", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0 and "rank 0 done" in done.stdout and "rank 1 done" in done.stdout, done.stderr[-4000:]

    from transformers import AutoModelForCausalLM

    folder = tmp_path / "sharded" / "checkpoints" / "step_2"
    expected = load_file(tmp_path / "expected.safetensors")
    loaded, info = AutoModelForCausalLM.from_pretrained(folder / "model", output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")) and loaded.config.architectures == ["LlamaForCausalLM"]
    assert all(torch.equal(p, expected[n]) for n, p in loaded.named_parameters())
    optimizer = torch.optim.AdamW(loaded.parameters())
    shards.load_optimizer(optimizer, names := {p: n for n, p in loaded.named_parameters()}, folder)
    assert all(torch.equal(v, expected[f"{n}/{k}"]) for p, n in names.items() for k, v in optimizer.state[p].items())
    fake = FakeRun(loaded, optimizer, tmp_path / "x")
    checkpoint.restore(fake, folder)  # fewer processes than saved it: the first one's random state
    assert fake.step == 2


# ------------------------------------------------------------------------------------------------ security


class Evil:
    """A pickle that, loaded, writes a file."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return (open, (str(self.target), "w"))


def test_nothing_in_a_checkpoint_can_execute_code(model, tmp_path):
    """A pickle under every name that a loader might look for, beside the files and instead of them, with a manifest that vouches for it."""
    target = tmp_path / "executed"
    bomb = pickle.dumps(Evil(target))
    pickle.loads(bomb).close()
    assert target.exists()  # it does go off
    target.unlink()
    torch.save({"w": Evil(target)}, tmp_path / "zip.pt")
    zipped = (tmp_path / "zip.pt").read_bytes()
    names = [
        ".metadata", "__0_0.distcp", "optimizer.pt", "optimizer.bin", "optimizer.safetensors.pt", "scheduler.pt", "rng_state.pth", "state.pkl", "rank-00000.pt",
        "training_args.bin", "random_states_0.pkl", "model/pytorch_model.bin", "model/model.pt", "model/adapter_model.bin", "model/tokenizer.pkl",
        "model/pytorch_model.bin.index.json", "model/tf_model.h5", "model/.metadata",
    ]  # fmt: skip

    def vouch(folder):
        files = [p for p in folder.rglob("*") if p.is_file() and p.name != "manifest.json"]
        manifest = {str(p.relative_to(folder)): {"size": p.stat().st_size, "sha256": checkpoint.digest(p)} for p in files}
        (folder / "manifest.json").write_text(json.dumps(manifest))

    for data in (bomb, zipped):  # beside everything else
        out = tmp_path / f"beside-{len(data)}"
        run(model, out, steps=1)
        folder = out / "checkpoints" / "step_1"
        for name in names:
            (folder / name).write_bytes(data)
        config = json.loads((folder / "model/config.json").read_text()) | {"auto_map": {"AutoModelForCausalLM": "evil.Model", "AutoConfig": "evil.Config"}}
        (folder / "model/config.json").write_text(json.dumps(config))
        (folder / "model/evil.py").write_text(f"open({str(target)!r}, 'w')\nclass Model: pass\nclass Config: pass\n")
        vouch(folder)
        assert run(model, out, "--resume", steps=2)[-1]["step"] == 2
        assert not target.exists()
    for data in (bomb, zipped):  # instead of what is read
        for name in ("model/model.safetensors", "optimizer.safetensors", "state.json", "rank-00000.json", "model/config.json"):
            out = tmp_path / f"instead-{len(data)}-{Path(name).name}"
            shutil.copytree(tmp_path / f"beside-{len(data)}", out)
            folder = out / "checkpoints" / "step_2"
            (folder / name).write_bytes(data)
            vouch(folder)
            with pytest.raises(Exception) as error:  # whatever the reader of that format says
                run(model, out, "--resume", steps=3)
            assert not isinstance(error.value, AssertionError) and not target.exists(), name
    for data in (bomb, zipped):  # a pickle where the weights are missing
        out = tmp_path / f"missing-{len(data)}"
        shutil.copytree(tmp_path / f"beside-{len(data)}", out)
        folder = out / "checkpoints" / "step_2"
        (folder / "model/model.safetensors").unlink()
        (folder / "model/pytorch_model.bin").write_bytes(data)
        vouch(folder)
        with pytest.raises(UserError, match="has no model.safetensors"):
            run(model, out, "--resume", steps=3)
        assert not target.exists()
