"""Rollouts: the policy talks, the environment answers, and every token is kept exactly as it was sampled.

    one group = one prompt, G samples of it
    (1) reset G environments with the same (example, seed): one opening conversation, rendered to prompt_ids once
    (2) the engine samples each completion: token ids in, token ids out, one log-probability per sampled token
    (3) the environment hears the decoded text and answers; its messages are tokenised alone and appended
    (4) until the environment is done, or turns or tokens run out

Nothing is ever tokenised again from text: what the engine sampled is what is trained on. Every random choice is keyed by
(seed, prompt index, sample, turn), so a run can be repeated whatever arrives first and on however many ranks.

Engines answer one call, `generate(Request) -> [Completion]`: `VLLMEngine` speaks HTTP to vLLM's server; `HFEngine` lets the
policy sample itself, with no second copy of the weights and no refit.
"""

import asyncio
import contextlib
import copy
import hashlib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from jinja2 import TemplateError

from log import Metrics
from task import Environment, Example, Message, Step, Task, UserError


@dataclass
class SamplingConfig:
    temperature: float = 1.0  # of sampling, and of every log-probability the trainer computes
    max_prompt_tokens: int = 512  # longer prompts are dropped before training and counted
    max_completion_tokens: int = 1024  # all turns of an episode together, environment messages included
    stop: tuple[str, ...] = ()  # stop strings, besides the task's own
    stop_ids: tuple[int, ...] = ()  # stop token ids, besides the tokenizer's end, the generation config's and the chat template's


@dataclass
class DeadlineConfig:
    """Seconds after which waiting becomes an error that names what was waited for."""

    engine_start: float = 900.0  # from starting vLLM until it answers
    request: float = 1800.0  # one generation request, each attempt
    refit: float = 600.0  # sending the weights to the engine
    collective: float = 1800.0  # one collective call between trainer processes
    environment: float = 60.0  # one reset or step of an environment
    verifier: float = 10.0  # one reward computation in a worker process


class EngineError(RuntimeError):
    """The engine failed for good: it died, or refused a request."""


@dataclass
class Rollout:
    """One completion of one prompt. The last four lists have one entry per token of completion_ids."""

    index: int  # the prompt's position in the run's global order; also the group's id
    sample: int  # 0..G-1 within the group
    prompt_ids: list[int]
    completion_ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)  # False: written by the environment or the chat template
    logprobs_gen: list[float] = field(default_factory=list)  # of the engine, under the distribution sampled from; nan where not sampled
    versions: list[int] = field(default_factory=list)  # optimizer steps behind the weights that sampled the token; -1 where not sampled
    messages: list[Message] = field(default_factory=list)
    answer: str | None = None  # as the environment understood it, for majority votes
    rewards: dict[str, float] = field(default_factory=dict)  # summed over turns
    metrics: dict[str, float] = field(default_factory=dict)
    turns: int = 0
    finish: str = ""  # done | length | max_turns | truncated (by the environment) | failed
    failure: str = ""  # why, where finish is failed: such a rollout counts in no baseline, loss or denominator

    @property
    def truncated(self) -> bool:
        return self.finish in ("length", "max_turns", "truncated")

    def reward(self, weights: dict[str, float]) -> float:
        """The weighted sum of the named rewards; a name without weight weighs 1."""
        return sum(weights.get(name, 1.0) * value for name, value in self.rewards.items())

    def append(self, ids: Sequence[int], sampled: bool, logprobs: Sequence[float] = (), versions: Sequence[int] = ()) -> None:
        self.completion_ids += ids
        self.sampled += [sampled] * len(ids)
        self.logprobs_gen += logprobs if sampled else [math.nan] * len(ids)
        self.versions += versions if sampled else [-1] * len(ids)
        assert len(self.completion_ids) == len(self.sampled) == len(self.logprobs_gen) == len(self.versions), "one entry per token"


def seed_of(*key: Any) -> int:
    """A 62-bit seed from a key such as (seed, "train", index, sample, turn): the same on every rank and in every order of arrival.

    >>> seed_of(0, "train", 7) == seed_of(0, "train", 7), seed_of(0, "train", 7) == seed_of(0, "eval", 7)
    (True, False)
    """
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest()) >> 2


