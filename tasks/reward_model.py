"""A reward model: a sequence-classification model with one score, here or behind vLLM.

    --task reward_model:FOLDER_OR_HUB_ID --task.data prompts.jsonl        by transformers, in this process, on REWARD_MODEL_DEVICE (off: cpu)
    --task reward_model:http://127.0.0.1:8001 --task.data prompts.jsonl   by vLLM on devices of its own: vllm serve MODEL --runner pooling --port 8001
    --task gsm8k --task.extra-rewards reward_model:FOLDER                 one named reward among others: --task.reward-weights reward_model 0.1

The score is the raw logit, before any sigmoid or softmax. The conversation goes through the reward model's own chat template; a model
without one scores the plain text. Texts longer than its context are refused, never cut: the rollout is excluded.
"""

import asyncio
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from task import Example, Message, Reward, SingleTurn, Task, TaskConfig, UserError, assistant, table_task

DEADLINE = 60.0


def reward_model(config: TaskConfig, source: str) -> Task:
    if not config.data:
        raise UserError("--task reward_model needs prompts: --task.data FILE.jsonl")
    score = reward(source)
    task = table_task("reward_model", config.data, config, score, config.system_prompt)
    task.environment = lambda: SingleTurn(score)
    return task


def reward(source: str) -> Reward:
    if not source:
        raise UserError("reward_model: give a folder, a hub id or a URL, as in reward_model:http://127.0.0.1:8001")
    remote = source.startswith(("http://", "https://"))

    async def scored(completion: str, example: Example) -> dict[str, float]:
        messages = [*example.messages, assistant(completion)]
        return {"reward_model": await (score_by_http(source.rstrip("/"), messages) if remote else score_here(source, messages))}

    return scored


async def score_by_http(url: str, messages: list[Message]) -> float:
    """vLLM's /classify; its answer holds the logits when softmax is off, and there must be one."""
    import aiohttp

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE)) as session:
        async with session.post(f"{url}/classify", json={"messages": messages, "use_activation": False}) as response:
            if response.status != 200:
                raise RuntimeError(f"the reward model at {url} answered HTTP {response.status}: {(await response.text())[:300]}")
            (values,) = [row["probs"] for row in (await response.json())["data"]]
    if len(values) != 1:
        raise UserError(f"the model at {url} has {len(values)} scores; a reward model has one")
    return float(values[0])


async def score_here(source: str, messages: list[Message]) -> float:
    one_score, thread = load(source)
    return await asyncio.get_running_loop().run_in_executor(thread, one_score, messages)


@functools.cache
def load(source: str) -> tuple[Callable[[list[Message]], float], ThreadPoolExecutor]:
    """The model's scoring function, and the one thread it runs in: the tokenizer is used from nowhere else."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model: Any = AutoModelForSequenceClassification.from_pretrained(source).eval().to(os.environ.get("REWARD_MODEL_DEVICE", "cpu"))
    tokenizer = AutoTokenizer.from_pretrained(source)
    if model.config.num_labels != 1:
        raise UserError(f"{source} has {model.config.num_labels} scores; a reward model has one (num_labels 1)")
    longest = getattr(model.config, "max_position_embeddings", None) or 1 << 30

    @torch.no_grad()
    def one_score(messages: list[Message]) -> float:
        if tokenizer.chat_template:
            text, special = tokenizer.apply_chat_template(messages, tokenize=False), False
        else:
            text, special = "\n".join(str(m["content"]) for m in messages), True
        input_ids = tokenizer(text, return_tensors="pt", add_special_tokens=special, truncation=False, verbose=False)["input_ids"]  # (1, S)
        if input_ids.shape[1] > longest:
            raise ValueError(f"{input_ids.shape[1]} tokens are more than the {longest} that {source} can read")
        return float(model(input_ids=input_ids.to(model.device)).logits[0, 0])

    return one_score, ThreadPoolExecutor(1, thread_name_prefix="reward model")
