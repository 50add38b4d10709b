"""The refit against fake servers: order, errors, versions, names, sleep. Real ones: test_vllm.py (one) and test_fanout.py (two)."""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch
from fake_vllm import FakeVLLM
from safetensors.torch import load_file, save_file

import cluster
import grpo
from log import Timer
from policy import OptimConfig, Policy, make_optimizer
from ranks import Ranks
from refit import ColocatedRefit, EngineClient, Refit, SleepState, Weights, at_once, check_names, checkpoint_names, first_sleep, free_port, stored_differently
from rollout import DeadlineConfig, EngineError
from sharding import training_tensors
from task import UserError


class Sender:
    """The trainer's side of a transfer that goes through the control routes alone, one tensor a call."""

    def __init__(self, client, weights):
        self.client, self.weights = client, weights
        client.init_weight_transfer_engine({"rank_offset": 1, "world_size": client.world_size})

    def send_weights(self):
        self.client.start_weight_update()
        for name, _ in self.weights:
            self.client.update_weights({"names": [name]})
        self.client.finish_weight_update()


class Direct:
    def join(self, backend):
        return Sender(self.client, self.weights)


class FakeRefit(Direct, Refit): ...


class FakeColocated(Direct, ColocatedRefit): ...


@pytest.fixture(scope="module")
def policy():
    torch.set_num_threads(1)
    return Policy(tiny.llama(hidden=8))


@pytest.fixture
def two(policy):
    with FakeVLLM(world_size=2) as a, FakeVLLM(world_size=1) as b:
        yield a, b, FakeRefit([a.url, b.url], policy, torch.float32, "gloo", DeadlineConfig(refit=10.0))


def test_an_update_reaches_every_engine_in_the_same_order(two, policy):
    a, b, refit = two
    refit(7)
    names = [n for n, _ in policy.model.named_parameters()]
    expected = ["pause", "start_weight_update", *["update_weights"] * len(names), "finish_weight_update", "update_weight_version", "weight_info", "resume"]
    for engine in (a, b):
        assert engine.routes()[-len(expected) :] == expected
        assert list(engine.weights) == names
        assert engine.version == "7" and not engine.paused


def test_each_engine_gets_ranks_of_its_own_in_the_transfer_group(two):
    a, b, refit = two
    first, second = ([c[4]["init_info"] for c in engine.calls if c[2] == "init_weight_transfer_engine"] for engine in (a, b))
    assert first == [{"rank_offset": 1, "world_size": 4}] and second == [{"rank_offset": 3, "world_size": 4}]
    assert refit.client.world_size == 4


def test_no_engine_resumes_before_every_engine_has_acknowledged_the_update(policy):
    small = Policy(tiny.llama(hidden=8))
    small.model = torch.nn.Linear(2, 2, bias=False)
    small.model.device = torch.device("cpu")
    with FakeVLLM(jitter=0.002) as a, FakeVLLM(jitter=0.002) as b:
        refit = FakeRefit([a.url, b.url], small, torch.float32, "gloo", DeadlineConfig(refit=10.0))
        for version in range(100):
            refit(version)
        events = sorted([*a.calls, *b.calls])
        for version in range(100):
            acknowledged = [done for _, done, route, _, body in events if route == "update_weight_version" and body["new_version"] == str(version)]
            paused = [done for _, done, route, _, _ in events if route == "pause"][2 * version : 2 * version + 2]
            started = [arrived for arrived, _, route, _, _ in events if route == "start_weight_update"][2 * version : 2 * version + 2]
            resumed = [arrived for arrived, _, route, _, _ in events if route == "resume"][2 * version : 2 * version + 2]
            assert max(paused) < min(started) and max(acknowledged) < min(resumed)


@pytest.mark.parametrize("route", ["pause", "start_weight_update", "update_weights", "finish_weight_update", "update_weight_version", "resume"])
def test_one_engine_that_fails_ends_the_run_at_once_even_where_the_other_is_silent(two, route):
    a, b, refit = two
    refit(1)
    a.delays[route] = 8.0
    b.answers[route] = (500, {"error": "worker 2 of 2 failed"})
    began = time.monotonic()
    with pytest.raises(EngineError, match=f"POST {b.url}/{route}.* answered 500: .*worker 2 of 2 failed"):
        refit(2)
    assert time.monotonic() - began < 3
    if route not in ("update_weight_version", "resume"):
        assert a.version == b.version == "1"  # the version follows the acknowledgement
    b.answers.clear()
    with pytest.raises(EngineError, match="an earlier update failed"):
        refit(3)


