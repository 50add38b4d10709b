"""Schedules of asynchronous GRPO compared by simulation: no model, thousands of generation slots, heavy-tailed completion lengths.

    python bench/schedule_sim.py [--steps 120] [--png out/schedule_sim.png]

    slots        decode one token each per tick; a group takes G slots until its longest completion is done
    trainer      takes P finished groups and trains for a time proportional to their tokens, then the weights are sent
    admission    admitted - trained < (1 + lead) P, exactly async_grpo's table; `choose` is async_grpo's function

Lengths are log-normal with a cap, so that the longest of a step is many times the mean. Time is in ticks (the time of one decoding
iteration). Reported per schedule: throughput relative to the synchronous one, idle shares of trainer and slots, the staleness of trained
groups, and the length bias: mean length of what was trained in the first half of the run over the mean of all prompts admitted by then
(below 1: long completions come late).
"""

import argparse
import heapq
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from async_grpo import Group, choose


@dataclass
class Result:
    name: str
    throughput: float  # trained tokens per tick
    trainer_idle: float  # share of time in which the trainer waits
    slots_idle: float  # share of slot-ticks in which nothing is decoded
    ages: np.ndarray  # steps, of every trained group
    bias: float


def simulate(
    name: str, order: str, bound: int, lead: float, steps: int, size: int, samples: int, slots: int, balance: float, sigma: float, drop_older: bool, seed: int = 0
) -> Result:
    """One run. `balance`: training time of a step over its generation time if every slot were always busy.

    drop_older: instead of admission, keep every slot busy and throw away groups older than `bound` (what this project does not do).
    """
    rng = np.random.default_rng(seed)
    cap, mean = 8192, 1024.0
    draw = lambda: np.minimum(cap, rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, samples)).astype(int).clip(1)  # noqa: E731
    per_token = balance / slots  # trainer ticks per token
    window = 10**9 if drop_older else size + int(np.ceil(lead * size))
    table: dict[int, Group] = {}
    lengths: dict[int, np.ndarray] = {}
    waiting: list[int] = []  # admitted, without slots
    events: list[tuple[float, int, int]] = []  # (time, group, slots that come free; 0: the trainer is done)
    free, now, next_index, finished, step = slots, 0.0, 0, 0, 0
    remaining: dict[int, int] = {}
    in_training: list[Group] = []
    news = False  # whether anything has happened that could let a step begin
    training_until, training_time, busy, trained_tokens, ages, trained = 0.0, 0.0, 0.0, 0, [], []
    while step < steps:
        while len(table) + len(in_training) < window and (not drop_older or free >= samples and not waiting):
            table[next_index], lengths[next_index] = Group(next_index, step, step), draw()
            waiting.append(next_index)
            next_index += 1
            if drop_older and free < samples * len(waiting):
                break
        while waiting and free >= samples:
            index = waiting.pop(0)
            free -= samples
            remaining[index] = samples
            for length in lengths[index]:
                heapq.heappush(events, (now + length, index, 1))
                busy += length
        if now >= training_until and news:
            news = False
            if drop_older:
                for g in [g for g in table.values() if g.finished and step - g.born > bound]:
                    del table[g.index]
                ready = sorted((g for g in table.values() if g.finished), key=lambda g: g.finished)[:size]
                chosen = ready if len(ready) == size else None
            else:
                chosen = choose(list(table.values()), step, size, bound, order)
            if chosen is not None:
                tokens = int(sum(lengths[g.index].sum() for g in chosen))
                ages += [step - g.born for g in chosen]
                trained.append([g.index for g in chosen])
                trained_tokens += tokens
                training_until = now + tokens * per_token
                training_time += tokens * per_token
                for g in chosen:
                    del table[g.index]
                in_training = chosen
                heapq.heappush(events, (training_until, -1, 0))
        if not events:
            raise RuntimeError("nothing is left to happen: the schedule has stalled")
        now, index, count = heapq.heappop(events)
        free += count
        if index < 0:
            step, in_training, news = step + 1, [], True  # room comes with the new weights
        else:
            remaining[index] -= 1
            if remaining[index] == 0 and index in table:
                finished += 1
                table[index].finished, news = finished, True
    early = [i for part in trained[: steps // 2] for i in part]
    reached = max(early) + 1
    bias = np.mean([lengths[i].mean() for i in early]) / np.mean([lengths[i].mean() for i in range(reached)])
    return Result(name, trained_tokens / now, 1 - training_time / now, 1 - busy / (now * slots), np.array(ages), float(bias))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--slots", type=int, default=4096)
    parser.add_argument("--balance", type=float, default=1.0, help="training time over generation time, both at full use")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the log of a completion's length")
    parser.add_argument("--png", default="out/schedule_sim.png")
    a = parser.parse_args()
    size, samples = 256, 8
    rows = [("sync", "in_order", 0, 0.0, False)]
    rows += [(f"in_order A={b}", "in_order", b, float(b), False) for b in (1, 2, 4, 8)]
    rows += [(f"ready_first A={b} lead={lead:g}", "ready_first", b, lead, False) for b, lead in ((1, 1.0), (2, 1.0), (4, 1.0), (4, 2.0), (8, 2.0))]
    rows += [(f"discard older than {b}", "ready_first", b, 0.0, True) for b in (1, 4)]
    results = [
        simulate(name, order, bound, lead, a.steps, size, samples, a.slots, a.balance, a.sigma, discard) for name, order, bound, lead, discard in rows
    ]
    base = results[0].throughput
    print(f"{a.slots} slots, {size} x {samples} samples a step, balance {a.balance}, sigma {a.sigma}: mean 1024 tokens, cap 8192")
    print(f"{'schedule':28s} {'speed-up':>9s} {'trainer idle':>13s} {'slots idle':>11s} {'age mean':>9s} {'max':>4s} {'length bias':>12s}")
    for r in results:
        print(f"{r.name:28s} {r.throughput / base:9.2f} {r.trainer_idle:13.2f} {r.slots_idle:11.2f} {r.ages.mean():9.2f} {r.ages.max():4d} {r.bias:12.3f}")
    plot(results, base, Path(a.png))
    numbers = {r.name: {"speed_up": round(r.throughput / base, 3), "age_mean": round(float(r.ages.mean()), 3), "length_bias": round(r.bias, 3)} for r in results}
    print(json.dumps(numbers))


def plot(results: list[Result], base: float, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(15, 5))
    names, at = [r.name for r in results], np.arange(len(results))
    left.barh(at, [r.throughput / base for r in results], color="tab:blue")
    left.set_xlabel("trained tokens per second, over sync")
    middle.barh(at - 0.2, [r.trainer_idle for r in results], 0.4, label="trainer idle", color="tab:orange")
    middle.barh(at + 0.2, [r.slots_idle for r in results], 0.4, label="slots idle", color="tab:green")
    middle.set_xlabel("share of time")
    middle.set_xlim(0, 1)
    middle.legend(loc="lower right")
    for axes in (left, middle):
        axes.set_yticks(at, names if axes is left else [])
        axes.invert_yaxis()
        axes.grid(axis="x", alpha=0.3)
    colours = {"i": "tab:blue", "r": "tab:red", "d": "tab:gray", "s": "black"}
    for r in results:
        right.plot(r.ages.mean(), r.bias, "o", color=colours[r.name[0]])
        right.annotate(r.name, (r.ages.mean(), r.bias), fontsize=7, xytext=(4, 3), textcoords="offset points")
    right.axhline(1.0, color="black", lw=0.8)
    right.set_xlabel("mean staleness of what is trained, steps")
    right.set_ylabel("length of what is trained early, over all prompts begun by then")
    right.grid(alpha=0.3)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