# ------------------------------------------------------------------------------------------------ messages to tokens


class Renderer:
    """Messages to token ids, in one place. format: chat (the tokenizer's template) or text (the contents, nothing else).

    Raises:
        UserError: `chat` without a template; a multi-turn task whose template changes earlier turns when later ones are added.
    """

    def __init__(
        self, tokenizer: Any, prompt_format: str, tools: list[dict[str, Any]] | None = None, generation_config: Any = None, tool_prompt: str | None = None
    ):
        has_template = bool(getattr(tokenizer, "chat_template", None))
        if prompt_format == "chat" and not has_template:
            raise UserError("--task.prompt-format chat, but the tokenizer has no chat template: use --task.prompt-format text")
        self.tokenizer = tokenizer
        self.format = "chat" if prompt_format == "chat" or (prompt_format == "auto" and has_template) else "text"
        knows_tools = self.format == "chat" and "tools" in str(tokenizer.chat_template)
        self.tools = tools if knows_tools else None
        self.tool_prompt = None if knows_tools else tool_prompt  # said in words where the template would leave the tools out
        self.glue_error = ""
        # a template may begin the assistant's turn itself: the environment hears that beginning too
        self.opened = "<think>" if self.format == "chat" and self._render([{"role": "user", "content": "U"}]).rstrip().endswith("<think>") else ""
        try:
            self._check_glue()
        except (ValueError, TemplateError) as error:  # fatal only for multi-turn tasks: see require_multi_turn
            self.glue_error = str(error)
        ends = [tokenizer.eos_token_id, getattr(generation_config, "eos_token_id", None), self._turn_end()]
        flat = [i for end in ends for i in (end if isinstance(end, (list, tuple)) else [end]) if i is not None]
        self.stop_ids: list[int] = sorted(set(flat))

    def prompt(self, messages: list[Message]) -> list[int]:
        """The conversation so far, ready for the assistant to speak."""
        if self.tool_prompt:
            system = [m for m in messages[:1] if m["role"] == "system"]
            words = "\n\n".join([*(m["content"] for m in system), self.tool_prompt])
            messages = [{"role": "system", "content": words}, *messages[len(system) :]]
        if self.format == "text":
            return self._encode("\n".join(m["content"] for m in messages), special=True)
        return self._encode(self._render(messages))

    def glue(self, messages: list[Message], last_id: int | None) -> list[int]:
        """What stands between a sampled assistant turn and the next one: the turn's end unless it was sampled, then `messages`."""
        if self.format == "text":
            return self._encode("".join(f"\n{m['content']}" for m in messages) + "\n")
        ids = self._encode(self._after_turn(messages))
        return ids[1:] if ids and ids[0] == last_id else ids

    def text(self, ids: Sequence[int]) -> str:
        """What the environment hears. With tools, special tokens are kept ([TOOL_CALLS], <|python_tag|>), but for the end of the turn."""
        if self.tools is None:
            return self.tokenizer.decode(ids, skip_special_tokens=True)
        return self.tokenizer.decode([i for i in ids if i not in self.stop_ids], skip_special_tokens=False)

    def require_multi_turn(self) -> None:
        if self.glue_error:
            raise UserError(f"this model's chat template cannot be used for several turns: {self.glue_error}; use --task.prompt-format text")

    def _encode(self, text: str, special: bool = False) -> list[int]:
        # the template writes its own special tokens, so none are added; truncation is always off
        return self.tokenizer(text, add_special_tokens=special, truncation=False, verbose=False)["input_ids"]

    def _render(self, messages: list[Message], generate: bool = True) -> str:
        return self.tokenizer.apply_chat_template(messages, tools=self.tools, add_generation_prompt=generate, tokenize=False)

    def _after_turn(self, messages: list[Message]) -> str:
        """The template's text after an assistant turn: two renderings around a dummy turn, subtracted."""
        opening, dummy = [{"role": "user", "content": "U"}], "DUMMYTURN"
        turn = {"role": "assistant", "content": dummy}
        start = self._render(opening) + dummy
        whole = self._render([*opening, turn, *messages], generate=bool(messages))
        if not whole.startswith(start):
            raise ValueError("it writes an assistant turn differently once it is in the past")
        return whole[len(start) :]

    def _check_glue(self) -> None:
        if self.format == "chat":
            for role in ("user", "tool") if self.tools else ("user",):
                if not self._after_turn([{"role": role, "content": "V"}]).startswith(self._after_turn([]).rstrip()):
                    raise ValueError(f"it ends an assistant turn differently when a message of the {role} follows")

    def _turn_end(self) -> int | None:
        """The special token that the template puts after an assistant turn, if any (<|im_end|>, <|eot_id|>, ...)."""
        if self.format == "text" or self.glue_error:
            return None
        ids = self._encode(self._after_turn([]))
        added = self.tokenizer.added_tokens_decoder
        return ids[0] if ids and ids[0] in added else None


