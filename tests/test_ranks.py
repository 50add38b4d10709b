"""Several trainer processes: the same run as one, whatever holds the weights, and failures that end all of them soon.

Two gloo processes run everything in ranks_checks.py once; the tests read what they wrote and compare it with one process.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ranks_checks
import tiny
import torch
from safetensors.torch import load_file

import ranks as trainers
from cluster import free_port
from log import read_lines
from policy import PolicyConfig, load_policy, pack, pack_share
from ranks import Ranks, balance
from rollout import Rollout
from sharding import HostMemory
from task import UserError

HERE = Path(__file__).resolve().parent
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def two(model, tmp_path_factory):
    """The folder in which two processes have run every check, with their results."""
    folder = tmp_path_factory.mktemp("two")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port()), HERE / "ranks_checks.py"]
    done = subprocess.run([*command, model, str(folder)], env=ENVIRONMENT, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder, [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def one(model, tmp_path_factory):
    """The same runs by one process; each is trained when it is first asked for."""
    folder = tmp_path_factory.mktemp("one")

    def trained(name):
        if not (folder / name).exists():
            ranks_checks.train(model, folder / name, ranks_checks.RUNS[name], "failing_now_and_then" if name == "failing_step" else "digits")
        return folder / name

    return trained


def numbers(out):
    return [{k: v for k, v in row.items() if not k.startswith("time/") and k != "imbalance"} for row in read_lines(out / "metrics.jsonl")]


def weights(out, step=3, file="model/model.safetensors"):
    """Of all files of a checkpoint that `file` is split into."""
    pattern = file.replace(".safetensors", "*.safetensors")
    return {name: tensor for path in (out / "checkpoints" / f"step_{step}").glob(pattern) for name, tensor in load_file(path).items()}


def largest_difference(a, b):
    assert a.keys() == b.keys()
    return max((a[k] - b[k]).abs().max().item() for k in a)


# ------------------------------------------------------------------------------------------------ the same run


@pytest.mark.parametrize("name", ranks_checks.SPLIT)
def test_two_processes_log_the_numbers_and_learn_the_weights_of_one(name, one, two):
    folder, results = two
    alone = one(ranks_checks.SPLIT[name][0])
    assert results[0][name] == results[1][name] == (["Parameter"] if "ddp" in name else ["DTensor"])
    for a, b in zip(numbers(alone), numbers(folder / name), strict=True):
        assert a.keys() == b.keys()
        for key in a:  # the rounding of a sum in another order, amplified by Adam's division
            assert (a[key] is None) == (b[key] is None), (a["step"], key)
            assert a[key] is None or b[key] == pytest.approx(a[key], rel=2e-3, abs=2e-5), (a["step"], key)
    first = [read_lines(out / "metrics.jsonl")[-3] for out in (alone, folder / name)]  # before any update: the same to float32 rounding
    for key in ("reward", "loss", "grad_norm", "entropy", "mismatch_k3", "trained_tokens", "packed_tokens"):
        if key in first[0]:
            assert first[1][key] == pytest.approx(first[0][key], rel=2e-5, abs=1e-7), key
    assert largest_difference(weights(alone), weights(folder / name)) < 2e-3  # three steps of lr 1e-2
    a, b = (weights(out, file="optimizer.safetensors") for out in (alone, folder / name))
    assert largest_difference({k: v for k, v in a.items() if k.endswith("exp_avg")}, {k: v for k, v in b.items() if k.endswith("exp_avg")}) < 1e-4


def test_rank_zero_writes_what_one_process_writes_and_checkpoints_are_shared(one, two):
    folder, _ = two
    alone, split = ({str(p.relative_to(out)) for p in out.rglob("*")} for out in (one("plain"), folder / "fsdp"))
    assert {name for name in alone ^ split if "/model-0000" not in name} == {
        f"checkpoints/step_3/{name}"  # of the checkpoint each rank writes its share
        for name in ("model/model.safetensors", "model/model.safetensors.index.json", "rank-00001.json", "optimizer.safetensors")
    } | {f"checkpoints/step_3/optimizer-0000{i}-of-00002.safetensors" for i in (1, 2)}
    known = ("step", "index", "sample", "completion", "reward")
    rows = [[{k: r[k] for k in known} for r in read_lines(out / "rollouts.jsonl")] for out in (one("plain"), folder / "fsdp")]
    assert rows[0] == rows[1] and len(rows[0]) == 3 * 5 * 4
    assert len({r["completion"] for r in rows[1] if r["step"] == 1}) > 15  # no two ranks, and no two samples of a group, repeat each other
    assert (one("plain") / "samples.md").read_text() == (folder / "fsdp" / "samples.md").read_text()


def test_the_imbalance_is_a_metric(two):
    folder, _ = two
    assert all(1.0 <= row["imbalance"] < 1.5 for row in read_lines(folder / "fsdp" / "metrics.jsonl")[1:])
    assert all(row["imbalance"] == 2.0 for row in read_lines(folder / "fsdp_lonely" / "metrics.jsonl") if "imbalance" in row)  # one group, two ranks


def test_a_step_in_which_everything_failed_is_skipped_on_all_ranks(two):
    folder, _ = two
    assert [row["empty_steps"] for row in read_lines(folder / "fsdp_failing_step" / "metrics.jsonl")] == [0, 1, 0]


def test_a_sharded_run_resumes_where_it_was_and_a_replicated_one_too(one, two):
    folder, results = two
    assert results[0]["resume"] == pytest.approx([row["reward"] for row in read_lines(one("plain") / "metrics.jsonl")[1:]], rel=2e-3)
    for name in ("parts", "other", "mixed"):
        assert largest_difference(weights(one("plain")), weights(folder / name)) < 2e-3
        assert {v.item() for k, v in weights(folder / name, file="optimizer.safetensors").items() if k.endswith("/step")} == {3.0}


# ------------------------------------------------------------------------------------------------ collectives and shards


def test_metrics_are_reduced_over_the_union_of_names_by_their_kinds(two):
    for result in two[1]:
        assert result["collectives"]["reduced"] == {"mean": 0.75, "sum": 3.0, "max": 1.0, "min": 0.0, "only_on_0": 4.0}
        assert result["collectives"]["one_side_empty"] == 3.0


def test_sums_decisions_errors_and_groups_are_the_same_on_every_rank(two):
    a, b = (result["collectives"] for result in two[1])
    assert a == b
    assert a["sum"] == pytest.approx([0.3, 3.0]) and a["first"] == "from 0" and a["refused"] == "no such file"
    assert a["order"] == [[0, 0], [1, 1], [2, 2], [3, 3]]


def test_a_rank_loads_its_own_half_alone_and_the_halves_are_the_model(two):
    for result in two[1]:
        found = result["shards"]
        assert found["local"] == pytest.approx(found["total"] / 2, rel=0.02)
        assert found["same"] and found["same_buffers"]
        assert result["renamed"] is True and result["uneven"] is True


def test_master_weights_are_float32_under_bfloat16_compute(two):
    assert two[1][0]["shards"]["master_dtypes"] == ["torch.float32"]
    assert 0 < two[1][0]["shards"]["rounding"] < 0.1


def test_shards_gradients_and_moments_leave_the_device_and_come_back_the_same(two):
    for result in two[1]:
        found = result["shards"]
        assert found["taken"] == found["given"] >= 4 * 4 * found["local"]  # parameters, gradients, two moments, float32
        assert found["empty"] == 0 and found["restored"] and found["learned"]


def test_tensors_that_share_memory_leave_once_and_a_second_phase_uses_the_same_buffers():
    host, x = HostMemory(), torch.arange(8.0)
    view, other = x[3:], torch.ones(5, dtype=torch.bfloat16)
    assert host.take([x, view, other]) == 32 + 10 and x.untyped_storage().size() == 0
    assert host.take([x, other]) == 0  # already away
    assert host.give_back() == 42 and x.tolist() == list(range(8)) and view.tolist() == [3, 4, 5, 6, 7] and other.sum() == 5
    buffers = [b.data_ptr() for b in host.buffers.values()]
    x.add_(1)
    host.take([x, other]), host.give_back()
    assert buffers == [b.data_ptr() for b in host.buffers.values()] and x.tolist() == list(range(1, 9)) and host.seconds > 0


# ------------------------------------------------------------------------------------------------ balance


def rollouts(lengths_by_group, prompt=4):
    return [
        Rollout(g, s, [g + 1] * prompt, [7] * n, [True] * n, [-1.0] * n, [0] * n) for g, lengths in enumerate(lengths_by_group) for s, n in enumerate(lengths)
    ]


def test_whole_groups_are_dealt_out_by_work():
    rows = rollouts([[50, 60], [3, 4], [30, 30], [20, 25]])
    shares = []
    for rank in range(2):
        ranks = Ranks(rank, 2)
        ranks.gather = lambda value: [value, value]  # both have as many micro-batches
        batches, imbalance = pack_share(rows, 10_000, ranks, 64)
        shares.append(sorted(r for b in batches for r in b.rows))
        assert imbalance < 1.05
    assert sorted(shares[0] + shares[1]) == list(range(8))
    for share in shares:
        assert all(row ^ 1 in share for row in share)  # both members of a group


def test_squared_lengths_count_where_attention_is_the_work():
    long, short = [[600]], [[100] for _ in range(6)]
    assert balance([1.0], 2) == [[0], []]
    ranks = Ranks(0, 2)
    ranks.gather = lambda value: [value]
    share, _ = pack_share(rollouts(long + short), 10_000, ranks, hidden=1)
    assert [r for b in share for r in b.rows] == [0]  # alone against all the short ones


def test_a_rank_with_fewer_micro_batches_adds_idle_ones_that_hold_no_row():
    ranks = Ranks(1, 2)
    ranks.gather = lambda value: [3, value]
    batches, _ = pack_share(rollouts([[5, 5], [4, 4]]), 10_000, ranks, 64)
    assert len(batches) == 3 and [len(b.rows) for b in batches] == [2, 0, 0] and len(batches[1].target_ids) == 0


def test_an_idle_micro_batch_gives_every_parameter_a_zero_gradient(model):
    policy = load_policy(model, PolicyConfig(), 1.0, torch.device("cpu"))
    (batch,) = pack([Rollout(-1, 0, [0])], 10)
    logprobs, entropy = policy(batch)
    (logprobs.sum() + entropy.sum()).backward()
    assert all(p.grad is not None and not p.grad.any() for p in policy.parameters())


# ------------------------------------------------------------------------------------------------ failures


def fail(kind):
    """Two processes without a launcher that would end them. Returns their outputs and the seconds from ready to gone."""
    port, started = str(free_port()), time.time()
    common = {**ENVIRONMENT, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        subprocess.Popen(
            [sys.executable, HERE / "ranks_failure.py", kind], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [p.communicate(timeout=50) for p in processes]
    finally:
        for p in processes:
            p.kill()
    ready = max(float(out.split()[1]) for out, _ in outputs)
    return [p.returncode for p in processes], [error for _, error in outputs], time.time() - max(ready, started)


def test_a_rank_that_raises_shows_its_own_traceback_and_ends_the_one_that_waits_for_it():
    codes, (waiting, raising), seconds = fail("raise")
    assert all(codes) and seconds < 12
    assert "KeyError: 'the cause'" in raising and "Traceback" in raising
    assert "rank 1 failed: KeyError: 'the cause'" in waiting and "Traceback" not in waiting


def test_an_error_of_the_user_is_a_sentence_and_ends_a_rank_that_is_in_no_collective():
    codes, (busy, raising), seconds = fail("user")
    assert all(codes) and seconds < 12
    assert raising.splitlines()[0] == "error: --flag 3: give 4" and "Traceback" not in raising  # torch may add that rank 0, which kept the store, has gone
    assert "rank 0 stops in phase 'reading': rank 1 failed: --flag 3: give 4" in busy


def test_a_rank_that_does_not_come_is_named_with_phase_and_deadline_and_ended():
    codes, (waiting, late), seconds = fail("late")
    assert all(codes) and seconds < 20
    assert "rank 0 of 2, phase 'training'" in waiting and "--deadlines.collective" in waiting and "1" in waiting.split("Ranks")[-1]
    assert "rank 1 stops in phase 'reading': rank 0 failed: RankError" in late


# ------------------------------------------------------------------------------------------------ launchers


def launched(*flags):
    """The environment that accelerate launch gives a process."""
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    arguments = launch_command_parser().parse_args([*flags, "--mixed_precision", "no", "--dynamo_backend", "no", "--num_machines", "1", "grpo.py"])
    return prepare_simple_launcher_cmd_env(arguments)[1]


def test_several_cpu_processes_asked_of_accelerate_are_refused_with_the_command_that_starts_them():
    with pytest.raises(UserError, match="torchrun --nproc_per_node"):
        trainers.refuse_launchers(launched("--cpu", "--num_processes", "2"))
    trainers.refuse_launchers(launched("--cpu", "--num_processes", "1"))
    trainers.refuse_launchers({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h"})  # torchrun


@pytest.mark.parametrize("name, kind", [("ACCELERATE_USE_FSDP", "FSDP"), ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed")])
def test_sharding_by_accelerate_is_refused(name, kind):
    with pytest.raises(UserError, match=f"{kind}.*--policy.shard"):
        trainers.start_ranks(1.0, {name: "true"})


def test_offloading_without_shards_is_refused(model):
    with pytest.raises(UserError, match="--policy.offload needs --policy.shard"):
        load_policy(model, PolicyConfig(offload=True), 1.0, torch.device("cpu"))
