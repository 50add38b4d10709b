"""The asynchronous schedule: equal to the synchronous run at staleness 0, bounded above it, and never waiting for ever."""

import asyncio
import collections
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import requests
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from test_grpo import equal, flags, untimed, weights

import async_grpo
import cluster
import grpo
from async_grpo import Group, choose
from log import read_lines
from refit import EngineClient, Refit
from rollout import Completion, EngineError, VLLMEngine, seed_of
from task import UserError

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert not [t for t in threading.enumerate() if t.name == "producer"]


def run(model, out, *more, **options):
    async_grpo.main(flags(model, out, *more, **options))
    return read_lines(out / "metrics.jsonl")


@contextlib.contextmanager
def within(seconds):
    start = time.monotonic()
    yield
    assert time.monotonic() - start < seconds


def trained(out):
    """The trained prompts in order, and the multiset of what was trained."""
    rows = [r for r in read_lines(out / "rollouts.jsonl") if r["finish"] != "failed"]
    return [i for i in dict.fromkeys(r["index"] for r in rows)], collections.Counter((r["index"], r["sample"], r["completion"]) for r in rows)


# ------------------------------------------------------------------------------------------------ fakes


class Scripted:
    """An engine whose completions depend on the request's seed alone; half of the tokens come from the weights at its end."""

    version = 0

    def __init__(self, delay=lambda seed: 0.0, failure=lambda calls: None):
        self.delay, self.failure, self.calls = delay, failure, []  # calls: shared by copies

    async def __aenter__(self):
        return self

    async def __aexit__(self, *exc):
        pass

    async def generate(self, request):
        self.calls.append((self.version, request))
        if error := self.failure(self.calls):
            raise error
        begun = self.version
        await asyncio.sleep(self.delay(request.seed))
        return [self.complete(random.Random(request.seed + i), begun) for i in range(request.n)]

    def complete(self, rng, begun):
        ids = [rng.randint(3, 30) for _ in range(rng.randint(2, 8))]
        half = len(ids) // 2
        return Completion(ids, [-2.0] * len(ids), [begun] * half + [self.version] * (len(ids) - half), "stop")


class RecordedRefit:
    asleep = False

    def rest(self):
        pass

    def __init__(self, action=lambda version: None):
        self.versions, self.action, self.drain, self.keep_kv = [], action, False, False

    def __call__(self, version):
        self.versions.append(version)
        self.action(version)


class HTTPRefit(Refit):
    """The control calls of a refit against the fake server; the weights themselves are one more call."""

    def __init__(self, url, timeout=5.0):
        self.client, self.timeout, self.rank, self.barrier, self.broken, self.engine = EngineClient([url], timeout), timeout, 0, lambda phase: None, False, "unused"

    def transfer(self):
        self.call("POST", "transfer")


@pytest.fixture
def replace(monkeypatch):
    """replace(engine=..., refit=..., server=...): what setup returns then has these."""
    real = grpo.setup

    def with_parts(**parts):
        def setup(config):
            made = real(config)
            vars(made).update({"refit": RecordedRefit(), **parts})
            return made

        monkeypatch.setattr(grpo, "setup", setup)

    return with_parts


@pytest.fixture
def served(tmp_path, replace):
    """served(pace, request deadline, refit deadline) -> the fake HTTP engine's server, put in place of the run's."""
    servers = []

    def start(pace=0.002, request=5.0, refit=5.0):
        server = cluster.Server(lambda port: [sys.executable, str(HERE / "fake_engine.py"), str(port), str(pace)], dict(os.environ), tmp_path / "engine.log")
        servers.append(server)
        server.wait_until_healthy(20)
        replace(engine=VLLMEngine(server.url, "key", request, server.check_alive), refit=HTTPRefit(server.url, refit),
                server=SimpleNamespace(check_alive=server.check_alive, stop=lambda: None))  # its log is read after the run  # fmt: skip
        return server

    yield start
    for server in servers:
        server.stop()


FIRST = seed_of(0, "train", 0, 0, 0)  # of the first prompt's request
ANY = ("--loss.mismatch-limit", "1e9")  # scripted log-probabilities are not the policy's


# ------------------------------------------------------------------------------------------------ staleness 0