# ------------------------------------------------------------------------------------------------ engines


@dataclass(frozen=True)
class Request:
    prompt_ids: tuple[int, ...]
    n: int  # samples; sample i is drawn with seed + i
    max_tokens: int
    temperature: float  # 0: greedy
    seed: int
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    top_p: float = 1.0  # evaluation only
    affinity: int = -1  # requests of one number begin with the same tokens: an engine that saw one has the keys of the next; -1: unknown

    @property
    def work(self) -> int:
        """Tokens this may cost an engine: the prompt once, and every completion to its limit."""
        return len(self.prompt_ids) + self.n * self.max_tokens


@dataclass
class Completion:
    ids: list[int]  # the stop token included where one was sampled
    logprobs: list[float]
    versions: list[int]
    finish: str  # stop | length


class Engine(Protocol):
    """Samples completions. `version` is the number of optimizer steps behind the weights it holds."""

    version: int

    async def __aenter__(self) -> "Engine": ...
    async def __aexit__(self, *exc: object) -> None: ...
    async def generate(self, request: Request) -> list[Completion]: ...


class VLLMEngine:
    """vLLM's server over HTTP. `check_alive` raises EngineError, with the engine's last words, when its process is gone."""

    retries = 2  # of a request that failed in a way that may pass: connection, time-out, 5xx, 408, 429
    salted = False  # where the prefix cache outlives an update: a prompt may only continue from blocks of its own weights' version

    def __init__(self, url: str, api_key: str, deadline: float, check_alive: Callable[[], None] = lambda: None):
        self.url, self.api_key, self.deadline, self.check_alive = url, api_key, deadline, check_alive
        self.version = 0

    async def __aenter__(self) -> "VLLMEngine":
        import aiohttp  # a dependency of vLLM: HFEngine needs neither

        self.session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {self.api_key}"},
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self.deadline),
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.session.close()

    async def generate(self, request: Request) -> list[Completion]:
        import aiohttp

        body: dict[str, Any] = {
            "token_ids": request.prompt_ids,
            "sampling_params": {
                "n": request.n,
                "max_tokens": request.max_tokens,
                "temperature": request.temperature,
                "top_p": request.top_p,
                "seed": request.seed,
                "stop": list(request.stop),
                "stop_token_ids": list(request.stop_ids),
                "logprobs": 0,  # of the sampled token alone
                "skip_special_tokens": False,
            },
        }
        problem = ""
        for attempt in range(self.retries + 1):
            if self.salted:
                body["cache_salt"] = f"weights {self.version}"
            try:
                async with self.session.post(f"{self.url}/inference/v1/generate", json=body) as response:
                    if response.status == 200:
                        return [parse_choice(choice) for choice in (await response.json())["choices"]]
                    problem = f"HTTP {response.status}: {(await response.text())[:500]}"
                    if response.status < 500 and response.status not in (408, 429):
                        raise EngineError(f"vLLM refused a request of {len(request.prompt_ids)} tokens: {problem}")
            except TimeoutError:
                problem = f"no answer within {self.deadline:.0f} s (--deadlines.request)"
            except aiohttp.ClientError as error:
                problem = f"{type(error).__name__}: {error}"
            await asyncio.sleep(0.5 * 2**attempt)  # also gives a dying process the time to be seen as dead
            self.check_alive()
        raise EngineError(f"vLLM at {self.url} failed {self.retries + 1} times: {problem}")