def test_a_silent_engine_is_an_error_at_the_deadline(policy):
    with FakeVLLM() as a:
        refit = FakeRefit(a.url, policy, torch.float32, "gloo", DeadlineConfig(refit=1.0))
        a.delays["start_weight_update"] = 5.0
        with pytest.raises(EngineError, match="--deadlines.refit"):
            refit(1)


def test_an_engine_that_reports_another_version_ends_the_run(two):
    a, b, refit = two
    b.answers["weight_info"] = (200, {"weight_version": "default"})
    with pytest.raises(EngineError, match=f"{b.url} reports weights of version 'default' after an update to 4"):
        refit(4)


def test_every_update_drops_the_prefix_cache(two):
    a, b, refit = two
    for version in range(1, 4):
        refit(version)
        assert [engine.generate("prompt") for engine in (a, b)] == [str(version)] * 2
    assert not a.illegal and not b.illegal


def test_other_ranks_join_the_gathers_and_call_no_engine(two, policy):
    a, b, _ = two
    before = len(a.calls)
    other = FakeRefit([a.url, b.url], policy, torch.float32, "gloo", DeadlineConfig(), rank=1)
    met = []
    other.barrier = met.append
    other(1)
    assert len(a.calls) == before and met == ["refit", "resume"]


def test_calls_run_at_the_same_time_and_answer_in_their_order():
    began = time.monotonic()
    assert at_once([lambda i=i: time.sleep(0.3 - 0.1 * i) or i for i in range(3)], threading.Event()) == [0, 1, 2]
    assert time.monotonic() - began < 0.6


# ------------------------------------------------------------------------------------------------ sleep


@pytest.fixture
def colocated(policy):
    with FakeVLLM(asleep=True) as engine:
        offloaded = []
        yield engine, FakeColocated(engine.url, policy, torch.float32, "ipc", DeadlineConfig(refit=10.0), offload=offloaded.append), offloaded


def test_memory_changes_hands_in_the_one_order_that_works(colocated):
    engine, refit, offloaded = colocated
    refit(1)
    routes = [(c[2], c[3].get("tags", [""])[0]) for c in engine.calls if c[2] in ("wake_up", "start_weight_update", "update_weight_version", "sleep")]
    assert routes == [("wake_up", "weights"), ("start_weight_update", ""), ("update_weight_version", ""), ("wake_up", "kv_cache")]
    assert offloaded == ["optimizer", "policy"]
    engine.generate("prompt")
    refit.rest()
    assert (engine.calls[-1][2], engine.calls[-1][3]) == ("sleep", {"level": ["2"], "mode": ["wait"]})
    assert offloaded[2:] == ["back"] and refit.asleep
    assert not engine.illegal


def test_five_steps_with_evaluation_between_make_no_illegal_call(colocated):
    engine, refit, _ = colocated
    config = SimpleNamespace(deadlines=DeadlineConfig())
    run = SimpleNamespace(sent=-1, updates=0, refit=refit, timer=Timer(), engine=SimpleNamespace(version=0), ranks=Ranks(), config=config)
    for step in range(5):
        grpo.refit_if_stale(run)
        engine.generate("training prompt")
        refit.rest()
        run.updates += step != 2  # one step without signal: nothing was trained, and the engine has dropped its weights all the same
        grpo.refit_if_stale(run)
        engine.generate("held-out prompt")
    assert not engine.illegal
    assert engine.version == str(run.updates)


def test_an_exception_while_sampling_leaves_a_legal_state(colocated):
    engine, refit, _ = colocated
    refit(1)
    refit(2)  # sampling failed and was given up: the next update first sends the engine to sleep
    engine.generate("prompt")
    assert not engine.illegal and engine.version == "2"


@pytest.mark.parametrize("call", ["send", "wake cache", "sleep"])
def test_what_a_sleeping_engine_cannot_do_raises(call):
    state = SleepState("asleep")
    if call == "sleep":
        assert not state.next("sleep")  # repeated: nothing to do
    else:
        with pytest.raises(EngineError, match="only wake weights is possible now"):
            state.next(call)
    assert state.now == "asleep"


