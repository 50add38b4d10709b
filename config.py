"""The settings of a run: one dataclass per chapter, composed here, parsed by tyro, checked before anything is loaded.

A setting lives beside the code that reads it (SamplingConfig in rollout.py, OptimConfig in policy.py, ...); this file adds the ones of
the loss, of evaluation and of the run itself, and refuses impossible combinations with a sentence that names the flags and the fix.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro

import loss
import objectives
from checkpoint import CheckpointConfig
from cluster import ClusterConfig, EngineConfig, check_correction
from log import LogConfig
from policy import OptimConfig, PolicyConfig
from rollout import DeadlineConfig, SamplingConfig
from task import TaskConfig, UserError

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
    first: int = 0  # no evaluation before this step
    stop_at: float = math.inf  # end the run when held-out accuracy reaches this; inf: never
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
    eval_only: bool = False  # evaluate --model on the held-out examples, print the table, train nothing
    resume_force: bool = False  # resume although settings or prompts have changed that the run depends on
    dry_run: bool = False  # check and print the whole configuration, load no model
    seed: int = 0  # of prompt order and sampling
    steps: int = 1000  # at most this many steps
    epochs: float = 0.0  # at most this many passes over the training examples; 0: no bound
    prompts_per_step: int = 32  # P
    samples_per_prompt: int = 8  # G, completions per prompt
    updates_per_batch: int = 1  # optimizer steps a batch is split into, by whole groups; old log-probabilities are frozen once
    passes: int = 1  # times a batch is gone through
    refill: int = 0  # rounds of further prompts, as many as groups are missing, until every group of a step carries signal (DAPO); 0: none
    retire_at: float = math.inf  # a prompt leaves the order once the mean reward of its group reaches this; inf: never
    max_empty_steps: int = 10  # steps in a row without any group that carries signal before the run stops with an error
    task_config: Annotated[TaskConfig, tyro.conf.arg(name="task")] = field(default_factory=TaskConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    engine_config: Annotated[EngineConfig, tyro.conf.arg(name="engine")] = field(default_factory=EngineConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    deadlines: DeadlineConfig = field(default_factory=DeadlineConfig)

    @property
    def task_settings(self) -> TaskConfig:
        """What a task is built from: its own settings, and the deadline of a reward."""
        return replace(self.task_config, reward_deadline=self.deadlines.verifier)


C = TypeVar("C", bound=Config)


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
    check_correction(config.engine_config, config.loss.correction)
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
    if config.refill and config.loss.no_signal == "keep":
        raise UserError("--refill replaces groups without signal, which --loss.no-signal keep keeps: give one of the two")
    if config.eval_only and not config.eval.every:
        raise UserError("--eval-only with --eval.every 0: there is nothing to do")
    if config.checkpoint.metric_key.startswith("eval/") and not config.eval.every:
        raise UserError(f"--checkpoint.metric {config.checkpoint.metric} needs evaluations: --eval.every above 0")
    if config.checkpoint.deadline <= 0 or config.checkpoint.ft_keep < 1:
        raise UserError("--checkpoint.must-save-by must be after the start, and --checkpoint.ft-keep at least 1")
    if config.resume and not config.out:
        raise UserError("--resume needs --out, the folder of the run to go on with")


def parse(arguments: Sequence[str], description: str, kind: type[C] = Config, **loss_defaults: Any) -> C:  # type: ignore[assignment]
    """The command line as a `kind` of Config. A preset becomes the default of the loss settings, so that flags beside it win."""
    preset = next((b for a, b in zip(arguments, arguments[1:]) if a == "--loss.preset"), "")
    if preset and preset not in PRESETS:
        raise UserError(f"--loss.preset {preset}: give one of {', '.join(PRESETS)}")
    default = kind(loss=LossConfig(preset=preset, **(loss_defaults | PRESETS.get(preset, {}))))
    return tyro.cli(kind, args=list(arguments), default=default, description=description)
