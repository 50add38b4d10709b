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


@dataclass
class LossConfig:
    preset: str = ""  # settings by a method's name: grpo, dr_grpo, dapo, gspo, cispo, reinforce; flags given beside it win
    objective: str = "ppo"  # ppo, cispo, reinforce
    level: str = "token"  # of the ratio: token, or sequence (GSPO)
    clip_low: float = 0.2  # the ratio is clipped below at 1 - clip_low
    clip_high: float = 0.28  # and above at 1 + clip_high (DAPO's clip-higher)
    reduction: str = "token_mean"  # token_mean, sequence_mean, constant (Dr. GRPO), prompt_mean, sequence_sum
    baseline: Literal["mean", "leave_one_out"] = "mean"  # of the group
    divide_by_std: bool = True  # divide advantages by the group's standard deviation
    std: Literal["sample", "population"] = "sample"  # divide squared deviations by n - 1, or by n
    no_signal: Literal["drop", "keep"] = "drop"  # groups of equal rewards: absent from every term and denominator, or kept with advantage 0
    overlong_filter: bool = False  # truncated completions stay in their group's baseline and leave loss and denominators
    correction: str = "none"  # of trainer against engine: none, truncate (TIS), mask (IcePop), sequence_mask
    correction_low: float = 0.0  # lower bound of the correction's weight
    correction_high: float = 2.0  # upper bound
    kl: str = "k3"  # estimator: k1, k2, k3 (true gradient), k3_naive
    kl_coef: float = 0.0  # weight of the KL term to the starting model; 0: no reference model is built
    entropy_coef: float = 0.0  # weight of an entropy bonus
    mismatch_limit: float = 0.0  # stop when mismatch_k3 between engine and trainer exceeds this; 0: 1e-3 in float32, 0.05 in bfloat16


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
    if config.samples_per_prompt == 1:
        raise UserError("--samples-per-prompt 1: an advantage relative to its own group is always 0; give at least 2")
    if config.updates_per_batch > config.prompts_per_step:
        raise UserError(f"--updates-per-batch {config.updates_per_batch} exceeds --prompts-per-step {config.prompts_per_step}: a group is never split")
    if config.engine_config.max_num_seqs < config.samples_per_prompt:
        raise UserError("--engine.max-num-seqs must be at least --samples-per-prompt: vLLM refuses larger groups")
    if config.sampling.temperature <= 0:
        raise UserError(f"--sampling.temperature {config.sampling.temperature}: training samples need a temperature above 0 (--eval.temperature 0 is greedy)")
    if config.sampling.max_completion_tokens < 1 or config.sampling.max_prompt_tokens < 1:
        raise UserError("--sampling.max-prompt-tokens and --sampling.max-completion-tokens must be at least 1")
    settings = dataclasses.asdict(config.loss)
    try:
        loss.check_names(settings, loss.OBJECTIVES, loss.CORRECTIONS)
    except ValueError as error:
        raise UserError(str(error)) from None
    if config.loss.level == "sequence" and config.loss.reduction == "token_mean":
        raise UserError("--loss.level sequence (GSPO) is an average over sequences: add --loss.reduction sequence_mean")
    if config.loss.correction in ("mask", "sequence_mask") and config.loss.correction_low <= 0:
        raise UserError(f"--loss.correction {config.loss.correction} needs --loss.correction-low above 0")
    if config.loss.correction_low > config.loss.correction_high:
        raise UserError("--loss.correction-low exceeds --loss.correction-high")
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
    advantages: np.ndarray  # (R,)
    weights: np.ndarray  # (R,) 1, or 0 for rows that leave loss and denominators

    def groups(self) -> list[list[int]]:
        """Row numbers by group, in order."""
        found: dict[int, list[int]] = {}
        for row, rollout in enumerate(self.rollouts):
            found.setdefault(rollout.index, []).append(row)
        return list(found.values())

    def take(self, rows: Sequence[int]) -> "Rows":
        return Rows([self.rollouts[r] for r in rows], self.advantages[list(rows)], self.weights[list(rows)])