@pytest.mark.parametrize("task, more", [
    ("digits", ""), ("digits", "--updates-per-batch 2 --passes 2"), ("digits", "--eval.every 0 --loss.preset dapo"), ("digits", "--loss.kl-coef .1"),
    ("half_constant", ""), ("half_constant", "--refill 3"), ("sparse", "--refill 2"), ("constant_for_some", "--refill 1 --retire-at 1"),
])  # fmt: skip
def test_with_staleness_0_it_is_grpo_bit_for_bit(model, tmp_path, task, more):
    grpo.main(flags(model, tmp_path / "sync", *more.split(), task=task))
    rows = run(model, tmp_path / "async", "--schedule.max-staleness", "0", *more.split(), task=task)
    for a, b in zip(untimed(read_lines(tmp_path / "sync" / "metrics.jsonl")), untimed(rows), strict=True):
        assert a == {k: b[k] for k in a}
    assert read_lines(tmp_path / "sync" / "rollouts.jsonl") == read_lines(tmp_path / "async" / "rollouts.jsonl")
    assert equal(weights(tmp_path / "sync", 4), weights(tmp_path / "async", 4))
    moments = [load_file(tmp_path / name / "checkpoints" / "step_4" / "optimizer.safetensors") for name in ("sync", "async")]
    assert equal(*moments)
    assert all(r["schedule/age_max"] == 0 for r in rows if r["step"])


def test_with_staleness_0_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(model, tmp_path):
    zero = ("--schedule.max-staleness", "0")
    whole = run(model, tmp_path / "whole", *zero, steps=6)
    run(model, tmp_path / "parts", *zero, steps=2)
    parts = run(model, tmp_path / "parts", *zero, "--resume", steps=6)
    assert untimed(whole) == untimed(parts)
    assert equal(weights(tmp_path / "whole", 6), weights(tmp_path / "parts", 6))


def test_with_staleness_0_there_is_no_correction_by_default_and_above_it_truncation():
    common = "--model m --task arith".split()
    assert async_grpo.parse_async([*common, "--schedule.max-staleness", "0"]).loss.correction == "none"
    assert async_grpo.parse_async(common).loss.correction == "truncate"
    assert async_grpo.parse_async([*common, "--loss.preset", "dapo"]).loss.correction == "truncate"
    assert async_grpo.parse_async([*common, "--loss.anchor", "gen"]).loss.correction == "none"
    assert async_grpo.parse_async([*common, "--loss.preset", "dppo_tv"]).loss.correction == "none"


@pytest.mark.parametrize("arguments, message", [
    ("--loss.correction none", "--loss.correction truncate"),
    ("--schedule.lead 2", "--schedule.lead"),
    ("--schedule.max-staleness -1", "--schedule.max-staleness"),
    ("--schedule.deadline 0", "--schedule.deadline"),
])  # fmt: skip
def test_a_schedule_that_cannot_be_right_is_refused_with_the_flag_to_set(model, tmp_path, arguments, message):
    with pytest.raises(UserError, match=message):
        run(model, tmp_path / "a", *arguments.split())
    assert not (tmp_path / "a").exists()


def test_colocated_generation_cannot_be_asynchronous(model, tmp_path, monkeypatch):
    monkeypatch.setattr(async_grpo, "make_plan", lambda config, processes: cluster.Plan("vllm", "cuda", "colocated", "ipc"))
    with pytest.raises(UserError, match="colocated"):
        run(model, tmp_path / "a")


# ------------------------------------------------------------------------------------------------ the bound


def simulate(rng, steps, size, bound, lead, order, drops=0.0):
    """The schedule without engine or model: groups finish in random order. Returns the ages of what was trained."""
    window, table, next_index, ages, finished = size + -(-int(lead * size * 2) // 2), [], 0, [], 0
    for step in range(steps):
        while True:
            while len(table) < window:
                table.append(Group(next_index, step, step))
                next_index += 1
            if chosen := choose(table, step, size, bound, order):
                break
            waiting = [g for g in table if not g.finished]
            assert waiting, "it waits although everything has finished"
            group = rng.choice(waiting)
            finished += 1
            group.finished = finished
            if rng.random() < drops:
                table.remove(group)
        assert len(chosen) == size == len(set(g.index for g in chosen)) and all(g.finished for g in chosen)
        ages += [step - g.born for g in chosen]
        table = [g for g in table if g not in chosen]
    return ages


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(0, 4), st.sampled_from([0.25, 0.5, 1.0]), st.sampled_from(["in_order", "ready_first"]), st.booleans())
def test_no_group_is_ever_older_than_the_bound_and_there_is_always_a_next_step(seed, size, bound, share, order, drops):
    ages = simulate(random.Random(seed), 30, size, bound, share * bound, order, drops=0.3 * drops)
    assert 0 <= min(ages) and max(ages) <= bound


