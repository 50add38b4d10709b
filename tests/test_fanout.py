"""Two real vLLM servers of one tiny model on CPU, started by the command line that users have, updated together and sampled from in turn."""

import asyncio
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import tiny
import torch
from test_vllm import disagreement, generate, perturb

import cluster
import policy as policies
from cluster import ClusterConfig, EngineConfig, check_external, make_plan
from refit import free_port
from rollout import Balanced, DeadlineConfig, EngineError
from task import UserError

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not cluster.vllm_installed(), reason="vLLM is not installed")]
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """(model, policy, engines): two servers started by `cluster.py serve`, found by their URLs as a run finds them."""
    folder = tmp_path_factory.mktemp("fanout")
    model = tiny.save_model(folder / "model")
    ports = [free_port(), free_port()]
    os.environ["VLLM_API_KEY"] = "the key of this test"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "cluster.py"), "serve", "--model", model, "--max-model-len", "256", "--engine.max-num-seqs", "64"]
    command += ["--engine.cpu-cache-gb", "1"]
    processes = [
        subprocess.Popen([*command, "--port", str(port), "--log", str(folder / f"engine-{port}.log")], env=environment, stdout=subprocess.PIPE, text=True)
        for port in ports
    ]
    try:
        policy = policies.load_policy(model, policies.PolicyConfig(), 1.0, torch.device("cpu"))
        urls = tuple(f"http://127.0.0.1:{port}" for port in ports)
        plan = make_plan("vllm", 0, 1, True, ClusterConfig(engine_urls=urls))
        engines = cluster.start_engines(model, plan, EngineConfig(), "float32", 256, folder, DeadlineConfig(engine_start=300.0))
        yield model, policy, engines
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(timeout=30)
        del os.environ["VLLM_API_KEY"]


def refit_of(two):
    model, policy, engines = two
    return engines.refit(policy, policies.make_optimizer(policy, policies.OptimConfig()), torch.float32, ClusterConfig(), model)


def test_both_engines_agree_with_the_trainer_after_one_refit(two):
    _, policy, engines = two
    refit, sampler = refit_of(two), engines.sampler()
    assert isinstance(sampler, Balanced) and refit.client.world_size == 3
    for version in (1, 2):
        perturb(policy, seed=version)
        refit(version)
        sampler.version = version
        for engine in sampler.engines:  # each by itself, so that neither can hide behind the other
            completions = generate(engine)
            worst, count = disagreement(policy, completions)
            assert count > 300 and worst < 1e-3
            assert {v for group in completions for c in group for v in c.versions} == {version}


def test_requests_are_spread_over_both_engines_with_the_same_results(two):
    _, policy, engines = two
    refit = refit_of(two)
    refit(3)
    both, one = engines.sampler(), engines.sampler().engines[0]
    spread, single = generate(both, seed=5), generate(one, seed=5)
    assert len(set(both.homes.values()) | {0, 1}) == 2
    assert [[c.ids for c in g] for g in spread] == [[c.ids for c in g] for g in single]
    assert disagreement(policy, spread)[0] < 1e-3


def test_another_trainer_takes_over_engines_that_the_first_one_left_paused(two):
    _, policy, engines = two
    first = refit_of(two)
    first(4)
    first.pause()  # and it is gone
    perturb(policy, seed=9)
    second = refit_of(two)
    second(5)
    for engine in engines.sampler().engines:
        completions = generate(engine)
        assert disagreement(policy, completions)[0] < 1e-3
        assert {v for group in completions for c in group for v in c.versions} == {5}


def test_an_engine_is_refused_by_what_it_says_of_itself(two):
    model, _, engines = two
    (url, key), plan = engines.own[0], engines.plan
    check_external(url, key, model, plan, "float32", 256)
    for changed, sentence in (
        ((url, key, model, plan, "bfloat16", 256), "dtype is float32, this run needs bfloat16"),
        ((url, key, "other", plan, "float32", 256), "model is .*, this run needs other"),
        ((url, key, model, plan, "float32", 257), "takes 256 tokens, this run has up to 257"),
        ((url, "wrong key", model, plan, "float32", 256), "answered 401: .* VLLM_API_KEY"),
    ):
        with pytest.raises(UserError, match=sentence):
            check_external(*changed)


def test_no_engine_is_left_out_when_one_has_died(two):
    """The last test of this file: it ends one of the servers."""
    _, policy, engines = two
    refit = refit_of(two)
    refit(6)
    pids = [p for p in Path("/proc").glob("[0-9]*") if engines.urls[1].rpartition(":")[2] in _command(p) and "cluster.py" in _command(p)]
    (pid,) = [int(p.name) for p in pids]
    os.kill(pid, 15)
    for _ in range(100):
        try:
            urllib.request.urlopen(engines.urls[1] + "/health", timeout=1)
            asyncio.run(asyncio.sleep(0.2))
        except OSError:
            break
    with pytest.raises(EngineError, match=engines.urls[1]):
        refit(7)


def _command(folder):
    try:
        return (folder / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
    except OSError:
        return ""
