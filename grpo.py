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

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: waiting threads that spin slow the engine's down tenfold

import asyncio
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import checkpoint
import cluster
import loss
import objectives
import policy as policies
import sharding
from cluster import Plan
from config import CORRECTIONS, KL_GRADIENTS, OBJECTIVES, Config, LossConfig, check, parse
from log import Log, Metrics, Timer, plot_run, start_trackers, step_line, write_samples
from policy import Batch, Policy
from ranks import Ranks, guarded, report, start_ranks
from rollout import EngineError, HFEngine, Renderer, Rollout, Sampler, rollout_metrics, sample_groups
from shaping import Rows, advantages_of, after_scoring, likelihood_coefficients, prepare, shape
from task import Example, Task, UserError, evaluation, keep, load_task, next_position, position, self_test

# ------------------------------------------------------------------------------------------------ (1) prompts


def take_prompts(run: "Run", count: int) -> list[tuple[int, Example]]:
    """The next `count` (index, example) of the endless global order: each epoch is a permutation, f(seed, epoch) alone (task.position).
    A prompt that is retired is passed over."""
    prompts = []
    for _ in range(count):
        found, run.cursor = next_position(run.task, run.config.seed, run.cursor, frozenset(run.retired))
        prompts.append((run.cursor - 1, run.task.train[found]))
    return prompts


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
    refit: cluster.Refit | sharding.WholeCopy | None
    server: cluster.Engines | None  # None where the policy samples itself
    log: Log
    timer: Timer
    total: int
    ranks: Ranks = field(default_factory=Ranks)
    step: int = 0
    cursor: int = 0  # prompts taken from the global order
    ahead: list[int] = field(default_factory=list)  # taken beyond the cursor already: only of schedules that train out of order
    updates: int = 0
    empty_steps: int = 0
    retired: list[int] = field(default_factory=list)  # positions of training examples that left the order
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
    ranks = start_ranks(config.deadlines.collective)
    plan = make_plan(config, ranks.size)
    out = ranks.gather(Path(config.out or f"out/{Path(config.task.split(':')[0]).stem}-{time.strftime('%Y%m%d-%H%M%S')}"))[0]
    tokenizer, generation_config = load_tokenizer(config.model)
    task = load_task(config.task, config.task_settings)
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
    ranks.barrier("setup")  # every rank has checked --out before the first one writes there
    resumed = checkpoint.find(config, out)
    log = Log(out, config.log, ranks.is_main, keep_until=checkpoint.resumed_step(resumed) if config.resume else None)
    if ranks.is_main:
        (out / "config.json").write_text(json.dumps(dataclasses.asdict(config), indent=1))
    log.print(f"{config.task}: {len(examples)} training prompts, {len(task.eval)} held out, {renderer.format} prompts")
    log.print(plan.table())
    for reason, count in task.dropped.items():
        log.print(f"dropped {count}: {reason}")
    log.print(f"{total} steps of {config.prompts_per_step} x {config.samples_per_prompt} samples; writing to {out}")

    dtype = policies.compute_dtype(config.policy, ranks.device)
    wire = dtype if config.engine_config.dtype == "auto" else getattr(torch, config.engine_config.dtype)
    server = None
    try:
        source = checkpoint.weights_of(resumed) if resumed else config.model
        if plan.engine == "vllm":  # before anything is put on a device
            length = config.sampling.max_prompt_tokens + config.sampling.max_completion_tokens
            name = str(wire).removeprefix("torch.")
            server = cluster.start_engines(config.model, plan, config.engine_config, name, length, out, config.deadlines, ranks)
        policy = policies.load_policy(source, config.policy, config.sampling.temperature, ranks.device, ranks)
        reference = None
        if config.loss.kl_coef:  # always the model the run began with, also on resume
            reference = policies.load_policy(config.model, config.policy, config.sampling.temperature, ranks.device, ranks).requires_grad_(False)
        optimizer = policies.make_optimizer(policy, config.optim)
        refit, engine = None, None
        if server is not None:
            log.print(f"policy loaded; waiting for vLLM (log: {out}/engine*.log)")
            server.wait_until_healthy()
            ranks.barrier("engine start", config.deadlines.engine_start)
            engine, refit = server.sampler(), server.refit(policy, optimizer, wire, config.cluster, config.model, reference)
        elif policy.sharded:
            log.print("--engine hf on a sharded policy: each rank samples from a whole float32 copy, gathered once per update; for small models")
            refit = sharding.WholeCopy(policy, ranks.device)
            engine = HFEngine(refit.model, tokenizer, lambda sampling: None, config.engine_config.hf_batch)
        else:
            engine = HFEngine(policy.model, tokenizer, policy.set_sampling, config.engine_config.hf_batch)
        run = Run(config, plan, out, task, examples, renderer, tokenizer, policy, reference, optimizer, engine, refit, server, log, Timer(), total, ranks)
        run.entropy_coef = run.entropy_bonus = config.loss.entropy_coef
        if resumed:
            checkpoint.restore(run, resumed)
        return run
    except BaseException as error:
        report(error)
        if server is not None:
            server.stop()
        raise


