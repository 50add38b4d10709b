"""GRPO, Group Relative Policy Optimization (arXiv 2402.03300), synchronous, from prompt to gradient.

    accelerate launch grpo.py --model Qwen/Qwen2.5-1.5B                      # gsm8k, vLLM, defaults below
    accelerate launch grpo.py --model models/SmolLM2-135M-Instruct --task arith --out out/arith
    python grpo.py --help                                                    # every setting with its sentence
    python grpo.py --dry-run --model ...                                     # check and print everything, load nothing

One step:
    (1) prompts       the next P of a fixed global order, f(seed, epoch)
    (2) rollouts      G completions of each, sampled with the present weights (rollout.py)
    (3) rewards       from the environment, by name; their weighted sum is r (task.py)
    (4) advantages    A = (r - mean of the group) / std of the group; groups of equal rewards carry no signal (loss.py)
    (5) batch         packed, each prompt once, no padding (policy.py)
    (6) update        clipped objective, denominators of the whole step, one clip, AdamW (loss.py, policy.py)
    (7) refit         the engine gets the new weights before it samples again (cluster.py)

Copy this file, change one function, run it.
"""

import asyncio
import dataclasses
import json
import math
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import tyro
from torch import Tensor

import checkpoint
import cluster
import loss
import objectives
import policy as policies
from checkpoint import CheckpointConfig
from cluster import EngineConfig, Plan
from log import Log, LogConfig, Metrics, Timer, plot_run, samples_table
from policy import Batch, OptimConfig, Policy, PolicyConfig
from rollout import (
    DeadlineConfig,
    EngineError,
    HFEngine,
    Renderer,
    Rollout,
    Sampler,
    SamplingConfig,
    VLLMEngine,
    rollout_metrics,
    sample_groups,
)
from task import Example, Task, TaskConfig, UserError, evaluation, keep, load_task, position, self_test


# what the flags of LossConfig choose from: the daily ones and the long tail (docs/objectives.md)
OBJECTIVES = loss.OBJECTIVES | objectives.OBJECTIVES
CORRECTIONS = loss.CORRECTIONS | objectives.CORRECTIONS
KL_GRADIENTS = loss.KL_GRADIENTS | objectives.KL_GRADIENTS
PRESETS = loss.PRESETS | objectives.PRESETS


@dataclass
class LossConfig:
    preset: str = ""  # settings by a method's name: grpo, dr_grpo, dapo, gspo, cispo, rloo, ... (docs/objectives.md); flags given beside it win
    objective: str = "ppo"  # ppo, cispo, reinforce; dual_clip, gmpo, sapo, vespo, dppo_tv, clip_cov, ... (docs/objectives.md)
    objective_params: dict[str, float] = field(default_factory=dict)  # settings the objective has of its own, for example: tau_negative 1.1
    level: str = "token"  # of the ratio: token, or sequence (GSPO)
    anchor: str = "old"  # the ratio is to the old policy, or to the sampler: gen (no correction then)
    clip_low: float = 0.2  # the ratio is clipped below at 1 - clip_low
    clip_high: float = 0.28  # and above at 1 + clip_high (DAPO's clip-higher)
    reduction: str = "token_mean"  # token_mean, sequence_mean, constant (Dr. GRPO), prompt_mean, sequence_sum
    reward_from: tuple[float, float] | None = None  # rewards are clamped to this interval and
    reward_to: tuple[float, float] | None = None  # mapped linearly onto this one
    overlong_buffer: int = 0  # the last so many tokens before the longest completion cost up to overlong_penalty (DAPO); 0: off
    overlong_penalty: float = 1.0  # reward lost at the longest completion
    stop_properly: float = 1.0  # share of its reward that a truncated completion keeps
    baseline: str = "mean"  # of the group: mean, leave_one_out, length_weighted (OPO); batch_mean; none; or pass_at_k
    scale: str = "std"  # advantages are divided by the group's std, leave_one_out_std or mean (MaxRL); batch_std; none
    std: Literal["sample", "population"] = "sample"  # divide squared deviations by n - 1, or by n
    gdpo: bool = False  # normalise every named reward by itself, then add them up (GDPO)
    whiten: bool = False  # whiten advantages over the tokens of the optimizer step (REINFORCE++)
    advantage_clip_low: float | None = None  # lower bound of an advantage
    advantage_clip_high: float | None = None  # upper bound
    no_signal: Literal["drop", "keep"] = "drop"  # groups of equal rewards: absent from every term and denominator, or kept with advantage 0
    overlong_filter: bool = False  # truncated completions stay in their group's baseline and leave loss and denominators
    correction: str = "none"  # of trainer against engine: none, truncate (TIS), mask (IcePop), sequence_mask, ...
    correction_low: float = 0.0  # lower bound of the correction's weight
    correction_high: float = 2.0  # upper bound
    rejection: str = "none"  # drops tokens or completions besides: veto, opsm, m2po, k3_mean, ...
    rejection_params: dict[str, float] = field(default_factory=dict)  # its own settings, for example: threshold 0.02
    sequence_error_limit: float = 0.0  # completions whose mean exp |log pi_old - log mu| is above leave the step (1.5, say); 0: off
    kl: str = "k3"  # estimator: k1, k2, k3
    kl_coef: float = 0.0  # weight of the KL term to the starting model; 0: no reference model is built
    kl_in: str = "loss"  # loss; or subtracted: reward (per completion), advantage (per token), return (the rest of the completion)
    kl_gradient: str = "true"  # in the loss: true, naive (as written: TRL, verl), score, ratio (DeepSeek-V3.2), ratio_gen
    kl_input_clamp: float = 20.0  # bound on |log pi - log ref|; inf: off
    kl_output_clamp: float = 10.0  # bound on the estimate; inf: off
    entropy_coef: float = 0.0  # weight of an entropy bonus; with entropy_target, the one it starts from
    entropy_target: float = 0.0  # adapt the coefficient: it grows while the entropy of a step is below this, and is off above; 0: fixed
    entropy_delta: float = 0.005  # by so much per optimizer step
    entropy_share: float = 1.0  # only this share of the tokens, of the highest entropy, trains the policy (.2: arXiv 2506.01939); one more forward
    likelihood_coef: float = 0.0  # weight of -log pi on completions of positive reward (VAPO)
    mismatch_limit: float = 0.0  # stop when mismatch_k3 between engine and trainer exceeds this; 0: 1e-3 in float32, 0.05 in bfloat16

    @property
    def needs_step(self) -> bool:
        """Whether something has to know the whole optimizer step before its first micro-batch."""
        return objectives.needs_step(self.objective, self.correction, self.rejection, self.entropy_share)

    def needs_old(self, updates: int) -> bool:
        """Whether the old policy has to be scored by its own forward pass, for so many optimizer steps on one batch."""
        reads_old = self.anchor == "old" or self.rejection != "none" or self.kl_gradient == "ratio"
        return updates > 1 and reads_old or self.needs_step or self.kl_in != "loss" or self.sequence_error_limit > 0