@pytest.mark.parametrize("bound", [0, 1, 3])
@pytest.mark.parametrize("order", ["in_order", "ready_first"])
def test_with_a_full_lead_the_bound_is_reached(bound, order):
    assert max(simulate(random.Random(1), 20, 4, bound, bound, order)) == bound


@pytest.mark.parametrize("bound", [0, 1, 3])
@pytest.mark.parametrize("training", [0.0, 0.05])
@pytest.mark.parametrize("order", ["in_order", "ready_first"])
def test_whatever_is_slower_the_run_goes_on_within_the_bound(model, tmp_path, replace, monkeypatch, bound, training, order):
    real = grpo.learn
    monkeypatch.setattr(async_grpo, "learn", lambda run, groups: (time.sleep(training), real(run, groups))[1])
    engine, refit = Scripted(delay=lambda seed: random.Random(seed).random() * 0.05), RecordedRefit()
    replace(engine=engine, refit=refit)
    more = (*ANY, "--schedule.max-staleness", str(bound), "--schedule.order", order, "--loss.correction", "truncate", "--eval.every", "0")
    rows = run(model, tmp_path / "a", *more, steps=8)
    ages = [r["schedule/age_max"] for r in rows]
    assert len(rows) == 8 and max(ages) <= bound
    assert refit.versions == list(range(8))  # one update a step, and none after the last
    assert max(ages) == bound or training == 0.0
    if order == "in_order":
        assert trained(tmp_path / "a")[0] == list(range(32))
    assert sorted(trained(tmp_path / "a")[0]) == list(range(32))


def test_ready_first_does_not_wait_for_a_slow_group_until_it_is_due(model, tmp_path, replace):
    replace(engine=Scripted(lambda seed: 0.6 if seed == FIRST else 0.01))
    more = (*ANY, "--schedule.max-staleness", "3", "--schedule.lead", "0.5", "--schedule.order", "ready_first", "--eval.every", "0")
    run(model, tmp_path / "a", *more, steps=6)
    order = trained(tmp_path / "a")[0]
    assert sorted(order) == list(range(24)) and order.index(0) >= 4 and order.index(0) < 16  # not in the first step, and by step 4


def test_tokens_carry_the_version_that_sampled_them_and_their_age_is_measured(model, tmp_path, replace):
    replace(engine=Scripted(delay=lambda seed: 0.3 if seed % 3 == 0 else 0.01))
    more = ("--schedule.max-staleness", "2", "--schedule.lead", "1", "--schedule.order", "ready_first", "--eval.every", "0")
    rows = run(model, tmp_path / "a", *ANY, *more, steps=10)
    assert max(r["schedule/versions"] for r in rows) > 1.0
    assert 0 < max(r["schedule/token_age"] for r in rows) <= 2
    assert {"schedule/ready", "schedule/in_flight", "schedule/age", "time/generation", "time/refit", "schedule/length_accepted"} <= rows[-2].keys()
    assert any("schedule/length_generated" in r for r in rows)


def test_an_engine_that_answers_with_older_weights_than_it_was_asked_for_stops_the_run(model, tmp_path, replace):
    class Old(Scripted):
        def complete(self, rng, begun):
            made = super().complete(rng, begun)
            made.versions = [0] * len(made.ids)
            return made

    replace(engine=Old())
    with pytest.raises(EngineError, match="version 0 answered"):
        run(model, tmp_path / "a", *ANY, "--schedule.max-staleness", "0", "--eval.every", "0")


# ------------------------------------------------------------------------------------------------ the canary


def test_where_no_trained_token_is_fresh_the_probe_is_the_canary(model, tmp_path, replace, monkeypatch):
    real = grpo.learn
    monkeypatch.setattr(async_grpo, "learn", lambda run, groups: (time.sleep(0.05), real(run, groups))[1])
    replace(engine=Scripted())  # its log-probabilities are not the policy's
    with pytest.raises(EngineError, match="--loss.mismatch-limit"):
        run(model, tmp_path / "a", "--loss.mismatch-limit", "1e-3", "--eval.every", "0")