class Balanced:
    """Several engines as one. A request goes where its prompt was before, for the keys kept there, or else to the least busy engine.

    It leaves its home when that has more than twice the work of the least busy engine with this request, since an idle engine computes a
    prompt again sooner than a busy one gets to it. No result depends on who answers: every request carries its own seed.

    Args:
        engines: at least one.
        first: the one that ties go to, another one on each rank.
    """

    def __init__(self, engines: "Sequence[Engine]", first: int = 0):
        self.engines = [*engines[first:], *engines[:first]]
        self.work = [0] * len(self.engines)  # tokens that each may still have to compute
        self.homes: dict[int, int] = {}  # affinity -> engine

    def __copy__(self) -> "Balanced":
        """One whose engines are others too: an engine's connections belong to one event loop."""
        return Balanced([copy.copy(engine) for engine in self.engines])

    @property
    def salted(self) -> bool:
        return getattr(self.engines[0], "salted", False)

    @salted.setter
    def salted(self, salted: bool) -> None:
        for engine in self.engines:
            engine.salted = salted  # type: ignore[attr-defined]

    @property
    def version(self) -> int:
        return self.engines[0].version

    @version.setter
    def version(self, version: int) -> None:
        for engine in self.engines:
            engine.version = version
        self.homes.clear()  # an update drops every prefix cache

    async def __aenter__(self) -> "Balanced":
        async with contextlib.AsyncExitStack() as stack:  # when one cannot be entered, those before it are left
            for engine in self.engines:
                await stack.enter_async_context(engine)
            self.stack = stack.pop_all()
        self.work = [0] * len(self.engines)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stack.aclose()

    def choose(self, request: Request) -> int:
        least = min(range(len(self.engines)), key=lambda i: self.work[i])
        home = self.homes.get(request.affinity, least)
        chosen = home if self.work[home] <= 2 * (self.work[least] + request.work) else least
        if request.affinity >= 0:
            self.homes[request.affinity] = chosen
        return chosen

    async def generate(self, request: Request) -> list[Completion]:
        chosen = self.choose(request)
        self.work[chosen] += request.work
        try:
            return await self.engines[chosen].generate(request)
        finally:
            self.work[chosen] -= request.work


def parse_choice(choice: dict[str, Any]) -> Completion:
    """One element of vLLM's `choices`.

    Raises:
        EngineError: the request was aborted, a sampled token has no log-probability, or the weights that sampled it are unknown.
    """
    ids, content = choice["token_ids"], choice["logprobs"]["content"]
    if choice["finish_reason"] not in ("stop", "length"):
        raise EngineError(f"vLLM ended a request with {choice['finish_reason']!r}")
    if len(content) != len(ids):
        raise EngineError(f"vLLM returned {len(content)} log-probabilities for {len(ids)} tokens")
    versions = [-1] * len(ids)
    for span in choice["weight_versions"]:
        if not str(span["version"]).isdigit():
            raise EngineError(f"vLLM sampled with weights of unknown version {span['version']!r}: was the first refit left out?")
        for position in range(span["start"], min(span["end"], len(ids))):
            versions[position] = int(span["version"])
    if -1 in versions:
        raise EngineError(f"no weight version for token {versions.index(-1)} of {len(ids)}: {choice['weight_versions']}")
    return Completion(ids, [token["logprob"] for token in content], versions, choice["finish_reason"])


