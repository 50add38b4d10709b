"""Where things run: the device plan, and vLLM's servers from start to end. The weights' way to them is refit.py.

    python cluster.py serve --model Qwen/Qwen2.5-7B --host 10.0.0.7 --port 8000      # an engine for --cluster.engine-urls

    start    keeper.py leads a process group with vLLM's own server in it: free port, loopback, an API key, a scrubbed environment
    watch    whoever waits for the engine also looks whether it lives; its last words become the error
    stop     the whole group ends with the trainer, however the trainer ends

The control routes of vLLM are not guarded by its API key, so an engine is bound to loopback and the machine must be single-tenant;
engines of other nodes belong on a private network.
"""

import importlib.util
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

import sharding
from policy import Policy
from ranks import Ranks
from refit import ColocatedRefit, EngineClient, Refit, address_towards, first_sleep, free_port
from rollout import Balanced, DeadlineConfig, Engine, EngineError, VLLMEngine
from task import UserError

ROOT = Path(__file__).resolve().parent


@dataclass
class EngineConfig:
    """vLLM's settings. Anything else it knows can be given with --engine.extra."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of the engine's weights and of the wire; auto: as the policy computes
    quantization: str = ""  # fp8: weights and products of the engine alone, on CUDA; needs a --loss.correction. off: ""
    max_num_seqs: int = 256  # sequences decoded at once; at least --samples-per-prompt
    gpu_memory_utilization: float = 0.6  # share of a GPU's memory for vLLM's weights and cache
    cpu_cache_gb: int = 2  # key-value cache on CPU
    block_size: int = 0  # tokens per cache block; 0: 32 on CPU (its default of 128 shares no shorter prompt), vLLM's own on CUDA
    tensor_parallel: int = 1  # GPUs per engine
    hf_batch: int = 64  # sequences sampled at once where the policy samples itself (--engine hf)
    extra: str = ""  # further arguments for vLLM's server, in one word: --engine.extra="--max-num-batched-tokens 4096"


@dataclass
class ClusterConfig:
    """Which devices train and which generate. On CUDA without any of these every device does both, in turn (colocated)."""

    generation_devices: int = 0  # the last so many CUDA devices of each node generate and do not train; 0: all do both
    reward_devices: int = 0  # so many devices, before those, are left to a reward model's server; for runs on one node
    engine_urls: tuple[str, ...] = ()  # engines started elsewhere by `python cluster.py serve`; their API key is in the variable VLLM_API_KEY
    refit_buffer_gb: float = 1.0  # weights gathered and sent at once; raised to the largest tensor


# ------------------------------------------------------------------------------------------------ the plan


@dataclass(frozen=True)
class Plan:
    """Which devices of each node train, which generate, and how the engines get their weights. All nodes are alike."""

    engine: str  # vllm | hf
    device: str  # cpu | cuda
    placement: str  # cpu | self | colocated | disaggregated | external
    backend: str  # gloo | ipc | nccl | none
    nodes: int = 1
    processes: int = 1  # trainer processes of a node; on CUDA one for each of its first devices
    engines: tuple[tuple[int, ...], ...] = ()  # the device indices of each engine that a node starts; on CPU one engine without any
    reward: tuple[int, ...] = ()  # device indices left to a reward model
    urls: tuple[str, ...] = ()  # engines started elsewhere

    def rows(self) -> list[tuple[str, str, str]]:
        """(node, device, role), neighbours of one role in one row."""
        generating = {device for engine in self.engines for device in engine}
        alone = "train, generate (the policy itself)" if self.engine == "hf" else "train"
        roles: list[tuple[str, str]] = []
        if self.device == "cpu":
            roles = [("cpu", f"{alone} ({self.processes} processes)" if self.processes > 1 else alone)]
            roles += [("cpu", "generate (vLLM)")] * len(self.engines)
        else:
            for i in range(max([self.processes - 1, *generating, *self.reward]) + 1):
                both = "train and generate (vLLM) in turn" if i in generating else alone
                role = "reward model" if i in self.reward else both if i < self.processes else "generate (vLLM)"
                if roles and roles[-1][1] == role:
                    roles[-1] = (f"{roles[-1][0].split('-')[0]}-{i}", role)
                else:
                    roles.append((str(i), role))
        own = [(str(node), device, role) for node in range(self.nodes) for device, role in roles]
        return own + [("-", url, "generate (vLLM)") for url in self.urls]

    def table(self) -> str:
        """What to print: node, device, role; and how weights travel."""
        rows = [("node", "device", "role"), *self.rows()]
        width = max(len(device) for _, device, _ in rows)
        return "\n".join([*(f"{node:>4}  {device:<{width}}  {role}" for node, device, role in rows), f"weights: {WEIGHTS_BY[self.backend]}"])


WEIGHTS_BY = {
    "none": "the policy samples itself, nothing to send",
    "gloo": "by gloo, between processes",
    "ipc": "by CUDA IPC, on the same device; the engine sleeps while the policy trains",
    "nccl": "by NCCL, from the first trainer to every engine",
}
VISIBLE = "CUDA_VISIBLE_DEVICES"


def make_plan(
    engine: str, cuda_devices: int, processes: int, vllm_installed: bool, cluster: ClusterConfig = ClusterConfig(),
    config: EngineConfig = EngineConfig(), environment: Mapping[str, str] = {},
) -> Plan:  # fmt: skip
    """The device plan, a pure function of what was asked for and what there is.

    Args:
        cuda_devices: visible on this node.
        processes: trainer processes in all (WORLD_SIZE).
        environment: of this process, for what launchers say (LOCAL_WORLD_SIZE, GROUP_WORLD_SIZE) and the allocator's settings.

    >>> make_plan("auto", 0, 1, vllm_installed=True).rows()
    [('0', 'cpu', 'train'), ('0', 'cpu', 'generate (vLLM)')]
    >>> six_and_two = make_plan("auto", 8, 6, True, ClusterConfig(generation_devices=2), environment={"LOCAL_WORLD_SIZE": "6"})
    >>> print(six_and_two.table())
    node  device  role
       0  0-5     train
       0  6-7     generate (vLLM)
    weights: by NCCL, from the first trainer to every engine

    Raises:
        UserError: what was asked for does not fit what there is; the sentence has the arithmetic and the command that would.
    """
    if engine == "vllm" and not vllm_installed and not cluster.engine_urls:
        raise UserError("--engine vllm, but vLLM is not installed: pip install -r requirements.txt, or --engine hf")
    chosen = engine if engine != "auto" else "vllm" if vllm_installed else "hf"
    local = int(environment.get("LOCAL_WORLD_SIZE", processes))
    nodes = int(environment.get("GROUP_WORLD_SIZE", max(1, processes // local)))
    if processes != nodes * local:
        raise UserError(f"{processes} trainer processes on {nodes} nodes, {local} on this one: every node must run as many")
    refuse_impossible(chosen, cuda_devices, nodes, cluster, config, environment)
    if not cuda_devices:
        if chosen == "hf":
            return Plan("hf", "cpu", "self", "none", nodes, local)
        if cluster.engine_urls:
            return Plan("vllm", "cpu", "external", "gloo", nodes, local, urls=cluster.engine_urls)
        return Plan("vllm", "cpu", "cpu", "gloo", nodes, local, engines=((),))

    generating, size = cluster.generation_devices, config.tensor_parallel
    training = cuda_devices - generating - cluster.reward_devices
    sum_ = f"{cuda_devices} devices - {generating} (--cluster.generation-devices) - {cluster.reward_devices} (--cluster.reward-devices) = {training}"
    if training < 1:
        raise UserError(f"no device is left for training on a node: {sum_}")
    if local > training or (local < training and chosen != "hf"):
        machines = f" --num_machines {nodes} --machine_rank RANK --main_process_ip FIRST_NODE --main_process_port 29500" if nodes > 1 else ""
        raise UserError(
            f"this node runs {local} trainer process{'es' if local > 1 else ''}, but {training} of its devices train: {sum_}. Start it with\n"
            f"    accelerate launch --num_processes {training * nodes}{machines} grpo.py ...\n"
            f"or hide devices with {VISIBLE}"
        )
    reward = tuple(range(training, training + cluster.reward_devices))
    if chosen == "hf":
        return Plan("hf", "cuda", "self", "none", nodes, local, reward=reward)
    if cluster.engine_urls:
        return Plan("vllm", "cuda", "external", "nccl", nodes, local, reward=reward, urls=cluster.engine_urls)
    own = range(cuda_devices - generating, cuda_devices) if generating else range(training)
    if len(own) % size:
        raise UserError(f"--engine.tensor-parallel {size} does not divide the {len(own)} devices that generate on a node")
    engines = tuple(tuple(own[i : i + size]) for i in range(0, len(own), size))
    if generating:
        return Plan("vllm", "cuda", "disaggregated", "nccl", nodes, local, engines, reward)
    return Plan("vllm", "cuda", "colocated", "ipc", nodes, local, engines, reward)


def refuse_impossible(engine: str, cuda_devices: int, nodes: int, cluster: ClusterConfig, config: EngineConfig, environment: Mapping[str, str]) -> None:
    """Raises UserError for settings that exclude each other, whatever the number of devices."""
    for name in ("generation_devices", "reward_devices"):
        value, flag = getattr(cluster, name), f"--cluster.{name.replace('_', '-')}"
        if value < 0:
            raise UserError(f"{flag} {value}: must be at least 0")
        if value and not cuda_devices:
            raise UserError(f"{flag} {value}, but this machine has no CUDA device")
    if config.tensor_parallel < 1:
        raise UserError(f"--engine.tensor-parallel {config.tensor_parallel}: must be at least 1")
    if cluster.refit_buffer_gb <= 0:
        raise UserError(f"--cluster.refit-buffer-gb {cluster.refit_buffer_gb}: must be above 0")
    if engine == "hf" and (cluster.generation_devices or cluster.engine_urls):
        raise UserError("--engine hf samples with the policy itself: leave out --cluster.generation-devices and --cluster.engine-urls, or use --engine vllm")
    if cluster.generation_devices and cluster.engine_urls:
        raise UserError("--cluster.generation-devices and --cluster.engine-urls: engines run here or elsewhere, give one of the two")
    if cluster.reward_devices and nodes > 1:
        raise UserError(
            f"--cluster.reward-devices is for runs on one node, and there are {nodes}: serve the reward model on a node outside the launch"
            " and give its URL to the task"
        )
    for url in cluster.engine_urls:
        if not re.fullmatch(r"http://[^/\s]+:\d+/?", url):
            raise UserError(f"--cluster.engine-urls {url}: expected http://HOST:PORT")
    if len(set(cluster.engine_urls)) < len(cluster.engine_urls):
        raise UserError("--cluster.engine-urls names an engine twice")
    if config.quantization and not cuda_devices:
        raise UserError(f"--engine.quantization {config.quantization} needs CUDA")
    colocated = engine == "vllm" and cuda_devices and not cluster.generation_devices and not cluster.engine_urls
    for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if colocated and "expandable_segments:true" in environment.get(variable, "").replace(" ", "").lower():
            raise UserError(
                f"{variable} has expandable_segments:True, with which memory shared between trainer and engine (colocated) is opened about 9 times"
                f" slower: unset it, or separate the devices with --cluster.generation-devices"
            )


def check_correction(config: EngineConfig, correction: str) -> None:
    """Raises UserError where the engine samples with other numbers than the trainer scores, and nothing makes up for it."""
    if config.quantization and correction == "none":
        raise UserError(
            f"--engine.quantization {config.quantization} samples from a distribution that is not the trainer's:"
            " give a --loss.correction (truncate, for example), or leave it out"
        )


def vllm_installed() -> bool:
    return importlib.util.find_spec("vllm") is not None


def visible_devices(inherited: str | None, indices: Sequence[int]) -> str:
    """The engine's CUDA_VISIBLE_DEVICES: indices count within what this process may see itself, which may be UUIDs.

    >>> visible_devices("2,3", [1]), visible_devices(None, [6, 7]), visible_devices("GPU-8a,GPU-9b", [0])
    ('3', '6,7', 'GPU-8a')
    """
    if inherited is None:
        return ",".join(map(str, indices))
    names = [name.strip() for name in inherited.split(",") if name.strip()]
    if any(i >= len(names) for i in indices):
        raise UserError(f"{VISIBLE}={inherited} has {len(names)} devices, and the plan needs index {max(indices)}")
    return ",".join(names[i] for i in indices)


# ------------------------------------------------------------------------------------------------ the server process

INHERITED_FROM_LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "ACCELERATE_", "OMP_", "NCCL_ASYNC")
UNPICKLES = "VLLM_ALLOW_INSECURE_SERIALIZATION"  # lets /update_weights run code that it is sent


def engine_environment(
    inherited: Mapping[str, str], api_key: str, config: EngineConfig, cpu: bool, devices: Sequence[int] = (), backend: str = ""
) -> dict[str, str]:
    """A child's environment: ours without what launchers put there for us, plus what vLLM's server needs.

    Args:
        devices: indices within our own visible devices; empty: as inherited.
        backend: only ipc needs the server to unpickle what it is sent.

    >>> sorted(engine_environment({"RANK": "1", "HOME": "/h", "MASTER_PORT": "2"}, "k", EngineConfig(), cpu=False))
    ['DO_NOT_TRACK', 'HOME', 'PYTHONPATH', 'VLLM_API_KEY', 'VLLM_NO_USAGE_STATS', 'VLLM_SERVER_DEV_MODE']
    """
    kept = {k: v for k, v in inherited.items() if not k.startswith(INHERITED_FROM_LAUNCHERS) and k != UNPICKLES}
    kept |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_API_KEY": api_key, "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    kept["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [inherited.get("PYTHONPATH")])])  # the worker imports gloo_transfer
    if devices:
        kept[VISIBLE] = visible_devices(inherited.get(VISIBLE), devices)
    if backend == "ipc":
        kept[UNPICKLES] = "1"
    if cpu:
        kept |= {"OMP_WAIT_POLICY": "PASSIVE", "VLLM_CPU_KVCACHE_SPACE": str(config.cpu_cache_gb), "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
    return kept


def engine_command(
    model: str, port: int, plan: Plan, config: EngineConfig, max_model_len: int, dtype: str, extension: str, host: str = "127.0.0.1"
) -> list[str]:
    """vLLM's own API server, as a module: `vllm serve` does not start under the CPU build."""
    block_size = config.block_size or (32 if plan.device == "cpu" else 0)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host", host, "--port", str(port)]
    command += ["--dtype", dtype, "--max-model-len", str(max_model_len), "--max-num-seqs", str(config.max_num_seqs)]
    command += ["--logprobs-mode", "processed_logprobs"]  # log-probabilities of the distribution sampled from, temperature included
    command += ["--enable-scale-out", "--weight-transfer-config", f'{{"backend": "{plan.backend}"}}']
    command += ["--worker-extension-cls", extension] if plan.backend == "gloo" else []
    command += ["--tensor-parallel-size", str(config.tensor_parallel), "--generation-config", "vllm"]  # sampling settings are ours alone
    command += ["--block-size", str(block_size)] if block_size else []
    if plan.device == "cpu":
        # a prompt prefilled in two parts rewinds its request's random generator, which a CPU generator cannot: the server would die
        command += ["--enforce-eager", "--no-enable-chunked-prefill", "--max-num-batched-tokens", str(max(2048, max_model_len))]
    else:
        command += ["--gpu-memory-utilization", str(config.gpu_memory_utilization)]
    command += ["--enable-sleep-mode"] if plan.placement == "colocated" else []
    command += ["--quantization", config.quantization] if config.quantization else []
    return [*command, *shlex.split(config.extra)]


