"""Adapter: environments that speak in lists of OpenAI messages, such as those of skyrl-gym. Your file builds the Task:

    from tasks.message_env import MessageEnvironment
    def mine(config): return Task("mine", examples, lambda: MessageEnvironment(MyEnv), max_turns=8)

Their shape: init(prompt) -> (messages, metadata); step(text) -> {"observations": [message], "reward": number, "done": bool}; close().
The environment is made from example.extra, by keyword. Its calls run in a thread, so they may block but not hang for ever.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from task import Example, Message, Step


class MessageEnvironment:
    def __init__(self, make: Callable[..., Any]):
        self.make, self.env = make, None

    async def reset(self, example: Example, seed: int) -> list[Message]:
        self.env = await asyncio.to_thread(self.make, **example.extra)
        messages, _ = await asyncio.to_thread(self.env.init, [dict(message) for message in example.messages])
        return messages

    async def step(self, message: Message) -> Step:
        told = await asyncio.to_thread(self.env.step, message["content"])
        truncated = bool((told.get("metadata") or {}).get("truncated", False))
        return Step(told["observations"], {"environment": float(told["reward"])}, bool(told["done"]), truncated)

    async def close(self) -> None:
        if self.env is not None:
            await asyncio.to_thread(self.env.close)
