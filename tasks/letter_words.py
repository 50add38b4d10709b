"""Five different words that start with a given letter: a reward that moves from the first step, because it has degrees.

    --task letter_words                          any words of letters count
    --task letter_words:/usr/share/dict/words    only words of this list count (one a line; `reasoning_gym` takes that package's list)

Without a list the policy in time makes words up: good for watching a run learn, not for learning words.
"""

import importlib.util
import re
from pathlib import Path

from task import Example, Reward, SingleTurn, Task, TaskConfig, UserError, assistant, user

WORDS = 5
SHOTS = {"p": "paper, plant, pocket, piano, pepper", "s": "sun, stone, silver, sister, sugar", "b": "bread, bottle, butter, bridge, brown"}
HELD_OUT = "dhmr"


def letter_words(config: TaskConfig, argument: str = "") -> Task:
    known = read_words(argument) if argument else None
    shots = list(SHOTS.items())[: 2 if config.few_shot is None else config.few_shot]
    opening = [{"role": "system", "content": config.system_prompt}] if config.system_prompt else []
    opening += [message for letter, words in shots for message in (user(question(letter)), assistant(words))]

    def example(letter: str) -> Example:
        return Example([*opening, user(question(letter))], answer=letter)

    letters = [letter for letter in "abcdefghijklmnoprstuvw" if letter not in dict(shots)]
    return Task(
        name="letter_words",
        train=[example(letter) for letter in letters if letter not in HELD_OUT],
        eval=[example(letter) for letter in letters if letter in HELD_OUT],
        environment=lambda: SingleTurn(fraction_of_words(known)),
        stop=["\n"],
        checks=[(example("s"), SHOTS["s"], 1.0), (example("s"), SHOTS["p"], 0.0), (example("s"), "", 0.0)] if known is None else [],
    )


def question(letter: str) -> str:
    return f"Write {WORDS} different words that start with the letter {letter}."


def fraction_of_words(known: frozenset[str] | None = None) -> Reward:
    def words(completion: str, example: Example) -> float:
        return share(completion, example.answer, known)

    return words


def share(completion: str, letter: str, known: frozenset[str] | None = None) -> float:
    """The number of different right words over 5; with more than 5 words, over their number, so that rambling does not pay.

    >>> [share(text, "s") for text in ("sun, sea, son, sit, set", "sun sun sun sun sun", "sun, moon", "sun sea son sit set a b c d e")]
    [1.0, 0.2, 0.2, 0.5]
    """
    found = re.findall(r"[a-z]+", completion.lower())
    right = {w for w in found if w[0] == letter and 3 <= len(w) <= 14 and (known is None or w in known)}
    return min(len(right), WORDS) / max(WORDS, len(found))


def read_words(source: str) -> frozenset[str]:
    path = Path(source)
    if source == "reasoning_gym":
        package = importlib.util.find_spec("reasoning_gym")
        if package is None or package.origin is None:
            raise UserError("--task letter_words:reasoning_gym: the package is not installed; pip install reasoning-gym, or give a word list")
        path = Path(package.origin).parent / "data" / "words3to10.txt"
    if not path.exists():
        raise UserError(f"--task letter_words:{source}: no such file; give a list with one word a line")
    return frozenset(path.read_text().lower().split())