class HFEngine:
    """The policy samples itself with a key-value cache, in batches: requests that wait at the same time are run together.

    Args:
        model: a transformers causal language model, the policy's own.
        set_sampling: called with True before and False after sampling (switches the attention implementation).
    """

    def __init__(self, model: Any, tokenizer: Any, set_sampling: Callable[[bool], None], max_batch: int = 64):
        self.model, self.tokenizer, self.set_sampling, self.max_batch = model, tokenizer, set_sampling, max_batch
        self.version = 0
        self.waiting: list[tuple[Request, asyncio.Future[list[Completion]]]] = []
        self.runner: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "HFEngine":
        self.waiting, self.runner = [], None
        return self

    async def __aexit__(self, *exc: object) -> None:
        pass

    async def generate(self, request: Request) -> list[Completion]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[Completion]] = loop.create_future()
        self.waiting.append((request, future))
        if self.runner is None:  # it starts after every coroutine that is ready now has asked
            self.runner = loop.create_task(self._run())
        return await future

    async def _run(self) -> None:
        """Sample what waits, in a thread, so that environments and deadlines go on meanwhile; then what has come to wait since."""
        while self.waiting:
            # sorted, so that the batches, and with them the last bits of the results, do not depend on the order of arrival
            waiting, self.waiting = sorted(self.waiting, key=lambda w: (w[0].n, w[0].temperature, w[0].top_p, w[0].max_tokens, w[0].seed)), []
            outcome: list[list[Completion]] | Exception
            try:
                outcome = await asyncio.to_thread(self._sample_all, [request for request, _ in waiting])
            except Exception as error:  # handed to whoever waits: a task's own exception would only be printed
                outcome = error
            for i, (_, future) in enumerate(waiting):
                if not future.done():
                    future.set_exception(outcome) if isinstance(outcome, Exception) else future.set_result(outcome[i])
        self.runner = None

    def _sample_all(self, requests: list[Request]) -> list[list[Completion]]:
        """Batches of neighbours that agree in n, temperature and nucleus."""
        done: list[list[Completion]] = []
        self.set_sampling(True)
        try:
            while len(done) < len(requests):
                first = requests[len(done)]
                batch = requests[len(done) : len(done) + max(1, self.max_batch // first.n)]
                done += self._sample([r for r in batch if (r.n, r.temperature, r.top_p) == (first.n, first.temperature, first.top_p)])
        finally:
            self.set_sampling(False)
        return done

    @torch.no_grad()
    def _sample(self, requests: list[Request]) -> list[list[Completion]]:
        """Requests of equal n and temperature: prefill each prompt once (B, S), then decode B * n rows."""
        device, n, temperature = self.model.device, requests[0].n, requests[0].temperature
        longest = max(len(r.prompt_ids) for r in requests)
        pads = [longest - len(r.prompt_ids) for r in requests]
        input_ids = torch.tensor([[0] * pad + list(r.prompt_ids) for r, pad in zip(requests, pads)], device=device)  # (B, S), left-padded
        mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in pads], device=device)
        position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
        out = self.model(input_ids, attention_mask=mask, position_ids=position_ids, use_cache=True, logits_to_keep=1)
        cache, logits = out.past_key_values, out.logits[:, -1].repeat_interleave(n, 0)  # (B n, V)
        if n > 1:
            cache.batch_repeat_interleave(n)
        mask = mask.repeat_interleave(n, 0)
        row_requests = [r for r in requests for _ in range(n)]
        draws = [torch.Generator().manual_seed(r.seed + i) for r in requests for i in range(n)]
        rows = [Completion([], [], [], "length") for _ in row_requests]
        active = list(range(len(rows)))  # row of each line of the running batch
        while True:
            logprobs = torch.log_softmax(logits.float() / (temperature or 1.0), -1)
            if requests[0].top_p < 1:
                logprobs = nucleus(logprobs, requests[0].top_p)
            if temperature == 0:
                chosen = logprobs.argmax(-1)
            else:  # inverse of the cumulative distribution at one uniform number per token, from the row's own generator
                cumulative = logprobs.double().exp().cumsum(-1)
                uniform = torch.stack([torch.rand((), generator=draws[a], dtype=torch.float64) for a in active]).to(device)
                chosen = torch.searchsorted(cumulative, (uniform * cumulative[:, -1])[:, None], right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
            values = logprobs.gather(1, chosen[:, None])[:, 0].tolist()
            for line, (token, value) in enumerate(zip(chosen.tolist(), values)):
                row, request = rows[active[line]], row_requests[active[line]]
                row.ids.append(token)
                row.logprobs.append(value)
                row.versions.append(self.version)
                if token in request.stop_ids or (request.stop and self._hits(row.ids, request.stop)):
                    row.finish = "stop"
            keep = [line for line, a in enumerate(active) if rows[a].finish != "stop" and len(rows[a].ids) < row_requests[a].max_tokens]
            if not keep:
                return [rows[i * n : (i + 1) * n] for i in range(len(requests))]
            if len(keep) < len(active):
                index = torch.tensor(keep, device=device)
                cache.batch_select_indices(index)
                mask, chosen, active = mask[index], chosen[index], [active[line] for line in keep]
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
            position_ids = mask.sum(-1, keepdim=True) - 1
            out = self.model(chosen[:, None], attention_mask=mask, position_ids=position_ids, past_key_values=cache, use_cache=True)
            logits = out.logits[:, -1]

    def _hits(self, ids: list[int], stop: tuple[str, ...]) -> bool:
        # a stop string ends within the last token, so a tail of as many tokens as it has characters holds it
        tail = self.tokenizer.decode(ids[-max(map(len, stop)) - 1 :])
        return any(s in tail for s in stop)


def nucleus(logprobs: torch.Tensor, top_p: float) -> torch.Tensor:
    """(B, V) renormalised over the smallest set of tokens that holds at least top_p of each row (arXiv 1904.09751); -inf elsewhere."""
    values, order = logprobs.sort(-1, descending=True)
    before = values.exp().cumsum(-1) - values.exp()  # what better tokens hold already
    kept = torch.full_like(logprobs, -torch.inf).scatter(-1, order, values.masked_fill(before >= top_p, -torch.inf))
    return torch.log_softmax(kept, -1)


# ------------------------------------------------------------------------------------------------ episodes


@dataclass(frozen=True)
class Sampler:
    """All that sampling needs beside the example. `label` keeps the random numbers of training and evaluation apart."""

    engine: Engine
    renderer: Renderer
    task: Task
    sampling: SamplingConfig
    deadlines: DeadlineConfig
    seed: int
    label: str = "train"
    top_p: float = 1.0

    async def group(self, index: int, example: Example, samples: int) -> list[Rollout]:
        """Sample one prompt `samples` times.

        Returns:
            `samples` rollouts. Those whose environment raised or exceeded its deadline have finish "failed".

        Raises:
            EngineError: the engine died or refused; this ends the run.
        """
        environments = [self.task.environment() for _ in range(samples)]
        seed = seed_of(self.seed, self.label, index)
        try:
            openings = [await self._within(e.reset(example, seed), "reset") for e in environments]
        except EnvironmentFailure as failure:
            await self._close(environments)
            return [Rollout(index, s, [], finish="failed", failure=str(failure)) for s in range(samples)]
        if any(opening != openings[0] for opening in openings):
            raise UserError(f"the environments of prompt {index} opened differently: reset must depend on (example, seed) alone")
        prompt_ids = self.renderer.prompt(openings[0])
        rollouts = [Rollout(index, s, prompt_ids, messages=list(openings[0])) for s in range(samples)]
        if len(prompt_ids) > self.sampling.max_prompt_tokens or not prompt_ids:
            for rollout in rollouts:
                rollout.finish, rollout.failure = "failed", f"prompt of {len(prompt_ids)} tokens (--sampling.max-prompt-tokens)"
            await self._close(environments)
            return rollouts
        stop = self.task.stop if example.stop is None else example.stop
        first = await self.engine.generate(self._request(rollouts[0], samples, stop))
        await asyncio.gather(*(self._episode(*each, stop) for each in zip(rollouts, environments, first, strict=True)))
        return rollouts

    async def _episode(self, rollout: Rollout, environment: Environment, completion: Completion, stop: Sequence[str]) -> None:
        """Alternate policy and environment until the episode ends; fills `rollout` in place."""
        try:
            while True:
                rollout.append(completion.ids, True, completion.logprobs, completion.versions)
                rollout.turns += 1
                message: Message = {"role": "assistant", "content": self.renderer.opened + self.renderer.text(completion.ids)}
                rollout.messages.append(message)
                step = await self._within(environment.step(message), "step")
                for name, value in step.rewards.items():
                    rollout.rewards[name] = rollout.rewards.get(name, 0.0) + value
                rollout.metrics.update(step.metrics)
                rollout.answer = step.answer
                rollout.finish = self._finish(rollout, completion, step)
                if rollout.finish:
                    return
                stop = step.stop if step.stop is not None else stop
                last = completion.ids[-1] if completion.ids else None
                rollout.append(self.renderer.glue(step.messages, last), False)
                rollout.messages += step.messages
                if self._room(rollout) <= 0:
                    rollout.finish = "length"
                    return
                (completion,) = await self.engine.generate(self._request(rollout, 1, stop))
        except EnvironmentFailure as failure:
            rollout.finish, rollout.failure = "failed", str(failure)
        finally:
            await self._close([environment])

    def _finish(self, rollout: Rollout, completion: Completion, step: Step) -> str:
        """Why the episode ends here, or "" where it goes on. A turn cut by length ends it, whatever the environment says."""
        if completion.finish == "length":
            return "length"
        if step.done:
            return "truncated" if step.truncated else "done"
        return "max_turns" if rollout.turns >= self.task.max_turns else ""

    def _room(self, rollout: Rollout) -> int:
        return self.sampling.max_completion_tokens - len(rollout.completion_ids)

    def _request(self, rollout: Rollout, n: int, stop: Sequence[str]) -> Request:
        key = (self.seed, self.label, rollout.index, rollout.sample, rollout.turns)
        return Request(
            prompt_ids=(*rollout.prompt_ids, *rollout.completion_ids),
            n=n,
            max_tokens=min(self._room(rollout), self.task.max_turn_tokens or self._room(rollout)),
            temperature=self.sampling.temperature,
            seed=seed_of(*key),
            stop=(*self.sampling.stop, *stop),
            stop_ids=(*self.renderer.stop_ids, *self.sampling.stop_ids),
            top_p=self.top_p,
            affinity=seed_of(self.seed, self.label, rollout.index),
        )

    async def _within(self, awaitable: Any, what: str) -> Any:
        """An environment's answer within its deadline; anything it raises becomes an EnvironmentFailure."""
        try:
            return await asyncio.wait_for(awaitable, self.deadlines.environment)
        except TimeoutError:
            raise EnvironmentFailure(f"{what} took more than {self.deadlines.environment:.0f} s (--deadlines.environment)") from None
        except UserError:
            raise  # the user can mend it, and every other rollout would fail alike: it ends the run
        except Exception as error:
            logging.getLogger(__name__).warning("environment %s failed", what, exc_info=True)
            raise EnvironmentFailure(f"{what}: {type(error).__name__}: {error}") from error

    async def _close(self, environments: Sequence[Environment]) -> None:
        for environment in environments:
            try:
                await asyncio.wait_for(environment.close(), self.deadlines.environment)
            except Exception:  # the episode is over and its rewards are in: a failing clean-up is reported, not fatal
                logging.getLogger(__name__).warning("environment close failed", exc_info=True)


class EnvironmentFailure(Exception):
    """An environment raised or did not answer: no fault of the policy's, so its rollout is excluded."""


async def sample_groups(sampler: Sampler, prompts: Sequence[tuple[int, Example]], samples: int) -> list[list[Rollout]]:
    """All groups at once, in the order of `prompts` [(index, example)]; the first error cancels the rest."""
    async with sampler.engine:
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(sampler.group(index, example, samples)) for index, example in prompts]
        except BaseExceptionGroup as errors:  # the first, with its own traceback; the others are the same or its consequence
            raise errors.exceptions[0] from None
    return [task.result() for task in running]


