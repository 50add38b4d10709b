"""The device plan is a pure function: every placement, every refusal with its arithmetic and its command, without any device."""

import subprocess
import sys
from pathlib import Path

import pytest

from cluster import ClusterConfig, EngineConfig, Plan, check_correction, engine_command, engine_environment, make_plan, visible_devices
from config import check, parse
from task import UserError

ROOT = Path(__file__).resolve().parent.parent


def plan(devices, local, nodes=1, engine="vllm", tensor_parallel=1, environment=None, quantization="", **cluster):
    seen = {"LOCAL_WORLD_SIZE": str(local), "GROUP_WORLD_SIZE": str(nodes)} | (environment or {})
    config = EngineConfig(tensor_parallel=tensor_parallel, quantization=quantization)
    return make_plan(engine, devices, local * nodes, True, ClusterConfig(**cluster), config, seen)


def roles(made: Plan):
    return [row[1:] for row in made.rows() if row[0] == "0"]


def test_one_node_of_8_is_shared_by_default():
    made = plan(8, 8)
    assert (made.placement, made.backend, made.engines) == ("colocated", "ipc", tuple((i,) for i in range(8)))
    assert roles(made) == [("0-7", "train and generate (vLLM) in turn")]


def test_a_reward_model_of_2_leaves_6_of_8_to_share():
    made = plan(8, 6, reward_devices=2)
    assert made.placement == "colocated" and len(made.engines) == 6
    assert roles(made) == [("0-5", "train and generate (vLLM) in turn"), ("6-7", "reward model")]


def test_2_of_8_that_generate_leave_6_that_train():
    made = plan(8, 6, generation_devices=2)
    assert (made.placement, made.backend, made.engines) == ("disaggregated", "nccl", ((6,), (7,)))
    assert roles(made) == [("0-5", "train"), ("6-7", "generate (vLLM)")]


def test_4_that_generate_and_a_reward_model_of_2_leave_2_of_8_that_train():
    made = plan(8, 2, generation_devices=4, reward_devices=2)
    assert roles(made) == [("0-1", "train"), ("2-3", "reward model"), ("4-7", "generate (vLLM)")]


@pytest.mark.parametrize("cluster", [{"generation_devices": 8}, {"reward_devices": 8}, {"generation_devices": 5, "reward_devices": 4}])
def test_nothing_left_for_training_is_refused_with_the_sum(cluster):
    with pytest.raises(UserError, match=r"no device is left for training on a node: 8 devices - \d .* - \d .* = (0|-1)"):
        plan(8, 1, **cluster)


def test_a_reward_model_on_a_node_of_its_own_is_not_subtracted():
    assert roles(plan(8, 4, generation_devices=4)) == [("0-3", "train"), ("4-7", "generate (vLLM)")]
    with pytest.raises(UserError, match="serve the reward model on a node outside the launch"):
        plan(8, 4, nodes=2, reward_devices=4)


def test_3_nodes_train_and_a_fourth_generates_by_url():
    made = plan(8, 8, nodes=3, engine_urls=("http://10.0.0.4:8000",))
    assert (made.placement, made.backend, made.nodes, made.processes, made.engines) == ("external", "nccl", 3, 8, ())
    assert [row for row in made.rows()] == [
        ("0", "0-7", "train"),
        ("1", "0-7", "train"),
        ("2", "0-7", "train"),
        ("-", "http://10.0.0.4:8000", "generate (vLLM)"),
    ]


def test_the_table_lists_every_node():
    assert plan(8, 6, nodes=2, generation_devices=2).table().splitlines() == [
        "node  device  role",
        "   0  0-5     train",
        "   0  6-7     generate (vLLM)",
        "   1  0-5     train",
        "   1  6-7     generate (vLLM)",
        "weights: by NCCL, from the first trainer to every engine",
    ]


def test_8_processes_beside_2_generation_devices_are_refused_with_the_command_that_starts_6():
    with pytest.raises(UserError) as refused:
        plan(8, 8, generation_devices=2)
    text = str(refused.value)
    assert "8 trainer processes, but 6 of its devices train: 8 devices - 2 (--cluster.generation-devices) - 0 (--cluster.reward-devices) = 6" in text
    assert "    accelerate launch --num_processes 6 grpo.py" in text
    with pytest.raises(UserError, match=r"accelerate launch --num_processes 12 --num_machines 2 --machine_rank RANK --main_process_ip FIRST_NODE"):
        plan(8, 8, nodes=2, generation_devices=2)


def test_one_process_on_8_devices_is_refused_with_the_command_that_starts_8():
    with pytest.raises(UserError, match="--num_processes 8 grpo.py"):
        make_plan("vllm", 8, 1, True)