@dataclass
class EvalConfig:
    every: int = 10  # steps between evaluations on held-out examples, besides one at the start and one at the end; 0: never
    samples: int = 1  # completions per held-out example
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # nucleus of evaluation sampling


@dataclass
class Config:
    model: str = ""  # folder or hub name of a causal language model
    task: str = "gsm8k"  # arith, gsm8k, or path/to/file.py:name
    engine: Literal["auto", "vllm", "hf"] = "auto"  # vllm; hf: the policy samples itself; auto: vllm where it is installed
    out: str = ""  # folder for everything the run writes; off: out/TASK-TIME
    resume: bool = False  # go on from the newest whole checkpoint in --out
    dry_run: bool = False  # check and print the whole configuration, load no model
    seed: int = 0  # of prompt order and sampling
    steps: int = 1000  # at most this many steps
    epochs: float = 0.0  # at most this many passes over the training examples; 0: no bound
    prompts_per_step: int = 32  # P
    samples_per_prompt: int = 8  # G, completions per prompt
    updates_per_batch: int = 1  # optimizer steps a batch is split into, by whole groups; old log-probabilities are frozen once
    passes: int = 1  # times a batch is gone through
    max_empty_steps: int = 10  # steps in a row without any group that carries signal before the run stops with an error
    task_config: Annotated[TaskConfig, tyro.conf.arg(name="task")] = field(default_factory=TaskConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    engine_config: Annotated[EngineConfig, tyro.conf.arg(name="engine")] = field(default_factory=EngineConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    deadlines: DeadlineConfig = field(default_factory=DeadlineConfig)


def check(config: Config) -> None:
    """Everything that can be known to be wrong before anything is loaded. Raises UserError, naming the flags and the fix."""
    if not config.model:
        raise UserError("--model is missing: give a folder or a hub name, for example --model Qwen/Qwen2.5-1.5B")
    if config.model.startswith((".", "/")) and not Path(config.model, "config.json").exists():
        raise UserError(f"--model {config.model}: no config.json there")
    for name in ("steps", "prompts_per_step", "samples_per_prompt", "updates_per_batch", "passes", "max_empty_steps"):
        if getattr(config, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(config, name)}: must be at least 1")
    if config.updates_per_batch > config.prompts_per_step:
        raise UserError(f"--updates-per-batch {config.updates_per_batch} exceeds --prompts-per-step {config.prompts_per_step}: a group is never split")
    if config.engine_config.max_num_seqs < config.samples_per_prompt:
        raise UserError("--engine.max-num-seqs must be at least --samples-per-prompt: vLLM refuses larger groups")
    if config.sampling.temperature <= 0:
        raise UserError(f"--sampling.temperature {config.sampling.temperature}: training samples need a temperature above 0 (--eval.temperature 0 is greedy)")
    if config.sampling.max_completion_tokens < 1 or config.sampling.max_prompt_tokens < 1:
        raise UserError("--sampling.max-prompt-tokens and --sampling.max-completion-tokens must be at least 1")
    try:
        objectives.validate(vars(config.loss), config.samples_per_prompt, config.sampling.max_completion_tokens)
    except ValueError as error:
        raise UserError(str(error)) from None
    if config.out and Path(config.out).exists() and any(Path(config.out).iterdir()) and not config.resume and not config.dry_run:
        raise UserError(f"--out {config.out} is not empty: add --resume to go on with that run, or give another folder")
    if config.resume and not config.out:
        raise UserError("--resume needs --out, the folder of the run to go on with")


# ------------------------------------------------------------------------------------------------ (1) prompts


def prompt_at(index: int, examples: Sequence[Example], seed: int) -> Example:
    """The example at a position of the endless global order: each epoch is its own permutation, f(seed, epoch) alone.

    >>> sorted(prompt_at(i, ["a", "b", "c"], seed=1) for i in range(3, 6))
    ['a', 'b', 'c']
    """
    epoch, position = divmod(index, len(examples))
    return examples[np.random.default_rng((seed, epoch)).permutation(len(examples))[position]]


def total_steps(config: Config, examples: int) -> int:
    """What --steps and --epochs allow; a remainder of an epoch smaller than one step is left out."""
    by_epochs = int(config.epochs * examples) // config.prompts_per_step if config.epochs else config.steps
    return min(config.steps, by_epochs)


# ------------------------------------------------------------------------------------------------ setup


@dataclass
class Run:
    """Everything a run holds. `step` counts completed steps, `updates` optimizer steps; the engine's version is compared with `updates`."""

    config: Config
    plan: Plan
    out: Path
    task: Task
    examples: list[Example]
    renderer: Renderer
    tokenizer: Any
    policy: Policy
    reference: Policy | None
    optimizer: torch.optim.Optimizer
    engine: Any
    refit: cluster.Refit | None
    server: cluster.Server | None
    log: Log
    timer: Timer
    total: int
    step: int = 0
    cursor: int = 0  # prompts taken from the global order
    updates: int = 0
    empty_steps: int = 0
    sent: int = -1  # the version the engine holds; -1: never refitted
    entropy_coef: float = 0.0  # where the adaptive coefficient stands
    entropy_bonus: float = 0.0  # what of it applies to the next optimizer step

    @property
    def parameter_names(self) -> dict[torch.nn.Parameter, str]:
        return {p: name for name, p in self.policy.model.named_parameters()}


def setup(config: Config) -> Run:
    """Check, then start the slow things: the engine first, the policy while it boots.

    Raises:
        UserError: something the user can mend; nothing is left running.
    """
    plan = make_plan(config)
    out = Path(config.out or f"out/{Path(config.task.split(':')[0]).stem}-{time.strftime('%Y%m%d-%H%M%S')}")
    tokenizer, generation_config = load_tokenizer(config.model)
    task = load_task(config.task, config.task_config)
    renderer = Renderer(tokenizer, config.task_config.prompt_format, task.tools, generation_config, task.tool_prompt)
    if task.max_turns > 1:
        renderer.require_multi_turn()
    asyncio.run(self_test(task, config.deadlines.environment))
    limit = config.sampling.max_prompt_tokens
    task = keep(task, lambda e: len(renderer.prompt(e.messages)) <= limit, "longer than --sampling.max-prompt-tokens")
    examples = list(task.train)
    if len(examples) < config.prompts_per_step:
        raise UserError(
            f"{len(examples)} training prompts (--sampling.max-prompt-tokens is {limit}; dropped: {task.dropped or 'none'})"
            f" are fewer than --prompts-per-step {config.prompts_per_step}"
        )
    if config.eval.every and not task.eval:
        raise UserError(f"--task {config.task} has no held-out examples: give --task.eval-data, or --eval.every 0")
    total = total_steps(config, len(examples))
    if total < 1:
        raise UserError(f"--epochs {config.epochs} of {len(examples)} prompts is less than one step of --prompts-per-step {config.prompts_per_step}")
    resumed = find_checkpoint(config, out)
    log = Log(out, config.log, keep_until=json.loads((resumed / "state.json").read_text())["step"] if resumed else None)
    (out / "config.json").write_text(json.dumps(dataclasses.asdict(config), indent=1))
    log.print(f"{config.task}: {len(examples)} training prompts, {len(task.eval)} held out, {renderer.format} prompts; {plan.table()}")
    for reason, count in task.dropped.items():
        log.print(f"dropped {count}: {reason}")
    log.print(f"{total} steps of {config.prompts_per_step} x {config.samples_per_prompt} samples; writing to {out}")

    device = torch.device("cuda", torch.cuda.current_device()) if plan.device == "cuda" else torch.device("cpu")
    dtype = policies.compute_dtype(config.policy, device)
    wire = dtype if config.engine_config.dtype == "auto" else getattr(torch, config.engine_config.dtype)
    server = None
    try:
        source = str(resumed / "model") if resumed else config.model
        if plan.engine == "vllm":
            length = config.sampling.max_prompt_tokens + config.sampling.max_completion_tokens
            server, key = cluster.start_vllm(config.model, plan, config.engine_config, str(wire).removeprefix("torch."), length, out / "engine.log")
        policy = policies.load_policy(source, config.policy, config.sampling.temperature, device)
        reference = None
        if config.loss.kl_coef:  # always the model the run began with, also on resume
            reference = policies.load_policy(config.model, config.policy, config.sampling.temperature, device).requires_grad_(False)
        optimizer = policies.make_optimizer(policy, config.optim)
        refit, engine = None, None
        if server is not None:
            log.print(f"policy loaded; waiting for vLLM (log: {out / 'engine.log'})")
            server.wait_until_healthy(config.deadlines.engine_start)
            engine = VLLMEngine(server.url, key, config.deadlines.request, server.check_alive)
            refit = cluster.Refit(server.url, policy, wire, plan.backend, config.deadlines)
        else:
            engine = HFEngine(policy.model, tokenizer, policy.set_sampling, config.engine_config.hf_batch)
        run = Run(config, plan, out, task, examples, renderer, tokenizer, policy, reference, optimizer, engine, refit, server, log, Timer(), total)
        run.entropy_coef = run.entropy_bonus = config.loss.entropy_coef
        if resumed:
            restore(run, resumed)
        return run
    except BaseException:
        if server is not None:
            server.stop()
        raise


def make_plan(config: Config) -> Plan:
    from accelerate import PartialState

    return cluster.make_plan(config.engine, torch.cuda.device_count(), PartialState().num_processes, cluster.vllm_installed())


def load_tokenizer(model: str) -> tuple[Any, Any]:
    """The tokenizer and the generation config (None where the model has none)."""
    from transformers import AutoTokenizer, GenerationConfig

    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise UserError(f"--model {model}: cannot load its tokenizer: {str(error).splitlines()[0]}") from error
    try:
        return tokenizer, GenerationConfig.from_pretrained(model)
    except OSError:  # optional in a model folder
        return tokenizer, None


# ------------------------------------------------------------------------------------------------ (2), (3) rollouts and rewards


def refit_if_stale(run: Run) -> None:
    """Give the engine the present weights, unless it has them. Called before sampling only, so a last update is not sent for nothing."""
    if run.sent != run.updates:
        with run.timer("refit"):
            if run.refit is not None:
                run.refit(run.updates)
            run.engine.version = run.sent = run.updates


def sample(run: Run) -> list[list[Rollout]]:
    """The next P groups of the global order."""
    config = run.config
    sampler = Sampler(run.engine, run.renderer, run.task, config.sampling, config.deadlines, config.seed)
    prompts = [(i, run.task.train[position(run.task, config.seed, i)]) for i in range(run.cursor, run.cursor + config.prompts_per_step)]
    with run.timer("generation"):
        groups = asyncio.run(sample_groups(sampler, prompts, config.samples_per_prompt))
    run.cursor += config.prompts_per_step
    return groups


# ------------------------------------------------------------------------------------------------ (4) advantages


@dataclass
class Rows:
    """What a step trains on: rollouts with their advantages and weights; members of a group stand together."""

    rollouts: list[Rollout]
    rewards: np.ndarray  # (R,) after scaling and shaping
    advantages: np.ndarray  # (R,)
    weights: np.ndarray  # (R,) 1, or 0 for rows that leave loss and denominators

    def groups(self) -> list[list[int]]:
        """Row numbers by group, in order."""
        found: dict[int, list[int]] = {}
        for row, rollout in enumerate(self.rollouts):
            found.setdefault(rollout.index, []).append(row)
        return list(found.values())

    def take(self, rows: Sequence[int]) -> "Rows":
        return Rows([self.rollouts[r] for r in rows], self.rewards[list(rows)], self.advantages[list(rows)], self.weights[list(rows)])


def shape(rewards: np.ndarray, rollouts: Sequence[Rollout], config: LossConfig, longest: int) -> np.ndarray:
    """(R,) rewards scaled, then shaped by length."""
    if config.reward_from is not None and config.reward_to is not None:
        rewards, _ = objectives.scale_rewards(rewards, config.reward_from, config.reward_to)
    rewards = objectives.stop_properly(rewards, np.array([r.truncated for r in rollouts], dtype=bool), config.stop_properly)
    if config.overlong_buffer:
        lengths = np.array([sum(r.sampled) for r in rollouts])
        rewards = rewards + objectives.soft_overlong_penalty(lengths, longest, config.overlong_buffer, config.overlong_penalty)
    return rewards


def advantages_of(rollouts: Sequence[Rollout], rewards: np.ndarray, config: LossConfig, reward_weights: dict[str, float]) -> np.ndarray:
    """(R,) of whole groups."""
    ids = np.array([r.index for r in rollouts])
    lengths = np.array([sum(r.sampled) for r in rollouts])
    settings: dict[str, Any] = dict(baseline=config.baseline, scale=config.scale, population=config.std == "population", row_tokens=lengths)
    if config.gdpo:
        components = {name: np.array([r.rewards.get(name, 0.0) for r in rollouts]) for name in {n for r in rollouts for n in r.rewards}}
        advantages = objectives.gdpo(components, ids, {name: reward_weights.get(name, 1.0) for name in components}, **settings)
    else:
        advantages = objectives.advantages(rewards, ids, **settings)
    low, high = config.advantage_clip_low, config.advantage_clip_high
    return advantages.clip(-math.inf if low is None else low, math.inf if high is None else high)


def make_rows(
    groups: Sequence[Sequence[Rollout]], config: LossConfig, reward_weights: dict[str, float], longest: int = 0
) -> tuple[Rows, Metrics]:
    """Rollouts with advantages. Failed rollouts are in no baseline; groups without signal are dropped or kept as configured.

    Signal is a matter of the rewards as the environment gave them: shaping (longest: of a completion, in tokens) changes advantages only.
    """
    usable = [r for group in groups for r in group if not r.failure and any(r.sampled)]
    rewards = np.array([r.reward(reward_weights) for r in usable], dtype=np.float64)
    if not np.isfinite(rewards).all():
        raise ValueError(f"a reward is not finite: {usable[int(np.flatnonzero(~np.isfinite(rewards))[0])].rewards}")
    signal = loss.has_signal(rewards, np.array([r.index for r in usable]))
    shaped = shape(rewards, usable, config, longest)
    advantages = advantages_of(usable, shaped, config, reward_weights) if usable else np.zeros(0)
    metrics = Metrics()
    for group in groups:
        members = [i for i, r in enumerate(usable) if r.index == group[0].index]
        metrics.mean("groups/signal", float(any(signal[i] for i in members)))
        metrics.mean("groups/solved", float(bool(members) and all(rewards[i] == rewards[members].max() > 0 for i in members)))
    kept = [i for i in range(len(usable)) if signal[i] or config.no_signal == "keep"]
    weights = np.array([0.0 if config.overlong_filter and r.truncated else 1.0 for r in usable])
    rows = Rows(usable, shaped, advantages, weights).take(kept)
    if len(kept):
        metrics.mean("advantage_abs", float(np.abs(rows.advantages).sum()), len(kept))
        metrics.max("advantage_max", float(rows.advantages.max()))
        metrics.min("advantage_min", float(rows.advantages.min()))
    return rows, metrics


# ------------------------------------------------------------------------------------------------ (5), (6) batch and update


def update(run: Run, rows: Rows) -> Metrics:
    """`updates_per_batch` x `passes` optimizer steps on the rows of a batch."""
    config, metrics = run.config, Metrics()
    groups = rows.groups()
    splits = min(config.updates_per_batch, len(groups))
    bounds = [len(groups) * s // splits for s in range(splits + 1)]
    parts = [rows.take([r for g in groups[a:b] for r in g]) for a, b in zip(bounds, bounds[1:])]
    packed = [[b.to(run.policy.device) for b in policies.pack(part.rollouts, config.policy.micro_batch_tokens)] for part in parts]
    if config.loss.kl_coef:
        assert run.reference is not None
        with run.timer("reference"):
            for batch in (b for batches in packed for b in batches):
                (batch.logprobs_ref,) = policies.score(run.reference, [batch])
    if config.loss.needs_old(splits * config.passes):  # frozen before the first update; with a single one the present policy is the old one
        with run.timer("old_logprobs"):
            for batch in (b for batches in packed for b in batches):
                (batch.logprobs_old,) = policies.score(run.policy, [batch])
    for part, batches in zip(parts, packed):
        metrics.add(after_scoring(run, part, batches))
    for number in range(splits * config.passes):
        part, batches = parts[number % splits], packed[number % splits]
        if part.weights.any():
            metrics.add(one_update(run, part, batches, check_mismatch=number == 0))
    return metrics


def after_scoring(run: Run, rows: Rows, batches: list[Batch]) -> Metrics:
    """What advantages and weights owe to log-probabilities: KL in the reward, and completions that engine and trainer score too differently."""
    settings, metrics = run.config.loss, Metrics()
    if settings.kl_in == "reward":
        for batch in batches:
            kl = objectives.kl_in_reward(batch.logprobs_old, batch.logprobs_ref, batch.row_ids, len(batch.rows), settings.kl)
            rows.rewards[batch.rows] -= settings.kl_coef * kl.double().cpu().numpy()
            metrics.mean("kl_reward", float(kl.sum()), len(kl))
        rows.advantages = advantages_of(rows.rollouts, rows.rewards, settings, run.task.reward_weights)
    if settings.sequence_error_limit:
        error = np.zeros(len(rows.rollouts))
        for batch in batches:
            error[batch.rows] = objectives.sequence_error(batch.logprobs_old, batch.logprobs_gen, batch.row_ids, len(batch.rows)).cpu().numpy()
        keep, found = objectives.drop_by_sequence_error(error, rows.weights != 0, rows.rewards, settings.sequence_error_limit)
        rows.weights = np.where(keep, rows.weights, 0.0)
        metrics.add(found)
    return metrics


def prepare(run: Run, rows: Rows, batches: list[Batch], weights: Tensor) -> list[tuple[Tensor, loss.StepValues]]:
    """For each micro-batch the advantages of its tokens (N,), and what a setting must know about the whole optimizer step."""
    settings, device = run.config.loss, run.policy.device
    row_ids = [torch.tensor(batch.rows, device=device)[batch.row_ids] for batch in batches]  # (N,) rows of the step
    of_rows = torch.tensor(rows.advantages, dtype=torch.float32, device=device)  # (R,)
    advantages = [of_rows[ids] for ids in row_ids]
    if settings.kl_in in ("advantage", "return"):
        for batch, values in zip(batches, advantages):
            kl = objectives.kl_in_reward(batch.logprobs_old, batch.logprobs_ref, batch.row_ids, len(batch.rows), settings.kl, settings.kl_in)
            values -= settings.kl_coef * kl
    sizes, ids = [len(values) for values in advantages], torch.cat(row_ids)
    trained = weights[ids] != 0
    if settings.whiten:
        advantages = list(objectives.whiten(torch.cat(advantages), trained).split(sizes))
    if not settings.needs_step:
        return [(values, loss.StepValues()) for values in advantages]
    now = [(batch.logprobs_old, None) for batch in batches]
    if settings.entropy_share < 1 or ("objective", settings.objective) in objectives.PREPARATIONS:  # these ask the policy as it is now
        with torch.no_grad():
            now = [run.policy(batch) for batch in batches]
    logprobs, old, gen = (torch.cat(values) for values in ([n[0] for n in now], [b.logprobs_old for b in batches], [b.logprobs_gen for b in batches]))
    entropy = None if now[0][1] is None else torch.cat([n[1] for n in now])
    tokens = loss.Tokens(logprobs, old, gen, torch.cat(advantages), ids, len(weights), trained, entropy)
    keys = torch.tensor([r.index * run.config.samples_per_prompt + r.sample for r in rows.rollouts], device=device)
    positions = torch.cat([batch.position_ids[batch.source] for batch in batches])
    step = objectives.prepare(
        tokens, objective=settings.objective, objective_params=settings.objective_params, clip_low=settings.clip_low, clip_high=settings.clip_high,
        correction=settings.correction, correction_low=settings.correction_low, correction_high=settings.correction_high,
        rejection=settings.rejection, rejection_params=settings.rejection_params, entropy_share=settings.entropy_share,
        uniform=objectives.keyed_uniform(run.config.seed, run.updates, keys[ids], positions),
    )  # fmt: skip
    ends = np.cumsum(sizes)
    return [(values, step[end - size : end]) for values, size, end in zip(advantages, sizes, ends)]


def one_update(run: Run, rows: Rows, batches: list[Batch], check_mismatch: bool) -> Metrics:
    """One optimizer step: gradients of all micro-batches added up, then one clip and one AdamW step."""
    settings, metrics = run.config.loss, Metrics()
    device = run.policy.device
    coefficients = torch.tensor(row_coefficients(rows, run.config), dtype=torch.float32, device=device)  # (R,)
    likelihood = torch.tensor(likelihood_coefficients(rows, settings.likelihood_coef), dtype=torch.float32, device=device)  # (R,)
    objective = objectives.bind(OBJECTIVES[settings.objective], settings.objective_params)
    rejection = objectives.bind(objectives.REJECTIONS[settings.rejection], settings.rejection_params)
    correction = objectives.combine(CORRECTIONS[settings.correction], rejection)
    with run.timer("training"):
        for batch, (advantages, step) in zip(batches, prepare(run, rows, batches, coefficients)):
            logprobs, entropy = run.policy(batch)  # (N,), (N,)
            old = logprobs.detach() if batch.logprobs_old is None else batch.logprobs_old
            own = torch.tensor(batch.rows, device=device)  # rows of this micro-batch
            value, found = loss.policy_loss(
                logprobs, old, batch.logprobs_gen, batch.logprobs_ref, entropy, advantages, coefficients[own], batch.row_ids,
                objective=objective, level=settings.level, clip_low=settings.clip_low, clip_high=settings.clip_high, anchor=settings.anchor,
                correction=correction, correction_low=settings.correction_low, correction_high=settings.correction_high,
                kl=settings.kl, kl_coef=settings.kl_coef if settings.kl_in == "loss" else 0.0, kl_gradient=KL_GRADIENTS[settings.kl_gradient],
                kl_input_clamp=settings.kl_input_clamp, kl_output_clamp=settings.kl_output_clamp, entropy_coef=run.entropy_bonus,
                likelihood=likelihood[own] if settings.likelihood_coef else None, step=step,
            )  # fmt: skip
            if not torch.isfinite(value):
                raise FloatingPointError(f"the loss of a micro-batch is {value.item()}: no optimizer step was taken; the last checkpoint stands")
            value.backward()
            metrics.add(found)
            if check_mismatch:
                metrics.add(loss.mismatch(old, batch.logprobs_gen, batch.versions == run.updates))
        if check_mismatch:
            stop_on_mismatch(run, metrics.result()["mismatch_k3"])
        lr = policies.learning_rate(run.updates, run.total * run.config.updates_per_batch * run.config.passes, run.config.optim)
        norm = policies.optimizer_step(run.policy, run.optimizer, lr, run.config.optim.clip_norm)
    run.updates += 1
    metrics.mean("entropy_coef", run.entropy_bonus)
    if settings.entropy_target:
        entropy = metrics.result()["entropy"]
        run.entropy_coef, run.entropy_bonus = objectives.adaptive_entropy_coef(
            run.entropy_coef, entropy, settings.entropy_target, settings.entropy_delta
        )
    metrics.mean("grad_norm", norm)
    metrics.mean("lr", lr)
    metrics.sum("updates", 1)
    metrics.sum("trained_tokens", sum(sum(r.sampled) for r, w in zip(rows.rollouts, rows.weights) if w))
    metrics.sum("packed_tokens", sum(len(b.input_ids) for b in batches))
    return metrics


def row_coefficients(rows: Rows, config: Config) -> np.ndarray:
    """(R,) what each token of a row weighs in the loss: the reduction over the whole optimizer step, times the row's weight."""
    tokens = np.array([sum(r.sampled) for r in rows.rollouts], dtype=np.float64) * (rows.weights != 0)
    of_group = np.zeros_like(tokens)
    for members in rows.groups():
        of_group[members] = tokens[members].sum()
    prompts = sum(of_group[members[0]] > 0 for members in rows.groups())
    counts = loss.Counts(float(tokens.sum()), float((tokens > 0).sum()), float(prompts), config.sampling.max_completion_tokens)
    reduced = loss.REDUCTIONS[config.loss.reduction](torch.from_numpy(tokens), torch.from_numpy(of_group), counts)
    return reduced.numpy() * rows.weights


def likelihood_coefficients(rows: Rows, coef: float) -> np.ndarray:
    """(R,) coef / tokens of all completions of positive reward, on exactly those."""
    positive = (rows.rewards > 0) & (rows.weights != 0)
    tokens = sum(sum(r.sampled) for r, p in zip(rows.rollouts, positive) if p)
    return coef * positive / max(1, tokens)


def stop_on_mismatch(run: Run, k3: float) -> None:
    """The canary: engine and trainer score the same tokens with the same weights, so anything but rounding is a bug."""
    limit = run.config.loss.mismatch_limit or (1e-3 if run.policy.compute_dtype == torch.float32 else 0.05)
    if k3 > limit:
        raise EngineError(
            f"engine and trainer disagree: mismatch_k3 {k3:.2e} exceeds {limit:.0e} (--loss.mismatch-limit). The engine holds other weights,"
            " continues from an old cache, or samples another distribution (temperature, filters) than the trainer scores"
        )


def train_step(run: Run) -> tuple[Metrics, list[list[Rollout]]]:
    """Steps (1) to (7) of the box above."""
    refit_if_stale(run)
    groups = sample(run)
    failures = [r.failure for group in groups for r in group]
    if all("VerifierError" in failure for failure in failures):
        raise UserError(f"all {len(failures)} verifications of step {run.step + 1} failed, so there is no reward to train on; the first: {failures[0][:500]}")
    metrics = rollout_metrics(groups, run.task.reward_weights)
    rows, found = make_rows(groups, run.config.loss, run.task.reward_weights, run.config.sampling.max_completion_tokens)
    metrics.add(found)
    if rows.weights.any():
        run.empty_steps = 0
        metrics.add(update(run, rows))
    else:
        run.empty_steps += 1
        if run.empty_steps >= run.config.max_empty_steps:
            failures = sorted({r.failure for group in groups for r in group if r.failure})
            raise UserError(
                f"{run.empty_steps} steps in a row had no group with signal (--max-empty-steps): all rewards of each group were equal"
                + (f"; failures: {'; '.join(failures)[:500]}" if failures else "; the task may be too hard or too easy for this model")
            )
    metrics.sum("empty_steps", float(not rows.weights.any()))
    run.step += 1
    return metrics, groups


# ------------------------------------------------------------------------------------------------ evaluation


def evaluate(run: Run) -> dict[str, float]:
    """Mean reward over held-out examples, `eval.samples` each. The same random numbers every time; training is not touched."""
    config = run.config
    sampling = dataclasses.replace(config.sampling, temperature=config.eval.temperature)
    sampler = Sampler(run.engine, run.renderer, run.task, sampling, config.deadlines, config.seed, "eval", config.eval.top_p)
    refit_if_stale(run)
    with run.timer("evaluation"):
        groups = asyncio.run(sample_groups(sampler, list(enumerate(run.task.eval)), config.eval.samples))
    good = [[r for r in group if not r.failure] for group in groups]
    rewards = [[r.reward(run.task.reward_weights) for r in group] for group in good if group]
    if not rewards:
        raise EngineError(f"no held-out example could be evaluated; the first failure: {groups[0][0].failure}")
    by_task = evaluation(
        [e.task or run.task.name for e in run.task.eval],
        [[r.reward(run.task.reward_weights) for r in group] for group in good],
        [[r.answer for r in group] for group in good],
        ks=(config.eval.samples,),
    )
    flat = [r for group in rewards for r in group]
    rollouts = [r for group in good for r in group]
    write_samples(run, rollouts)
    return {
        "eval/accuracy": sum(flat) / len(flat),
        **{f"eval/{name}" if row == "all" else f"eval/{row}/{name}": value for row, scores in by_task.items() for name, value in scores.items()},
        "eval/samples": float(len(flat)),
        "eval/failed": float(sum(bool(r.failure) for group in groups for r in group)),
        "eval/completion_tokens": sum(sum(r.sampled) for r in rollouts) / len(rollouts),
        "eval/truncated": sum(r.truncated for r in rollouts) / len(rollouts),
    }


def write_samples(run: Run, rollouts: Sequence[Rollout]) -> None:
    """Append a table of some completions to samples.md: from the best, the worst, and between."""
    ranked = sorted(rollouts, key=lambda r: -r.reward(run.task.reward_weights))
    count = min(run.config.log.samples, len(ranked))
    picked = [ranked[i * (len(ranked) - 1) // max(1, count - 1)] for i in range(count)]
    with (run.out / "samples.md").open("a") as file:
        file.write(f"## after step {run.step}\n\n{samples_table([describe(run, r) for r in picked])}\n")


def describe(run: Run, rollout: Rollout) -> dict[str, Any]:
    last = next((m["content"] for m in reversed(rollout.messages) if m["role"] != "assistant"), "")
    text = run.tokenizer.decode(rollout.completion_ids)
    return {"prompt": last, "completion": text, "reward": rollout.reward(run.task.reward_weights), "finish": rollout.finish or "failed"}


# ------------------------------------------------------------------------------------------------ checkpoints


COUNTERS = ("step", "cursor", "updates", "empty_steps", "entropy_coef", "entropy_bonus")  # the state of a run besides weights and optimizer


def save_checkpoint(run: Run) -> None:
    def write(folder: Path) -> None:
        policies.export(run.policy, folder / "model", run.tokenizer, torch.float32)
        checkpoint.save_optimizer(run.optimizer, run.parameter_names, folder / "optimizer.safetensors")

    counters = {name: getattr(run, name) for name in COUNTERS}
    versions = {name: sys.modules[name].__version__ for name in ("torch", "transformers", "numpy")}
    state = {**counters, "random": checkpoint.random_state(), "config": dataclasses.asdict(run.config), "versions": versions}
    with run.timer("checkpoint"):
        checkpoint.save(run.out / "checkpoints", run.step, write, state, run.config.checkpoint.keep)


def find_checkpoint(config: Config, out: Path) -> Path | None:
    """The checkpoint to resume from. Raises UserError where there is none, or where the run would not be the same run."""
    if not config.resume:
        return None
    found = checkpoint.latest(out / "checkpoints")
    if found is None:
        raise UserError(f"--resume: no whole checkpoint in {out / 'checkpoints'}; start without --resume in another --out")
    stored = json.loads((found / "state.json").read_text())["config"]
    now = json.loads(json.dumps(dataclasses.asdict(config)))
    for name in ("model", "task", "seed", "task_config", "prompts_per_step", "samples_per_prompt"):
        if stored[name] != now[name]:
            raise UserError(f"--resume: {name} was {stored[name]!r} and is {now[name]!r}: the run could not go on as it began")
    return found


def restore(run: Run, folder: Path) -> None:
    """Counters, optimizer and random state; the weights were loaded with the policy."""
    state = json.loads((folder / "state.json").read_text())
    for name in COUNTERS:
        setattr(run, name, state[name])
    checkpoint.load_optimizer(run.optimizer, run.parameter_names, folder / "optimizer.safetensors")
    checkpoint.restore_random_state(state["random"])
    run.log.print(f"resumed after step {run.step} from {folder}")


# ------------------------------------------------------------------------------------------------ main


def train(run: Run) -> dict[str, float]:
    """The loop. Returns the last evaluation's accuracy and the first's, nan where there was none."""
    config, begun = run.config, time.time()
    trackers = start_trackers(run)
    before = after = math.nan
    if config.eval.every and run.step == 0:
        numbers = evaluate(run)
        before = after = numbers["eval/accuracy"]
        run.log.step(0, {**numbers, **run.timer.take()})
        run.log.print(f"before training: held-out accuracy {before:.3f}")
    while run.step < run.total:
        start = time.perf_counter()
        metrics, groups = train_step(run)
        numbers = metrics.result()
        numbers |= loss.derived_metrics(numbers)
        last = run.step == run.total
        if config.eval.every and (last or run.step % config.eval.every == 0):
            numbers |= evaluate(run)
            after = numbers["eval/accuracy"]
        numbers |= {**run.timer.take(), "time/step": time.perf_counter() - start, "epoch": run.cursor / len(run.examples)}
        run.log.step(run.step, numbers)
        run.log.rollouts(run.step, [describe(run, r) | {"index": r.index, "sample": r.sample} for group in groups for r in group])
        trackers.log(numbers, step=run.step)
        run.log.print(step_line(run, numbers))
        if last or (config.checkpoint.every and run.step % config.checkpoint.every == 0):
            save_checkpoint(run)  # after the step's metrics are written: a resumed run finds all of them
    trackers.end_training()
    return {"accuracy_before": before, "accuracy_after": after, "minutes": (time.time() - begun) / 60}


def start_trackers(run: Run) -> Any:
    """Accelerate's trackers; with none configured, its calls do nothing."""
    from accelerate import Accelerator

    trackers = Accelerator(log_with=list(run.config.log.trackers) or None, project_dir=run.out, cpu=run.plan.device == "cpu")
    flat = {k: v if isinstance(v, (int, float, str, bool)) else str(v) for k, v in dataclasses.asdict(run.config).items()}
    trackers.init_trackers(run.config.log.project, config=flat)
    return trackers


def step_line(run: Run, numbers: dict[str, float]) -> str:
    get = numbers.get
    line = f"step {run.step:4d}/{run.total}  reward {get('reward', math.nan):.3f}  signal {get('groups/signal', 0):.2f}"
    line += f"  tokens {get('rollout/completion_tokens', 0):.1f}  loss {get('loss', math.nan):+.4f}  grad {get('grad_norm', math.nan):.2f}"
    line += f"  k3 {get('mismatch_k3', math.nan):.1e}  | generation {get('time/generation', 0):.1f}s"
    line += f"  training {get('time/training', 0):.1f}s  refit {get('time/refit', 0):.1f}s"
    return line + (f"  | held-out accuracy {numbers['eval/accuracy']:.3f}" if "eval/accuracy" in numbers else "")


def parse(arguments: Sequence[str]) -> Config:
    """The command line. A preset becomes the default of the loss settings, so that flags beside it win."""
    preset = next((b for a, b in zip(arguments, arguments[1:]) if a == "--loss.preset"), "")
    if preset and preset not in PRESETS:
        raise UserError(f"--loss.preset {preset}: give one of {', '.join(PRESETS)}")
    default = Config(loss=LossConfig(preset=preset, **PRESETS.get(preset, {})))  # type: ignore[arg-type]
    return tyro.cli(Config, args=list(arguments), default=default, description=__doc__)


def main(arguments: Sequence[str]) -> None:
    config = parse(arguments)
    check(config)
    if config.dry_run:
        asyncio.run(self_test(load_task(config.task, config.task_config)))
        print(json.dumps(dataclasses.asdict(config), indent=1))
        print(make_plan(config).table())
        return
    cluster.stop_on_signals()
    cluster.set_threads(config.policy.threads)
    run = setup(config)
    try:
        result = train(run)
    finally:
        if run.server is not None:
            run.server.stop()
    plot = plot_run(run.out)
    run.log.print(f"wrote {run.out}/: metrics.jsonl, samples.md, {plot.name if plot else 'no plot'}, checkpoints/step_{run.step}/model")
    run.log.print(json.dumps({k: None if math.isnan(v) else round(v, 4) for k, v in result.items()}))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (UserError, EngineError) as error:
        sys.exit(f"error: {error}")