def make_rows(groups: Sequence[Sequence[Rollout]], config: LossConfig, reward_weights: dict[str, float]) -> tuple[Rows, Metrics]:
    """Rollouts with advantages. Failed rollouts are in no baseline; groups without signal are dropped or kept as configured."""
    usable = [r for group in groups for r in group if not r.failure and any(r.sampled)]
    rewards = np.array([r.reward(reward_weights) for r in usable], dtype=np.float64)
    if not np.isfinite(rewards).all():
        raise ValueError(f"a reward is not finite: {usable[int(np.flatnonzero(~np.isfinite(rewards))[0])].rewards}")
    ids = np.array([r.index for r in usable])
    advantages = loss.group_advantages(rewards, ids, config.baseline == "leave_one_out", config.divide_by_std, config.std == "population")
    signal = loss.has_signal(rewards, ids)
    metrics = Metrics()
    for group in groups:
        members = [i for i, r in enumerate(usable) if r.index == group[0].index]
        metrics.mean("groups/signal", float(any(signal[i] for i in members)))
        metrics.mean("groups/solved", float(bool(members) and all(rewards[i] == rewards[members].max() > 0 for i in members)))
    kept = [i for i in range(len(usable)) if signal[i] or config.no_signal == "keep"]
    weights = np.array([0.0 if config.overlong_filter and r.truncated else 1.0 for r in usable])
    rows = Rows(usable, advantages, weights).take(kept)
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
    if splits * config.passes > 1:  # frozen before the first update; with a single update the present policy is the old one
        with run.timer("old_logprobs"):
            for batch in (b for batches in packed for b in batches):
                (batch.logprobs_old,) = policies.score(run.policy, [batch])
    for number in range(splits * config.passes):
        part, batches = parts[number % splits], packed[number % splits]
        if part.weights.any():
            metrics.add(one_update(run, part, batches, check_mismatch=number == 0))
    return metrics


def one_update(run: Run, rows: Rows, batches: list[Batch], check_mismatch: bool) -> Metrics:
    """One optimizer step: gradients of all micro-batches added up, then one clip and one AdamW step."""
    settings, metrics = run.config.loss, Metrics()
    device = run.policy.device
    coefficients = torch.tensor(row_coefficients(rows, run.config), dtype=torch.float32, device=device)  # (R,)
    advantages = torch.tensor(rows.advantages, dtype=torch.float32, device=device)  # (R,)
    with run.timer("training"):
        for batch in batches:
            logprobs, entropy = run.policy(batch)  # (N,), (N,)
            old = logprobs.detach() if batch.logprobs_old is None else batch.logprobs_old
            own = torch.tensor(batch.rows, device=device)  # rows of this micro-batch
            value, found = loss.policy_loss(
                logprobs, old, batch.logprobs_gen, batch.logprobs_ref, entropy, advantages[own][batch.row_ids], coefficients[own], batch.row_ids,
                objective=loss.OBJECTIVES[settings.objective], level=settings.level, clip_low=settings.clip_low, clip_high=settings.clip_high,
                correction=loss.CORRECTIONS[settings.correction], correction_low=settings.correction_low, correction_high=settings.correction_high,
                kl=settings.kl, kl_coef=settings.kl_coef, entropy_coef=settings.entropy_coef,
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
    rows, found = make_rows(groups, run.config.loss, run.task.reward_weights)
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


def save_checkpoint(run: Run) -> None:
    def write(folder: Path) -> None:
        policies.export(run.policy, folder / "model", run.tokenizer, torch.float32)
        checkpoint.save_optimizer(run.optimizer, run.parameter_names, folder / "optimizer.safetensors")

    counters = {name: getattr(run, name) for name in ("step", "cursor", "updates", "empty_steps")}
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
    for name in ("step", "cursor", "updates", "empty_steps"):
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
    if preset and preset not in loss.PRESETS:
        raise UserError(f"--loss.preset {preset}: give one of {', '.join(loss.PRESETS)}")
    default = Config(loss=LossConfig(preset=preset, **loss.PRESETS.get(preset, {})))  # type: ignore[arg-type]
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
