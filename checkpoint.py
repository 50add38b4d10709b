"""Checkpoints: whole or absent, resumable to the same next step on any number of processes, and nothing in them can execute code.

    OUT/checkpoints/step_12/model/                 what transformers and vLLM load: safetensors in the compute dtype, config, tokenizer
                            master/                float32 weights, where the compute dtype is another
                            optimizer.safetensors  AdamW's moments and step counters, by parameter name
                            state.json             counters, schedule, metrics, the resolved configuration, library versions
                            rank-00000.json        random state of each process
                            manifest.json          size and SHA-256 of every other file; written last

One save, on every trainer process:
    (1) begin       the first rank removes leftovers and makes tmp_step_12
    (2) snapshot    every tensor is gathered whole by the one rank that writes it, file by file: nobody ever holds the model
    (3) write       each rank its files, through to the disk; with --checkpoint.asynchronous on a thread, from copies, while training goes on
    (4) commit      the first rank: manifest, one rename, and only then older checkpoints go
Files hold whole tensors by name, so whoever resumes, sharded or not, reads the parts it needs. A folder without a manifest, or that
does not match it, is passed over with a warning and the one before it is used.
"""

import dataclasses
import hashlib
import json
import math
import os
import re
import shutil
import signal
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from log import round_number
from shards import (
    Files,
    Work,
    clean,
    digest,
    flush,
    here,
    load_optimizer,
    random_state,
    restore_random_state,
    side_files,
    snapshot,
    write_bytes,
    write_json,
)
from task import UserError


@dataclass
class CheckpointConfig:
    every: int = 50  # steps between checkpoints; the last step is always saved; 0: only the last
    keep: int = 2  # checkpoints kept: the best by --checkpoint.metric, or the newest; the very newest always stays; 0: all
    metric: str = ""  # what makes one the best: val:NAME (eval/NAME in metrics.jsonl) or train:NAME; off: the newest are kept
    higher_is_better: bool = True  # of the metric
    ft_every: int = 0  # steps between further checkpoints against crashes, which never compete for --checkpoint.keep; 0: none
    ft_keep: int = 1  # newest checkpoints of either kind kept besides, where --checkpoint.ft-every is on
    asynchronous: bool = False  # write from a copy in CPU memory, on a thread, while training goes on
    must_save_by: str = ""  # DD:HH:MM:SS after the start, save and end the run; off: no limit
    grace: float = 25.0  # seconds after SIGTERM or SIGUSR1 for the running step to end; then it is saved and the exit code is 0

    @property
    def deadline(self) -> float:
        """Seconds from the start; inf where there is no limit."""
        if not self.must_save_by:
            return math.inf
        if not re.fullmatch(r"\d+:\d\d:\d\d:\d\d", self.must_save_by):
            raise UserError(f"--checkpoint.must-save-by {self.must_save_by}: give DD:HH:MM:SS, for example 00:03:45:00")
        return float(sum(int(n) * unit for n, unit in zip(self.must_save_by.split(":"), (86400, 3600, 60, 1))))

    @property
    def metric_key(self) -> str:
        """The metric's name in metrics.jsonl. `val:accuracy` is eval/accuracy, `train:reward` is reward."""
        kind, _, name = self.metric.partition(":")
        if self.metric and (kind not in ("val", "train") or not name):
            raise UserError(f"--checkpoint.metric {self.metric}: give val:NAME or train:NAME, for example val:accuracy")
        return f"eval/{name}" if kind == "val" else name


# ------------------------------------------------------------------------------------------------ one checkpoint, whole or absent


def save(root: Path, step: int, work: Iterable[Work], after: Callable[[], None] = lambda: None, deadline: float = 1800.0) -> None:
    """Write step_<step> here and now, on all ranks: begin, then finish. Arguments as in `finish`."""
    failure = None
    aside = begin(root, step)
    try:
        finish(aside, work, after, deadline)
    except UserError as error:
        failure = error
    for error in here().gather(failure):
        if error is not None:
            raise error


def begin(root: Path, step: int) -> Path:
    """An empty folder tmp_step_<step>; what a killed save left is removed, never merged."""

    def make() -> None:
        try:
            recover(root)
            (root / f"tmp_step_{step}").mkdir(parents=True)
        except OSError as error:
            raise UserError(f"cannot write the checkpoint of step {step} to {root}: {error}; the previous checkpoint stands") from error

    here().on_first(make)
    return root / f"tmp_step_{step}"


