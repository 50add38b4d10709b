"""Asynchronous GRPO: generation and training overlap. The step is grpo.py's; only the schedule differs.

    accelerate launch async_grpo.py --model Qwen/Qwen2.5-1.5B                        # at most one step stale
    python async_grpo.py --model models/SmolLM2-135M-Instruct --task arith --schedule.max-staleness 0      # what grpo.py does
    python async_grpo.py --help

Two threads share one table of groups; P is prompts per step, A is --schedule.max-staleness.

    producer  waits for   room: admitted - (trained + dropped) < (1 + A) P
              produces    the next prompt of the global order, sampled; a finished group in the table
              woken by    the trainer, once the engine holds the weights of a finished step; a dropped group
    trainer   waits for   P finished groups: the next ones in order (in_order), or any (ready_first)
              produces    steps (3) to (6) of grpo.py, then the refit, while requests are running; then room for P more
              woken by    every group that finishes; an error of the producer's

Staleness is bounded by admission alone: when step s begins, a group that began k steps ago has k P trained groups behind it, and with
at most (1 + A) P in the table its turn comes before k exceeds A. So no finished work is ever thrown away for its age, which would favour
short answers. (AReaL, arXiv 2505.24298, gates admission the same way; updates in flight: also PipelineRL, arXiv 2509.19128.)

Weights are updated in flight: running requests wait, and go on with the new weights. Every token carries the version that sampled it and
the log-probability it was sampled with, so the correction of loss.py (here token truncation at 2 by default) is exact per token.

With --engine hf there is one model for both: sampling and training take turns.
"""

import asyncio
import copy
import math
import os
import sys
import threading
import time
from collections.abc import Collection, Coroutine, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

import grpo
import loss
import policy as policies
from config import Config, parse
from grpo import Run, carries_signal, launch, learn, make_plan, refit_if_stale, retire, stop_on_mismatch
from log import Metrics
from ranks import guarded
from rollout import Completion, EngineError, HFEngine, Request, Rollout, Sampler, seed_of
from task import UserError, next_position, position


@dataclass
class ScheduleConfig:
    max_staleness: int = 1  # A: a group trained at step s was begun with weights of step s - A or later; 0: exactly grpo.py
    lead: float = 0.0  # steps' worth of groups admitted ahead of training, at most max_staleness; 0: max_staleness itself
    order: Literal["in_order", "ready_first"] = "in_order"  # train the next groups; or any finished ones, within max_staleness (choice needs a smaller lead)
    cache: Literal["recompute", "keep_kv"] = "recompute"  # at an update running requests are prefilled again, or keep the keys of older weights
    drain: bool = False  # finish running requests before an update, instead of updating in flight
    retries: int = 1  # times a group is sampled again that failed as a whole (its request, environments or rewards)
    on_failure: Literal["replace", "stop"] = "replace"  # what then: the next prompt takes its place, or the run stops with the cause
    max_failures: int = 8  # groups in a row that fail beyond their retries before the run stops in any case
    deadline: float = 3600.0  # seconds in which no group succeeds before the trainer gives up


@dataclass
class AsyncConfig(Config):
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)


def check_schedule(config: AsyncConfig) -> None:
    """What an asynchronous run cannot be. Raises UserError, naming the flags and the fix."""
    schedule = config.schedule
    for name in ("max_staleness", "lead", "retries", "max_failures"):
        if getattr(schedule, name) < 0:
            raise UserError(f"--schedule.{name.replace('_', '-')} {getattr(schedule, name)}: must not be negative")
    if schedule.lead > schedule.max_staleness:
        raise UserError(f"--schedule.lead {schedule.lead} exceeds --schedule.max-staleness {schedule.max_staleness}: raise the bound or lower the lead")
    if schedule.deadline <= 0:
        raise UserError(f"--schedule.deadline {schedule.deadline}: must be above 0")
    if schedule.max_staleness == 0:
        return
    if config.loss.correction == "none" and config.loss.anchor != "gen":
        raise UserError(
            f"--schedule.max-staleness {schedule.max_staleness} trains on tokens of older weights, and nothing corrects for it: give --loss.correction"
            " truncate (or mask, sequence_mask, ...), or --loss.anchor gen, or --schedule.max-staleness 0"
        )
    if make_plan(config, int(os.environ.get("WORLD_SIZE", "1"))).placement == "colocated":
        raise UserError(
            f"--schedule.max-staleness {schedule.max_staleness} needs generation devices of its own: colocated, vLLM sleeps while the policy trains."
            " Give --cluster.generation-devices, or run grpo.py"
        )