def make_plan(config: Config, processes: int) -> Plan:
    there = (torch.cuda.device_count(), processes, cluster.vllm_installed())
    return cluster.make_plan(config.engine, *there, config.cluster, config.engine_config, os.environ)


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
    if run.sent != run.updates or (run.refit is not None and run.refit.asleep):  # a sleeping engine has dropped its weights
        with run.timer("refit"):
            if run.refit is not None:
                run.ranks.current = "refit"
                run.refit(run.updates)
                run.ranks.barrier("refit", run.config.deadlines.refit)  # nobody asks an engine that is being filled
            run.engine.version = run.sent = run.updates


def sample(run: Run) -> list[list[Rollout]]:
    """P groups of the next prompts; with --refill, as many more as lack signal, until none does or the rounds are used up."""
    config, groups, missing = run.config, [], run.config.prompts_per_step
    sampler = Sampler(run.engine, run.renderer, run.task, config.sampling, config.deadlines, config.seed)
    with run.timer("generation"):
        for _ in range(1 + config.refill):
            groups += generate(run, sampler, take_prompts(run, missing), config.samples_per_prompt)
            missing = config.prompts_per_step - sum(carries_signal(group, run.task.reward_weights) for group in groups)
            if missing == 0:
                break
    retire(run, groups)
    return groups


def generate(run: Run, sampler: Sampler, prompts: Sequence[tuple[int, Example]], samples: int) -> list[list[Rollout]]:
    """The groups of these prompts. Each rank samples its share, then all ranks know all groups."""
    own = prompts[run.ranks.rank :: run.ranks.size]
    return run.ranks.exchange(asyncio.run(sample_groups(sampler, own, samples)))


def retire(run: Run, groups: Sequence[Sequence[Rollout]]) -> None:
    """Solved prompts leave the order."""
    for group in groups:
        if not any(r.failure for r in group) and np.mean([r.reward(run.task.reward_weights) for r in group]) >= run.config.retire_at:
            run.retired.append(position(run.task, run.config.seed, group[0].index))


def carries_signal(group: Sequence[Rollout], weights: dict[str, float]) -> bool:
    """Whether the rewards of a group's usable rollouts differ at all."""
    rewards = [r.reward(weights) for r in group if not r.failure and any(r.sampled)]
    return bool(rewards) and max(rewards) > min(rewards)


# ------------------------------------------------------------------------------------------------ (4) advantages


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
    packed, hidden = [], run.policy.model.config.get_text_config().hidden_size
    for part in parts:
        batches, imbalance = policies.pack_share(part.rollouts, config.policy.micro_batch_tokens, run.ranks, hidden)
        packed.append([b.to(run.policy.device) for b in batches])
        metrics.max("imbalance", imbalance)
    run.ranks.barrier("training")
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
            own = torch.tensor(batch.rows, dtype=torch.int64, device=device)  # rows of this micro-batch
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
            (value * run.policy.gradient_scale).backward()
            metrics.add(found)
            if check_mismatch:
                metrics.add(loss.mismatch(old, batch.logprobs_gen, batch.versions == run.updates))
        metrics = run.ranks.reduce(metrics)  # from here on those of the whole step
        policies.sum_gradients(run.policy)
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
    metrics.sum("packed_tokens", sum(run.ranks.gather(sum(len(b.input_ids) for b in batches if b.rows))))
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


def learn(run: Run, groups: Sequence[Sequence[Rollout]]) -> Metrics:
    """Steps (3) to (6): what a batch of finished groups teaches. Any schedule may have sampled them."""
    if run.refit is not None:
        run.refit.rest()  # where engine and policy share devices, the memory changes hands
    metrics = rollout_metrics(groups, run.task.reward_weights)
    rows, found = make_rows(groups, run.config.loss, run.task.reward_weights, run.config.sampling.max_completion_tokens)
    metrics.add(found)
    metrics.sum("empty_steps", float(not rows.weights.any()))
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
    run.step += 1
    return metrics


def train_step(run: Run) -> tuple[Metrics, list[list[Rollout]]]:
    """Steps (1) to (7) of the box above, (7) being the first thing the next step does."""
    refit_if_stale(run)
    groups = sample(run)
    return learn(run, groups), groups


# ------------------------------------------------------------------------------------------------ evaluation


