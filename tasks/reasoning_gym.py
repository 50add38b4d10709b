"""The 105 procedural data sets of reasoning-gym (pip install reasoning-gym), by name.

    --task reasoning_gym:chain_sum
    --task reasoning_gym:chain_sum:min_terms=2,max_terms=2,min_digits=1,max_digits=1       settings of the data set
    --task reasoning_gym:countdown:size=200                                                how many training items (some take 0.1 s each to make)

Training items come from seeds 0.., held-out ones from far away: the package makes item i of seed s from s + i, so neighbouring seeds
would share nearly all their items. Held-out questions that also occur in training are dropped; where too few are left, because the
data set knows only so many questions, a fifth of the questions is set apart instead.

Scores run in locked worker processes, a fork each: several of the package's scorers evaluate what the model wrote, as Python. For those
the answer must moreover look like data (no attributes, no dunders, no calls but sqrt, sin, ...); see verify.py for what remains possible.
"""

import functools
import importlib
import json
import re
from typing import Any

from task import Example, Reward, SingleTurn, Step, Task, TaskConfig, UserError, user
from verify import Verdict, VerifierError, can_lock, extract, rates, workers

SIZE, EVAL_SEED = 1000, 1_000_000_000
EVALUATES = {  # data sets whose scorers evaluate the answer as code
    "binary_matrix",
    "countdown",
    "intermediate_integration",
    "n_queens",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
    "spiral_matrix",
    "string_insertion",
}
FUNCTIONS = {"sqrt", "sin", "cos", "tan", "exp", "log", "ln", "Abs", "abs", "sinh", "cosh", "tanh", "asin", "acos", "atan", "sec", "csc", "cot", "E", "I"}
INSTRUCTION = "Think step by step, then give the final answer alone within <answer> and </answer>."


def reasoning_gym(config: TaskConfig, argument: str) -> Task:
    name, _, settings = argument.partition(":")
    package = import_package()
    if name not in package.factory.DATASETS:
        raise UserError(f"--task reasoning_gym:{argument}: no such data set; there are {', '.join(sorted(package.factory.DATASETS))}")
    if name in EVALUATES and can_lock() and not config.unsafe_tools:
        raise UserError(
            f"--task reasoning_gym:{name}: its scorer evaluates what the model wrote, and cannot be contained here: {can_lock()} (--task.unsafe-tools)"
        )
    options = tuple(sorted((key.strip(), read_value(value)) for key, _, value in (pair.partition("=") for pair in settings.split(",") if pair)))
    size = int(dict(options).get("size", SIZE))
    options = tuple((key, value) for key, value in options if key != "size")
    train, held_out = items(name, options, 0, size), items(name, options, EVAL_SEED, min(config.eval_size, max(1, size // 5)))
    train, kept = split_by_question(train, held_out)
    instruction = config.system_prompt or INSTRUCTION

    def example(item: dict[str, Any]) -> Example:
        return Example([{"role": "system", "content": instruction}, user(item["question"])], answer=item["answer"], extra=item)

    reward = score(name, options, config.reward_deadline, locked=not can_lock())
    task = Task(f"reasoning_gym:{name}", [example(i) for i in train], lambda: SingleTurn(reward), [example(i) for i in kept])
    right = [item for item in train[:20] if item["answer"] is not None][:2]
    task.checks = [(example(item), f"<answer>{item['answer']}</answer>", 1.0) for item in right] + [(example(train[0]), "no marker", 0.0)]
    return task


def split_by_question(train: list[dict[str, Any]], held_out: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training and held-out items that have no question in common.

    >>> items = [{"question": q} for q in "abcdeabcde"]
    >>> train, held_out = split_by_question(items, items[:3])
    >>> [item["question"] for item in train], [item["question"] for item in held_out]
    (['a', 'b', 'c', 'd', 'a', 'b', 'c', 'd'], ['e'])
    """
    questions = list(dict.fromkeys(item["question"] for item in train))
    unseen = [item for item in held_out if item["question"] not in set(questions)]
    if len(unseen) >= len(held_out) / 2:
        return train, unseen
    apart = set(questions[len(questions) - len(questions) // 5 :])
    one_each = {item["question"]: item for item in train if item["question"] in apart}
    return [item for item in train if item["question"] not in apart], list(one_each.values())


def read_value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def import_package() -> Any:
    try:
        return importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise UserError(f"--task reasoning_gym needs the package: pip install reasoning-gym ({error})") from error


def items(name: str, options: tuple[tuple[str, Any], ...], seed: int, size: int) -> list[dict[str, Any]]:
    try:
        dataset = import_package().create_dataset(name, size=size, seed=seed, **dict(options))
    except (TypeError, AssertionError, ValueError) as error:
        raise UserError(f"--task reasoning_gym:{name} with {dict(options)}: {error}") from error
    return [json.loads(json.dumps(dataset[i], default=str)) for i in range(size)]


def score(name: str, options: tuple[tuple[str, Any], ...], deadline: float, locked: bool) -> Reward:
    """The data set's own score, 0 to 1; 0.99 and more count as 1. A scorer that raises on an answer gives it 0 and is counted."""

    async def solved(completion: str, example: Example) -> Step:
        answer = extract(completion, "answer")
        if answer is None or len(answer) > 2000 or (name in EVALUATES and not is_data(answer)):
            verdict = Verdict("no_answer" if answer is None else "wrong", answer)
            return Step(rewards={"solved": 0.0}, metrics=rates([verdict]) | {"verify/scorer_raised": 0.0}, answer=answer)
        reply = await workers(f"{__file__}:score_item", deadline=deadline, fresh=True, locked=locked).call(name, options, answer, example.extra)
        if reply.status == "error":
            raise VerifierError(f"reasoning_gym:{name}: {reply.detail}")
        value, raised = reply.value if reply.status == "ok" else (0.0, False)
        verdict = Verdict("timeout" if reply.status == "timeout" else "ok" if value >= 0.99 else "wrong", answer)
        reward = 1.0 if value >= 0.99 else float(value)
        return Step(rewards={"solved": reward}, metrics=rates([verdict]) | {"verify/scorer_raised": float(raised)}, answer=answer)

    return solved


def is_data(answer: str) -> bool:
    """Whether an answer that will be evaluated is numbers, lists and formulas, not a program.

    >>> [is_data(a) for a in ("(3+4)*2", "[[0, 1], [1, 0]]", "x**2/2 + sin(x)", "__import__('os')", "().x", "open('f')", "9**9**9", "lambda: 0")]
    [True, True, True, False, False, False, False, False]
    """
    words = set(re.findall(r"[A-Za-z_]\w*(?=\s*\()", answer)) - FUNCTIONS
    program = re.search(r"__|\.\s*[A-Za-z_]|[\"']\s*%|\b(?:lambda|import|for|if|exec|eval)\b|[;{}@`\\]|:=|\*\*[^*]*\*\*|\d{40}", answer)
    return not program and all(len(word) == 1 for word in words)


@functools.cache
def dataset_of(name: str, options: tuple[tuple[str, Any], ...]) -> Any:
    return import_package().create_dataset(name, size=1, seed=0, **dict(options))


def score_item(name: str, options: tuple[tuple[str, Any], ...], answer: str, item: dict[str, Any]) -> tuple[float, bool]:
    """Runs in a worker: (score, whether the scorer raised)."""
    try:
        return float(dataset_of(name, options).score_answer(answer=answer, entry=item)), False
    except (MemoryError, RecursionError):
        raise
    except BaseException:  # the package's scorers raise on text they did not expect, which is the answer's fault
        return 0.0, True


score_item.warm = import_package  # type: ignore[attr-defined]