def test_weights_that_were_woken_must_be_sent_before_the_cache_wakes():
    state = SleepState("asleep")
    assert state.next("wake weights") and not state.next("wake weights")
    with pytest.raises(EngineError, match="'wake cache' while the engine is 'weights': only send"):
        state.next("wake cache")


def test_an_engine_that_does_not_wake_ends_the_run(colocated):
    engine, refit, _ = colocated
    engine.unknown_tags = {"kv_cache"}
    with pytest.raises(EngineError, match="is 'sleeping' after waking its weights and its cache"):
        refit(1)


def test_the_first_sleep_must_free_the_engines_memory():
    with FakeVLLM() as engine:
        free = [10e9, 60e9]
        first_sleep(EngineClient([engine.url], 5.0), expected=60e9, free_memory=lambda: free.pop(0))
        assert engine.calls[-1][2:4] == ("sleep", {"level": ["1"]})
        with pytest.raises(EngineError, match="0.0 GB became free, of about 60.0 GB .* --enable-sleep-mode"):
            first_sleep(EngineClient([engine.url], 5.0), expected=60e9, free_memory=lambda: 10e9)


@pytest.mark.parametrize("url", ["http://10.0.0.4:8000", "http://node7:8000", "http://0.0.0.0:8000"])
def test_handles_are_sent_to_loopback_only(policy, url):
    with pytest.raises(UserError, match="must be bound to 127.0.0.1"):
        FakeRefit(url, policy, torch.float32, "ipc", DeadlineConfig())


def test_what_left_the_devices_comes_back_bit_for_bit():
    policy, reference = Policy(tiny.llama(hidden=8)), Policy(tiny.llama(hidden=8))
    optimizer = make_optimizer(policy, OptimConfig())
    for p in policy.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    before = [t.clone() for t in training_tensors(policy, optimizer)]
    move = cluster.memory_of(policy, optimizer, reference)
    with FakeVLLM(asleep=True) as engine:
        refit = FakeColocated(engine.url, policy, torch.float32, "ipc", DeadlineConfig(refit=10.0), offload=move)
        refit(1)  # reads the policy after the optimizer's state has left
        tensors = training_tensors(policy, optimizer)
        assert all(t.untyped_storage().size() == 0 for t in [*tensors, *reference.parameters()])
        refit.rest()
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))
    assert all(p.untyped_storage().size() for p in reference.parameters())


# ------------------------------------------------------------------------------------------------ names and tensors


def test_the_names_sent_are_those_of_the_checkpoint(tmp_path):
    for tied in (True, False):
        path = tiny.save_model(tmp_path / str(tied), tied)
        weights = Weights(Policy(tiny.llama(tied)), torch.bfloat16)
        assert set(weights.shapes()) == checkpoint_names(path)
        assert all(t.dtype == torch.bfloat16 for _, t in weights)


@pytest.mark.parametrize("damage", ["missing", "extra", "renamed"])
def test_names_that_differ_from_the_checkpoint_are_refused_with_the_list(tmp_path, policy, damage):
    path = tiny.save_model(tmp_path / "model", hidden=8)
    file = tmp_path / "model" / "model.safetensors"
    stored = load_file(file)
    if damage != "extra":  # the checkpoint lacks what is sent: to the engine that name is unknown
        stored.pop("model.norm.weight")
    if damage != "missing":
        stored["module.model.norm.weight"] = torch.zeros(8)
    save_file(stored, file)
    with FakeVLLM() as engine, pytest.raises(UserError, match="the weights to send are not those of the checkpoint") as refused:
        FakeRefit(engine.url, policy, torch.float32, "gloo", DeadlineConfig(), checkpoint=path)
    assert ("extra: model.norm.weight" in str(refused.value)) == (damage != "extra")
    assert ("missing: module.model.norm.weight" in str(refused.value)) == (damage != "missing")


def test_a_tied_head_may_be_stored_or_not_and_old_buffers_are_no_weights():
    check_names({"embed"}, {"embed", "lm_head"}, {"lm_head": "embed"})
    check_names({"embed"}, {"lm_head"}, {"lm_head": "embed"})
    check_names({"embed"}, {"embed", "layers.0.rotary_emb.inv_freq"}, {}, [r"rotary_emb\.inv_freq"])


