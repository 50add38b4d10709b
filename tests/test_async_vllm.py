"""In-flight updates against vLLM's real server, on CPU: one server for both cache policies."""

import asyncio
import threading
import time

import pytest
import tiny
import torch
from test_vllm import perturb

import cluster
import policy as policies
from cluster import EngineConfig
from refit import Refit
from rollout import DeadlineConfig, Request, Rollout, VLLMEngine

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not cluster.vllm_installed(), reason="vLLM is not installed")]
PROMPT = tuple(range(10, 80))  # longer than two cache blocks


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    model = tiny.save_model(folder / "model")
    server, key = cluster.start_vllm(model, cluster.make_plan("vllm", 0, 1, True), EngineConfig(max_num_seqs=16, cpu_cache_gb=1), "float32", 1000, folder / "log")
    with server:
        policy = policies.load_policy(model, policies.PolicyConfig(), 1.0, torch.device("cpu"))
        server.wait_until_healthy(300)
        yield policy, Refit(server.url, policy, torch.float32, "gloo", DeadlineConfig()), VLLMEngine(server.url, key, 120, server.check_alive)


def updated_in_flight(policy, refit, engine, version):
    """Completions during which the weights went from `version` to `version + 1`."""
    engine.salted = refit.keep_kv
    refit(version)
    engine.version = version
    answer = []

    async def ask():
        async with engine:
            answer.extend(await engine.generate(Request(PROMPT, 4, 800, 1.0, version)))

    thread = threading.Thread(target=lambda: asyncio.run(ask()))
    thread.start()
    time.sleep(0.7)
    perturb(policy, seed=version)
    refit(version + 1)
    engine.version = version + 1
    thread.join(timeout=120)
    return answer


def disagreement(policy, completions, version):
    """Largest difference of log-probabilities over the tokens that `version` sampled, in completions that it did not begin."""
    rows = [Rollout(0, s, list(PROMPT), c.ids, [True] * len(c.ids), c.logprobs, c.versions) for s, c in enumerate(completions)]
    (batch,) = policies.pack(rows, 10**6)
    fresh = batch.versions == version
    assert 0 < fresh.sum() < len(fresh), "the update was not in flight"
    return (policies.score(policy, [batch])[0] - batch.logprobs_gen)[fresh].abs().max().item()


def test_recomputed_requests_go_on_exactly_as_the_new_weights_would(served):
    policy, refit, engine = served
    completions = updated_in_flight(policy, refit, engine, 1)
    assert any(len(set(c.versions)) == 2 for c in completions)
    assert all(c.versions == sorted(c.versions) for c in completions)
    assert disagreement(policy, completions, 2) < 1e-3


def test_kept_keys_are_those_of_older_weights_and_new_requests_never_see_them(served):
    policy, refit, engine = served
    refit.keep_kv = True
    try:
        completions = updated_in_flight(policy, refit, engine, 3)
        assert disagreement(policy, completions, 4) > 1e-3  # the past of these tokens was computed by version 3

        async def ask():
            async with engine:
                return await engine.generate(Request(PROMPT, 4, 30, 1.0, 9))

        rows = [Rollout(0, s, list(PROMPT), c.ids, [True] * len(c.ids), c.logprobs, c.versions) for s, c in enumerate(asyncio.run(ask()))]
        (batch,) = policies.pack(rows, 10**6)
        assert (batch.versions == 4).all()
        assert (policies.score(policy, [batch])[0] - batch.logprobs_gen).abs().max() < 1e-3
    finally:
        refit.keep_kv, engine.salted = False, False
