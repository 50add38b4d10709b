"""Tasks: what the policy is asked, and what its answers are worth. No torch, no tokens.

    --task arith                     few-shot sums of two small numbers (the demo; needs nothing)
    --task gsm8k                     grade-school word problems (from the hub, or --task.data train.jsonl)
    --task path/to/file.py:name      yours: `name` is a reward function or a function that builds a Task
    --task name:argument             the function `name` of tasks/name.py, called with the argument (`reasoning_gym:chain_sum`)
    --task arith+gsm8k               several at once, drawn in the proportions of --task.weights

The least a task can be is one function, with a file of prompts and answers beside it:

    def shorter_is_better(completion: str, example: Example) -> float:      # --task mine.py:shorter_is_better
        return 1 / (1 + len(completion))                                   # --task.data prompts.jsonl

An `Environment` is the general form: the policy speaks, the environment answers, until it is done.

    messages = await env.reset(example, seed)      the opening of the conversation, OpenAI style
    step = await env.step(assistant_message)       new messages, rewards by name, done or not
    await env.close()

All members of a group are reset with the same (example, seed), so they share one prompt. An environment that raises or
exceeds its deadline is an infrastructure failure: its rollout is excluded from every baseline and denominator, never scored 0.

A reward function given by path runs in worker processes that can be killed (`--task.isolate`); one written `async def` waits
for something else, such as a judge, and runs here.
"""

import asyncio
import functools
import importlib
import importlib.util
import inspect
import json
import math
import random
import re
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import tyro

Message = dict[str, Any]  # {"role": "system" | "user" | "assistant" | "tool", "content": str, ...}


class UserError(ValueError):
    """Something the user can mend: shown without a traceback; the text names the flag and the fix."""


@dataclass
class TaskConfig:
    data: str | None = None  # training data: a .jsonl or .parquet file, or a hub id (`owner/name` or `owner/name:config`); off: the task's own
    eval_data: str | None = None  # held-out data, likewise; off: the task's own, or --task.eval-size rows set apart from the training data
    split: str = "train"  # split of a hub data set to train on
    eval_split: str = "test"  # split of a hub data set to evaluate on
    eval_size: int = 256  # at most this many held-out examples; set apart from the training data where there is no evaluation data
    prompt_column: str = "question"  # column that holds the prompt: a string, or a list of messages
    answer_column: str = "answer"  # column that holds the reference answer
    prompt_format: Literal["auto", "chat", "text"] = "auto"  # chat: the tokenizer's template; text: raw; auto: chat where there is a template
    system_prompt: str | None = None  # opens every conversation; off: the task's own, or none
    few_shot: int | None = None  # worked examples in the prompt; off: the task's own number
    max_turns: int | None = None  # assistant turns per episode; off: the task's own
    max_turn_tokens: int | None = None  # tokens of one assistant turn; a turn cut by it ends its episode; off: the task's own
    weights: tuple[float, ...] = ()  # shares of the tasks joined by + in --task, to one percent; off: equal
    extra_rewards: tuple[str, ...] = ()  # more named rewards on the last answer: path.py:function, judge:URL, reward_model:FOLDER_OR_URL
    reward_weights: dict[str, float] = field(default_factory=dict)  # weight of a reward by its name; off: the task's own, or 1
    isolate: str | None = "verify.py:in_workers"  # path:name of what runs reward functions given by path; None: here, undefended
    reward_deadline: Annotated[float, tyro.conf.Suppress] = 10.0  # --deadlines.verifier, for whoever builds a task
    unsafe_tools: bool = False  # allow code-running tools on a kernel that cannot take the network away from them


@dataclass(frozen=True)
class Example:
    """One problem. `messages` open the conversation; `answer` and `extra` are for the reward, the policy never sees them."""

    messages: list[Message]
    answer: Any = None
    extra: dict[str, Any] = field(default_factory=dict)
    task: str = ""  # which task of a mixture it belongs to
    stop: list[str] | None = None  # stop strings of the first turn; off: the task's


