"""Refit: the policy's present weights go to every engine that samples, through one call, by whichever road the placement has.

    gloo, nccl   engines on devices of their own     pause -> transfer -> set the version -> resume
    ipc          engines on the trainer's devices    wake weights -> transfer -> set the version -> wake the cache; sleep after sampling

    update     every control call goes to all engines at once, and the first error ends the run: a half-updated engine is unusable
    names      what is sent is compared with the checkpoint, since vLLM only warns of a weight that never came
    buckets    weights are cast, gathered and sent in buckets of bounded size: gathers and sends of a sharded model never interleave

Weights travel by vLLM's own weight-transfer engines (gloo: gloo_transfer.py). vLLM is imported where it is used: that takes seconds
and patches torch's compiler.
"""

import base64
import json
import pickle
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from policy import Policy
from rollout import DeadlineConfig, EngineError
from sharding import refuse_mixture, whole
from task import UserError

LOOPBACK = ("127.0.0.1", "localhost", "::1")


# ------------------------------------------------------------------------------------------------ the control routes of several engines


def at_once(calls: Sequence[Callable[[], Any]], closed: threading.Event) -> list[Any]:
    """Run calls at the same time, results in their order. The first error is raised at once; nobody waits for the others' threads.

    Raises:
        whatever a call raised; EngineError when `closed` is set meanwhile.
    """
    answers: queue.Queue[tuple[int, Any, BaseException | None]] = queue.Queue()

    def run(position: int, call: Callable[[], Any]) -> None:
        try:
            answers.put((position, call(), None))
        except BaseException as error:  # handed to whoever waits
            answers.put((position, None, error))

    for position, call in enumerate(calls):
        threading.Thread(target=run, args=(position, call), daemon=True).start()  # daemon: a silent engine must not hold up the exit
    results: list[Any] = [None] * len(calls)
    left = len(calls)
    while left:
        try:
            position, value, error = answers.get(timeout=0.2)
        except queue.Empty:
            if closed.is_set():
                raise EngineError("abandoned: another part of the update failed") from None
            continue
        if error is not None:
            raise error
        results[position], left = value, left - 1
    return results