def test_the_probe_agrees_where_engine_and_trainer_hold_the_same_weights(model, tmp_path, replace, monkeypatch):
    real = grpo.learn
    monkeypatch.setattr(async_grpo, "learn", lambda run, groups: (time.sleep(0.05), real(run, groups))[1])
    replace()  # an HFEngine beside a refit that does nothing: it shares the weights, so they always agree
    rows = run(model, tmp_path / "a", "--eval.every", "0", steps=6)
    found = [r["probe/mismatch_k3"] for r in rows if r.get("probe/mismatch_k3") is not None]
    assert found and max(found) < 1e-8


# ------------------------------------------------------------------------------------------------ dynamic sampling and the end of the data


def toy(name):
    return dict(task=name)


def test_groups_without_signal_are_replaced_by_the_next_prompts(model, tmp_path):
    rows = run(model, tmp_path / "a", "--refill", "10", "--eval.every", "0", **toy("half_constant"), steps=3)
    assert sum(r.get("schedule/dropped_no_signal", 0) for r in rows) > 2
    with_signal = [r["groups/signal"] * len({x["index"] for x in read_lines(tmp_path / "a" / "rollouts.jsonl") if x["step"] == r["step"]}) for r in rows]
    assert with_signal == pytest.approx([4.0] * 3)  # each step has all of its groups; those that were replaced count in its metrics alone


def test_refilling_is_bounded_and_a_run_without_signal_ends_with_an_error(model, tmp_path):
    with within(60), pytest.raises(UserError, match="--max-empty-steps"):
        run(model, tmp_path / "a", "--refill", "2", "--max-empty-steps", "3", "--eval.every", "0", **toy("constant"), steps=50)
    rows = read_lines(tmp_path / "a" / "metrics.jsonl")
    assert sum(r.get("schedule/dropped_no_signal", 0) for r in rows) <= 2 * (8 + 4 * 3)  # two for every place that was admitted


@pytest.mark.parametrize("order", ["in_order", "ready_first"])
@pytest.mark.parametrize("bound", ["0", "1", "4"])
@pytest.mark.parametrize("refill", ["0", "5"])
def test_when_the_epochs_are_over_the_run_ends_normally_and_every_prompt_is_accounted_for(model, tmp_path, order, bound, refill):
    more = ("--schedule.max-staleness", bound, "--schedule.order", order, "--refill", refill, "--epochs", "2", "--eval.every", "100")
    with within(60):
        rows = run(model, tmp_path / "a", *more, **toy("half_constant"), steps=1000)
    state = json.loads((tmp_path / "a" / "checkpoints" / f"step_{rows[-1]['step']}" / "state.json").read_text())
    dropped = sum(r.get("schedule/dropped_no_signal", 0) for r in rows)
    assert 4 * rows[-1]["step"] + dropped <= 40 < 4 * rows[-1]["step"] + dropped + 4  # what is left is less than a step
    assert (dropped > 0) == (refill != "0")
    assert state["cursor"] + len(state["ahead"]) == 4 * rows[-1]["step"] + dropped
    assert "eval/accuracy" in rows[-1]


def test_a_data_set_of_one_step_is_enough_for_a_wide_window(model, tmp_path):
    more = ("--prompts-per-step", "20", "--samples-per-prompt", "2", "--schedule.max-staleness", "3", "--epochs", "1", "--eval.every", "0")
    assert [r["step"] for r in run(model, tmp_path / "a", *more)] == [1]
    assert sorted(trained(tmp_path / "a")[0]) == list(range(20))
    twice = run(model, tmp_path / "b", *more[:-4], "--epochs", "3", "--eval.every", "0")  # the same prompt in flight several times
    assert [r["step"] for r in twice] == [1, 2, 3] and sorted(trained(tmp_path / "b")[0]) == list(range(60))


# ------------------------------------------------------------------------------------------------ resume


class Stop(Exception):
    pass