@dataclass
class Step:
    """What an environment says after one assistant message."""

    messages: list[Message] = field(default_factory=list)  # appended to the conversation; ignored when done
    rewards: dict[str, float] = field(default_factory=dict)  # by name; summed over the turns of an episode
    done: bool = False
    truncated: bool = False  # done because a limit of the environment was reached
    stop: list[str] | None = None  # stop strings of the next turn; None keeps those of this one
    metrics: dict[str, float] = field(default_factory=dict)  # averaged over rollouts and logged
    answer: str | None = None  # the answer as understood, for majority votes


class Environment(Protocol):
    """One instance per episode. Use no global random state: `seed` is all the randomness an episode gets."""

    async def reset(self, example: Example, seed: int) -> list[Message]: ...
    async def step(self, message: Message) -> Step: ...
    async def close(self) -> None: ...


Score = float | dict[str, float] | Step  # one number, several by name, or a whole Step where there are metrics to tell
Reward = Callable[[str, Example], Score | Awaitable[Score]]


@dataclass
class Task:
    name: str
    train: Sequence[Example]
    environment: Callable[[], Environment]
    eval: Sequence[Example] = ()
    max_turns: int = 1  # assistant turns per episode; an episode still open after them is truncated
    max_turn_tokens: int | None = None  # tokens of one assistant turn; off: what is left of the episode's
    stop: list[str] = field(default_factory=list)  # stop strings of the first turn
    tools: list[dict[str, Any]] | None = None  # tool schemas for the chat template
    tool_prompt: str | None = None  # added to the system message where the chat template does not know tools
    reward_weights: dict[str, float] = field(default_factory=dict)  # the reward is the weighted sum; a name not listed weighs 1
    dropped: dict[str, int] = field(default_factory=dict)  # rows left out while loading, by reason
    checks: list[tuple[Example, str, float]] = field(default_factory=list)  # (example, answer, its reward), tried before training
    parts: list[tuple[str, int, float]] = field(default_factory=list)  # of a mixture: (task, number of examples, weight), in the order of `train`


class SingleTurn:
    """A reward function as an environment: the first answer ends the episode."""

    def __init__(self, reward: Reward):
        self.reward = reward

    async def reset(self, example: Example, seed: int) -> list[Message]:
        self.example = example
        return example.messages

    async def step(self, message: Message) -> Step:
        step = await scored(self.reward, message["content"], self.example)
        return replace(step, done=True)

    async def close(self) -> None:
        pass


async def scored(reward: Reward, completion: str, example: Example) -> Step:
    """A reward function's result, whatever its form, as a Step."""
    value = reward(completion, example)
    if inspect.isawaitable(value):
        value = await value
    return value if isinstance(value, Step) else Step(rewards=named_rewards(value, reward))


def named_rewards(value: Any, reward: Reward) -> dict[str, float]:
    """A reward function's result as {name: float}.

    Raises:
        TypeError: for anything but one finite number or a dict of them. A list or None would otherwise spread over a group unseen.
    """
    name = getattr(reward, "__name__", "reward")
    rewards = value if isinstance(value, dict) else {name: value}
    for key, number in rewards.items():
        if isinstance(number, str) or not hasattr(number, "__float__") or getattr(number, "size", 1) != 1 or not math.isfinite(number):
            raise TypeError(f"reward function {name} must return one number or a dict of numbers, all finite; got {key}={number!r:.200}")
    if not rewards:
        raise TypeError(f"reward function {name} returned an empty dict: it must name at least one reward")
    return {key: float(number) for key, number in rewards.items()}


def total(rewards: dict[str, float], weights: dict[str, float]) -> float:
    """The weighted sum of named rewards; a name without a weight weighs 1.

    >>> total({"right": 1.0, "format": 1.0, "length": 9.0}, {"format": 0.5, "length": 0})
    1.5
    """
    return sum(weights.get(name, 1.0) * value for name, value in rewards.items())


