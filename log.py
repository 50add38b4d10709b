"""What a run tells: metrics that add up, timers, one line per step, files, trackers, sample tables and plots.

A metric declares its kind when it is recorded (mean with a count, sum, max, min), so that adding up micro-batches and ranks gives
the same number however the work was split. One `metrics.jsonl` line per step; the same numbers go to the trackers.
"""

import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class LogConfig:
    trackers: tuple[str, ...] = ()  # of accelerate: tensorboard, wandb, trackio, ...; metrics.jsonl is always written
    project: str = "grpo"  # project name for the trackers
    samples: int = 4  # completions shown in samples.md per evaluation
    rollouts: bool = True  # write every rollout to rollouts.jsonl, those of evaluations to eval.jsonl


@dataclass
class Metrics:
    """Named numbers under addition.

    >>> a, b = Metrics(), Metrics()
    >>> a.mean("reward", 3.0, 3), b.mean("reward", 0.0, 1), b.max("longest", 7)
    (None, None, None)
    >>> a.add(b); a.result()
    {'reward': 0.75, 'longest': 7.0}
    """

    entries: dict[str, tuple[str, float, float]] = field(default_factory=dict)  # name -> (kind, value, count)

    def mean(self, name: str, total: float, count: float = 1.0) -> None:
        self._merge(name, "mean", total, count)

    def sum(self, name: str, value: float) -> None:
        self._merge(name, "sum", value, 1.0)

    def max(self, name: str, value: float) -> None:
        self._merge(name, "max", value, 1.0)

    def min(self, name: str, value: float) -> None:
        self._merge(name, "min", value, 1.0)

    def add(self, other: "Metrics | Mapping[str, tuple[str, Any, Any]]") -> None:
        """Merge other metrics, or a mapping name -> (kind, value, count) of numbers or one-element tensors."""
        entries = other.entries if isinstance(other, Metrics) else other
        for name, (kind, value, count) in entries.items():
            self._merge(name, kind, float(value), float(count))

    def _merge(self, name: str, kind: str, value: float, count: float) -> None:
        if name not in self.entries:
            self.entries[name] = (kind, value, count)
            return
        known, a, n = self.entries[name]
        if known != kind:
            raise ValueError(f"metric {name} was recorded as {known} and as {kind}")
        merged = max(a, value) if kind == "max" else min(a, value) if kind == "min" else a + value
        self.entries[name] = (kind, merged, n + count)

    def result(self) -> dict[str, float]:
        """name -> number. A mean of nothing is nan; extremes over nothing are nan."""
        numbers = {}
        for name, (kind, value, count) in self.entries.items():
            if kind == "mean":
                value = value / count if count else math.nan
            numbers[name] = math.nan if kind in ("max", "min") and math.isinf(value) else value
        return numbers


class Timer:
    """Seconds by label; a label used twice in a step adds up.

    >>> timer = Timer()
    >>> with timer("work"): pass
    >>> list(timer.seconds)
    ['time/work']
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, label: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[f"time/{label}"] = self.seconds.get(f"time/{label}", 0.0) + time.perf_counter() - start

    def take(self) -> dict[str, float]:
        seconds, self.seconds = self.seconds, {}
        return seconds


class Log:
    """The files of one run, written by the main process alone. `keep_until` cuts metrics back to a resumed step."""

    def __init__(self, folder: Path, config: LogConfig, is_main: bool = True, keep_until: int | None = None):
        self.folder, self.config, self.is_main = folder, config, is_main
        self.started = time.time()
        if is_main:
            folder.mkdir(parents=True, exist_ok=True)
            if keep_until is not None:
                for name in ("metrics.jsonl", "rollouts.jsonl", "eval.jsonl"):
                    cut_back(folder / name, keep_until)

    def step(self, step: int, numbers: Mapping[str, float]) -> None:
        if self.is_main:
            line = {"step": step, **{k: round_number(v) for k, v in numbers.items()}}
            append_line(self.folder / "metrics.jsonl", line)

    def rollouts(self, step: int, rows: Sequence[Mapping[str, Any]], name: str = "rollouts.jsonl") -> None:
        if self.is_main and self.config.rollouts:
            for row in rows:
                append_line(self.folder / name, {"step": step, **row})

    def print(self, *parts: Any) -> None:
        if self.is_main:
            print(*parts, flush=True)


def round_number(value: float) -> float | None:
    """Numbers as they are; nan and infinities as null, since JSON has none."""
    return value if math.isfinite(value) else None


def append_line(path: Path, row: Mapping[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a .jsonl file; a last line cut short by a crash is left out."""
    if not path.exists():
        return []
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def cut_back(path: Path, step: int) -> None:
    """Drop the lines after `step`: a resumed run writes them again. Written aside, then renamed."""
    if path.exists():
        aside = path.with_suffix(".tmp")
        aside.write_text("".join(json.dumps(row) + "\n" for row in read_lines(path) if row["step"] <= step))
        os.replace(aside, path)