# ------------------------------------------------------------------------------------------------ the table of groups


@dataclass(eq=False)
class Group:
    """One admitted prompt, until it is trained or dropped."""

    index: int  # in the global order
    born: int  # steps behind the weights the engine held when it was admitted
    version: int  # optimizer steps behind them
    round: int = 0  # how many groups without signal it replaces, one after the other (--refill)
    rollouts: list[Rollout] = field(default_factory=list)  # empty while in flight
    finished: int = 0  # 1, 2, ...: its place among the finished ones


def choose(groups: Collection[Group], step: int, size: int, bound: int, order: str) -> list[Group] | None:
    """The `size` groups that step `step` (0-based) trains on, by index; None while it has to wait.

    in_order takes the first. ready_first takes what finished first, after those without which a later step would have to exceed the
    bound: `due` groups must be trained within `ahead` more steps, which hold ahead * size of them.

    >>> a, b, c = Group(0, 0, 0), Group(1, 0, 0, finished=1), Group(2, 1, 1, finished=2)
    >>> choose([a, b, c], 1, 2, bound=2, order="in_order")                          # waits for a
    >>> [g.index for g in choose([a, b, c], 1, 2, bound=2, order="ready_first")]    # a may still be trained by step 2
    [1, 2]
    >>> choose([a, b, c], 2, 2, bound=2, order="ready_first")                       # a is due: it would be too old at step 3
    """
    if order == "in_order":
        chosen = sorted(groups, key=lambda g: g.index)[:size]
        return chosen if len(chosen) == size and all(g.finished for g in chosen) else None
    ready = sorted((g for g in groups if g.finished), key=lambda g: g.finished)
    picked: dict[Group, None] = {}  # in order
    for ahead in range(bound + 1):
        due = {g for g in groups if g.born + bound <= step + ahead}
        needed = len(due) - ahead * size - sum(g in due for g in picked)
        fit = [g for g in ready if g in due and g not in picked]
        if len(fit) < needed:
            return None
        picked |= dict.fromkeys(fit[: max(0, needed)])
    chosen = [*picked, *[g for g in ready if g not in picked][: size - len(picked)]]
    return sorted(chosen, key=lambda g: g.index) if len(chosen) == size else None


class SharedHFEngine(HFEngine):
    """The policy samples itself while nobody trains it."""

    def __init__(self, engine: HFEngine, lock: threading.Lock):
        super().__init__(engine.model, engine.tokenizer, engine.set_sampling, engine.max_batch)
        self.version, self.lock = engine.version, lock

    def _sample_all(self, requests: list[Request]) -> list[list[Completion]]:
        with self.lock:  # in a thread of its own: the event loop goes on
            return super()._sample_all(requests)


# ------------------------------------------------------------------------------------------------ the schedule