class ExtraRewards:
    """An environment whose last answer is also scored by further reward functions, each under its own names."""

    def __init__(self, inner: Environment, rewards: Sequence[Reward], max_turns: int):
        self.inner, self.rewards, self.turns_left = inner, rewards, max_turns

    async def reset(self, example: Example, seed: int) -> list[Message]:
        self.example = example
        return await self.inner.reset(example, seed)

    async def step(self, message: Message) -> Step:
        step = await self.inner.step(message)
        self.turns_left -= 1
        if not step.done and self.turns_left > 0:
            return step
        for extra in await asyncio.gather(*(scored(r, message["content"], self.example) for r in self.rewards)):
            if step.rewards.keys() & extra.rewards.keys():
                raise UserError(f"two rewards are called {sorted(step.rewards.keys() & extra.rewards.keys())}: rename one (--task.extra-rewards)")
            step = replace(step, rewards=step.rewards | extra.rewards, metrics=step.metrics | extra.metrics)
        return step

    async def close(self) -> None:
        await self.inner.close()


async def self_test(task: Task, deadline: float = 60.0) -> None:
    """Play the task's checks through its environment, just as training does: a right answer must be worth what it says, a wrong one too.

    Raises:
        UserError: an answer of known worth is scored otherwise, or scoring fails. Better now than after hours of zeros.
    """
    for example, answer, expected in task.checks:
        environment = task.environment()
        try:
            async with asyncio.timeout(deadline):
                await environment.reset(example, 0)
                step = await environment.step(assistant(answer))
                await environment.close()
        except TimeoutError:
            raise UserError(f"task {task.name}: scoring {answer!r:.80} took more than {deadline:.0f} s; the rewards cannot be trusted") from None
        except Exception as error:
            raise UserError(f"task {task.name}: scoring {answer!r:.80} failed, so every reward would: {type(error).__name__}: {error}") from error
        worth = total(step.rewards, task.reward_weights)
        if not math.isclose(worth, expected):
            raise UserError(f"task {task.name}: {answer!r:.80} must be worth {expected}, but scores {worth} {step.rewards} (reference {example.answer!r:.80})")


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


# ------------------------------------------------------------------------------------------------ arith


def arith(config: TaskConfig) -> Task:
    """Sums of two numbers 1..9, shown as short chats. 81 pairs, of which 16 are held out: 8, and their mirror images."""
    numbers = range(1, 10)
    shown = [(2, 3), (8, 4), (7, 9), (5, 1)]
    shots = shown[: 2 if config.few_shot is None else config.few_shot]  # an answer of one digit and one of two
    prefix = [m for a, b in shots for m in (user(f"{a}+{b}="), assistant(f"{a + b}"))]
    if config.system_prompt is not None:
        prefix = [{"role": "system", "content": config.system_prompt}, *prefix]

    def example(a: int, b: int) -> Example:
        return Example([*prefix, user(f"{a}+{b}=")], answer=a + b)

    unordered = [(a, b) for a in numbers for b in numbers if a < b and not {(a, b), (b, a)} & set(shown)]
    random.Random(0).shuffle(unordered)  # not the run's seed: the held-out pairs are the same in every run
    chosen = {a + b: (a, b) for a, b in unordered if a + b not in (3, 17)}  # one pair of a sum, never its only one: every sum is seen in training
    held_out = {pair for a, b in list(chosen.values())[:8] for pair in ((a, b), (b, a))}
    pairs = [(a, b) for a in numbers for b in numbers]
    return Task(
        name="arith",
        train=[example(a, b) for a, b in pairs if (a, b) not in held_out],
        eval=[example(a, b) for a, b in pairs if (a, b) in held_out],
        environment=lambda: SingleTurn(exact_integer),
        checks=[(example(2, 2), "4", 1.0), (example(2, 2), "5", 0.0)],
    )


def exact_integer(completion: str, example: Example) -> float:
    """1 if the completion holds exactly one integer and it is the answer.

    >>> [exact_integer(text, Example([], answer=12)) for text in ("12", " It is 12.", "12 or 13", "1 2", "-12", "")]
    [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    """
    found = re.findall(r"-?\d+", completion)
    return float(len(found) == 1 and int(found[0]) == example.answer)