class EngineClient:
    """The control routes of one or several vLLM servers, driven as one. Has the four methods of vLLM's VLLMWeightSyncClient.

    Args:
        urls: of the servers; the workers of server i are ranks offset_i ... of the transfer group, the trainer being rank 0.
        timeout: seconds for each call.
    """

    def __init__(self, urls: Sequence[str], timeout: float):
        self.urls, self.timeout = [url.rstrip("/") for url in urls], timeout
        self.closed = threading.Event()
        self.error: BaseException | None = None  # the first; whoever waits for a transfer looks here
        self.world_sizes: list[int] = []

    def call(self, method: str, route: str, body: dict[str, Any] | None = None, bodies: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
        """The same call to all servers at once (bodies: one for each), their answers in order of urls.

        Raises:
            EngineError: naming the server; the first that failed.
        """
        each = bodies or [body] * len(self.urls)
        try:
            return at_once([lambda url=url, b=b: self._one(method, url, route, b) for url, b in zip(self.urls, each, strict=True)], self.closed)  # type: ignore[misc]
        except BaseException as error:
            self.error = self.error or error
            raise

    def _one(self, method: str, url: str, route: str, body: dict[str, Any] | None) -> dict[str, Any]:
        import requests

        try:
            response = requests.request(method, f"{url}/{route}", json=body, timeout=self.timeout)
        except requests.RequestException as error:
            raise EngineError(f"{method} {url}/{route} failed (deadline --deadlines.refit {self.timeout:.0f} s): {error}") from error
        if response.status_code != 200:
            raise EngineError(f"{method} {url}/{route} answered {response.status_code}: {response.text[:500]}")
        answer: dict[str, Any] = response.json()
        return answer

    @property
    def world_size(self) -> int:
        """The trainer and every worker of every server."""
        if not self.world_sizes:
            self.world_sizes = [int(answer["world_size"]) for answer in self.call("GET", "get_world_size")]
        return 1 + sum(self.world_sizes)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """vLLM's trainer engines write rank_offset 1 for whoever they talk to: each server gets its own."""
        bodies = []
        offset = init_info.get("rank_offset", 1)
        for size in self.world_sizes or [0] * len(self.urls):
            own = {"rank_offset": offset} if "rank_offset" in init_info else {}
            bodies.append({"init_info": init_info | own})
            offset += size
        self.call("POST", "init_weight_transfer_engine", bodies=bodies)

    def start_weight_update(self) -> None:
        self.call("POST", "start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        handles = update_info.get("ipc_handles")
        if handles is not None:  # tuples with bytes in them: HTTP carries them pickled, to a server on loopback only
            pickled = base64.b64encode(pickle.dumps(handles)).decode()
            update_info = {k: v for k, v in update_info.items() if k != "ipc_handles"} | {"ipc_handles_pickled": pickled}
        self.call("POST", "update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.call("POST", "finish_weight_update", {"weight_version": weight_version} if weight_version is not None else None)


# ------------------------------------------------------------------------------------------------ what is sent


class Weights:
    """The policy's weights as a re-iterable stream of (checkpoint name, tensor in the wire's dtype), tied duplicates once.

    vLLM's WeightSource in structure: metadata() agrees with iteration element for element, and every rank iterates in lockstep.

    Args:
        device: where the receiver expects them (CUDA for ipc and nccl); None: where they are.
        buffer_bytes: weights are gathered in buckets of at most so many bytes (one tensor may exceed it) before any is handed out.
    """

    def __init__(self, policy: Policy, dtype: torch.dtype, device: torch.device | None = None, buffer_bytes: int = 2**30):
        self.policy, self.dtype, self.device, self.buffer_bytes = policy, dtype, device, buffer_bytes
        self.converts = stored_differently(policy.model)

    def buckets(self) -> Iterator[list[tuple[str, torch.nn.Parameter]]]:
        """Neighbours within the buffer; of a model that is stored differently, whole layers, since several weights may become one."""
        bucket: list[tuple[str, torch.nn.Parameter]] = []
        size, layer = 0, ""
        for name, p in self.policy.model.named_parameters():
            bytes_ = p.numel() * self.dtype.itemsize
            begins = ".".join(name.split(".")[:3]) != layer if self.converts else True
            if bucket and begins and (size + bytes_ > self.buffer_bytes or self.converts):
                yield bucket
                bucket, size = [], 0
            bucket.append((name, p))
            size, layer = size + bytes_, ".".join(name.split(".")[:3])
        if bucket:
            yield bucket

    def convert(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if not self.converts:
            return tensors
        from transformers.core_model_loading import revert_weight_conversion

        return {name: tensor.contiguous() for name, tensor in revert_weight_conversion(self.policy.model, tensors).items()}

    def metadata(self) -> list[Any]:
        from vllm.distributed.weight_transfer import ParamMeta

        return [ParamMeta(name, self.dtype, shape) for name, shape in self.shapes().items()]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and full shapes on the wire, without gathering anything."""
        found = {}
        for bucket in self.buckets():
            empty = {name: torch.empty(tuple(p.shape), dtype=self.dtype, device="meta") for name, p in bucket}
            found.update({name: tuple(tensor.shape) for name, tensor in self.convert(empty).items()})
        return found

    def largest(self) -> int:
        """Bytes of the largest tensor."""
        import math

        return max(math.prod(shape) for shape in self.shapes().values()) * self.dtype.itemsize

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        refuse_mixture(self.policy.model)
        for bucket in self.buckets():  # the shard is cast before it is gathered: half the traffic
            gathered = {name: whole(p.detach().to(device=self.device, dtype=self.dtype)) for name, p in bucket}
            yield from self.convert(gathered).items()


def stored_differently(model: Any) -> bool:
    """Whether transformers holds this model under other names or shapes than its checkpoint (fused experts, for example)."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    conversions = getattr(model, "_weight_conversions", None)
    return bool(get_model_conversion_mapping(model, add_legacy=False) if conversions is None else conversions)


def checkpoint_names(model: str) -> set[str] | None:
    """The names in a model's safetensors files, or None where it has none (older formats)."""
    from transformers.utils import cached_file

    def find(name: str) -> str | None:
        return cached_file(model, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False)

    index = find("model.safetensors.index.json")
    if index is not None:
        return set(json.loads(Path(index).read_text())["weight_map"])
    single = find("model.safetensors")
    if single is None:
        return None
    with open(single, "rb") as file:  # the header: its length in 8 bytes, then JSON
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return set(header) - {"__metadata__"}


def check_names(sent: set[str], stored: set[str], tied: Mapping[str, str], ignored: Sequence[str] = ()) -> None:
    """What is sent must be what the checkpoint holds: vLLM keeps old weights, without an error, where a name does not arrive.

    Args:
        tied: duplicates, each with the name it repeats; either name may stand for both in a checkpoint.
        ignored: patterns of names that old checkpoints hold and no model reads.

    >>> check_names({"a", "b"}, {"a", "b", "head"}, {"head": "a"})

    Raises:
        UserError: with the missing and the extra names.
    """
    import re

    stored = {tied.get(name, name) for name in stored if not any(re.search(pattern, name) for pattern in ignored)}
    sent = {tied.get(name, name) for name in sent}
    missing, extra = sorted(stored - sent), sorted(sent - stored)
    if missing or extra:
        lists = [f"{what}: {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}" for what, names in (("missing", missing), ("extra", extra)) if names]
        raise UserError(
            f"the weights to send are not those of the checkpoint ({len(missing)} missing, {len(extra)} extra): {'; '.join(lists)}."
            " The engine would go on sampling with old weights: use --engine hf for this model"
        )


# ------------------------------------------------------------------------------------------------ how it is sent


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def address_towards(url: str) -> str:
    """This machine's address on the way to a server: what the server can call us by. Nothing is sent."""
    host, port = urlsplit(url).hostname or "127.0.0.1", urlsplit(url).port or 80
    if host in LOOPBACK:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
        except OSError as error:
            raise UserError(f"--cluster.engine-urls {url}: this machine has no way there: {error}") from error
        return str(probe.getsockname()[0])


def trainer_info(backend: str, rank: int, client: EngineClient, weights: Weights, timeout: float) -> Any:
    """vLLM's description of the trainer's side, by backend. NCCL: one buffer, so that each bucket is gathered, sent and waited for."""
    if backend == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        return IPCTrainerInitInfo(rank=rank, packed=True, packed_buffer_size_bytes=max(weights.buffer_bytes, weights.largest()))
    address = address_towards(client.urls[0])
    if backend == "nccl":
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        size = max(weights.buffer_bytes, weights.largest())
        return NCCLTrainerInitInfo(
            rank=rank, master_address=address, master_port=free_port(address), world_size=client.world_size,
            packed=True, packed_buffer_size_bytes=size, packed_num_buffers=1,
        )  # fmt: skip
    import gloo_transfer

    return gloo_transfer.GlooTrainerInitInfo(address, free_port(address), client.world_size, timeout, rank=rank)


class Refit:
    """Sends the policy's weights to engines on devices of their own. Every trainer rank calls it; rank 0 drives the engines.

    The four parts of an update are methods, in the order in which `__call__` runs them:
    pause (requests wait, caches are dropped), transfer, set_version, resume. Any failure leaves the engines unusable and is raised.

    Args:
        urls: one or several servers; they are updated together.
        backend: gloo, nccl; ipc through ColocatedRefit.
        rank: 0 sends.
        barrier: called with a phase's name where all ranks have to meet.
        checkpoint: the model folder or name whose files hold the names that must be sent; "": not compared.
    """

    asleep = False  # whether the engines have to be sent the weights again before they can sample
    drain = keep_kv = False  # an asynchronous schedule may ask for either: see pause

    def __init__(
        self, urls: str | Sequence[str], policy: Policy, dtype: torch.dtype, backend: str, deadlines: DeadlineConfig,
        buffer_gb: float = 1.0, rank: int = 0, barrier: Callable[[str], None] = lambda phase: None, checkpoint: str = "",
    ):  # fmt: skip
        urls = [urls] if isinstance(urls, str) else list(urls)
        if backend == "ipc" and any(urlsplit(url).hostname not in LOOPBACK for url in urls):
            raise UserError(f"weights by CUDA IPC to {', '.join(urls)}: the server unpickles what it is sent, so it must be bound to 127.0.0.1")
        self.policy, self.deadlines, self.timeout, self.rank, self.barrier, self.broken = policy, deadlines, deadlines.refit, rank, barrier, False
        self.client = EngineClient(urls, deadlines.refit)
        device = policy.device if backend in ("nccl", "ipc") else None
        self.weights = Weights(policy, dtype, device, int(buffer_gb * 2**30))
        stored = checkpoint_names(checkpoint) if checkpoint else None
        if stored is not None:
            ignored = list(getattr(policy.model, "_keys_to_ignore_on_load_unexpected", None) or [])
            check_names(set(self.weights.shapes()), stored, getattr(policy.model, "all_tied_weights_keys", {}), ignored)
        # of a sharded policy the other ranks only join the gathers; by ipc every rank has a part to send
        self.engine = self.join(backend) if rank == 0 or backend == "ipc" else None

    def join(self, backend: str) -> Any:
        """vLLM's trainer-side engine, which has met the workers."""
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

        import gloo_transfer  # noqa: F401, registers the backend

        info = trainer_info(backend, self.rank, self.client, self.weights, self.timeout)
        return self.within("joining the engines", lambda: WeightTransferTrainerFactory.trainer_init(info, client=self.client, source=self.weights))

    def __call__(self, version: int) -> None:
        """Give the engines the policy's present weights, called `version` from now on.

        Raises:
            EngineError: some part failed; the engines must not be used again.
        """
        if self.broken:
            raise EngineError("an earlier update failed: the engines hold parts of two versions and must be started again")
        try:
            self.pause()
            self.transfer()
            self.set_version(version)
            self.resume()
        except BaseException as error:
            self.broken = True
            self.client.closed.set()
            if isinstance(error, EngineError) or not isinstance(error, Exception):
                raise
            raise EngineError(f"sending weights of version {version} failed: {type(error).__name__}: {error}") from error

    def pause(self) -> None:
        """Stop decoding. Running requests wait, or with `drain` are finished first. The cache is dropped, and running requests are prefilled
        again afterwards, so that no prompt is continued from keys of older weights; `keep_kv` keeps it (then new requests must be salted)."""
        self.barrier("refit")
        self.control("POST", f"pause?mode={'wait' if self.drain else 'keep'}&clear_cache={'false' if self.keep_kv else 'true'}")

    def transfer(self) -> None:
        self.within("sending the weights", self.engine.send_weights if self.engine is not None else self.join_gathers)

    def join_gathers(self) -> None:
        for _ in self.weights:
            pass

    def set_version(self, version: int) -> None:
        self.control("POST", "update_weight_version", {"new_version": str(version)})
        for url, answer in zip(self.client.urls, self.control("GET", "weight_info")):
            if answer["weight_version"] != str(version):
                raise EngineError(f"the engine at {url} reports weights of version {answer['weight_version']!r} after an update to {version}")

    def resume(self) -> None:
        self.control("POST", "resume")
        self.barrier("resume")

    def rest(self) -> None:
        """Sampling is over and training begins. Engines on devices of their own have nothing to give up."""

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def control(self, method: str, route: str, body: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        return self.client.call(method, route, body) if self.leads else []

    def call(self, method: str, route: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """One call to every engine; the first one's answer."""
        return self.client.call(method, route, body)[0]

    def within(self, what: str, call: Callable[[], Any]) -> Any:
        """Run a blocking transfer in a thread that may be left behind: when an engine refuses, its peers would wait in it for ever."""
        device = self.policy.device

        def on_device() -> Any:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            return call()

        answers: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue()

        def run() -> None:
            try:
                answers.put((on_device(), None))
            except BaseException as error:  # handed to whoever waits
                answers.put((None, error))

        threading.Thread(target=run, daemon=True).start()
        give_up = time.monotonic() + self.timeout
        while time.monotonic() < give_up:
            try:
                value, error = answers.get(timeout=0.05)
            except queue.Empty:
                if self.client.error is not None:
                    raise self.client.error from None
                continue
            if error is not None:
                raise self.client.error or error  # what an engine said is the cause of what the transfer then raises
            return value
        raise EngineError(f"{what} took more than {self.timeout:.0f} s (--deadlines.refit)")


# ------------------------------------------------------------------------------------------------ engines that share the trainer's devices


class SleepState:
    """What a sleeping engine may be asked next. Weights go only to an engine whose weights are awake and whose cache is not.

    >>> state = SleepState("asleep")
    >>> [state.next(call) for call in ("wake weights", "send", "wake cache", "sleep")], state.now
    ([True, True, True, True], 'asleep')

    Repeating the last call is allowed and changes nothing.

    Raises:
        EngineError: a call that is illegal now.
    """

    TRANSITIONS = {
        ("asleep", "wake weights"): "weights",  # their memory is back, their contents are not
        ("weights", "send"): "sent",
        ("sent", "wake cache"): "awake",
        ("awake", "sleep"): "asleep",
    }

    def __init__(self, now: str):
        self.now = now

    def next(self, call: str) -> bool:
        """Returns whether there is anything to do."""
        if any(c == call and after == self.now for (_, c), after in self.TRANSITIONS.items()) and call != "send":
            return False
        if (self.now, call) not in self.TRANSITIONS:
            legal = ", ".join(c for now, c in self.TRANSITIONS if now == self.now)
            raise EngineError(f"{call!r} while the engine is {self.now!r}: only {legal} is possible now")
        self.now = self.TRANSITIONS[self.now, call]
        return True


class ColocatedRefit(Refit):
    """Refit of an engine on the trainer's own devices: it sleeps while the policy trains, and memory changes hands in a fixed order.

    (1) optimizer state and gradients leave the device      (2) the engine's weights wake      (3) weights are sent, the version set
    (4) the policy leaves the device                        (5) the engine's cache wakes: "awake" is required
    (6) sampling                                            (7) the engine sleeps, the policy comes back

    Args (besides Refit's):
        urls: this rank's own engine alone, on loopback.
        rank: within the devices that engine spans; 0 drives it.
        offload: called with "optimizer" (1), "policy" (4) and "back" (7).
    """

    def __init__(self, *args: Any, offload: Callable[[str], None] = lambda what: None, **settings: Any):
        super().__init__(*args, **settings)
        self.offload = offload
        self.state = SleepState("asleep")  # as the start-up leaves it

    @property
    def asleep(self) -> bool:  # type: ignore[override]
        return self.state.now != "awake"

    def pause(self) -> None:
        self.rest()  # where nothing was trained since, an awake engine is sent to sleep first: weights go to no engine with a cache
        self.offload("optimizer")
        self.barrier("wake weights")
        if self.state.next("wake weights"):
            self.control("POST", "wake_up?tags=weights")
        self.barrier("refit")

    def transfer(self) -> None:
        self.state.next("send")
        super().transfer()

    def resume(self) -> None:
        self.offload("policy")
        self.barrier("wake cache")  # every rank's memory is free before any engine takes it
        if self.state.next("wake cache"):
            for url, answer in zip(self.client.urls, self.control("POST", "wake_up?tags=kv_cache")):
                if answer["status"] != "awake":  # an unknown tag is ignored by vLLM, with a warning in its log
                    raise EngineError(f"the engine at {url} is {answer['status']!r} after waking its weights and its cache")
        self.barrier("resume")

    def rest(self) -> None:
        """Sampling is over: the engine drops weights and cache (level 2: all weights are sent again), the policy comes back."""
        if self.state.now == "awake":
            self.barrier("sampling done")  # sleeping aborts running requests: no rank may still wait for one
            self.state.next("sleep")
            self.control("POST", "sleep?level=2&mode=wait")
            self.barrier("asleep")
            self.offload("back")


def first_sleep(client: EngineClient, expected: float, free_memory: Callable[[], int]) -> None:
    """Send a freshly started engine to sleep and see that it gave its memory back: vLLM answers 200 even where sleep mode is off.

    Args:
        expected: bytes that the engine holds.
        free_memory: of the device, in bytes.

    Raises:
        EngineError: less than half of that became free.
    """
    before = free_memory()
    client.call("POST", "sleep?level=1")  # level 1: nothing was sent yet, so the weights are kept in the host's memory
    freed = free_memory() - before
    if freed < expected / 2:
        raise EngineError(
            f"the engine went to sleep and {freed / 1e9:.1f} GB became free, of about {expected / 1e9:.1f} GB that it holds:"
            " was it started without --enable-sleep-mode?"
        )