class Server:
    """A server in a process group of its own, kept by keeper.py. Use as a context manager, or call stop().

    Args:
        command: given the port, the command to run.
        log: file for everything it prints.
    """

    def __init__(self, command: Any, environment: dict[str, str], log: Path, host: str = "127.0.0.1", port: int = 0):
        self.port, self.log = port or free_port(), log
        self.url = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{self.port}"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(ROOT / "keeper.py"), str(os.getpid()), *command(self.port)],
                env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def last_words(self, lines: int = 12) -> str:
        """The first error in its log, which is the cause, and the last lines, without what its libraries say about their own clean-up."""
        with self.log.open(errors="replace") as file:
            text = [line.rstrip() for line in file if not re.search(r"leaked|nanobind|resource_tracker", line)]
        cause = [line for line in text if re.search(r"\w(Error|Exception): ", line) and "WARNING" not in line][:1]
        return "\n".join([line for line in cause if line not in text[-lines:]] + text[-lines:])

    def check_alive(self) -> None:
        """Raises EngineError with the last lines it printed, if it is gone."""
        if self.process.poll() is not None:
            raise EngineError(f"the engine ended (exit code {self.process.returncode}). Its last lines, from {self.log}:\n{self.last_words()}")

    def wait_until_healthy(self, deadline: float) -> None:
        """Poll GET /health until it answers 200.

        Raises:
            EngineError: it ended, or did not answer in time.
        """
        try:
            wait_for_health(self.url, deadline, self.check_alive)
        except TimeoutError:
            self.stop()
            raise EngineError(f"the engine did not answer within {deadline:.0f} s (--deadlines.engine-start). Its last lines:\n{self.last_words()}") from None

    def stop(self) -> None:
        """End the whole group; returns when it is gone."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(timeout=15)


def wait_for_health(url: str, deadline: float, check_alive: Callable[[], None]) -> None:
    """Poll GET /health until it answers 200. Raises TimeoutError."""
    import urllib.request

    give_up = time.monotonic() + deadline
    while time.monotonic() < give_up:
        check_alive()
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
                if response.status == 200:
                    return
        except OSError:
            time.sleep(0.25)
    raise TimeoutError(f"{url} did not answer within {deadline:.0f} s")


# ------------------------------------------------------------------------------------------------ engines, from start to end


def start_vllm(
    model: str, plan: Plan, config: EngineConfig, dtype: str, max_model_len: int, log: Path, extension: str = "gloo_transfer.WorkerExtension",
    devices: Sequence[int] = (), host: str = "127.0.0.1", port: int = 0, key: str = "",
) -> tuple[Server, str]:  # fmt: skip
    """Start one server without waiting for it.

    Returns:
        The server and its API key.
    """
    key = key or secrets.token_hex(16)
    environment = engine_environment(os.environ, key, config, plan.device == "cpu", devices, plan.backend)
    server = Server(lambda port: engine_command(model, port, plan, config, max_model_len, dtype, extension, host), environment, log, host, port)
    return server, key


@dataclass
class Engines:
    """The engines of a run as one rank knows them: all of them, which are updated together, and its own, which it samples from."""

    plan: Plan
    urls: list[str]
    own: list[tuple[str, str]]  # (url, API key)
    servers: list[Server]  # those that this process started and will stop
    deadlines: DeadlineConfig
    ranks: Ranks
    tensor_parallel: int = 1

    def wait_until_healthy(self) -> None:
        """Raises EngineError when one ended or did not answer in time."""
        give_up = time.monotonic() + self.deadlines.engine_start
        for server in self.servers:
            server.wait_until_healthy(max(1.0, give_up - time.monotonic()))
        for url, _ in self.own:  # also those that others started
            try:
                wait_for_health(url, max(1.0, give_up - time.monotonic()), self.check_alive)
            except TimeoutError as error:
                raise EngineError(f"{error} (--deadlines.engine-start)") from None

    def check_alive(self) -> None:
        for server in self.servers:
            server.check_alive()

    def stop(self) -> None:
        for server in self.servers:
            server.stop()

    def sampler(self) -> Engine:
        """What `generate` is asked of: requests go to the least busy engine, those of one prompt to the same."""
        each = [VLLMEngine(url, key, self.deadlines.request, self.check_alive) for url, key in self.own]
        return each[0] if len(each) == 1 else Balanced(each, first=self.ranks.rank % len(each))

    def refit(
        self, policy: Policy, optimizer: torch.optim.Optimizer, dtype: torch.dtype, settings: ClusterConfig, model: str, reference: Policy | None = None
    ) -> Refit:
        """The refit of this placement. model: its checkpoint, for the names that must be sent."""

        def barrier(phase: str) -> None:
            self.ranks.barrier(phase, self.deadlines.refit)

        arguments = (policy, dtype, self.plan.backend, self.deadlines, settings.refit_buffer_gb)
        if self.plan.placement == "colocated":  # each engine hears from the first rank on its devices
            rank, offload = self.ranks.local_rank % self.tensor_parallel, memory_of(policy, optimizer, reference)
            return ColocatedRefit([self.own[0][0]], *arguments, rank=rank, barrier=barrier, checkpoint=model, offload=offload)
        return Refit(self.urls, *arguments, rank=self.ranks.rank, barrier=barrier, checkpoint=model)


def memory_of(policy: Policy, optimizer: torch.optim.Optimizer, reference: Policy | None) -> Callable[[str], None]:
    """What leaves the devices for the engine's sake: "optimizer" (its state, and gradients), "policy" (all the rest), and "back"."""
    host = sharding.HostMemory()

    def move(what: str) -> None:
        if what == "back":
            host.give_back()
            return
        kept = {id(p) for p in policy.parameters()} if what == "optimizer" else set()
        others = list(reference.parameters()) if reference is not None else []
        host.take(t for t in [*sharding.training_tensors(policy, optimizer), *others] if id(t) not in kept)

    return move