# ------------------------------------------------------------------------------------------------ gsm8k and other tables


def gsm8k(config: TaskConfig) -> Task:
    """GSM8K (arXiv 2110.14168): word problems whose reference ends in `#### number`; the policy is asked for the same ending."""
    instruction = "Solve the problem step by step. End with a line `#### ` followed by the number alone."
    source = config.data or "openai/gsm8k:main"
    task = table_task("gsm8k", source, config, numbered, system_prompt=config.system_prompt or instruction)
    for example in [*task.train, *task.eval]:
        if reference_number(example.answer) is None:
            raise UserError(f"{source}: no `#### number` in the answer {example.answer!r:.80}; is --task.answer-column right?")
    task.checks = [check for e in task.train[:3] for check in ((e, str(e.answer), 1.0), (e, f"#### 1{reference_number(e.answer)}", 0.0), (e, "", 0.0))]
    return task


def reference_number(text: Any) -> Decimal | None:
    """The number after the last `####`, exactly; None where there is none, or where anything but one number stands on that line.

    >>> reference_number("so 3 * 4 = 12. #### 1,200.50")
    Decimal('1200.50')
    >>> [reference_number(f"#### {text}") for text in ("41 or 42", "41=42", "1,2", "$18.")]
    [None, None, None, Decimal('18')]
    """
    line = str(text).rpartition("####")[2].strip().partition("\n")[0] if "####" in str(text) else ""
    found = re.fullmatch(r"(-?)\$?(\d{1,3}(?:,\d{3})+|\d{1,100})?(\.\d{1,100})?\.?", line.strip().replace("\u2212", "-").replace("$-", "-$"))
    if not found or not (found[2] or found[3]):
        return None
    return Decimal(found[1] + (found[2] or "").replace(",", "") + (found[3] or ""))


def final_number(completion: str, example: Example) -> float:
    """1 if the completion ends in `#### number` with the reference number. No marker, no reward: the text is never searched for it."""
    answer = reference_number(completion)
    return float(answer is not None and answer == reference_number(example.answer))


def numbered(completion: str, example: Example) -> Step:
    answer = reference_number(completion)
    return Step(rewards={"final_number": final_number(completion, example)}, answer=None if answer is None else format(answer.normalize(), "f"))