@pytest.mark.parametrize("order", ["in_order", "ready_first"])
@pytest.mark.parametrize("stop", [1, 2, 3, 5])
def test_an_interrupted_run_trains_the_same_multiset_as_an_uninterrupted_one(model, tmp_path, replace, monkeypatch, order, stop):
    more = (*ANY, "--schedule.max-staleness", "3", "--schedule.lead", "1.5", "--schedule.order", order, "--checkpoint.every", "1", "--eval.every", "0")
    delay = lambda seed: 0.2 * random.Random(seed).random() ** 6  # noqa: E731 heavy-tailed
    replace(engine=Scripted(delay))
    run(model, tmp_path / "whole", *more, steps=6)
    replace(engine=Scripted(delay))
    with monkeypatch.context() as patch:
        real = grpo.learn
        patch.setattr(async_grpo, "learn", lambda run, groups: real(run, groups) if run.step < stop else (_ for _ in ()).throw(Stop()))
        with pytest.raises(Stop):
            run(model, tmp_path / "parts", *more, steps=6)
    engine, refit = Scripted(delay), RecordedRefit()
    replace(engine=engine, refit=refit)
    with within(20):
        run(model, tmp_path / "parts", *more, "--resume", steps=6)
    assert refit.versions[0] == stop and all(version >= stop for version, _ in engine.calls)  # the engine had the resumed weights first
    whole, parts = trained(tmp_path / "whole"), trained(tmp_path / "parts")
    assert whole[1] == parts[1] and sorted(parts[0]) == list(range(24))
    lengths = [collections.Counter(len(r["completion"]) for r in read_lines(tmp_path / name / "rollouts.jsonl")) for name in ("whole", "parts")]
    assert lengths[0] == lengths[1]
    if order == "in_order":
        assert whole[0] == parts[0] == list(range(24))


def test_out_of_order_a_checkpoint_says_which_prompts_beyond_its_cursor_are_trained(model, tmp_path, replace):
    replace(engine=Scripted(lambda seed: 0.5 if seed == FIRST else 0.01))
    more = (*ANY, "--schedule.max-staleness", "4", "--schedule.lead", "1", "--schedule.order", "ready_first", "--checkpoint.every", "1", "--checkpoint.keep", "0")
    run(model, tmp_path / "a", *more, "--eval.every", "0", steps=6)
    states = [json.loads((tmp_path / "a" / "checkpoints" / f"step_{s}" / "state.json").read_text()) for s in range(1, 7)]
    assert states[0]["cursor"] == 0 and len(states[0]["ahead"]) == 4
    assert all(s["cursor"] + len(s["ahead"]) == 4 * s["step"] for s in states)
    assert states[-1]["ahead"] == [] and states[-1]["cursor"] == 24


# ------------------------------------------------------------------------------------------------ evaluation


def test_evaluation_uses_the_engine_while_it_generates(model, tmp_path, replace):
    engine = Scripted(delay=lambda seed: 0.05)
    replace(engine=engine)
    with within(30):
        rows = run(model, tmp_path / "a", *ANY, "--eval.every", "1", "--schedule.max-staleness", "2", steps=5)
    assert [r["step"] for r in rows if "eval/accuracy" in r] == list(range(6))
    answered = len(engine.calls)
    assert answered == 20 + 6 * 4 + 5  # groups, evaluations of four examples, probes: nothing asked twice, nothing lost


def test_evaluation_never_changes_what_is_trained(model, tmp_path, replace):
    for name, every in (("a", "1"), ("b", "0")):
        replace(engine=Scripted(delay=lambda seed: random.Random(seed).random() * 0.03))
        run(model, tmp_path / name, *ANY, "--eval.every", every)
    assert trained(tmp_path / "a") == trained(tmp_path / "b")


# ------------------------------------------------------------------------------------------------ failures


def test_rewards_that_always_fail_stop_the_run_with_their_cause(model, tmp_path):
    with within(60), pytest.raises(UserError, match="the judge is down.*--schedule.max-failures"):
        run(model, tmp_path / "a", "--eval.every", "0", "--schedule.max-failures", "3", **toy("failing"))


def test_a_group_that_fails_once_is_sampled_again(model, tmp_path):
    rows = run(model, tmp_path / "a", "--eval.every", "0", **toy("flaky"))
    assert sum(r.get("schedule/failed_attempts", 0) for r in rows) == 1
    assert trained(tmp_path / "a")[0] == list(range(16)) and all(r["rollout/failed"] == 0 for r in rows)


