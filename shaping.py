"""From rewards to the numbers that each token is trained with: shaping, advantages, KL in the reward, statistics of the whole step.

    rewards -> scaled and shaped by length -> advantages of whole groups -> (KL in the reward, completions left out) -> per-token advantages

Everything here happens once per optimizer step, before its micro-batches, over all of its rows. With the default settings it is
`group_advantages` and nothing else; the long tail (objectives.py) needs the rest.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import loss
import objectives
from config import LossConfig
from log import Metrics
from policy import Batch
from rollout import Rollout


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


def after_scoring(run: Any, rows: Rows, batches: list[Batch]) -> Metrics:
    """What advantages and weights owe to log-probabilities: KL in the reward, and completions that engine and trainer score too differently."""
    settings, metrics = run.config.loss, Metrics()
    if settings.kl_in == "reward":
        kl = np.zeros(len(rows.rollouts))
        for batch in batches:
            kl[batch.rows] = objectives.kl_in_reward(batch.logprobs_old, batch.logprobs_ref, batch.row_ids, len(batch.rows), settings.kl).cpu().numpy()
        kl = run.ranks.sum(torch.from_numpy(kl)).numpy()  # each rank has scored its own rows
        rows.rewards -= settings.kl_coef * kl
        metrics.mean("kl_reward", float(kl.sum()), len(kl))
        rows.advantages = advantages_of(rows.rollouts, rows.rewards, settings, run.task.reward_weights)
    if settings.sequence_error_limit:
        error = np.zeros(len(rows.rollouts))
        for batch in batches:
            error[batch.rows] = objectives.sequence_error(batch.logprobs_old, batch.logprobs_gen, batch.row_ids, len(batch.rows)).cpu().numpy()
        error = run.ranks.sum(torch.from_numpy(error)).numpy()
        keep, found = objectives.drop_by_sequence_error(error, rows.weights != 0, rows.rewards, settings.sequence_error_limit)
        rows.weights = np.where(keep, rows.weights, 0.0)
        metrics.add(found)
    return metrics


def prepare(run: Any, rows: Rows, batches: list[Batch], weights: Tensor) -> list[tuple[Tensor, loss.StepValues]]:
    """For each micro-batch the advantages of its tokens (N,), and what a setting must know about the whole optimizer step."""
    settings, device = run.config.loss, run.policy.device
    row_ids = [torch.tensor(batch.rows, dtype=torch.int64, device=device)[batch.row_ids] for batch in batches]  # (N,) rows of the step
    of_rows = torch.tensor(rows.advantages, dtype=torch.float32, device=device)  # (R,)
    advantages = [of_rows[ids] for ids in row_ids]
    if settings.kl_in in ("advantage", "return"):
        for batch, values in zip(batches, advantages):
            kl = objectives.kl_in_reward(batch.logprobs_old, batch.logprobs_ref, batch.row_ids, len(batch.rows), settings.kl, settings.kl_in)
            values -= settings.kl_coef * kl
    sizes, ids = [len(values) for values in advantages], torch.cat(row_ids)
    trained = weights[ids] != 0
    if settings.whiten:
        advantages = list(objectives.whiten(torch.cat(advantages), trained, run.ranks.sum).split(sizes))
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
        uniform=objectives.keyed_uniform(run.config.seed, run.updates, keys[ids], positions), sum_over_ranks=run.ranks.sum,
    )  # fmt: skip
    ends = np.cumsum(sizes)
    return [(values, step[end - size : end]) for values, size, end in zip(advantages, sizes, ends)]


def likelihood_coefficients(rows: Rows, coef: float) -> np.ndarray:
    """(R,) coef / tokens of all completions of positive reward, on exactly those."""
    positive = (rows.rewards > 0) & (rows.weights != 0)
    tokens = sum(sum(r.sampled) for r, p in zip(rows.rollouts, positive) if p)
    return coef * positive / max(1, tokens)
