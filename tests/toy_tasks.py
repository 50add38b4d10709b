"""Tasks that a tiny random model can learn in a few steps."""

from task import Example, SingleTurn, Task, TaskConfig, user


def digits(config: TaskConfig) -> Task:
    """The share of digits in the completion: every group has signal from the first step."""
    examples = [Example([user(f"{a}{b}?")], answer=a) for a in "abcdefgh" for b in "xyz"]
    return Task("digits", examples[:20], lambda: SingleTurn(share_of_digits), eval=examples[20:])


def share_of_digits(completion: str, example: Example) -> float:
    return sum(c.isdigit() for c in completion) / max(1, len(completion))