def start_engines(
    model: str, plan: Plan, config: EngineConfig, dtype: str, max_model_len: int, out: Path, deadlines: DeadlineConfig, ranks: Ranks = Ranks()
) -> Engines:
    """Start what this rank starts, and learn of the rest. Called on every rank, before anything is put on a CUDA device.

    cpu             local rank 0 starts one server; it boots while the policy is loaded
    disaggregated   local rank 0 starts the node's servers on the last devices, which boot meanwhile too
    colocated       the first rank of each engine's devices starts it on them and waits until it is healthy and asleep, its memory free
    external        nobody starts anything: the servers are looked at, and refused where they cannot serve this run

    Raises:
        UserError: an external engine that serves something else.
        EngineError: one did not start, or did not give its memory back.
    """
    engines = Engines(plan, [], [], [], deadlines, ranks, config.tensor_parallel)
    if plan.placement == "external":
        key = os.environ.get("VLLM_API_KEY", "")
        if not key:
            raise UserError("--cluster.engine-urls: the engines' API key is expected in the environment variable VLLM_API_KEY")
        engines.urls, engines.own = list(plan.urls), [(url, key) for url in plan.urls]
        engines.wait_until_healthy()
        for url in plan.urls if ranks.is_main else ():
            check_external(url, key, model, plan, dtype, max_model_len)
        return engines
    colocated = plan.placement == "colocated"
    # other nodes' engines are driven by rank 0, so with several nodes they listen on the cluster's own network, which must be private
    routable = plan.nodes > 1 and not colocated
    host = address_towards(f"http://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}") if routable else "127.0.0.1"
    node, started = ranks.rank - ranks.local_rank, []  # a node is known by its first rank
    try:
        for number, devices in enumerate(plan.engines):
            if (devices[0] if colocated else 0) == ranks.local_rank:
                log = out / ("engine.log" if plan.nodes * len(plan.engines) == 1 else f"engine-{ranks.rank}-{number}.log")
                server, key = start_vllm(model, plan, config, dtype, max_model_len, log, devices=devices, host=host)
                engines.servers.append(server)
                started.append((server.url, key, number))
        everyone = ranks.gather((node, started))
        engines.urls = [url for _, some in everyone for url, _, _ in some]
        for where, some in everyone:
            own = [(url, key) for url, key, number in some if not colocated or ranks.local_rank in plan.engines[number]]
            engines.own += own if where == node else []
        if colocated:
            engines.wait_until_healthy()
            if engines.servers:
                held = config.gpu_memory_utilization * torch.cuda.mem_get_info(ranks.device)[1]
                client = EngineClient([engines.servers[0].url], deadlines.refit)
                first_sleep(client, held, lambda: torch.cuda.mem_get_info(ranks.device)[0])
            ranks.barrier("engine start", deadlines.engine_start)  # nobody loads a policy before every engine is asleep
        return engines
    except BaseException:
        engines.stop()
        raise


