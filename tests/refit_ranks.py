"""Run by test_refit.py under torchrun with two processes: a sharded policy is sent to two fake engines, driven by rank 0 alone."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]

import tiny
import torch
from fake_vllm import FakeVLLM
from test_refit import FakeRefit

import policy as policies
from ranks import guarded, start_ranks
from rollout import DeadlineConfig, EngineError


def main(model: str) -> None:
    torch.set_num_threads(1)
    ranks = start_ranks(60.0)
    policy = policies.load_policy(model, policies.PolicyConfig(), 1.0, ranks.device, ranks)
    assert policy.sharded
    with FakeVLLM() as a, FakeVLLM() as b:
        a.url, b.url = ranks.gather((a.url, b.url))[0]  # those of rank 0
        refit = FakeRefit([a.url, b.url], policy, torch.float32, "gloo", DeadlineConfig(refit=20.0), rank=ranks.rank, barrier=ranks.barrier, checkpoint=model)
        for version in (1, 2):
            refit(version)
        expected = dict(tiny.llama().named_parameters())
        sent = dict(refit.weights)  # every rank has gathered the same, whole and exact
        assert sent.keys() == expected.keys() and all(torch.equal(sent[name], expected[name]) for name in expected)
        if ranks.is_main:
            assert list(a.weights) == list(b.weights) == list(expected) and a.version == b.version == "2"
            b.answers["update_weights"] = (500, {"error": "no"})
        else:
            assert not a.calls and not b.calls
        ranks.barrier("before the failure")
        if ranks.is_main:  # it leaves the gathers in the middle: the others must not wait for it longer than the deadline
            try:
                refit(3)
            except EngineError as error:
                assert "answered 500" in str(error)
                print("failed as told", flush=True)
                raise
        else:
            refit(3)


if __name__ == "__main__":
    guarded(lambda arguments: main(*arguments), sys.argv[1:])
