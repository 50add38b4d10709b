"""Tasks: what the policy is asked, and what its answers are worth. No torch, no tokens.

    --task arith                     few-shot sums of two small numbers (the demo; needs nothing)
    --task gsm8k                     grade-school word problems (from the hub, or --task.data train.jsonl)
    --task path/to/file.py:name      yours: `name` is a reward function or a function that builds a Task

The least a task can be is one function, with a file of prompts and answers beside it:

    def shorter_is_better(completion: str, example: Example) -> float:      # --task mine.py:shorter_is_better
        return 1 / (1 + len(completion))                                   # --task.data prompts.jsonl

An `Environment` is the general form: the policy speaks, the environment answers, until it is done.

    messages = await env.reset(example, seed)      the opening of the conversation, OpenAI style
    step = await env.step(assistant_message)       new messages, rewards by name, done or not
    await env.close()

All members of a group are reset with the same (example, seed), so they share one prompt. An environment that raises or
exceeds its deadline is an infrastructure failure: its rollout is excluded from every baseline and denominator, never scored 0.
"""

import importlib.util
import inspect
import json
import random
import re
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Literal, Protocol

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


@dataclass(frozen=True)
class Example:
    """One problem. `messages` open the conversation; `answer` and `extra` are for the reward, the policy never sees them."""

    messages: list[Message]
    answer: Any = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class Step:
    """What an environment says after one assistant message."""

    messages: list[Message] = field(default_factory=list)  # appended to the conversation; ignored when done
    rewards: dict[str, float] = field(default_factory=dict)  # by name; summed over the turns of an episode
    done: bool = False
    truncated: bool = False  # done because a limit of the environment was reached
    stop: list[str] | None = None  # stop strings of the next turn; None keeps those of this one
    metrics: dict[str, float] = field(default_factory=dict)  # averaged over rollouts and logged


class Environment(Protocol):
    """One instance per episode. Use no global random state: `seed` is all the randomness an episode gets."""

    async def reset(self, example: Example, seed: int) -> list[Message]: ...
    async def step(self, message: Message) -> Step: ...
    async def close(self) -> None: ...


Reward = Callable[[str, Example], float | dict[str, float] | Awaitable[float | dict[str, float]]]


@dataclass
class Task:
    name: str
    train: Sequence[Example]
    environment: Callable[[], Environment]
    eval: Sequence[Example] = ()
    max_turns: int = 1  # assistant turns per episode; an episode still open after them is truncated
    stop: list[str] = field(default_factory=list)  # stop strings of the first turn
    tools: list[dict[str, Any]] | None = None  # tool schemas for the chat template
    reward_weights: dict[str, float] = field(default_factory=dict)  # the reward is the weighted sum; a name not listed weighs 1


class SingleTurn:
    """A reward function as an environment: the first answer ends the episode."""

    def __init__(self, reward: Reward):
        self.reward = reward

    async def reset(self, example: Example, seed: int) -> list[Message]:
        self.example = example
        return example.messages

    async def step(self, message: Message) -> Step:
        value = self.reward(message["content"], self.example)
        if inspect.isawaitable(value):
            value = await value
        return Step(rewards=named_rewards(value, self.reward), done=True)

    async def close(self) -> None:
        pass


def named_rewards(value: Any, reward: Reward) -> dict[str, float]:
    """A reward function's result as {name: float}.

    Raises:
        TypeError: for anything but one number or a dict of numbers. A list or None would otherwise spread over a group unseen.
    """
    name = getattr(reward, "__name__", "reward")
    rewards = value if isinstance(value, dict) else {name: value}
    for key, number in rewards.items():
        if isinstance(number, str) or not hasattr(number, "__float__") or getattr(number, "size", 1) != 1:
            raise TypeError(f"reward function {name} must return one number or a dict of numbers, got {key}={number!r}")
    return {key: float(number) for key, number in rewards.items()}


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


# ------------------------------------------------------------------------------------------------ arith