def check_external(url: str, key: str, model: str, plan: Plan, dtype: str, max_model_len: int) -> None:
    """Raises UserError, with the flag to change, unless the engine at `url` serves this model as this run needs it."""
    import requests
    import vllm

    def get(route: str) -> Any:
        try:
            response = requests.get(f"{url}/{route}", headers={"Authorization": f"Bearer {key}"}, timeout=60)
        except requests.RequestException as error:
            raise EngineError(f"GET {url}/{route}: {error}") from error
        if response.status_code != 200:
            raise UserError(f"GET {url}/{route} answered {response.status_code}: was it started by `python cluster.py serve`, with this VLLM_API_KEY?")
        return response.json()

    (card,) = get("v1/models")["data"][:1]
    served = get("server_info?config_format=json")["vllm_config"]
    found = {
        "vLLM": (get("version")["version"], vllm.__version__, "install the same version on both sides"),
        "model": (card["root"], model, "give `cluster.py serve` the same --model"),
        "dtype": (str(served["model_config"]["dtype"]).removeprefix("torch."), dtype, "--engine.dtype"),
        "log-probabilities": (served["model_config"]["logprobs_mode"], "processed_logprobs", "start it by `python cluster.py serve`"),
        "weight transfer": ((served["weight_transfer_config"] or {}).get("backend"), plan.backend, "start it by `python cluster.py serve`"),
    }
    for what, (has, needs, fix) in found.items():
        if has != needs:
            raise UserError(f"--cluster.engine-urls {url}: {what} is {has}, this run needs {needs}: {fix}")
    if card["max_model_len"] < max_model_len:
        raise UserError(f"--cluster.engine-urls {url} takes {card['max_model_len']} tokens, this run has up to {max_model_len}: serve with --max-model-len")