def rollout_metrics(groups: Sequence[Sequence[Rollout]], weights: dict[str, float]) -> Metrics:
    """What was sampled, all of it: before any group is dropped."""
    metrics = Metrics()
    for group in groups:
        for r in group:
            metrics.mean("rollout/failed", float(bool(r.failure)))
            if r.failure:
                continue
            sampled = sum(r.sampled)
            metrics.mean("reward", r.reward(weights))
            metrics.max("reward_max", r.reward(weights))
            metrics.min("reward_min", r.reward(weights))
            metrics.mean("rollout/completion_tokens", sampled)
            metrics.max("rollout/completion_tokens_max", sampled)
            metrics.min("rollout/completion_tokens_min", sampled)
            metrics.mean("rollout/environment_tokens", len(r.sampled) - sampled)
            metrics.mean("rollout/prompt_tokens", len(r.prompt_ids))
            metrics.mean("rollout/turns", r.turns)
            metrics.max("rollout/turns_max", r.turns)
            metrics.mean("rollout/truncated", float(r.truncated))
            metrics.mean("rollout/done", float(r.finish == "done"))
            metrics.mean("rollout/max_turns", float(r.finish == "max_turns"))
            for name, value in r.rewards.items():
                metrics.mean(f"reward/{name}", value)
            for name, value in r.metrics.items():
                metrics.mean(f"environment/{name}", value)
    return metrics
