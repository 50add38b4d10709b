"""Number problems that want a program, with a Python sandbox to run it in.

    --task python                                  made-up problems
    --task python --task.data problems.jsonl       yours: columns `question` and `answer` (the reference may be a boxed solution)

The last turn must hold the answer in \\boxed{}. Reward: 1 if it is right, plus 0.1 for having run a program without an error. The
sandbox, and what it does not protect against, is described in tools.py.
"""

import math
import random

from task import Example, Task, TaskConfig, table_task, user
from tools import ToolUse, python_tool, tool_prompt, tool_stops
from verify import right_answer, usable

INSTRUCTION = "Solve the problem; you may run Python. Put your final answer within \\boxed{}."


def python(config: TaskConfig) -> Task:
    tool = python_tool(config)
    reward = right_answer("boxed", config.reward_deadline)
    instruction = config.system_prompt or INSTRUCTION
    if config.data:
        task = table_task("python", config.data, config, reward, instruction, usable)
    else:
        train, held_out = [[problem(instruction, number) for number in numbers] for numbers in (range(1000), range(10**6, 10**6 + 100))]
        task = Task("python", train, lambda: ToolUse([tool], reward), held_out)
    task.environment = lambda: ToolUse([tool], reward)
    task.max_turns, task.stop, task.tools = 4, tool_stops([tool]), [tool.schema]
    task.tool_prompt, task.reward_weights = tool_prompt([tool]), {"called": 0.1}
    task.checks = [(task.train[0], f"\\boxed{{{task.train[0].answer}}}", 1.0), (task.train[0], "\\boxed{no}", 0.0)]
    return task


def problem(instruction: str, number: int) -> Example:
    draw = random.Random(number)
    a, b, n = draw.randint(3, 9), draw.randint(10, 19), draw.randint(200, 2000)
    kind = draw.randrange(3)
    if kind == 0:
        text, answer = f"What is the sum of all positive multiples of {a} or {b} below {n}?", sum(i for i in range(1, n) if i % a == 0 or i % b == 0)
    elif kind == 1:
        text, answer = f"What is the sum of the digits of {a}^{n}?", sum(map(int, str(a**n)))
    else:
        text, answer = f"How many numbers below {n} have no common divisor with {a * b} but 1?", sum(math.gcd(i, a * b) == 1 for i in range(1, n))
    return Example([{"role": "system", "content": instruction}, user(text)], answer=answer)