def samples_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table of completions: prompt, completion, reward, finish. Text is escaped so that no completion can break it."""

    def cell(text: Any) -> str:
        return str(text).replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ⏎ ").replace("<", "&lt;").replace("`", "\\`")

    lines = ["| prompt | completion | reward | finish |", "|---|---|---|---|"]
    lines += [f"| {cell(r['prompt'])} | {cell(r['completion'])} | {r['reward']:.2f} | {r['finish']} |" for r in rows]
    return "\n".join(lines) + "\n"


def plot_run(folder: Path, window: int = 5) -> Path | None:
    """reward.png: reward per step with a running mean, and held-out accuracy where it was measured."""
    rows = read_lines(folder / "metrics.jsonl")
    reward = [(r["step"], r["reward"]) for r in rows if r.get("reward") is not None]
    accuracy = [(r["step"], r["eval/accuracy"]) for r in rows if r.get("eval/accuracy") is not None]
    if not reward:
        return None
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot

    steps, values = zip(*reward)
    smooth = [sum(values[max(0, i - window + 1) : i + 1]) / min(i + 1, window) for i in range(len(values))]
    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(steps, values, color="tab:blue", alpha=0.3, label="reward of a step")
    axes.plot(steps, smooth, color="tab:blue", label=f"mean of {window} steps")
    if accuracy:
        axes.plot(*zip(*accuracy), "o-", color="tab:orange", label="held-out accuracy")
    axes.set_xlabel("optimizer steps taken")
    axes.set_ylabel("reward")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    path = folder / "reward.png"
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def write_samples(folder: Path, step: int, rows: Sequence[Mapping[str, Any]], count: int) -> None:
    """Append a table of `count` completions to samples.md: from the best, the worst, and between."""
    ranked = sorted(rows, key=lambda row: -row["reward"])
    count = min(count, len(ranked))
    picked = [ranked[i * (len(ranked) - 1) // max(1, count - 1)] for i in range(count)]
    with (folder / "samples.md").open("a") as file:
        file.write(f"## after step {step}\n\n{samples_table(picked)}\n")


def step_line(step: int, total: int, numbers: Mapping[str, float]) -> str:
    """What the terminal shows of a step."""
    get = numbers.get
    line = f"step {step:4d}/{total}  reward {get('reward', math.nan):.3f}  signal {get('groups/signal', 0):.2f}"
    line += f"  tokens {get('rollout/completion_tokens', 0):.1f}"
    if "grad_norm" in numbers:
        line += f"  loss {numbers['loss']:+.4f}  grad {numbers['grad_norm']:.2f}  k3 {get('mismatch_k3', math.nan):.1e}"
    else:
        line += "  no group with signal, no update"
    line += f"  | generation {get('time/generation', 0):.1f}s  training {get('time/training', 0):.1f}s  refit {get('time/refit', 0):.1f}s"
    return line + (f"  | held-out accuracy {numbers['eval/accuracy']:.3f}" if "eval/accuracy" in numbers else "")


def start_trackers(config: LogConfig, settings: Mapping[str, Any], folder: Path, cpu: bool, is_main: bool = True) -> list[Any]:
    """Accelerate's trackers (`.log(numbers, step=)`, `.finish()`), in the main process alone."""
    if not (config.trackers and is_main):
        return []
    from accelerate import Accelerator

    trackers = Accelerator(log_with=list(config.trackers), project_dir=folder, cpu=cpu)
    trackers.init_trackers(config.project, config={k: v if isinstance(v, (int, float, str, bool)) else str(v) for k, v in settings.items()})
    return list(trackers.trackers)
