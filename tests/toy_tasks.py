"""Tasks that a tiny random model can learn in a few steps."""

import asyncio

from task import Example, SingleTurn, Task, TaskConfig, position, user


def digits(config: TaskConfig) -> Task:
    """The share of digits in the completion: every group has signal from the first step."""
    examples = [Example([user(f"{a}{b}?")], answer=a) for a in "abcdefgh" for b in "xyz"]
    return Task("digits", examples[:20], lambda: SingleTurn(share_of_digits), eval=examples[20:])


def share_of_digits(completion: str, example: Example) -> float:
    return sum(c.isdigit() for c in completion) / max(1, len(completion))


def constant(config: TaskConfig) -> Task:
    """Every answer is worth the same: no group has signal."""
    task = digits(config)
    task.environment = lambda: SingleTurn(lambda completion, example: 0.7)
    return task


def failing(config: TaskConfig) -> Task:
    """Every reward raises."""

    def reward(completion: str, example: Example) -> float:
        raise ConnectionError("the judge is down")

    task = digits(config)
    task.environment = lambda: SingleTurn(reward)
    return task


def failing_now_and_then(config: TaskConfig) -> Task:
    """Every reward of the second step of five prompts raises."""
    task = digits(config)
    second = {task.train[position(task, 0, i)].answer for i in range(5, 10)}

    def reward(completion: str, example: Example) -> float:
        if example.answer in second:
            raise ConnectionError("the judge is down")
        return share_of_digits(completion, example)

    task.environment = lambda: SingleTurn(reward)
    return task


def no_eval(config: TaskConfig) -> Task:
    task = digits(config)
    task.eval = ()
    return task


def sparse(config: TaskConfig) -> Task:
    """One point for a completion that begins with a digit: many groups have no signal."""
    task = digits(config)
    task.environment = lambda: SingleTurn(lambda completion, example: float(completion[:1].isdigit()))
    return task


def constant_for_some(config: TaskConfig) -> Task:
    """Prompts that begin with an a are solved from the start."""
    task = digits(config)
    task.environment = lambda: SingleTurn(lambda completion, example: 1.0 if example.answer == "a" else 0.5 * share_of_digits(completion, example))
    return task


def half_constant(config: TaskConfig) -> Task:
    """Every other prompt is worth the same whatever is said."""
    return rewarded_by(config, lambda completion, example: 0.7 if example.answer in "aceg" else share_of_digits(completion, example))


def one_fails(config: TaskConfig) -> Task:
    """One prompt of twenty can never be judged."""
    return rewarded_by(config, lambda completion, example: fail("no answer key") if is_first(example) else share_of_digits(completion, example))


def flaky(config: TaskConfig) -> Task:
    """The first four judgements fail: one group, once."""
    calls: list[int] = []

    def reward(completion: str, example: Example) -> float:
        if is_first(example):
            calls.append(1)
            if len(calls) <= 4:
                fail("try again")
        return share_of_digits(completion, example)

    return rewarded_by(config, reward)


def one_hangs(config: TaskConfig) -> Task:
    """One prompt's judge does not answer."""

    async def reward(completion: str, example: Example) -> float:
        await asyncio.sleep(1e6 if is_first(example) else 0)
        return share_of_digits(completion, example)

    return rewarded_by(config, reward)


def slow_first(config: TaskConfig) -> Task:
    """One prompt's judge takes its time."""

    async def reward(completion: str, example: Example) -> float:
        await asyncio.sleep(0.5 if is_first(example) else 0)
        return share_of_digits(completion, example)

    return rewarded_by(config, reward)


def rewarded_by(config: TaskConfig, reward) -> Task:
    task = digits(config)
    task.environment = lambda: SingleTurn(reward)
    return task


def is_first(example: Example) -> bool:
    return example.messages[0]["content"] == "ax?"


def fail(reason: str) -> float:
    raise ConnectionError(reason)