def evaluate(run: Run) -> dict[str, float]:
    """Mean reward over held-out examples, `eval.samples` each. The same random numbers every time; training is not touched."""
    config = run.config
    sampling = dataclasses.replace(config.sampling, temperature=config.eval.temperature)
    sampler = Sampler(run.engine, run.renderer, run.task, sampling, config.deadlines, config.seed, "eval", config.eval.top_p)
    refit_if_stale(run)
    with run.timer("evaluation"):
        groups = generate(run, sampler, list(enumerate(run.task.eval)), config.eval.samples)
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
    if run.ranks.is_main:
        rows = [describe(run, r) for r in rollouts]
        write_samples(run.out, run.step, rows, config.log.samples)
        run.log.rollouts(run.step, rows, "eval.jsonl")
    return {
        "eval/accuracy": sum(flat) / len(flat),
        **{f"eval/{name}" if row == "all" else f"eval/{row}/{name}": value for row, scores in by_task.items() for name, value in scores.items()},
        "eval/samples": float(len(flat)),
        "eval/failed": float(sum(bool(r.failure) for group in groups for r in group)),
        "eval/completion_tokens": sum(sum(r.sampled) for r in rollouts) / len(rollouts),
        "eval/truncated": sum(r.truncated for r in rollouts) / len(rollouts),
    }


def describe(run: Run, rollout: Rollout) -> dict[str, Any]:
    """One rollout for the sample table and for rollouts.jsonl."""
    asked = next((m["content"] for m in reversed(rollout.messages) if m["role"] != "assistant"), "")
    text = run.tokenizer.decode(rollout.completion_ids)
    reward = rollout.reward(run.task.reward_weights)
    return {"index": rollout.index, "sample": rollout.sample, "prompt": asked, "completion": text, "reward": reward, "finish": rollout.finish or "failed"}


# ------------------------------------------------------------------------------------------------ main


def train(run: Run, step: Callable[[Run], tuple[Metrics, list[list[Rollout]]]] = train_step) -> dict[str, float]:
    """The loop. Returns the last evaluation's accuracy and the first's, nan where there was none. `step` may follow another schedule."""
    config = run.config
    trackers = start_trackers(config.log, dataclasses.asdict(config), run.out, run.plan.device == "cpu", run.ranks.is_main)
    before = after = math.nan
    if config.eval.every and run.step == 0 == config.eval.first:
        numbers = evaluate(run)
        before = after = numbers["eval/accuracy"]
        run.log.step(0, {**numbers, **run.timer.take()})
        run.log.print(f"before training: held-out accuracy {before:.3f}")
    with checkpoint.Saver(run) as saver:
        while run.step < run.total:
            start = time.perf_counter()
            metrics, groups = step(run)
            numbers = metrics.result()
            numbers |= loss.derived_metrics(numbers)
            if config.eval.every and (run.step == run.total or (run.step % config.eval.every == 0 and run.step >= config.eval.first)):
                numbers |= evaluate(run)
                after = numbers["eval/accuracy"]
                if after >= config.eval.stop_at:
                    run.total = run.step
                    run.log.print(f"held-out accuracy {after:.3f} reached --eval.stop-at {config.eval.stop_at}: stopping")
            numbers |= {**run.timer.take(), "time/step": time.perf_counter() - start, "epoch": run.cursor / len(run.examples)}
            run.log.step(run.step, numbers)
            if run.ranks.is_main:
                run.log.rollouts(run.step, [describe(run, r) for group in groups for r in group])
            for tracker in trackers:
                tracker.log(numbers, step=run.step)
            run.log.print(step_line(run.step, run.total, numbers))
            if saver.after_step(numbers):
                break
    for tracker in trackers:
        tracker.finish()
    return {"accuracy_before": before, "accuracy_after": after, "minutes": (time.time() - run.log.started) / 60}


def score_only(run: Run) -> dict[str, float]:
    """--eval-only: the table of one evaluation."""
    numbers = evaluate(run)
    run.log.step(run.step, numbers)
    for name, value in numbers.items():
        run.log.print(f"{name.removeprefix('eval/'):32s} {value:.4f}")
    run.log.print(json.dumps({k: round(v, 4) for k, v in numbers.items()}))
    return numbers


def main(arguments: Sequence[str]) -> None:
    launch(parse(arguments, __doc__ or ""), train)


def launch(config: Config, loop: Callable[[Run], dict[str, float]]) -> None:
    """From a configuration to the last line that a run prints."""
    check(config)
    if config.dry_run:
        ranks = start_ranks(config.deadlines.collective)
        asyncio.run(self_test(load_task(config.task, config.task_settings)))
        if ranks.is_main:
            print(json.dumps(dataclasses.asdict(config), indent=1))
            print(make_plan(config, ranks.size).table())
        return ranks.finish()
    cluster.stop_on_signals()
    cluster.set_threads(config.policy.threads)
    run = setup(config)
    try:
        result = score_only(run) if config.eval_only else loop(run)
    except BaseException as error:
        report(error)  # to the other ranks, before the engine is stopped
        raise
    finally:
        if run.server is not None:
            run.server.stop()
    if not config.eval_only:
        plot = plot_run(run.out) if run.ranks.is_main else None
        run.log.print(f"wrote {run.out}/: metrics.jsonl, samples.md, {plot.name if plot else 'no plot'}, checkpoints/step_{run.step}/model")
        run.log.print(json.dumps({k: None if math.isnan(v) else round(v, 4) for k, v in result.items()}))
    run.ranks.finish()


if __name__ == "__main__":
    guarded(main, sys.argv[1:])