def table_task(
    name: str, source: str, config: TaskConfig, reward: Reward, system_prompt: str | None = None, valid: Callable[[Any], bool] = lambda answer: True
) -> Task:
    """A single-turn task from rows with a prompt and an answer column. Rows whose answer is not `valid` are dropped and counted.

    Without evaluation data, the last `eval_size` rows of a fixed shuffle are set apart from the training rows.
    """
    rows = read_rows(source, config.split)
    if config.eval_data:
        held_out = read_rows(config.eval_data, config.eval_split)[: config.eval_size]
    elif Path(source).suffix in (".jsonl", ".parquet"):
        random.Random(0).shuffle(rows)
        size = min(config.eval_size, len(rows) // 5)
        rows, held_out = rows[: len(rows) - size], rows[len(rows) - size :]
    else:
        held_out = read_rows(source, config.eval_split)[: config.eval_size]
    for row in [*rows, *held_out]:
        for flag, column in (("--task.prompt-column", config.prompt_column), ("--task.answer-column", config.answer_column)):
            if column not in row:
                raise UserError(f"{source} has no column {column!r} ({flag}); it has {sorted(row)}")
    all_rows = len(rows) + len(held_out)
    rows, held_out = ([row for row in part if valid(row[config.answer_column])] for part in (rows, held_out))
    invalid = all_rows - len(rows) - len(held_out)
    if not rows:
        raise UserError(f"{source}: none of its {all_rows} rows has a usable answer in column {config.answer_column!r} (--task.answer-column)")
    opening = [{"role": "system", "content": system_prompt}] if system_prompt else []
    shots = [m for row in rows[: config.few_shot or 0] for m in (user(str(row[config.prompt_column])), assistant(str(row[config.answer_column])))]
    rows = rows[config.few_shot or 0 :]  # a worked example is not also a training example

    def example(row: dict[str, Any]) -> Example:
        prompt = row[config.prompt_column]
        messages = prompt if isinstance(prompt, list) else [user(str(prompt))]
        return Example([*opening, *shots, *messages], answer=row[config.answer_column], extra=row)

    dropped = {"answer not usable": invalid} if invalid else {}
    return Task(name, [example(r) for r in rows], lambda: SingleTurn(reward), [example(r) for r in held_out], dropped=dropped)


def read_rows(source: str, split: str) -> list[dict[str, Any]]:
    """The rows of a .jsonl or .parquet file, or of one split of a hub data set (`owner/name` or `owner/name:config`)."""
    path = Path(source)
    if path.suffix == ".jsonl":
        if not path.exists():
            raise UserError(f"no file {source} (--task.data): give the path of a .jsonl file")
        rows = []
        for number, line in enumerate(path.read_text().splitlines(), 1):
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise UserError(f"{source} line {number} is not JSON: {error}") from None
        return rows
    import datasets  # slow to import, needed only here

    try:
        if path.suffix == ".parquet":
            return list(datasets.load_dataset("parquet", data_files=str(path), split="train"))
        name, _, subset = source.partition(":")
        return list(datasets.load_dataset(name, subset or None, split=split))
    except Exception as error:
        raise UserError(f"cannot read {source} split {split!r} (--task.data): {type(error).__name__}: {error}") from error


# ------------------------------------------------------------------------------------------------ several tasks, and the order of examples


def mixture(tasks: Sequence[Task], weights: Sequence[float] = ()) -> Task:
    """Several tasks as one; `position` draws from them in proportion to the weights (off: equally), whatever their sizes.

    Raises:
        UserError: equal names, tools that differ (they belong to the prompt's rendering), or weights that do not fit.
    """
    names = [task.name for task in tasks]
    weights = tuple(weights) or (1.0,) * len(tasks)
    if len(set(names)) < len(names):
        raise UserError(f"--task {'+'.join(names)}: the tasks of a mixture need different names")
    if len(weights) != len(tasks) or min(weights) <= 0:
        raise UserError(f"--task.weights must be {len(tasks)} positive numbers, one for each of {', '.join(names)}; got {list(weights)}")
    if any(task.tools != tasks[0].tools for task in tasks):
        raise UserError(f"--task {'+'.join(names)}: tasks with different tools cannot be mixed")
    reward_weights = {name: weight for task in tasks for name, weight in task.reward_weights.items()}
    for task in tasks:
        if any(reward_weights[name] != weight for name, weight in task.reward_weights.items()):
            raise UserError(f"--task {'+'.join(names)}: a reward of {task.name} has another weight elsewhere; set it with --task.reward-weights")

    def named(task: Task, example: Example) -> Example:
        return replace(example, task=task.name, stop=task.stop if example.stop is None else example.stop)

    by_name = {task.name: task for task in tasks}
    return Task(
        name="+".join(names),
        train=[named(task, example) for task in tasks for example in task.train],
        eval=[named(task, example) for task in tasks for example in task.eval],
        environment=lambda: Mixed(by_name),
        max_turns=max(task.max_turns for task in tasks),
        max_turn_tokens=max(task.max_turn_tokens or 0 for task in tasks) if all(task.max_turn_tokens for task in tasks) else None,
        tools=tasks[0].tools,
        tool_prompt=tasks[0].tool_prompt,
        reward_weights=reward_weights,
        dropped={f"{task.name}: {reason}": count for task in tasks for reason, count in task.dropped.items()},
        checks=[(named(task, example), answer, worth) for task in tasks for example, answer, worth in task.checks],
        parts=[(task.name, len(task.train), weight) for task, weight in zip(tasks, weights, strict=True)],
    )


class Mixed:
    """The environment of whichever task the example belongs to. Its rewards are also metrics under the task's name."""

    def __init__(self, tasks: dict[str, Task]):
        self.tasks = tasks
        self.inner: Environment | None = None

    async def reset(self, example: Example, seed: int) -> list[Message]:
        self.task, self.turns, self.rewards = self.tasks[example.task], 0, dict[str, float]()
        self.inner = self.task.environment()
        return await self.inner.reset(example, seed)

    async def step(self, message: Message) -> Step:
        assert self.inner is not None, "reset comes first"
        step = await self.inner.step(message)
        self.turns += 1
        late = not step.done and self.turns >= self.task.max_turns  # the mixture's own limit is that of its longest task
        self.rewards |= {name: self.rewards.get(name, 0.0) + value for name, value in step.rewards.items()}
        by_task = {f"{self.task.name}/{name}": value for name, value in self.rewards.items()}
        by_task[f"{self.task.name}/reward"] = total(self.rewards, self.task.reward_weights)
        return replace(step, done=step.done or late, truncated=step.truncated or late, metrics=step.metrics | by_task)

    async def close(self) -> None:
        if self.inner is not None:
            await self.inner.close()


@functools.lru_cache(maxsize=64)
def permutation(size: int, *key: Any) -> tuple[int, ...]:
    order = list(range(size))
    random.Random(repr(key)).shuffle(order)
    return tuple(order)


def tickets(weights: Sequence[float], block: int = 100) -> list[int]:
    """How many of `block` draws each weight gets: rounded so that they add up, at least one each.

    >>> tickets([2, 1]), tickets([1000, 1]), tickets([5])
    ([67, 33], [99, 1], [100])
    """
    exact = [block * weight / sum(weights) for weight in weights]
    counts = [max(1, math.floor(share)) for share in exact]
    while sum(counts) != block:
        step = 1 if sum(counts) < block else -1
        eligible = [i for i in range(len(counts)) if step > 0 or counts[i] > 1]
        counts[max(eligible, key=lambda i: step * (exact[i] - counts[i]))] += step
    return counts


def position(task: Task, seed: int, index: int) -> int:
    """Which of `task.train` the run's `index`-th prompt is: a function of (seed, index) alone, so an integer resumes it.

    Every epoch of a task is a permutation of its examples, a different one each time. In a mixture every hundred indices hold
    each task as often as its weight says, and each task walks through its own epochs.
    """
    parts = task.parts or [(task.name, len(task.train), 1.0)]
    counts = tickets([weight for _, _, weight in parts]) if len(parts) > 1 else [1]
    block, place = divmod(index, sum(counts))
    owners = [part for part, count in enumerate(counts) for _ in range(count)]
    order = [owners[o] for o in permutation(len(owners), seed, "block", block)]
    part = order[place]
    epoch, place = divmod(block * counts[part] + order[:place].count(part), parts[part][1])
    return sum(size for _, size, _ in parts[:part]) + permutation(parts[part][1], seed, part, epoch)[place]


def next_position(task: Task, seed: int, index: int, retired: Collection[int] = frozenset()) -> tuple[int, int]:
    """The first position from `index` on whose example is not retired, and the index after it.

    Raises:
        UserError: every training example is retired.
    """
    if len(retired) >= len(task.train):
        raise UserError(f"all {len(task.train)} training prompts are solved and retired: there is nothing left to train on")
    while (found := position(task, seed, index)) in retired:
        index += 1
    return found, index + 1


def keep(task: Task, fits: Callable[[Example], bool], reason: str) -> Task:
    """The task without the examples that do not fit; what was dropped is counted under `reason`, training and held out apart."""
    train, held_out = [[fits(example) for example in part] for part in (task.train, task.eval)]
    ends = [sum(size for _, size, _ in task.parts[: i + 1]) for i in range(len(task.parts))]
    parts = [(name, sum(train[end - size : end]), weight) for (name, size, weight), end in zip(task.parts, ends, strict=True)]
    for name, size, _ in parts:
        if not size:
            raise UserError(f"no training example of {name} is left: all were dropped ({reason})")
    counts = {reason: train.count(False), f"held out: {reason}": held_out.count(False)}
    return replace(
        task,
        train=[example for example, fit in zip(task.train, train) if fit],
        eval=[example for example, fit in zip(task.eval, held_out) if fit],
        parts=parts,
        dropped=task.dropped | {name: count for name, count in counts.items() if count},
    )


# ------------------------------------------------------------------------------------------------ evaluation


def pass_at_k(successes: int, samples: int, k: int) -> float:
    """Chance that at least one of k of the samples succeeds: the unbiased estimator 1 - C(n-c, k) / C(n, k) (arXiv 2107.03374 eq. 1).

    >>> [pass_at_k(1, 4, k) for k in (1, 2, 4)]
    [0.25, 0.5, 1.0]
    """
    if not 0 <= successes <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {samples} samples with {successes} successes is not defined")
    return 1.0 - math.comb(samples - successes, k) / math.comb(samples, k)


def majority_vote(answers: Sequence[str | None], rewards: Sequence[float]) -> float:
    """The reward of the most frequent answer; None does not vote, and equal counts share. 0 where nobody votes.

    >>> majority_vote(["7", "8", "7", None], [1.0, 0.0, 1.0, 0.0]), majority_vote(["7", "8"], [1.0, 0.0])
    (1.0, 0.5)
    """
    votes = Counter(answer for answer in answers if answer is not None)
    most = max(votes.values(), default=0)
    winners = [answer for answer, count in votes.items() if count == most]
    means = [sum(r for a, r in zip(answers, rewards, strict=True) if a == winner) / most for winner in winners]
    return sum(means) / len(means) if means else 0.0


def evaluation(
    names: Sequence[str],
    rewards: Sequence[Sequence[float]],
    answers: Sequence[Sequence[str | None]] | None = None,
    ks: Sequence[int] = (),
    solved: float = 1.0,
) -> dict[str, dict[str, float]]:
    """One row a task, and "all": prompts, mean reward, pass@1, pass@k, majority.

    Args:
        names: the task of each prompt.
        rewards: of each prompt, of its samples; failed rollouts left out. A prompt without any is not counted.
        answers: of each prompt and sample, for the vote; without any there is no majority.
        ks: further k; left out where a prompt has fewer samples.
        solved: the reward from which an answer counts as right.
    """
    voted = answers is not None and any(answer is not None for group in answers for answer in group)
    rows: dict[str, dict[str, list[float]]] = {}
    for number, (name, values) in enumerate(zip(names, rewards, strict=True)):
        if not values:
            continue
        right = sum(value >= solved for value in values)
        scores = {"reward": sum(values) / len(values)}
        scores |= {f"pass@{k}": pass_at_k(right, len(values), k) for k in sorted({1, *ks}) if k <= len(values)}
        if answers is not None and voted:
            scores["majority"] = majority_vote(answers[number], [float(value >= solved) for value in values])
        for row in {name, "all"}:
            for key, value in scores.items():
                rows.setdefault(row, {}).setdefault(key, []).append(value)
    order = [*sorted(rows.keys() - {"all"}), *(["all"] if rows else [])]
    return {row: {"prompts": len(rows[row]["reward"])} | {key: sum(v) / len(v) for key, v in rows[row].items()} for row in order}


# ------------------------------------------------------------------------------------------------ finding a task

TASKS: dict[str, Callable[[TaskConfig], Task]] = {"arith": arith, "gsm8k": gsm8k}


def load_task(spec: str, config: TaskConfig) -> Task:
    """A task by name, `path/to/file.py:name`, or `name:argument` of tasks/name.py; several joined by `+`.

    Raises:
        UserError: unknown name, missing file, or a task without training examples.
    """
    tasks = [load_one(single, config) for single in spec.split("+")]
    task = tasks[0] if len(tasks) == 1 else mixture(tasks, config.weights)
    if config.weights and len(tasks) == 1:
        raise UserError(f"--task.weights {list(config.weights)}: --task {spec} is one task; join several with +")
    if config.extra_rewards:
        rewards, inner = [load_reward(extra, config) for extra in config.extra_rewards], task.environment
        task = replace(task, environment=lambda: ExtraRewards(inner(), rewards, task.max_turns), checks=[])  # the checks know nothing of them
    return replace(task, reward_weights=task.reward_weights | config.reward_weights, checks=[] if config.reward_weights else task.checks)


def load_one(spec: str, config: TaskConfig) -> Task:
    name, _, argument = spec.partition(":")
    if name in TASKS and not argument:
        task = TASKS[name](config)
    else:
        function, path, argument = find_function(spec, "--task")
        parameters = list(inspect.signature(function).parameters)
        if len(parameters) == 1 or parameters[0] == "config":
            try:
                task = function(config, argument) if argument else function(config)
            except TypeError as error:
                if "positional argument" not in str(error):
                    raise
                raise UserError(f"--task {spec}: {error}; an argument follows a colon, as in {name}:something") from error
            if not isinstance(task, Task):
                raise UserError(f"--task {spec}: {function.__name__}(config) must return a Task, got {type(task).__name__}")
        elif config.data is None:
            raise UserError(f"--task {spec} is a reward function: it needs prompts, --task.data FILE.jsonl (or a Task builder with one argument)")
        else:
            task = table_task(function.__name__, config.data, config, isolated(function, path, config))
    if not task.train:
        raise UserError(f"--task {spec}: no training examples; check --task.data")
    task = task if config.max_turns is None else replace(task, max_turns=config.max_turns)
    return task if config.max_turn_tokens is None else replace(task, max_turn_tokens=config.max_turn_tokens)


def load_reward(spec: str, config: TaskConfig) -> Reward:
    """A reward by `path/to/file.py:function`, or `name:argument`: what `reward(argument)` of tasks/name.py returns."""
    name = spec.partition(":")[0]
    if name.endswith(".py"):
        function, path, _ = find_function(spec, "--task.extra-rewards")
        return isolated(function, path, config)
    function, _, argument = find_function(spec, "--task.extra-rewards", "reward")
    return function(argument)


def isolated(function: Any, path: Path, config: TaskConfig) -> Reward:
    """The reward function as it is run: in workers that can be killed, unless it waits (`async def`) or the user wants it here."""
    if config.isolate is None or inspect.iscoroutinefunction(function):
        return function
    runner, _, _ = find_function(config.isolate, "--task.isolate")
    return runner(f"{path}:{function.__name__}", config.reward_deadline)


def find_function(spec: str, flag: str, default: str | None = None) -> tuple[Any, Path, str]:
    """The function that `spec` names, its file, and what is left of the spec as its argument."""
    name, _, argument = spec.partition(":")
    if name.endswith(".py"):
        function_name, _, argument = argument.partition(":")
        path = Path(name) if Path(name).exists() else HERE / name
        if not path.exists():
            raise UserError(f"{flag} {spec}: no file {name}")
    else:
        function_name, path = default or name, HERE / "tasks" / f"{name}.py"
        if not name.isidentifier() or not path.exists():
            known = [*TASKS, *sorted(p.stem for p in (HERE / "tasks").glob("*.py") if not p.stem.endswith("_env"))]
            raise UserError(f"{flag} {spec}: no such task; give one of {', '.join(known)}, or path/to/file.py:name")
    function = getattr(load_file(path.resolve()), function_name, None)
    if not callable(function):
        raise UserError(f"{flag} {spec}: {path} defines no function {function_name}")
    return function, path.resolve(), argument


HERE = Path(__file__).resolve().parent


def load_file(path: Path) -> Any:
    """A Python file as a module, once. One beside this file is imported as usual; others get a name that cannot hide a library's."""
    if path.parent == HERE:
        return importlib.import_module(path.stem)
    name = f"file:{path}"  # tasks/math.py must not become `math`
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec and spec.loader
        module = sys.modules[name] = importlib.util.module_from_spec(spec)  # known by name, so that its dataclasses resolve
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
