"""Guess a number from 1 to 7 in 3 turns, told "higher" or "lower": the smallest task that takes several turns.

    --task guess_number

Halving wins always. Each guess that is possible after all that was said earns 0.1, and finding the number fills the reward up to 1.
"""

import re

from task import Example, Message, Step, Task, TaskConfig, assistant, user

HIGHEST, TURNS = 7, 3
RULES = f"I think of a number from 1 to {HIGHEST}. Guess it in {TURNS} tries. Answer with one number only."


def guess_number(config: TaskConfig) -> Task:
    shots = [user(RULES), assistant("4"), user("higher"), assistant("6"), user("lower"), assistant("5"), user(f"correct\n{RULES}")]
    opening = shots if config.few_shot is None or config.few_shot > 0 else [user(RULES)]
    if config.system_prompt:
        opening = [{"role": "system", "content": config.system_prompt}, *opening]
    games = [Example(opening, answer=secret) for secret in range(1, HIGHEST + 1)]
    return Task("guess_number", games, GuessNumber, eval=games, max_turns=TURNS, max_turn_tokens=8, stop=["\n"], checks=[(games[3], "4", 1.0)])


class GuessNumber:
    async def reset(self, example: Example, seed: int) -> list[Message]:
        self.secret, self.low, self.high = int(example.answer), 1, HIGHEST
        self.turns, self.valid, self.sensible, self.earned = 0, 0, 0, 0.0
        return example.messages

    async def step(self, message: Message) -> Step:
        self.turns += 1
        numbers = re.findall(r"\d+", message["content"])
        guess = int(numbers[0]) if len(numbers) == 1 and len(numbers[0]) < 4 else None
        sensible = guess is not None and self.low <= guess <= self.high
        self.valid += guess is not None
        self.sensible += sensible
        shares = {"guess/valid": self.valid / self.turns, "guess/sensible": self.sensible / self.turns}
        metrics = {**shares, "guess/found": float(guess == self.secret)}
        gain = 1.0 - self.earned if guess == self.secret else 0.1 * sensible
        self.earned += gain
        if guess == self.secret or self.turns == TURNS:
            return Step(rewards={"guess": gain}, done=True, metrics=metrics)
        if guess is None or not 1 <= guess <= HIGHEST:
            hint = f"invalid, give one number from 1 to {HIGHEST}"
        elif guess < self.secret:
            hint, self.low = "higher", max(self.low, guess + 1)
        else:
            hint, self.high = "lower", min(self.high, guess - 1)
        return Step([user(hint)], rewards={"guess": gain}, metrics=metrics)

    async def close(self) -> None:
        pass