def finish(aside: Path, work: Iterable[Work], after: Callable[[], None] = lambda: None, deadline: float = 1800.0) -> None:
    """This rank's files; on the first rank also the commit. No collective call of its own: it may run on a thread.

    Args:
        work: writes files; an iterator whose steps are collective is drawn to its end even where writing fails.
        after: called on the first rank once the checkpoint stands.
        deadline: seconds that the first rank waits for the files of the others.

    Raises:
        UserError: a disk is full or gone; the previous checkpoint stands.
    """
    files: Files = {}
    failure = ""
    for write in work:
        try:
            files |= {} if failure else write(aside)
        except OSError as error:
            failure = f"{error}" if here().size == 1 else f"rank {here().rank}: {error}"
    try:
        if here().rank > 0:
            for name in files if failure else ():
                (aside / name).unlink()  # makes room for the word that it failed
            write_json(aside / f"part-{here().rank}.tmp", {"files": files, "failure": failure})
            (aside / f"part-{here().rank}.tmp").rename(aside / f"part-{here().rank}.json")
        elif not failure:
            for part in parts(aside, deadline):
                files |= part["files"]
                failure = failure or part["failure"]
            if not failure:
                commit(aside, files)
    except OSError as error:
        failure = str(error)
    if failure:
        if here().rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
        step, root = aside.name.removeprefix("tmp_step_"), aside.parent
        raise UserError(f"cannot write the checkpoint of step {step} to {root}: {failure}; the previous checkpoint stands")
    if here().rank == 0:
        after()


def parts(aside: Path, deadline: float) -> Iterator[dict[str, Any]]:
    """What the other ranks wrote, as they finish. Through the file system, since a thread must not use the trainer's process group."""
    give_up = time.monotonic() + deadline
    for other in range(1, here().size):
        path = aside / f"part-{other}.json"
        while not path.exists():
            if time.monotonic() > give_up:
                raise TimeoutError(f"rank {other} did not finish its files within {deadline:.0f} s; is {aside} on a disk that all share?")
            time.sleep(0.02)
        part: dict[str, Any] = json.loads(path.read_text())
        path.unlink()
        yield part