def test_nodes_that_run_different_numbers_of_processes_are_refused():
    with pytest.raises(UserError, match="every node must run as many"):
        make_plan("vllm", 8, 14, True, environment={"LOCAL_WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "2"})


def test_tensor_parallel_engines_take_neighbouring_devices_and_must_fit():
    assert plan(8, 4, generation_devices=4, tensor_parallel=2).engines == ((4, 5), (6, 7))
    assert plan(8, 8, tensor_parallel=4).engines == ((0, 1, 2, 3), (4, 5, 6, 7))
    with pytest.raises(UserError, match="--engine.tensor-parallel 2 does not divide the 3 devices"):
        plan(8, 5, generation_devices=3, tensor_parallel=2)


def test_the_policy_that_samples_itself_takes_no_engine_devices():
    assert roles(plan(2, 2, engine="hf")) == [("0-1", "train, generate (the policy itself)")]
    assert roles(plan(2, 1, engine="hf")) == [("0", "train, generate (the policy itself)")]
    with pytest.raises(UserError, match="--num_processes 2"):
        plan(2, 4, engine="hf")
    for cluster in ({"generation_devices": 1}, {"engine_urls": ("http://a:1",)}):
        with pytest.raises(UserError, match="--engine hf samples with the policy itself"):
            plan(2, 1, engine="hf", **cluster)


@pytest.mark.parametrize(
    "cluster, sentence",
    [
        ({"generation_devices": 1}, "--cluster.generation-devices 1, but this machine has no CUDA device"),
        ({"reward_devices": 1}, "--cluster.reward-devices 1, but this machine has no CUDA device"),
        ({"generation_devices": -1}, "--cluster.generation-devices -1: must be at least 0"),
        ({"engine_urls": ("10.0.0.4:8000",)}, "expected http://HOST:PORT"),
        ({"engine_urls": ("http://a:1", "http://a:1")}, "names an engine twice"),
        ({"refit_buffer_gb": 0.0}, "--cluster.refit-buffer-gb 0.0: must be above 0"),
        ({"quantization": "fp8"}, "--engine.quantization fp8 needs CUDA"),
        ({"tensor_parallel": 0}, "--engine.tensor-parallel 0"),
    ],
)
def test_settings_that_cannot_work_on_a_cpu_are_refused(cluster, sentence):
    with pytest.raises(UserError, match=sentence):
        plan(0, 1, **cluster)


def test_engines_here_and_elsewhere_exclude_each_other():
    with pytest.raises(UserError, match="give one of the two"):
        plan(8, 6, generation_devices=2, engine_urls=("http://a:1",))


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_refused_where_memory_is_shared_and_only_there(variable):
    environment = {variable: "max_split_size_mb:64, expandable_segments: True"}
    with pytest.raises(UserError, match=f"{variable} has expandable_segments:True"):
        plan(8, 8, environment=environment)
    assert plan(8, 6, generation_devices=2, environment=environment).placement == "disaggregated"
    assert plan(8, 8, environment={variable: "expandable_segments:False"}).placement == "colocated"


def test_fp8_generation_needs_a_correction():
    with pytest.raises(UserError, match="--engine.quantization fp8 .* --loss.correction"):
        check_correction(EngineConfig(quantization="fp8"), "none")
    check_correction(EngineConfig(quantization="fp8"), "truncate")
    flags = ["--model", "Qwen/Qwen2.5-7B", "--engine.quantization", "fp8"]
    with pytest.raises(UserError, match="--loss.correction"):
        check(parse(flags, ""))
    check(parse([*flags, "--loss.correction", "truncate"], ""))


def test_device_indices_count_within_what_the_parent_may_see():
    assert visible_devices("2,3", [1]) == "3"
    assert visible_devices("GPU-aaa, GPU-bbb,GPU-ccc", [1, 2]) == "GPU-bbb,GPU-ccc"
    assert visible_devices(None, [6, 7]) == "6,7"
    with pytest.raises(UserError, match="has 2 devices, and the plan needs index 2"):
        visible_devices("2,3", [0, 2])
    parent = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1", "CUDA_VISIBLE_DEVICES": "2,3"}
    child = engine_environment(parent, "k", EngineConfig(), cpu=False, devices=[1], backend="nccl")
    assert child["CUDA_VISIBLE_DEVICES"] == "3" and not {"RANK", "WORLD_SIZE", "MASTER_PORT"} & set(child)


def test_only_a_server_that_is_sent_handles_unpickles_what_it_is_sent():
    inherited = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    for backend, allowed in (("ipc", True), ("nccl", False), ("gloo", False)):
        assert ("VLLM_ALLOW_INSECURE_SERIALIZATION" in engine_environment(inherited, "k", EngineConfig(), False, backend=backend)) == allowed


def test_each_placement_starts_its_engine_with_the_flags_it_needs():
    def command(made, **config):
        return " ".join(engine_command("m", 1, made, EngineConfig(**config), 64, "bfloat16", "gloo_transfer.WorkerExtension"))

    colocated, apart, cpu = command(plan(8, 8)), command(plan(8, 6, generation_devices=2), tensor_parallel=2, quantization="fp8"), command(plan(0, 1))
    for each in (colocated, apart, cpu):
        assert "--host 127.0.0.1" in each and "--enable-scale-out" in each and "--logprobs-mode processed_logprobs" in each
    assert "--enable-sleep-mode" in colocated and '{"backend": "ipc"}' in colocated and "--gpu-memory-utilization 0.6" in colocated
    assert "--enable-sleep-mode" not in apart and '{"backend": "nccl"}' in apart and "--tensor-parallel-size 2" in apart and "--quantization fp8" in apart
    assert "--enforce-eager" in cpu and "--worker-extension-cls gloo_transfer.WorkerExtension" in cpu and "--block-size 32" in cpu
    assert "worker-extension" not in colocated and "worker-extension" not in apart


def test_further_arguments_for_the_server_are_passed_on():
    config = parse(["--model", "m", "--engine.extra=--max-num-batched-tokens 4096 --seed 3"], "").engine_config
    assert engine_command("m", 1, plan(0, 1), config, 64, "float32", "x")[-4:] == ["--max-num-batched-tokens", "4096", "--seed", "3"]


def test_the_api_key_is_no_setting_so_it_is_written_nowhere():
    assert not [name for name in (*vars(ClusterConfig()), *vars(EngineConfig())) if "key" in name]


def test_dry_run_prints_the_plan(tmp_path):
    command = [sys.executable, "grpo.py", "--dry-run", "--model", "Qwen/Qwen2.5-1.5B", "--task", "arith", "--engine", "hf"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, env={"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("node  device  role\n   0  cpu     train, generate (the policy itself)\nweights: the policy samples itself, nothing to send\n")
