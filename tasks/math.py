r"""Mathematics with boxed answers: MATH, AIME, or any table of problems and answers.

    --task math --task.data owner/name                            columns `problem` and `answer` or `solution` are found by themselves
    --task math --task.data problems.jsonl --task.prompt-column q --task.answer-column a
    --task math:answer --task.data ...                            <answer>...</answer> in place of \boxed{...}; likewise `math:####`

The reference may be the bare answer, or a solution whose last \boxed{...} holds it. Rows without a usable reference are dropped and
counted. Answers are compared by verify.py: exactly where they are numbers, by sympy in killable workers where they are expressions.
A bonus for thinking first: --task.extra-rewards tasks/math.py:thinks --task.reward-weights thinks 0.1.
"""

from dataclasses import replace

from task import Example, Task, TaskConfig, UserError, read_rows, table_task
from verify import MARKERS, last_boxed, right_answer, thought_first, usable

INSTRUCTIONS = {
    "boxed": "Reason step by step, and put your final answer within \\boxed{}.",
    "answer": "Reason step by step, and put your final answer within <answer> and </answer>.",
    "####": "Reason step by step. End with a line `#### ` followed by the final answer alone.",
}
WRITTEN = {"boxed": "\\boxed{%s}", "answer": "<answer>%s</answer>", "####": "#### %s"}


def math(config: TaskConfig, marker: str = "boxed") -> Task:
    marker = marker or "boxed"
    if marker not in MARKERS:
        raise UserError(f"--task math:{marker}: the marker must be one of {', '.join(MARKERS)}")
    if config.data is None:
        raise UserError("--task math needs problems: --task.data FILE.jsonl, FILE.parquet or a hub id, with a problem and an answer column")
    config = with_columns_found(config)
    task = table_task(
        "math", config.data, config, right_answer(marker, config.reward_deadline), config.system_prompt or INSTRUCTIONS[marker], lambda a: usable(reference(a))
    )
    task = replace(task, train=[referenced(e) for e in task.train], eval=[referenced(e) for e in task.eval])
    for example in task.train[:3]:  # the first rows must be verifiable, right and wrong, in the way they will be
        task.checks += [(example, WRITTEN[marker] % example.answer, 1.0), (example, WRITTEN[marker] % "no such answer", 0.0), (example, "", 0.0)]
    return task


def reference(answer: object) -> str | None:
    """The answer alone: what the last box of a solution holds, or all of a bare answer."""
    if answer is None:
        return None
    text = str(answer)
    return last_boxed(text) if "\\boxed" in text or "\\fbox" in text else text.rpartition("####")[2].strip()


def referenced(example: Example) -> Example:
    return replace(example, answer=reference(example.answer))


def thinks(completion: str, example: Example) -> float:
    """1 for one <think> block with an answer after it."""
    return float(thought_first(completion))


def with_columns_found(config: TaskConfig) -> TaskConfig:
    """The usual column names of such tables, where the settings are the defaults and the table has others."""
    first = read_rows(config.data, config.split)[:1] if config.data else []
    columns, default = set(first[0]) if first else set(), TaskConfig()
    if config.prompt_column == default.prompt_column and config.prompt_column not in columns and "problem" in columns:
        config = replace(config, prompt_column="problem")
    if config.answer_column == default.answer_column and config.answer_column not in columns and "solution" in columns:
        config = replace(config, answer_column="solution")
    return config