def test_a_prompt_that_fails_for_ever_is_replaced_or_stops_the_run(model, tmp_path):
    rows = run(model, tmp_path / "a", "--eval.every", "0", "--schedule.retries", "2", **toy("one_fails"))
    order = trained(tmp_path / "a")[0]
    assert len(order) == 16 and order != list(range(16))
    assert sum(r.get("schedule/dropped_failed", 0) for r in rows) == 1 and sum(r.get("schedule/failed_attempts", 0) for r in rows) == 3
    with pytest.raises(UserError, match="no answer key.*3 attempts"):
        run(model, tmp_path / "b", "--eval.every", "0", "--schedule.retries", "2", "--schedule.on-failure", "stop", **toy("one_fails"))


def test_an_environment_beyond_its_deadline_counts_as_failed(model, tmp_path):
    with within(60):
        rows = run(model, tmp_path / "a", "--eval.every", "0", "--schedule.retries", "0", "--deadlines.environment", "0.2", **toy("one_hangs"))
    assert sum(r.get("schedule/dropped_failed", 0) for r in rows) == 1


def test_whatever_the_producer_raises_ends_the_run_with_its_own_traceback(model, tmp_path, replace):
    replace(engine=Scripted(failure=lambda calls: ZeroDivisionError("in the third request") if len(calls) == 3 else None))
    with within(20), pytest.raises(ZeroDivisionError, match="third request") as caught:
        run(model, tmp_path / "a", *ANY, "--eval.every", "0")
    assert any(entry.name == "generate" for entry in caught.traceback)


def test_a_failing_request_is_retried_and_then_its_group_replaced(model, tmp_path, replace):
    replace(engine=Scripted(failure=lambda calls: EngineError("HTTP 500") if calls[-1][1].seed == FIRST else None))
    rows = run(model, tmp_path / "a", *ANY, "--eval.every", "0")
    assert sum(r.get("schedule/dropped_failed", 0) for r in rows) == 1 and len(trained(tmp_path / "a")[0]) == 16


def test_an_engine_that_fails_every_request_stops_the_run(model, tmp_path, replace):
    replace(engine=Scripted(failure=lambda calls: EngineError("HTTP 500")))
    with within(20), pytest.raises(EngineError, match="HTTP 500"):
        run(model, tmp_path / "a", *ANY, "--eval.every", "0")


def test_a_refit_that_fails_stops_the_run_before_anything_else_is_trained(model, tmp_path, replace):
    def action(version):
        if version == 2:
            raise EngineError("worker 2 of 2 did not answer")

    replace(engine=Scripted(), refit=RecordedRefit(action))
    with within(20), pytest.raises(EngineError, match="worker 2 of 2"):
        run(model, tmp_path / "a", *ANY, "--eval.every", "0")
    assert [r["step"] for r in read_lines(tmp_path / "a" / "metrics.jsonl")] == [1]


def test_a_trainer_that_raises_ends_the_producer(model, tmp_path, replace, monkeypatch):
    replace(engine=Scripted(delay=lambda seed: 30.0 if seed % 3 == 0 else 0.0))
    monkeypatch.setattr(async_grpo.Schedule, "_measure", lambda self, chosen: 1 / 0)
    with within(20), pytest.raises(ZeroDivisionError):
        run(model, tmp_path / "a", *ANY, "--eval.every", "0", "--schedule.order", "ready_first", "--schedule.max-staleness", "8")


def test_an_engine_that_never_answers_is_given_up_within_the_deadline(model, tmp_path, replace):
    replace(engine=Scripted(delay=lambda seed: 1e6))
    with within(20), pytest.raises(EngineError, match="--schedule.deadline"):
        run(model, tmp_path / "a", *ANY, "--eval.every", "0", "--schedule.deadline", "1")


# ------------------------------------------------------------------------------------------------ a server over HTTP