class Schedule:
    """The table of groups, the producer's thread, and the trainer's step. Use as a context manager: it ends the producer."""

    def __init__(self, run: Run, config: ScheduleConfig):
        self.run, self.config, self.size = run, config, run.config.prompts_per_step
        self.window = self.size + math.ceil((config.lead or config.max_staleness) * self.size)
        self.limit = int(run.config.epochs * len(run.examples)) if run.config.epochs else sys.maxsize  # prompts there are
        self.training = threading.Lock()  # held while weights change
        if isinstance(run.engine, HFEngine):
            run.engine = SharedHFEngine(run.engine, self.training)
        if run.refit is not None:
            run.refit.drain, run.refit.keep_kv = config.drain, config.cache == "keep_kv"
            run.engine.salted = config.cache == "keep_kv"
        self.engine = copy.copy(run.engine)  # the producer's: an engine belongs to one event loop, and evaluation runs in the trainer's
        # everything below is read and written under `changed`, which is notified when a group finishes and when the producer ends
        self.changed = threading.Condition()
        self.table: dict[int, Group] = {}
        self.step = run.step  # whose weights the engine holds
        self.cursor, self.ahead = run.cursor, set(run.ahead)  # all before the cursor are trained or dropped, and those ahead of it
        self.next = run.cursor  # the next to admit
        self.dropped = run.cursor + len(run.ahead) - run.step * self.size  # ever: without signal, failed, or passed over as retired
        self.discarded: list[list[Rollout]] = []  # since the last step: its metrics count them, its loss does not
        self.taken: list[int] = []  # in training
        self.rounds: list[int] = []  # of the groups that replace them
        self.finished = 0
        self.failures_in_row = 0
        self.idle_since = math.nan  # when the producer last ran out of work
        self.seen = Metrics()  # what the producer has seen since the last step
        self.error: BaseException | None = None
        self.stopping = False
        self.loop: asyncio.AbstractEventLoop | None = None
        self.wake, self.gate = asyncio.Event(), asyncio.Event()  # of the producer's loop: there may be room; requests may be sent
        self.gate.set()
        self.probe: Future[list[Completion]] | None = None
        self.thread = threading.Thread(target=self._produce_in_thread, name="producer", daemon=True)

    def __enter__(self) -> "Schedule":
        """The engine gets the present weights first, so that nothing is ever sampled from others."""
        refit_if_stale(self.run)
        self.engine.version = self.run.engine.version
        if not self.run.ranks.is_main:
            return self
        self.thread.start()
        try:
            self._wait(lambda: self.loop, "the producer to start")
            self._ask_probe()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        if not self.run.ranks.is_main:
            return
        with self.changed:
            self.stopping = True
            self._wake_producer()
        self.thread.join(timeout=10)  # a daemon: what cannot be interrupted now, a long sampling call, ends with the process

    # -------------------------------------------------------------------------------------------- the trainer

    def train_step(self, run: Run) -> tuple[Metrics, list[list[Rollout]]]:
        """One step of grpo.train: what `time/generation` measures is only what training had to wait for.

        With several trainer processes the first one keeps the table, and all train on what it chose: they cannot fall out of step.
        """
        metrics = Metrics()
        with run.timer("generation"):
            plan = self._plan(metrics) if run.ranks.is_main else None
            run.ranks.barrier("generation", self.config.deadline + run.config.deadlines.request)
            plan = run.ranks.gather(plan)[0]
        assert plan is not None
        groups, probe, run.total = plan
        retire(run, groups)
        with self.training:
            metrics.add(self._check_probe(probe))
            metrics.add(learn(run, groups))
            if run.ranks.is_main:
                with self.changed:
                    metrics.add(self.seen)
                    self.seen = Metrics()
                    self._settle(self.taken)
                    self.taken = []
                    run.cursor, run.ahead = self.cursor, sorted(self.ahead)  # as the next checkpoint will say
            if run.step < run.total:
                self._refit()
        if run.ranks.is_main:
            with self.changed:  # only now is there room: what begins from here on has the new weights
                self.step = run.step
                self._wake_producer()
            self._ask_probe()
        return metrics, groups

    def _plan(self, metrics: Metrics) -> tuple[list[list[Rollout]], list[Rollout], int]:
        """The groups of the next step, what the probe answered where it is needed, and the number of steps the run has."""
        chosen = self._wait(self._chosen, f"{self.size} groups for step {self.run.step + 1}")
        metrics.add(self._measure(chosen))
        with self.changed:
            self.taken = [g.index for g in chosen]
            groups, self.discarded = sorted([*(g.rollouts for g in chosen), *self.discarded], key=lambda group: group[0].index), []
            over = self._left() < self.size  # the epochs are over: fewer prompts are left than a step needs
        if self.config.cache == "keep_kv":  # for the canary: a completion that attends to keys of older weights is as old as they are
            for r in (r for group in groups for r in group if any(r.sampled)):
                r.versions = [min(w for w in r.versions if w >= 0) if v >= 0 else v for v in r.versions]
        return groups, self._probe_answer(groups), self.run.step + 1 if over else self.run.total

    def _left(self) -> int:
        """Prompts that are neither trained, nor in training, nor dropped."""
        return self.limit - self.cursor - len(self.ahead) - len(self.taken)

    def _refit(self) -> None:
        """Requests wait here from before the engine pauses until their salt can be the new version."""
        if self.run.ranks.is_main:
            self._result(self._ask(self._close_gate()), "the producer")
        refit_if_stale(self.run)
        self.engine.version = self.run.engine.version
        if self.loop is not None:
            self.loop.call_soon_threadsafe(self.gate.set)

    async def _close_gate(self) -> None:
        self.gate.clear()

    def _chosen(self) -> list[Group] | None:
        groups = list(self.table.values())
        if self.next >= self.limit and len(groups) < self.size and all(g.finished for g in groups):
            return groups  # so many prompts were retired that the epochs end within this step
        return choose(groups, self.step, self.size, self.config.max_staleness, self.config.order)

    def _wait(self, ready: Any, what: str) -> Any:
        """What `ready()` returns once it is true. Looks at producer and engine while it waits.

        Raises:
            EngineError: nothing succeeded within the deadline, or the engine died. Whatever the producer raised, with its traceback.
        """
        finished, give_up = self.finished, time.monotonic() + self.config.deadline
        with self.changed:
            while (found := ready()) is None:
                if self.error is not None:
                    raise self.error
                if not self.thread.is_alive():
                    raise EngineError(f"waiting for {what}: the producer has ended")
                if self.finished != finished:
                    finished, give_up = self.finished, time.monotonic() + self.config.deadline
                if time.monotonic() > give_up:
                    raise EngineError(
                        f"waiting for {what}: nothing succeeded within {self.config.deadline:.0f} s (--schedule.deadline);"
                        f" {len(self.table)} groups are in the table, {sum(not g.finished for g in self.table.values())} of them in flight"
                    )
                self.changed.wait(min(1.0, self.config.deadline))
                if self.run.server is not None:
                    self.run.server.check_alive()
        return found

    def _settle(self, indices: Iterable[int]) -> None:
        """Prompts that are trained, dropped or passed over."""
        for index in indices:
            self.table.pop(index, None)
            self.ahead.add(index)
        while self.cursor in self.ahead:
            self.ahead.remove(self.cursor)
            self.cursor += 1

    def _measure(self, chosen: list[Group]) -> Metrics:
        """Ages, lengths and the state of the table, as a step begins."""
        metrics = Metrics()
        with self.changed:
            waiting = sum(bool(g.finished) for g in self.table.values()) - len(chosen)
            metrics.mean("schedule/ready", waiting)  # finished groups that this step leaves in the table
            metrics.mean("schedule/in_flight", len(self.table) - waiting - len(chosen))
        for group in chosen:
            age = self.step - group.born
            assert 0 <= age <= self.config.max_staleness, f"group {group.index} of step {group.born} at step {self.step}: admission is broken"
            metrics.mean("schedule/age", age)  # in steps
            metrics.max("schedule/age_max", age)
            for r in group.rollouts:
                versions = [v for v in r.versions if v >= 0]
                if versions and min(versions) < group.version:
                    raise EngineError(f"prompt {group.index} was sent to weights of version {group.version}, and version {min(versions)} answered")
                metrics.mean("schedule/token_age", sum(self.run.updates - v for v in versions), len(versions))  # in optimizer steps
                metrics.mean("schedule/versions", len(set(versions)))  # weights that took part in one completion
                metrics.mean("schedule/length_accepted", len(versions))
        return metrics

    def _ask(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run something in the producer's event loop."""
        assert self.loop is not None
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        except RuntimeError:  # its loop is closed: say why
            coroutine.close()
            self.thread.join(timeout=10)
            raise self.error or EngineError("the producer has ended") from None

    def _result(self, future: Future[Any], what: str) -> Any:
        try:
            return future.result(self.run.config.deadlines.request)
        except CancelledError:
            self.thread.join(timeout=10)
            raise self.error or EngineError("the producer has ended") from None
        except TimeoutError:
            raise EngineError(f"{what} did not answer within {self.run.config.deadlines.request:.0f} s (--deadlines.request)") from None

    # -------------------------------------------------------------------------------------------- the canary

    def _ask_probe(self) -> None:
        """A few tokens from the weights just sent, from a prompt long enough to be in the prefix cache; see _probe_answer."""
        run, sampling = self.run, self.run.config.sampling
        if run.refit is None or run.sent != run.updates:
            return
        words = [i for e in run.examples[:64] for i in run.renderer.prompt(e.messages)]
        prompt = tuple(words[: min(64, sampling.max_prompt_tokens)])
        request = Request(prompt, 4, min(16, sampling.max_completion_tokens), sampling.temperature, seed_of(run.config.seed, "probe", run.updates))
        self.probe = self._ask(self.engine.generate(request))
        self.probe_prompt = list(prompt)

    def _probe_answer(self, groups: Sequence[Sequence[Rollout]]) -> list[Rollout]:
        """The probe as rollouts, where it is there or has to be waited for: where no trained token comes from the present weights."""
        fresh = any(v == self.run.updates for group in groups for r in group if not r.failure for v in r.versions)
        if self.probe is None or fresh and not self.probe.done():
            return []
        completions = self._result(self.probe, "the probe")
        return [Rollout(0, s, self.probe_prompt, c.ids, [True] * len(c.ids), c.logprobs, c.versions) for s, c in enumerate(completions)]

    def _check_probe(self, rows: list[Rollout]) -> Metrics:
        """Engine and trainer have to agree about the probe. (All ranks score it: a sharded forward is a collective.)"""
        run, metrics = self.run, Metrics()
        for batch in (b.to(run.policy.device) for b in policies.pack(rows, run.config.policy.micro_batch_tokens)):
            (logprobs,) = policies.score(run.policy, [batch])
            found = loss.mismatch(logprobs, batch.logprobs_gen, batch.versions == run.updates)
            metrics.add({f"probe/{name}": entry for name, entry in found.items()})
        if rows:
            stop_on_mismatch(run, metrics.result()["probe/mismatch_k3"])
        return metrics

    # -------------------------------------------------------------------------------------------- the producer

    def _produce_in_thread(self) -> None:
        try:
            if self.run.policy.device.type == "cuda":
                torch.cuda.set_device(self.run.policy.device)
            asyncio.run(self._produce())
        except BaseExceptionGroup as errors:  # the first, with its own traceback; the others are the same or its consequence
            self._end(errors.exceptions[0])
        except BaseException as error:  # handed to the trainer, which raises it
            self._end(error)

    def _end(self, error: BaseException) -> None:
        with self.changed:
            self.error = error
            self.changed.notify_all()

    async def _produce(self) -> None:
        """Admit whenever there is room; every group is a task of its own, and the first error cancels the rest."""
        async with self.engine, asyncio.TaskGroup() as tasks:
            with self.changed:
                self.loop = asyncio.get_running_loop()
                self.changed.notify_all()
            running: set[asyncio.Task[None]] = set()
            while not self.stopping:
                self.wake.clear()  # before looking: what happens after the look wakes us again
                for group in self._admit():
                    running.add(task := tasks.create_task(self._sample(group)))
                    task.add_done_callback(running.discard)
                await self.wake.wait()
            for task in running:
                task.cancel()

    def _wake_producer(self) -> None:
        if self.loop is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.wake.set)

    async def generate(self, request: Request) -> list[Completion]:
        """The engine as a Sampler sees it: new requests wait while weights are sent."""
        await self.gate.wait()
        return await self.engine.generate(request)

    def _admit(self) -> list[Group]:
        """The groups there is room for. Retired prompts are passed over (task.next_position)."""
        run, admitted = self.run, []
        with self.changed:
            while len(self.table) < self.window and self.next < self.limit and self.next - self.dropped < run.total * self.size:
                _, after = next_position(run.task, run.config.seed, self.next, frozenset(run.retired))
                index, passed = after - 1, set(range(self.next, min(after - 1, self.limit))) - self.ahead
                self.next, self.dropped = after, self.dropped + len(passed)
                self._settle(passed)
                if index < self.limit and index not in self.ahead:
                    self.table[index] = Group(index, self.step, self.engine.version, self.rounds.pop(0) if self.rounds else 0)
                    admitted.append(self.table[index])
            if admitted and not math.isnan(self.idle_since):
                self.seen.sum("time/generation_idle", time.perf_counter() - self.idle_since)
                self.idle_since = math.nan
        return admitted

    async def _sample(self, group: Group) -> None:
        """Sample a group, with retries; then it waits in the table to be trained, or is dropped."""
        run, config = self.run, self.run.config
        sampler = Sampler(self, run.renderer, run.task, config.sampling, config.deadlines, config.seed)
        example = run.task.train[position(run.task, config.seed, group.index)]
        for _ in range(self.config.retries + 1):
            error: UserError | EngineError
            try:
                rollouts = await sampler.group(group.index, example, config.samples_per_prompt)
                failures = [r.failure for r in rollouts if r.failure]
                if len(failures) < len(rollouts):  # what is left of a group that failed in part is trained
                    break
                error = UserError(f"prompt {group.index} failed: {failures[0]}")
            except EngineError as failure:
                if run.server is not None:
                    run.server.check_alive()  # nothing to retry on a dead engine
                rollouts = [Rollout(group.index, s, [], finish="failed", failure=str(failure)) for s in range(config.samples_per_prompt)]
                error = failure
            self.seen.sum("schedule/failed_attempts", 1)
        self._finish(group, rollouts, error if all(r.failure for r in rollouts) else None)

    def _finish(self, group: Group, rollouts: list[Rollout], error: UserError | EngineError | None) -> None:
        with self.changed:
            if error is not None:
                self.failures_in_row += 1
                if self.config.on_failure == "stop" or self.failures_in_row > self.config.max_failures:
                    raise type(error)(
                        f"{error} ({self.config.retries + 1} attempts: --schedule.retries; {self.failures_in_row} groups in a row:"
                        f" --schedule.max-failures, --schedule.on-failure {self.config.on_failure})"
                    )
            else:
                self.finished, self.failures_in_row = self.finished + 1, 0
                for r in rollouts:
                    self.seen.mean("schedule/length_generated", sum(r.sampled))
            if reason := self._drop_reason(group, rollouts):
                self.seen.sum(f"schedule/dropped_{reason}", 1)
                self.dropped += 1
                self.discarded.append(rollouts)
                self.rounds.append(group.round + (reason == "no_signal"))
                self._settle([group.index])
            else:
                group.rollouts, group.finished = rollouts, max(1, self.finished)
            idle = all(g.finished for g in self.table.values())
            if self.rounds and (idle or self.config.max_staleness):  # without staleness by whole rounds, as grpo.py
                self.wake.set()
            elif idle:
                self.idle_since = time.perf_counter()
            self.changed.notify_all()

    def _drop_reason(self, group: Group, rollouts: list[Rollout]) -> str:
        """Why the next prompt takes a group's place; "" where it is kept. Never so that the prompts left could not fill this step."""
        if self._left() <= self.size:
            return ""
        if all(r.failure for r in rollouts):
            return "failed"
        return "no_signal" if group.round < self.run.config.refill and not carries_signal(rollouts, self.run.task.reward_weights) else ""


# ------------------------------------------------------------------------------------------------ main


def train(run: Run) -> dict[str, float]:
    assert isinstance(run.config, AsyncConfig)
    with Schedule(run, run.config.schedule) as schedule:
        return grpo.train(run, schedule.train_step)


def parse_async(arguments: Sequence[str]) -> AsyncConfig:
    """The command line; what trains on older tokens gets a correction by default."""
    asked = parse(arguments, __doc__ or "", AsyncConfig)
    stale = asked.schedule.max_staleness > 0 and asked.loss.anchor != "gen"
    return parse(arguments, __doc__ or "", AsyncConfig, correction="truncate") if stale else asked


def main(arguments: Sequence[str]) -> None:
    config = parse_async(arguments)
    check_schedule(config)
    launch(config, train)


if __name__ == "__main__":
    guarded(main, sys.argv[1:])
