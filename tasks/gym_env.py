"""Adapter: text environments in the shape of Gymnasium, such as those of gem (and textarena through its wrappers). Your file builds the Task:

    from tasks.gym_env import GymEnvironment
    def mine(config): return Task("mine", [Example([], extra={"level": 1})] * 100, lambda: GymEnvironment(MyEnv), max_turns=8)

Their shape: reset(seed=...) -> (text, info); step(text) -> (text, reward, terminated, truncated, info). The environment is made from
example.extra, by keyword, and must use no random numbers but those of its seed: every member of a group must open alike.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from task import Example, Message, Step, user


class GymEnvironment:
    def __init__(self, make: Callable[..., Any]):
        self.make, self.env = make, None

    async def reset(self, example: Example, seed: int) -> list[Message]:
        self.env = await asyncio.to_thread(self.make, **example.extra)
        text, _ = await asyncio.to_thread(self.env.reset, seed=seed % 2**31)
        return [*example.messages, user(str(text))]

    async def step(self, message: Message) -> Step:
        text, reward, terminated, truncated, _ = await asyncio.to_thread(self.env.step, message["content"])
        return Step([user(str(text))], {"environment": float(reward)}, bool(terminated or truncated), bool(truncated and not terminated))

    async def close(self) -> None:
        if hasattr(self.env, "close"):
            await asyncio.to_thread(self.env.close)
