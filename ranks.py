"""Trainer processes: who this one is, and the collectives between them, each with a deadline, a rank and a phase in its error.

    torchrun --nproc_per_node 2 grpo.py ...                    # CPU (gloo)
    accelerate launch --num_processes 8 grpo.py ...            # CUDA (NCCL for tensors on devices, gloo for everything else)

Every rank runs the same program on the same decisions: rollouts are generated apart and then known to all, so counts, advantages and
splits are computed alike everywhere, and only micro-batches differ. One process is the identity: no group is made, nothing is sent.

A phase begins at a barrier with that phase's deadline, so that slow generation does not look like a hanging gradient. The first rank
that raises prints its own traceback; the others learn of it within a second, wherever they wait, and leave.
"""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from log import Metrics
from rollout import EngineError
from task import UserError

T = TypeVar("T")
GRACE = 10.0  # seconds for a rank to close files and engines after another one has failed


class RankError(RuntimeError):
    """A collective failed or exceeded its deadline, most often because another rank is gone; that one's error is the cause."""


@dataclass
class Ranks:
    """The trainer processes as seen by one of them."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    device: torch.device = torch.device("cpu")
    deadline: float = 1800.0  # seconds for one collective (--deadlines.collective)
    current: str = "start"  # the phase this rank is in, for errors
    gloo: Any = field(default=None, repr=False)  # group of CPU tensors, objects and barriers

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @contextmanager
    def collective(self, what: str) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:  # torch raises both where a peer is late or gone
            raise RankError(
                f"rank {self.rank} of {self.size}, phase {self.current!r}: {what} failed (deadline {self.deadline:.0f} s, --deadlines.collective):"
                f" {str(error).splitlines()[0]}"
            ) from error

    def barrier(self, phase: str, deadline: float = 0.0) -> None:
        """Enter a phase together. Raises RankError, naming the ranks that did not come within the deadline (seconds; 0: the usual one)."""
        self.current = phase
        if self.size > 1:
            with self.collective("waiting for the other ranks"):
                dist.monitored_barrier(self.gloo, timedelta(seconds=deadline or self.deadline), wait_all_ranks=True)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over ranks of a small tensor, bit for bit the same on each."""
        if self.size == 1:
            return values
        total = values.detach().to("cpu", copy=True)
        with self.collective("a sum"):
            dist.all_reduce(total, group=self.gloo)
        return total.to(values.device)

    def gather(self, value: T) -> list[T]:
        """Every rank's object, in the order of ranks."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self.collective("gathering objects"):
            dist.all_gather_object(values, value, group=self.gloo)
        return values

    def on_first(self, function: Callable[[], T]) -> T:
        """What the function returns on rank 0, on every rank; elsewhere it is not called. For files and decisions that must not race.

        Raises:
            UserError: where it raised one, on every rank.
        """
        result: Any = None
        if self.is_main:
            try:
                result = (function(), None)
            except UserError as error:
                result = (None, str(error))
        value, problem = self.gather(result)[0]
        if problem is not None:
            raise UserError(problem)
        return value

    def exchange(self, groups: list[list[Any]]) -> list[list[Any]]:
        """The groups of all ranks, on every rank, in the order of their index: whole groups, so that any rank may train any of them."""
        self.barrier("exchange of rollouts")
        return sorted((group for part in self.gather(groups) for group in part), key=lambda group: group[0].index)

    def reduce(self, metrics: Metrics) -> Metrics:
        """Metrics of all ranks added up over the union of their names, each by its kind."""
        total = Metrics()
        for part in self.gather(metrics.entries):
            total.add(part)
        return total

    def finish(self) -> None:
        """Meet at the end of the program; after this nobody waits for anybody."""
        self.barrier("end")
        leaving.set()
        self.barrier("end")  # so that no rank is gone while another still watches


def balance(costs: Sequence[float], size: int) -> list[list[int]]:
    """Items for each rank, so that the largest sum of costs is small: the costliest first, each to the rank with the least so far.

    >>> balance([5, 1, 4, 2], 2)
    [[0, 1], [2, 3]]
    """
    shares: list[list[int]] = [[] for _ in range(size)]
    loads = [0.0] * size
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = min(range(size), key=lambda r: (loads[r], r))
        shares[rank].append(item)
        loads[rank] += costs[item]
    return [sorted(share) for share in shares]


# ------------------------------------------------------------------------------------------------ start and end


def refuse_launchers(environment: Mapping[str, str]) -> None:
    """Launches that would not do what they say.

    >>> refuse_launchers({"ACCELERATE_USE_FSDP": "true"})
    Traceback (most recent call last):
    task.UserError: accelerate launch was given an FSDP configuration (--use_fsdp, or accelerate config): leave it out, --policy.shard is this program's own

    Raises:
        UserError: an FSDP or DeepSpeed configuration; several CPU processes asked of accelerate, which starts one and does not say so.
    """
    for name, kind in (("ACCELERATE_USE_FSDP", "an FSDP"), ("ACCELERATE_USE_DEEPSPEED", "a DeepSpeed")):
        if environment.get(name, "").lower() in ("true", "1", "yes"):
            flag = "--" + name.lower().removeprefix("accelerate_")
            raise UserError(
                f"accelerate launch was given {kind} configuration ({flag}, or accelerate config): leave it out, --policy.shard is this program's own"
            )
    # its simple launcher sets an address for its processes, and then starts one
    if "ACCELERATE_MIXED_PRECISION" in environment and "MASTER_ADDR" in environment and "WORLD_SIZE" not in environment:
        raise UserError(
            "accelerate launch was asked for several CPU processes and starts one: use `torchrun --nproc_per_node N grpo.py ...` with the same arguments"
        )


joined: Ranks | None = None  # a process belongs to one group for its whole life


def start_ranks(deadline: float, environment: Mapping[str, str] = os.environ) -> Ranks:
    """Join the other processes that a launcher started; with one process, nothing is set up.

    Args:
        deadline: seconds for each collective.

    Raises:
        UserError: the launch is one that would not do what it says.
    """
    global joined
    if joined is not None:
        return joined
    refuse_launchers(environment)
    size = int(environment.get("WORLD_SIZE", 1))
    local_rank, cuda = int(environment.get("LOCAL_RANK", 0)), torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if size == 1:
        return Ranks(device=device, deadline=deadline)
    # before any Accelerate object, which would set up NCCL alone
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(seconds=deadline))
    gloo = dist.new_group(backend="gloo", timeout=timedelta(seconds=deadline))
    joined = ranks = Ranks(dist.get_rank(), size, local_rank, int(environment.get("LOCAL_WORLD_SIZE", 1)), device, deadline, gloo=gloo)
    threading.Thread(target=watch, args=(ranks,), daemon=True).start()
    return ranks


leaving = threading.Event()  # set once this process has begun to end: a missing peer is no failure then


def watch(ranks: Ranks) -> None:
    """Look every half second whether another rank has failed; if so, end this one: its `finally` clauses first, then by force."""
    store = dist.distributed_c10d._get_default_store().clone()  # a connection of its own: the first may be waiting for a peer
    while True:
        try:
            text = store.get("failure").decode() if store.check(["failure"]) else ""
        except RuntimeError:
            text = "the launcher or rank 0, which kept the store, is gone"
        if text and not leaving.is_set():
            leaving.set()
            print(f"rank {ranks.rank} stops in phase {ranks.current!r}: {text}", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGHUP)  # not SIGTERM, which asks to save first
        if text:
            time.sleep(GRACE)
            os._exit(1)
        time.sleep(0.5)


def tell(text: str, summary: str) -> None:
    """Print an error and end the other ranks. Where another rank has failed before, its error is the cause, and this one is a line."""
    if not dist.is_initialized():
        print(text, file=sys.stderr, flush=True)
    elif not leaving.is_set():
        leaving.set()
        rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
        store.set_timeout(timedelta(seconds=5))
        try:
            if store.compare_set("first", "", str(rank)).decode() == str(rank):
                print(text, file=sys.stderr, flush=True)
                store.set("failure", f"rank {rank} failed: {summary}")
                time.sleep(1.5 if rank == 0 else 0)  # it may keep the store: the others read it before it goes
            else:
                cause = store.get("failure").decode()
                print(f"rank {rank} stops: {cause} (here: {summary})", file=sys.stderr, flush=True)
        except RuntimeError:
            print(text, file=sys.stderr, flush=True)


def report(error: BaseException, last: bool = False) -> int:
    """Print an error and end the other ranks; once, however often it is called on an error's way up. To be called before anything slow
    is stopped, so that this rank's own words come first.

    Args:
        last: nobody else will print it, which with one process is Python's own way.

    Returns:
        The exit code.
    """
    code, text, summary = 1, traceback.format_exc(), f"{type(error).__name__}: {error}"
    if isinstance(error, (UserError, EngineError)):
        text, summary = f"error: {error}", str(error)
    elif isinstance(error, KeyboardInterrupt):
        code, text, summary = 130, "interrupted", "it was interrupted"
    elif isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 1 if error.code else 0
        text, summary = str(error.code) if isinstance(error.code, str) else f"ended with exit code {code}", f"it ended with exit code {code}"
    if code and (last or dist.is_initialized()):
        tell(text, summary)
    return code


def guarded(main: Callable[[list[str]], None], arguments: list[str]) -> NoReturn:
    """The outermost call of a program. A user's error is a sentence, any other keeps its traceback; exit code 1. The first rank to
    fail prints, then tells the others, which say in one line why they stop."""
    code = 0
    try:
        main(arguments)
    except BaseException as error:
        code = report(error, last=True)
    sys.stdout.flush()
    sys.stderr.flush()
    if dist.is_initialized():
        os._exit(code)  # a peer that is gone must not keep us waiting in destructors
    sys.exit(code)