def test_weights_are_updated_in_flight_and_no_token_appears_while_the_engine_is_paused(model, tmp_path, served):
    server = served(pace=0.002)
    more = ("--schedule.max-staleness", "2", "--schedule.lead", "1", "--schedule.order", "ready_first", "--eval.every", "3")
    with within(60):
        rows = run(model, tmp_path / "a", *ANY, *more, steps=10)
        log = requests.get(f"{server.url}/log", timeout=5).json()
    assert max(r.get("schedule/versions", 0) for r in rows) > 1.0  # some completion was begun by one version and ended by another
    paused = False
    for what, *_ in log:
        assert not (what == "token" and paused)
        paused = what == "pause" or paused and what != "resume"
    cycle = [entry for entry in log if entry[0] in ("pause", "transfer", "version", "resume")]
    assert [e[0] for e in cycle] == ["pause", "transfer", "version", "resume"] * (len(cycle) // 4)
    assert [e[1] for e in cycle if e[0] == "version"] == [str(v) for v in range(11)]
    assert all(e[1] == "mode=keep&clear_cache=true" for e in cycle if e[0] == "pause")
    assert all(e[2] is None for e in log if e[0] == "request") and log[0][0] == "pause"
    assert len({e[3] for e in log if e[0] == "request"}) == 40 + 4 + 10  # groups, evaluation repeats its seeds, probes: no seed twice


def test_with_kept_keys_the_cache_stays_and_every_request_is_salted_with_its_version(model, tmp_path, served):
    server = served(pace=0.003)
    run(model, tmp_path / "a", *ANY, "--schedule.cache", "keep_kv", "--schedule.max-staleness", "2", "--eval.every", "2", steps=6)
    log = requests.get(f"{server.url}/log", timeout=5).json()
    assert {e[1] for e in log if e[0] == "pause"} == {"mode=keep&clear_cache=false"}
    asked = [e for e in log if e[0] == "request"]
    assert asked and all(e[2] == f"weights {e[1]}" for e in asked)


def test_draining_finishes_running_requests_before_an_update(model, tmp_path, served):
    server = served(pace=0.003)
    rows = run(model, tmp_path / "a", *ANY, "--schedule.drain", "--schedule.max-staleness", "2", "--eval.every", "0", steps=6)
    assert all(r["schedule/versions"] == 1.0 for r in rows)
    assert {e[1] for e in requests.get(f"{server.url}/log", timeout=5).json() if e[0] == "pause"} == {"mode=wait&clear_cache=true"}


def kill_at_the_third_step(monkeypatch, server, number):
    real = grpo.learn

    def learn(run, groups):
        if run.step == 2:
            children = [int(p) for p in Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()]
            os.kill(children[0], number)
        return real(run, groups)

    monkeypatch.setattr(async_grpo, "learn", learn)


def test_an_engine_that_is_killed_ends_the_run_with_its_exit_code(model, tmp_path, served, monkeypatch):
    server = served(pace=0.02)
    kill_at_the_third_step(monkeypatch, server, signal.SIGKILL)
    with within(40), pytest.raises(EngineError):
        run(model, tmp_path / "a", *ANY, "--eval.every", "0", steps=20)


def test_an_engine_that_is_stopped_is_given_up_at_its_deadline(model, tmp_path, served, monkeypatch):
    server = served(pace=0.02, request=2.0, refit=2.0)
    kill_at_the_third_step(monkeypatch, server, signal.SIGSTOP)
    with within(40), pytest.raises(EngineError, match="--deadlines|--schedule.deadline"):
        run(model, tmp_path / "a", *ANY, "--eval.every", "0", "--schedule.retries", "0", "--schedule.deadline", "8", steps=20)


def test_a_slow_environment_does_not_hold_up_the_others(model, tmp_path):
    with within(60):
        rows = run(model, tmp_path / "a", "--eval.every", "0", "--schedule.max-staleness", "2", **toy("slow_first"), steps=5)
    assert len(rows) == 5 and torch.isfinite(torch.tensor([r["loss"] for r in rows])).all()


# ------------------------------------------------------------------------------------------------ several trainer processes


def test_two_trainer_processes_train_what_one_trains(model, tmp_path):
    alone = run(model, tmp_path / "one", "--schedule.max-staleness", "0")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(cluster.free_port()), "async_grpo.py"]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}
    arguments = flags(model, tmp_path / "two", "--schedule.max-staleness", "0")
    done = subprocess.run([*command, *arguments], cwd=HERE.parent, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    rows = read_lines(tmp_path / "two" / "metrics.jsonl")
    for name in ("reward", "grad_norm", "trained_tokens"):
        assert [r[name] for r in rows[1:]] == pytest.approx([r[name] for r in alone[1:]], rel=1e-3), name
    assert trained(tmp_path / "one") == trained(tmp_path / "two")