@dataclass
class ServeConfig:
    """`python cluster.py serve`: one engine for --cluster.engine-urls, on the visible devices, until it is told to end."""

    model: str  # as the run's --model
    host: str = "127.0.0.1"  # to listen on; the control routes have no key, so anything but loopback belongs on a private network
    port: int = 8000
    max_model_len: int = 1536  # the run's --sampling.max-prompt-tokens + --sampling.max-completion-tokens
    log: str = "engine.log"  # what it prints
    engine: EngineConfig = field(default_factory=EngineConfig)
    deadlines: DeadlineConfig = field(default_factory=DeadlineConfig)


def serve(arguments: Sequence[str]) -> None:
    import tyro

    config = tyro.cli(ServeConfig, args=list(arguments), description=ServeConfig.__doc__)
    key = os.environ.get("VLLM_API_KEY", "")
    if not key:
        raise UserError("the engine's API key is expected in VLLM_API_KEY, here and where the run starts: export VLLM_API_KEY=$(openssl rand -hex 16)")
    device = "cuda" if torch.cuda.device_count() else "cpu"
    plan = Plan("vllm", device, "external", "nccl" if device == "cuda" else "gloo")
    dtype = config.engine.dtype if config.engine.dtype != "auto" else "bfloat16" if device == "cuda" else "float32"
    stop_on_signals()
    server, _ = start_vllm(config.model, plan, config.engine, dtype, config.max_model_len, Path(config.log), host=config.host, port=config.port, key=key)
    with server:
        server.wait_until_healthy(config.deadlines.engine_start)
        print(f"ready ({dtype}, log: {config.log}). Start the run with --cluster.engine-urls {server.url}", flush=True)
        while True:
            server.check_alive()
            time.sleep(1.0)


def set_threads(threads: int) -> None:
    """Launchers set OMP_NUM_THREADS=1 for their children; the trainer takes its share of the cores it may run on."""
    torch.set_num_threads(threads or max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


def stop_on_signals(signals: Sequence[int] = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)) -> None:
    """Turn signals into SystemExit, so that `finally` runs: engines are stopped, files closed. Exit code 128 + signal."""

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    for number in signals:
        signal.signal(number, leave)


if __name__ == "__main__":
    if sys.argv[1:2] != ["serve"]:
        sys.exit("usage: python cluster.py serve --model MODEL ... (--help lists the rest)")
    try:
        serve(sys.argv[2:])
    except (UserError, EngineError) as error:
        sys.exit(f"error: {error}")
