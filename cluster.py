"""Where things run: the device plan, vLLM's server process from start to end, and the channel that carries weights to it.

    start    keeper.py leads a process group with vLLM's own server in it: free port, loopback, an API key, a scrubbed environment
    watch    whoever waits for the engine also looks whether it lives; its last words become the error
    refit    pause -> transfer -> set the version -> resume; a failure anywhere ends the run, since a half-updated engine is unusable
    stop     the whole group ends with the trainer, however the trainer ends

Weights travel by vLLM's weight-transfer engines: gloo on CPU (gloo_transfer.py), NCCL to devices of their own, CUDA IPC on shared ones.
The control routes of vLLM are not guarded by its API key, so an engine is bound to loopback and the machine must be single-tenant.
"""

import importlib.util
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

import sharding
from policy import Policy
from rollout import DeadlineConfig, EngineError
from task import UserError

ROOT = Path(__file__).resolve().parent


@dataclass
class EngineConfig:
    """vLLM's settings. Anything else it knows can be given with --engine.extra."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of the engine's weights and of the wire; auto: as the policy computes
    max_num_seqs: int = 256  # sequences decoded at once; at least --samples-per-prompt
    gpu_memory_utilization: float = 0.6  # share of a GPU's memory for vLLM's weights and cache
    cpu_cache_gb: int = 2  # key-value cache on CPU
    block_size: int = 0  # tokens per cache block; 0: 32 on CPU (its default of 128 shares no shorter prompt), vLLM's own on CUDA
    tensor_parallel: int = 1  # GPUs per engine
    hf_batch: int = 64  # sequences sampled at once where the policy samples itself (--engine hf)
    extra: tuple[str, ...] = ()  # further arguments for vLLM's server, for example --engine.extra --max-num-batched-tokens 4096


# ------------------------------------------------------------------------------------------------ the plan


@dataclass(frozen=True)
class Plan:
    """Which engine samples, where, and how it gets its weights."""

    engine: str  # vllm | hf
    device: str  # cpu | cuda
    placement: str  # cpu | self
    backend: str  # gloo | none

    def table(self) -> str:
        engine = "vLLM server" if self.engine == "vllm" else "the policy itself"
        weights = "nothing to send" if self.backend == "none" else f"weights by {self.backend}"
        return f"trainer on {self.device}, generation by {engine} on {self.device} ({weights})"


def make_plan(engine: str, cuda_devices: int, processes: int, vllm_installed: bool) -> Plan:
    """The device plan, a pure function of what was asked for and what there is.

    >>> make_plan("auto", 0, 1, vllm_installed=True).table()
    'trainer on cpu, generation by vLLM server on cpu (weights by gloo)'
    >>> make_plan("auto", 0, 1, vllm_installed=False).engine
    'hf'

    Raises:
        UserError: an engine that is not installed.
    """
    if engine == "vllm" and not vllm_installed:
        raise UserError("--engine vllm, but vLLM is not installed: pip install -r requirements.txt, or --engine hf")
    chosen = engine if engine != "auto" else "vllm" if vllm_installed else "hf"
    device = "cuda" if cuda_devices else "cpu"
    if chosen == "hf":
        return Plan("hf", device, "self", "none")
    if device == "cuda":
        raise UserError("vLLM on CUDA is not wired up in this version: use --engine hf")
    return Plan("vllm", "cpu", "cpu", "gloo")


def vllm_installed() -> bool:
    return importlib.util.find_spec("vllm") is not None


# ------------------------------------------------------------------------------------------------ the server process

INHERITED_FROM_LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "ACCELERATE_", "OMP_", "NCCL_ASYNC")


def engine_environment(inherited: Mapping[str, str], api_key: str, config: EngineConfig, cpu: bool) -> dict[str, str]:
    """A child's environment: ours without what launchers put there for us, plus what vLLM's server needs.

    >>> sorted(engine_environment({"RANK": "1", "HOME": "/h", "MASTER_PORT": "2"}, "k", EngineConfig(), cpu=False))
    ['DO_NOT_TRACK', 'HOME', 'PYTHONPATH', 'VLLM_API_KEY', 'VLLM_NO_USAGE_STATS', 'VLLM_SERVER_DEV_MODE']
    """
    kept = {k: v for k, v in inherited.items() if not k.startswith(INHERITED_FROM_LAUNCHERS)}
    kept |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_API_KEY": api_key, "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    kept["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [inherited.get("PYTHONPATH")])])  # the worker imports gloo_transfer
    if cpu:
        kept |= {"OMP_WAIT_POLICY": "PASSIVE", "VLLM_CPU_KVCACHE_SPACE": str(config.cpu_cache_gb), "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
    return kept


def engine_command(model: str, port: int, plan: Plan, config: EngineConfig, max_model_len: int, dtype: str, extension: str) -> list[str]:
    """vLLM's own API server, as a module: `vllm serve` does not start under the CPU build."""
    block_size = config.block_size or (32 if plan.device == "cpu" else 0)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", dtype, "--max-model-len", str(max_model_len), "--max-num-seqs", str(config.max_num_seqs)]
    command += ["--logprobs-mode", "processed_logprobs"]  # log-probabilities of the distribution sampled from, temperature included
    command += ["--enable-scale-out", "--weight-transfer-config", f'{{"backend": "{plan.backend}"}}', "--worker-extension-cls", extension]
    command += ["--tensor-parallel-size", str(config.tensor_parallel), "--generation-config", "vllm"]  # sampling settings are ours alone
    command += ["--block-size", str(block_size)] if block_size else []
    if plan.device == "cpu":
        # a prompt prefilled in two parts rewinds its request's random generator, which a CPU generator cannot: the server would die
        command += ["--enforce-eager", "--no-enable-chunked-prefill", "--max-num-batched-tokens", str(max(2048, max_model_len))]
    else:
        command += ["--gpu-memory-utilization", str(config.gpu_memory_utilization)]
    return [*command, *config.extra]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A server in a process group of its own, kept by keeper.py. Use as a context manager, or call stop().

    Args:
        command: given the port, the command to run.
        log: file for everything it prints.
    """

    def __init__(self, command: Any, environment: dict[str, str], log: Path):
        self.port, self.log = free_port(), log
        self.url = f"http://127.0.0.1:{self.port}"
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
        import urllib.request

        give_up = time.monotonic() + deadline
        while time.monotonic() < give_up:
            self.check_alive()
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                    if response.status == 200:
                        return
            except OSError:
                time.sleep(0.25)
        self.stop()
        raise EngineError(f"the engine did not answer within {deadline:.0f} s (--deadlines.engine-start). Its last lines:\n{self.last_words()}")

    def stop(self) -> None:
        """End the whole group; returns when it is gone."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(timeout=15)