def arith(config: TaskConfig) -> Task:
    """Sums of two numbers 1..9, shown as short chats. 81 pairs, of which 16 are held out; a pair and its mirror image stay together."""
    numbers = range(1, 10)
    shots = [(2, 3), (7, 1), (4, 6)][: 2 if config.few_shot is None else config.few_shot]
    prefix = [m for a, b in shots for m in (user(f"{a}+{b}="), assistant(f"{a + b}"))]
    if config.system_prompt is not None:
        prefix = [{"role": "system", "content": config.system_prompt}, *prefix]

    def example(a: int, b: int) -> Example:
        return Example([*prefix, user(f"{a}+{b}=")], answer=a + b)

    unordered = [(a, b) for a in numbers for b in numbers if a <= b and (a, b) not in ((2, 3), (1, 7), (4, 6))]
    random.Random(0).shuffle(unordered)  # not the run's seed: the held-out pairs are the same in every run
    held_out: set[tuple[int, int]] = set()
    for a, b in unordered:
        both = {(a, b), (b, a)}
        if len(held_out | both) <= 16:
            held_out |= both
    pairs = [(a, b) for a in numbers for b in numbers]
    return Task(
        name="arith",
        train=[example(a, b) for a, b in pairs if (a, b) not in held_out],
        eval=[example(a, b) for a, b in pairs if (a, b) in held_out],
        environment=lambda: SingleTurn(exact_integer),
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
    task = table_task("gsm8k", source, config, final_number, system_prompt=config.system_prompt or instruction)
    for example in [*task.train, *task.eval]:
        if reference_number(example.answer) is None:
            raise UserError(f"{source}: no `#### number` in the answer {example.answer!r:.80}; is --task.answer-column right?")
    return task


def reference_number(text: Any) -> Decimal | None:
    """The number after the last `####`, exactly; None where there is none.

    >>> reference_number("so 3 * 4 = 12. #### 1,200.50")
    Decimal('1200.50')
    """
    found = re.findall(r"####\s*(-?[\d,]*\.?\d+)", str(text).replace("$", "").replace("\u2212", "-"))
    try:
        return Decimal(found[-1].replace(",", "")) if found else None
    except InvalidOperation:
        return None


def final_number(completion: str, example: Example) -> float:
    """1 if the completion ends in `#### number` with the reference number. No marker, no reward: the text is never searched for it."""
    answer = reference_number(completion)
    return float(answer is not None and answer == reference_number(example.answer))


def table_task(name: str, source: str, config: TaskConfig, reward: Reward, system_prompt: str | None = None) -> Task:
    """A single-turn task from rows with a prompt and an answer column.

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
    opening = [{"role": "system", "content": system_prompt}] if system_prompt else []

    def example(row: dict[str, Any]) -> Example:
        for flag, column in (("--task.prompt-column", config.prompt_column), ("--task.answer-column", config.answer_column)):
            if column not in row:
                raise UserError(f"{source} has no column {column!r} ({flag}); it has {sorted(row)}")
        prompt = row[config.prompt_column]
        messages = prompt if isinstance(prompt, list) else [user(str(prompt))]
        return Example([*opening, *messages], answer=row[config.answer_column], extra=row)

    shots = [m for row in rows[: config.few_shot or 0] for m in (user(str(row[config.prompt_column])), assistant(str(row[config.answer_column])))]
    opening = [*opening, *shots]
    rows = rows[config.few_shot or 0 :]  # a worked example is not also a training example
    return Task(name, [example(r) for r in rows], lambda: SingleTurn(reward), [example(r) for r in held_out])


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


# ------------------------------------------------------------------------------------------------ finding a task

TASKS: dict[str, Callable[[TaskConfig], Task]] = {"arith": arith, "gsm8k": gsm8k}


def load_task(spec: str, config: TaskConfig) -> Task:
    """A task by name, or by `path/to/file.py:name`.

    Raises:
        UserError: unknown name, missing file, or a task without training examples.
    """
    if ":" in spec and spec.split(":")[0].endswith(".py"):
        task = load_from_file(spec, config)
    elif spec in TASKS:
        task = TASKS[spec](config)
    else:
        raise UserError(f"--task {spec}: no such task; give one of {', '.join(TASKS)}, or path/to/file.py:name")
    if not task.train:
        raise UserError(f"--task {spec}: no training examples; check --task.data")
    if config.max_turns is not None:
        task.max_turns = config.max_turns
    return task


def load_from_file(spec: str, config: TaskConfig) -> Task:
    path, _, name = spec.rpartition(":")
    if not Path(path).exists():
        raise UserError(f"--task {spec}: no file {path}")
    module_spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert module_spec and module_spec.loader
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # so that its dataclasses resolve and its objects pickle
    module_spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"--task {spec}: {path} defines no function {name}")
    if len(inspect.signature(function).parameters) == 1:
        task = function(config)
        if not isinstance(task, Task):
            raise UserError(f"--task {spec}: {name}(config) must return a Task, got {type(task).__name__}")
        return task
    if config.data is None:
        raise UserError(f"--task {spec} is a reward function: it needs prompts, --task.data FILE.jsonl (or a Task builder with one argument)")
    return table_task(name, config.data, config, function)