def test_an_index_of_several_files_is_read(tmp_path):
    tiny.llama().save_pretrained(tmp_path, max_shard_size="50KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert checkpoint_names(str(tmp_path)) == set(Weights(Policy(tiny.llama()), torch.float32).shapes())


def mixture_of_experts():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=64, hidden_size=16, intermediate_size=32, moe_intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
            head_dim=8, num_experts=3, num_experts_per_tok=2, max_position_embeddings=64, tie_word_embeddings=False,
        )
    ).float()  # fmt: skip


def test_fused_experts_travel_under_the_checkpoints_names_and_shapes(tmp_path):
    model = mixture_of_experts()
    assert stored_differently(model) and not stored_differently(tiny.llama())
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    weights = Weights(Policy(model), torch.float32)
    sent = dict(weights)
    assert "model.layers.1.mlp.experts.2.gate_proj.weight" in sent
    assert sent.keys() == stored.keys() == checkpoint_names(str(tmp_path))
    assert all(torch.equal(sent[name], stored[name]) for name in stored)
    assert list(weights.shapes().items()) == [(name, tuple(t.shape)) for name, t in sent.items()]


def test_a_bucket_is_no_larger_than_asked_unless_one_tensor_is():
    weights = Weights(Policy(tiny.llama()), torch.bfloat16, buffer_bytes=20_000)
    sizes = [[p.numel() * 2 for _, p in bucket] for bucket in weights.buckets()]
    assert len(sizes) > 3
    assert all(sum(s) <= 20_000 or len(s) == 1 for s in sizes)
    assert sum(map(sum, sizes)) == 2 * sum(p.numel() for p in tiny.llama().parameters())
    assert weights.largest() == max(s for bucket in sizes for s in bucket)


def odd_tensors():
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(6, 4, generator=generator)
    return {
        "transposed": base.T, "view of the same storage": base[1:3], "scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4), "bfloat16": base.bfloat16(),
        "integers": torch.arange(5), "larger than a bucket": torch.randn(300, 300, generator=generator), "flags": torch.tensor([True, False]),
    }  # fmt: skip


class Source:
    """What Weights is to the transfer, for tensors as they are. `order`: of iteration, where it should differ from what is announced."""

    def __init__(self, tensors, order=None):
        self.tensors, self.order = tensors, order or list(tensors)

    def metadata(self):
        return [SimpleNamespace(name=n, dtype=t.dtype, shape=tuple(t.shape)) for n, t in self.tensors.items()]

    def __iter__(self):
        return ((n, self.tensors[n]) for n in self.order)


@pytest.fixture
def gloo():
    """Both ends of vLLM's transfer over gloo, in two threads; received: what arrived."""
    pytest.importorskip("vllm")
    import gloo_transfer

    port, received = free_port(), {}
    worker = object.__new__(gloo_transfer.GlooEngine)

    class Client:
        def init_weight_transfer_engine(self, info):
            worker.group = gloo_transfer.join(info["master_address"], info["master_port"], info["rank_offset"], info["world_size"], info["timeout"])

        def start_weight_update(self): ...

        def update_weights(self, info):
            received.update({name: tensor.clone() for name, tensor in worker.receive(gloo_transfer.GlooUpdateInfo(**info))})

        def finish_weight_update(self): ...

    def connect(source):
        info = gloo_transfer.GlooTrainerInitInfo("127.0.0.1", port, 2, 5.0, rank=0)
        return gloo_transfer.GlooTrainerEngine.trainer_init(info, client=Client(), source=source)

    return connect, received


def test_any_tensor_a_model_can_own_arrives_bit_for_bit(gloo):
    connect, received = gloo
    tensors = odd_tensors()
    connect(Source(tensors)).send_weights()
    assert received.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert received[name].dtype == tensor.dtype and received[name].shape == tensor.shape and torch.equal(received[name], tensor), name


def test_an_order_other_than_announced_is_an_error_and_no_hang(gloo):
    connect, _ = gloo
    tensors = odd_tensors()
    engine = connect(Source(tensors, order=[*list(tensors)[1:], list(tensors)[0]]))
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="sending view of the same storage .* announced"):
        engine.send_weights()
    assert time.monotonic() - began < 10