def start_vllm(
    model: str, plan: Plan, config: EngineConfig, dtype: str, max_model_len: int, log: Path, extension: str = "gloo_transfer.WorkerExtension"
) -> tuple[Server, str]:
    """Start vLLM's server without waiting for it.

    Returns:
        The server and its API key.
    """
    key = secrets.token_hex(16)
    environment = engine_environment(os.environ, key, config, cpu=plan.device == "cpu")
    server = Server(lambda port: engine_command(model, port, plan, config, max_model_len, dtype, extension), environment, log)
    return server, key


# ------------------------------------------------------------------------------------------------ refit


class Refit:
    """Sends the policy's weights to a vLLM server. One call per update; any failure leaves the engine unusable and is raised.

    The four parts of an update are methods, in the order in which `__call__` runs them:
    pause (requests wait, caches are dropped), transfer, set_version, resume.
    """

    def __init__(self, url: str, policy: Policy, dtype: torch.dtype, backend: str, deadlines: DeadlineConfig):
        from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient, WeightTransferTrainerFactory

        import gloo_transfer  # imports vLLM, which takes seconds and patches torch's compiler: only where an engine is used

        assert backend == "gloo"
        self.url, self.timeout, self.source = url, deadlines.refit, policy_source(policy, dtype)
        self.engine = None
        if not policy.ranks.is_main:
            return  # it only takes part in gathering shards
        client = HTTPVLLMWeightSyncClient(url, timeout=deadlines.refit)
        world_size = 1 + int(self.call("GET", "get_world_size")["world_size"])
        info = gloo_transfer.GlooTrainerInitInfo("127.0.0.1", free_port(), world_size, deadlines.refit, rank=0)
        self.engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=self.source)

    def __call__(self, version: int) -> None:
        """Give the engine the policy's present weights, called `version` from now on.

        Raises:
            EngineError: some part failed; the engine must not be used again.
        """
        if self.engine is None:
            for _ in self.source:
                pass
            return
        try:
            self.pause()
            self.transfer()
            self.set_version(version)
            self.resume()
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"sending weights of version {version} failed: {type(error).__name__}: {error}") from error

    def pause(self) -> None:
        self.call("POST", "pause?mode=keep&clear_cache=true")  # clear_cache: no prompt may be continued from keys of older weights

    def transfer(self) -> None:
        self.engine.send_weights()

    def set_version(self, version: int) -> None:
        self.call("POST", "update_weight_version", {"new_version": str(version)})
        known = self.call("GET", "weight_info")["weight_version"]
        if known != str(version):
            raise EngineError(f"the engine reports weights of version {known!r} after an update to {version}")

    def resume(self) -> None:
        self.call("POST", "resume")

    def call(self, method: str, route: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        import requests

        try:
            response = requests.request(method, f"{self.url}/{route}", json=body, timeout=self.timeout)
        except requests.RequestException as error:
            raise EngineError(f"{method} /{route} failed (deadline --deadlines.refit {self.timeout:.0f} s): {error}") from error
        if response.status_code != 200:
            raise EngineError(f"{method} /{route} answered {response.status_code}: {response.text[:500]}")
        answer: dict[str, Any] = response.json()
        return answer


def policy_source(policy: Policy, dtype: torch.dtype) -> Any:
    """The policy's weights as a stream of (checkpoint name, tensor in the wire's dtype), tied duplicates once."""
    from vllm.distributed.weight_transfer import ParamMeta, WeightSource

    class PolicySource(WeightSource):
        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta(name, dtype, tuple(p.shape)) for name, p in policy.model.named_parameters()]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return sharding.whole_parameters(policy.model, dtype)

    return PolicySource()


def set_threads(threads: int) -> None:
    """Launchers set OMP_NUM_THREADS=1 for their children; the trainer takes its share of the cores it may run on."""
    torch.set_num_threads(threads or max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


def stop_on_signals(signals: Sequence[int] = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)) -> None:
    """Turn signals into SystemExit, so that `finally` runs: engines are stopped, files closed. Exit code 128 + signal."""

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    for number in signals:
        signal.signal(number, leave)