def commit(aside: Path, files: Files) -> None:
    """Index files, the manifest, and the rename that makes the checkpoint exist."""
    for folder in ("model", "master"):
        shards = {name: entry for name, entry in files.items() if name.startswith(f"{folder}/model") and "tensors" in entry}
        if len(shards) > 1:
            names = {tensor: Path(name).name for name, entry in shards.items() for tensor in entry["tensors"]}
            index = {"metadata": {"total_size": sum(e["bytes"] for e in shards.values())}, "weight_map": names}
            files[f"{folder}/model.safetensors.index.json"] = write_json(aside / folder / "model.safetensors.index.json", index)
    write_json(aside / "manifest.json", {name: {"size": e["size"], "sha256": e["sha256"]} for name, e in sorted(files.items())})
    for folder in {(aside / name).parent for name in files} | {aside}:
        flush(folder)
    final = aside.parent / aside.name.removeprefix("tmp_")
    replaced = aside.parent / f"old_{final.name}"
    if final.exists():
        final.rename(replaced)
    aside.rename(final)
    flush(final.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def recover(root: Path) -> None:
    """Put right what a crash may have left: a checkpoint between two renames comes back, half-written and half-deleted ones go."""
    for interrupted in root.glob("old_step_*"):
        home = root / interrupted.name.removeprefix("old_")
        if home.exists():
            shutil.rmtree(interrupted)
        else:
            interrupted.rename(home)
    for leftover in root.glob("tmp_step_*"):
        shutil.rmtree(leftover)


def steps(root: Path) -> list[int]:
    """The steps of all finished checkpoints, ascending. Other folders, such as step_1-hf or tmp_step_2, do not count."""
    found = [re.fullmatch(r"step_(\d+)", p.name) for p in root.glob("step_*")] if root.exists() else []
    return sorted(int(m[1]) for m in found if m and (root / m[0] / "manifest.json").exists())


def latest(root: Path) -> Path | None:
    """The newest whole checkpoint. Damaged ones are passed over with a warning that names them, and renamed: a damaged one that went on
    counting as the newest would be kept in the place of those that the resumed run writes."""
    recover(root)
    for step in reversed(steps(root)):
        damage = damage_of(root / f"step_{step}")
        if not damage:
            return root / f"step_{step}"
        warnings.warn(f"checkpoint {root / f'step_{step}'} is damaged ({damage}): using the one before it", stacklevel=2)
        shutil.rmtree(root / f"damaged_step_{step}", ignore_errors=True)
        (root / f"step_{step}").rename(root / f"damaged_step_{step}")
    return None


def damage_of(folder: Path) -> str:
    """What differs from the manifest; "" for a whole checkpoint."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
    except (OSError, ValueError) as error:
        return f"manifest.json: {error}"
    for name, expected in manifest.items():
        path = folder / name
        if not path.exists():
            return f"{name} is missing"
        if path.stat().st_size != expected["size"] or digest(path) != expected["sha256"]:
            return f"{name} differs from its checksum"
    return ""


# ------------------------------------------------------------------------------------------------ retention


def kept(scores: Mapping[int, float | None], keep: int, higher_is_better: bool = True, every: int = 1, ft_keep: int = 0) -> set[int]:
    """Which of the finished checkpoints stay: the best `keep`, the newest `ft_keep`, and the newest of all.

    A missing score is the worst; ties go to the newer. With ft_keep only multiples of `every` compete.

    >>> sorted(kept({1: 0.5, 2: 0.3, 3: None, 4: 0.3}, keep=1))
    [1, 4]
    >>> sorted(kept({1: None, 2: None, 3: None}, keep=2))
    [2, 3]
    """
    if not scores or not keep and not ft_keep:
        return set(scores)
    order = sorted(scores)
    competing = [s for s in order if not ft_keep or every and s % every == 0]
    best = ranking({s: scores[s] for s in competing}, higher_is_better)[-keep:] if keep else competing
    return {order[-1], *best, *(order[-ft_keep:] if ft_keep else ())}


def ranking(scores: Mapping[int, float | None], higher_is_better: bool) -> list[int]:
    """Steps from the worst to the best."""

    def value(step: int) -> float:
        score = scores[step]
        return -math.inf if score is None or math.isnan(score) else score if higher_is_better else -score

    return sorted(scores, key=lambda step: (value(step), step))


def scores_of(root: Path, metric_key: str) -> dict[int, float | None]:
    """The metric of every finished checkpoint, None where it was not measured."""
    found: dict[int, float | None] = {}
    for step in steps(root):
        try:
            found[step] = json.loads((root / f"step_{step}" / "state.json").read_text()).get("metrics", {}).get(metric_key)
        except (OSError, ValueError):  # damaged: it ranks last, and `latest` will name it
            found[step] = None
    return found


def best(root: Path, config: CheckpointConfig) -> Path | None:
    """The checkpoint with the best --checkpoint.metric, the newer of equals; the newest where none was measured."""
    scores = scores_of(root, config.metric_key)
    measured = {s: v for s, v in scores.items() if v is not None}
    if config.metric and len(measured) < len(scores):
        without = ", ".join(str(s) for s in scores if s not in measured)
        warnings.warn(f"{config.metric} was not measured at step {without}: " + ("ignored" if measured else "taking the newest"), stacklevel=2)
    order = ranking(measured or scores, config.higher_is_better)
    return root / f"step_{order[-1]}" if order else None


def prune(root: Path, config: CheckpointConfig) -> None:
    """Remove what `kept` does not name. By a rename first: a half-deleted checkpoint must not look like one."""
    scores = scores_of(root, config.metric_key)
    for step in set(scores) - kept(scores, config.keep, config.higher_is_better, config.every, config.ft_keep if config.ft_every else 0):
        try:
            (root / f"step_{step}").rename(root / f"tmp_step_{step}")
            shutil.rmtree(root / f"tmp_step_{step}")
        except OSError as error:
            warnings.warn(f"could not remove the old checkpoint of step {step}: {error}", stacklevel=2)


# ------------------------------------------------------------------------------------------------ a run

COUNTERS = ("step", "cursor", "ahead", "updates", "empty_steps", "entropy_coef", "entropy_bonus", "retired")  # besides weights and optimizer


def run_work(run: Any, numbers: Mapping[str, float], beside: Mapping[str, bytes], copied: bool) -> Iterator[Work]:
    """Everything of a run that a checkpoint holds, this rank's share of it. A schedule with a state of its own has `schedule_state()`."""
    mine = random_state()
    names = {p: name for p, name in run.parameter_names.items() if p.requires_grad}
    dtype = run.policy.compute_dtype
    if any(p not in names for group in run.optimizer.param_groups for p in group["params"]):
        raise RuntimeError("the optimizer's parameters are not those of the policy: a forward pass was not followed by backward or settle")
    state = {name: getattr(run, name) for name in COUNTERS} | {
        "schedule": run.schedule_state() if hasattr(run, "schedule_state") else None,
        "metrics": {name: round_number(value) for name, value in numbers.items()},
        "processes": here().size,
        "without_moments": [clean(name) for p, name in names.items() if p not in run.optimizer.state],
        "examples": fingerprint(run.examples),
        "versions": {name: sys.modules[name].__version__ for name in ("torch", "transformers", "numpy", "vllm") if name in sys.modules},
        "config": dataclasses.asdict(run.config),
    }
    state = json.loads(json.dumps(state))  # as it is now, whatever the run does next

    def write(folder: Path) -> Files:
        files = {f"rank-{here().rank:05}.json": write_json(folder / f"rank-{here().rank:05}.json", {"random": mine})}
        if here().rank == 0:
            files["state.json"] = write_json(folder / "state.json", state)
            files |= {f"model/{name}": write_bytes(folder / "model" / name, [data]) for name, data in beside.items()}
            if dtype != torch.float32:
                files["master/config.json"] = write_bytes(folder / "master/config.json", [beside["config.json"]])
        return files

    yield write
    yield from snapshot(run.policy.model, run.optimizer, {p: clean(name) for p, name in names.items()}, dtype, copied)


def fingerprint(examples: Sequence[Any]) -> str:
    """Of the training prompts, in their order."""
    sha = hashlib.sha256()
    for example in examples:
        sha.update(repr(example.messages).encode())
    return f"{len(examples)}:{sha.hexdigest()[:16]}"


def find(config: Any, out: Path) -> Path | None:
    """The checkpoint to resume from; None without --resume, and where a run ended before its first checkpoint: it begins again.

    Raises:
        UserError: there is no run to resume, no whole checkpoint, or the run would not be the same run.
    """
    if not config.resume:
        return None
    root = out / "checkpoints"

    def search() -> Path | None:
        found = latest(root)
        if found is None and (any(root.glob("damaged_step_*")) or not (out / "config.json").exists()):
            raise UserError(f"--resume: no whole checkpoint in {root}; start without --resume in another --out")
        return found

    found = here().on_first(search)
    if found is None:
        if here().rank == 0:
            print(f"--resume: the run in {out} ended before its first checkpoint: beginning at step 0 again", flush=True)
        return None
    changed = [(name, was, now) for name, was, now in changes(stored_state(found)["config"], config) if name in REFUSED]
    if changed and not config.resume_force:
        what = "; ".join(f"{name} was {was!r} and is {now!r}" for name, was, now in changed)
        raise UserError(f"--resume: {what}: the run could not go on as it began (--resume-force if you mean it)")
    return found


# with another value of one of these a run could not go on: other weights, other prompts, or another place in their order
REFUSED = {
    "model", "task", "seed", "prompts-per-step", "samples-per-prompt", "sampling.max-prompt-tokens", "task.data", "task.split", "task.eval-data",
    "task.eval-size", "task.prompt-column", "task.answer-column", "task.prompt-format", "task.system-prompt", "task.few-shot", "task.weights",
}  # fmt: skip


def changes(stored: Mapping[str, Any], config: Any) -> list[tuple[str, Any, Any]]:
    """The settings that differ, as (flag, was, is)."""

    def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in settings.items():
            flag = prefix + name.removesuffix("_config").replace("_", "-")
            found |= flat(value, flag + ".") if isinstance(value, dict) and not name.endswith(("_params", "_weights")) else {flag: value}
        return found

    was, now = flat(stored), flat(json.loads(json.dumps(dataclasses.asdict(config))))
    same_run = {"resume", "resume-force", "out", "dry-run"}
    return [(name, was.get(name, "unset"), value) for name, value in now.items() if name not in same_run and was.get(name, "unset") != value]


def stored_state(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((folder / "state.json").read_text())
    return state


def resumed_step(folder: Path | None) -> int:
    """The step to go on after; -1, which is before the first evaluation, where there is no checkpoint yet."""
    return -1 if folder is None else int(stored_state(folder)["step"])


def weights_of(folder: Path) -> str:
    """The folder to load the policy from. Raises UserError where its weights are not safetensors: other formats can execute code."""
    weights = folder / "master" if (folder / "master").exists() else folder / "model"
    if not any((weights / f"model.safetensors{end}").exists() for end in ("", ".index.json")):
        raise UserError(f"{weights} has no model.safetensors")
    return str(weights)


def restore(run: Any, folder: Path) -> None:
    """Counters, optimizer, schedule and, last of all, random state; the weights were loaded with the policy. Says what has changed.

    Raises:
        UserError: other training prompts, a schedule that this script does not know, or parts of the state are missing.
    """
    state = stored_state(folder)
    problems = []
    if state["examples"] != (now := fingerprint(run.examples)):
        problems.append(f"the training prompts have changed ({state['examples']}, now {now})")
    if state["schedule"] is not None and not hasattr(run, "restore_schedule"):
        problems.append("the checkpoint holds the state of another schedule: resume with the script that wrote it")
    if problems and not run.config.resume_force:
        raise UserError(f"--resume: {'; '.join(problems)} (--resume-force if you mean it)")
    for name in COUNTERS:
        setattr(run, name, state[name])
    load_optimizer(run.optimizer, {p: n for p, n in run.parameter_names.items() if p.requires_grad}, folder, state["without_moments"])
    if state["schedule"] is not None and hasattr(run, "restore_schedule"):
        run.restore_schedule(state["schedule"])
    run.log.print(f"resumed after step {run.step} from {folder}")
    for name, was, value in changes(state["config"], run.config):
        run.log.print(f"changed since: --{name} was {was!r} and is {value!r}")
    for problem in problems:
        run.log.print(f"changed since: {problem}")
    own = folder / f"rank-{here().rank:05}.json"
    if own.exists():
        restore_random_state(json.loads(own.read_text())["random"])
    elif here().rank < state["processes"]:
        raise UserError(f"{own} is missing: the random state of process {here().rank}")
    else:  # more processes than before: a stream of its own, so that no two ranks draw alike
        torch.manual_seed(int(np.random.SeedSequence((run.config.seed, run.step, here().rank)).generate_state(1)[0]))


# ------------------------------------------------------------------------------------------------ when


class Saver:
    """Decides after each step whether to save and whether to end. A context manager around the loop; on leaving, a save under way is waited for.

    SIGTERM and SIGUSR1 (pre-emption) only set a flag, which `after_step` reads: the step is saved and the run ends with exit code 0. A
    step that takes longer than --checkpoint.grace is given up: exit code 128 + signal, and the previous checkpoint stands.
    """

    last_resort = 5.0  # seconds for the main thread to end the orderly way, after the grace

    def __init__(self, run: Any):
        self.run, self.config, self.root = run, run.config.checkpoint, run.out / "checkpoints"
        self.beside: dict[str, bytes] = {}
        self.told = 0  # the signal that asked for the end
        self.thread: threading.Thread | None = None
        self.failure: BaseException | None = None  # of the thread
        self.saved = run.step if run.step else -1  # the newest checkpoint that stands, or is on its way
        self.durations: deque[float] = deque(maxlen=10)  # seconds of the last steps
        self.longest_save = 0.0
        self.since = time.monotonic()

    def __enter__(self) -> "Saver":
        self.handlers = {number: signal.signal(number, self.on_signal) for number in (signal.SIGTERM, signal.SIGUSR1)}
        self.handlers[signal.SIGALRM] = signal.signal(signal.SIGALRM, self.give_up)
        self.patience = threading.Event()  # set when there is nothing left to be impatient about
        if here().rank == 0:
            prune(self.root, self.config)  # a crash may have come between the last save and its pruning
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        try:
            self.wait()
        except UserError as failure:
            if error is None:
                raise
            warnings.warn(str(failure), stacklevel=2)  # never in place of the error that ended the run
        finally:
            self.patience.set()
            for number, handler in self.handlers.items():
                signal.signal(number, handler)

    def on_signal(self, number: int, frame: Any) -> None:
        if not self.told:
            self.told = number
            threading.Thread(target=self.impatient, daemon=True).start()

    def impatient(self) -> None:
        """On a thread, since the main one may be in a call that no signal ends."""
        if not self.patience.wait(self.config.grace):
            stands = f"the checkpoint of step {self.saved} stands" if self.saved >= 0 else "no step had been saved"
            print(f"{signal.Signals(self.told).name}: the step did not end within --checkpoint.grace {self.config.grace:g} s; {stands}", flush=True)
            os.kill(os.getpid(), signal.SIGALRM)  # ends the main thread the orderly way, if it still runs Python
            if not self.patience.wait(self.last_resort):
                os._exit(128 + self.told)

    def give_up(self, number: int, frame: Any) -> None:
        raise SystemExit(128 + self.told)

    def after_step(self, numbers: Mapping[str, float]) -> bool:
        """Save where it is time. All ranks call it after every step; all get the same answer.

        Args:
            numbers: the metrics of the step, which are written already: a resumed run finds all of them.

        Returns:
            Whether the run should end now: it was told to, or --checkpoint.must-save-by is near.

        Raises:
            UserError: the save before this one failed; --checkpoint.metric names a metric that there is not.
        """
        run, config = self.run, self.config
        self.durations.append(time.monotonic() - self.since)
        self.check_metric(numbers)
        if self.thread is not None and not self.thread.is_alive():
            self.wait()
        reason = self.reason_to_end()
        last = run.step == run.total
        due = any(every and run.step % every == 0 for every in (config.every, config.ft_every))
        if last or reason or due:
            self.patience.set()  # the step has ended in time; however long saving takes, it is not given up
            self.save(numbers)
            reason = reason or self.reason_to_end()
            self.patience.clear()
        if reason:
            self.patience.set()
            self.wait()
            run.log.print(f"{reason}: saved after step {run.step} of {run.total}; go on with --resume")
        self.since = time.monotonic()
        return bool(reason)

    def reason_to_end(self) -> str:
        """The first rank's reason that has one; "" for none. Collective."""
        reason = signal.Signals(self.told).name if self.told else ""
        if time.time() - self.run.log.started + max(self.durations) + self.longest_save >= self.config.deadline:
            reason = reason or f"--checkpoint.must-save-by {self.config.must_save_by} leaves no time for another step"
        return next((r for r in here().gather(reason) if r), "")

    def save(self, numbers: Mapping[str, float]) -> None:
        """A checkpoint of the run as it is now. At most one is under way: the next waits for the one before."""
        self.wait()
        run, begun, deadline = self.run, time.monotonic(), self.run.config.deadlines.collective
        if self.config.metric and self.config.metric_key not in numbers:
            run.log.print(f"--checkpoint.metric {self.config.metric} was not measured at step {run.step}: this checkpoint ranks last")
        if here().rank == 0 and not self.beside:
            self.beside = side_files(run.policy.model, run.tokenizer, run.policy.compute_dtype)
        with run.timer("checkpoint"):
            work = run_work(run, numbers, self.beside, copied=self.config.asynchronous)
            if self.config.asynchronous:
                arguments = begin(self.root, run.step), list(work), lambda: prune(self.root, self.config), deadline
                self.thread = threading.Thread(target=self.write, args=(run.step, *arguments), name="checkpoint")
                self.thread.start()
            else:
                save(self.root, run.step, work, lambda: prune(self.root, self.config), deadline)
                self.saved = run.step
        self.longest_save = max(self.longest_save, time.monotonic() - begun)

    def write(self, step: int, *arguments: Any) -> None:
        begun = time.monotonic()
        try:
            finish(*arguments)
            self.saved = step
        except BaseException as failure:  # handed to the main thread by wait()
            self.failure = failure
        self.longest_save = max(self.longest_save, time.monotonic() - begun)

    def wait(self) -> None:
        """Until no save is under way. Raises what made the last one fail."""
        if self.thread is not None:
            self.thread.join(self.run.config.deadlines.collective)
            if self.thread.is_alive():
                raise UserError(f"a checkpoint was not written within {self.run.config.deadlines.collective:.0f} s (--deadlines.collective)")
            self.thread = None
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure

    def check_metric(self, numbers: Mapping[str, float]) -> None:
        """Raises UserError where the step measured metrics of that kind, but not the one asked for."""
        key, kind = self.config.metric_key, self.config.metric.partition(":")[0]
        measured = sorted(name for name in numbers if name.startswith("eval/") == (kind == "val"))
        complete = bool(measured) and (kind == "val" or "grad_norm" in numbers)  # a step without an update has fewer metrics
        if self.config.metric and complete and key not in numbers:
            raise UserError(f"--checkpoint.metric {self.config.metric}: there is no {key} among {', '.join(measured)}")