def test_a_rank_waits_for_a_stuck_transfer_no_longer_than_the_deadline(policy):
    with FakeVLLM() as engine:
        refit = FakeRefit(engine.url, policy, torch.float32, "gloo", DeadlineConfig(refit=1.0))
        refit.engine.send_weights = lambda: time.sleep(20)
        began = time.monotonic()
        with pytest.raises(EngineError, match="sending the weights took more than 1 s"):
            refit(1)
        assert time.monotonic() - began < 5


# ------------------------------------------------------------------------------------------------ the engines of a run


def external(engine, monkeypatch, dtype="float32", **changes):
    vllm = pytest.importorskip("vllm")
    monkeypatch.setenv("VLLM_API_KEY", "k")
    served = {
        "model_config": {"dtype": "torch.float32", "logprobs_mode": "processed_logprobs"},
        "weight_transfer_config": {"backend": "gloo"},
    }
    engine.answers |= {
        "version": (200, {"version": changes.get("version", vllm.__version__)}),
        "v1/models": (200, {"data": [{"root": changes.get("model", "m"), "max_model_len": changes.get("length", 100)}]}),
        "server_info": (200, {"vllm_config": served | changes.get("config", {})}),
    }
    plan = cluster.make_plan("vllm", 0, 1, True, cluster.ClusterConfig(engine_urls=(engine.url,)))
    return cluster.start_engines("m", plan, cluster.EngineConfig(), dtype, 100, None, DeadlineConfig(engine_start=3.0))


def test_engines_started_elsewhere_are_found(monkeypatch):
    with FakeVLLM() as engine:
        engines = external(engine, monkeypatch)
        assert engines.urls == [engine.url] and engines.own == [(engine.url, "k")] and engines.servers == []
        assert engines.sampler().url == engine.url


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"version": "0.1"}, "vLLM is 0.1, this run needs"),
        ({"model": "other"}, "model is other, this run needs m"),
        ({"dtype": "bfloat16"}, "dtype is float32, this run needs bfloat16"),
        ({"length": 99}, "takes 99 tokens, this run has up to 100"),
        ({"config": {"weight_transfer_config": None}}, "weight transfer is None, this run needs gloo"),
        ({"config": {"model_config": {"dtype": "torch.float32", "logprobs_mode": "raw_logprobs"}}}, "log-probabilities is raw_logprobs"),
    ],
)
def test_an_engine_that_serves_something_else_is_refused(monkeypatch, changes, sentence):
    with FakeVLLM() as engine, pytest.raises(UserError, match=sentence):
        external(engine, monkeypatch, **changes)


def test_external_engines_need_their_key_in_the_environment(monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    plan = cluster.make_plan("vllm", 0, 1, True, cluster.ClusterConfig(engine_urls=("http://127.0.0.1:9",)))
    with pytest.raises(UserError, match="VLLM_API_KEY"):
        cluster.start_engines("m", plan, cluster.EngineConfig(), "float32", 100, None, DeadlineConfig())


def test_an_external_engine_that_is_not_there_is_an_error_at_the_deadline(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "k")
    plan = cluster.make_plan("vllm", 0, 1, True, cluster.ClusterConfig(engine_urls=(f"http://127.0.0.1:{free_port()}",)))
    with pytest.raises(EngineError, match="did not answer within 1 s .--deadlines.engine-start"):
        cluster.start_engines("m", plan, cluster.EngineConfig(), "float32", 100, None, DeadlineConfig(engine_start=1.0))


def test_every_call_of_a_refit_goes_out_to_all_engines_at_once(policy):
    with ExitStack() as stack, ThreadPoolExecutor():
        engines = [stack.enter_context(FakeVLLM()) for _ in range(4)]
        client = EngineClient([e.url for e in engines], 5.0)
        for engine in engines:
            engine.delays["resume"] = 0.5
        began = time.monotonic()
        client.call("POST", "resume")
        assert time.monotonic() - began < 1.5


def test_two_ranks_send_a_sharded_policy_and_a_failure_ends_both_soon(tmp_path):
    model = tiny.save_model(tmp_path / "model")
    here = Path(__file__).resolve().parent
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port()), str(here / "refit_ranks.py"), model]
    began = time.monotonic()
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "failed as told" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
    assert "update_weights answered 500" in done.stderr
    assert time.monotonic() - began < 90
