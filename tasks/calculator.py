"""Sums too long for the head, with a calculator to call.

    --task calculator

A problem is like 37 * 48 + 913. Two calls and their results are shown in the prompt: after one, SmolLM2-135M-Instruct calls the tool in
1 of 10 samples, after two in 9 of 10. Reward: 1 for the right number as the only number of the last turn, plus 0.1 for having called the
tool without an error, so that a model which never calls has something to find.
"""

import random

from task import Example, Message, Task, TaskConfig, assistant, exact_integer, user
from tools import ToolUse, tool_prompt, tool_stops
from tools import calculator as tool

SHOTS = [("12 * 34 + 5", "413"), ("81 * 27 - 450", "1737")]


def shown(problem: str, result: str) -> list[Message]:
    call = f"<calculator>{problem}</calculator>"
    return [user(f"What is {problem}?"), assistant(call), user(f"<result>{result}</result>"), assistant(result)]


def calculator(config: TaskConfig) -> Task:
    shots = [message for shot in SHOTS[: 2 if config.few_shot is None else config.few_shot] for message in shown(*shot)]
    opening = [{"role": "system", "content": config.system_prompt}] if config.system_prompt else []

    def example(number: int) -> Example:
        draw = random.Random(number)
        a, b, c = draw.randint(11, 99), draw.randint(11, 99), draw.randint(100, 999)
        sign = draw.choice("+-")
        return Example([*opening, *shots, user(f"What is {a} * {b} {sign} {c}?")], answer=a * b + (c if sign == "+" else -c))

    return Task(
        name="calculator",
        train=[example(number) for number in range(2000)],
        eval=[example(number) for number in range(1_000_000, 1_000_000 + min(config.eval_size, 200))],
        environment=lambda: ToolUse([tool], exact_integer),
        max_turns=3,
        stop=tool_stops([tool]),
        tools=[tool.schema],
        tool_prompt=tool_prompt([tool]),
        reward_weights={"called": 0.1},
        checks=[(example(0), str(example(0).answer), 1.0), (example(0), str(example(0).answer + 1), 0.0)],
    )
