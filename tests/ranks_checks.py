"""What test_ranks.py runs in two processes under torchrun: every check in one process group, results as JSON, one file a rank."""

import dataclasses
import json
import os
import sys
import time
import traceback
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]

import torch

torch.set_num_threads(1)

import grpo
import ranks as trainers
from config import parse
from log import Metrics, read_lines
from ranks import Ranks, start_ranks
from task import UserError

FLAGS = (
    f"--task {Path(__file__).parent}/toy_tasks.py:digits --engine hf --steps 3 --prompts-per-step 5 --samples-per-prompt 4 --optim.lr 1e-2"
    " --sampling.max-completion-tokens 8 --sampling.max-prompt-tokens 64 --optim.warmup 1 --eval.every 3 --policy.threads 1 --log.no-rollouts"
)
# name -> further flags; each is run by one process and by two
RUNS = {
    "plain": "",
    "tight": "--policy.micro-batch-tokens 40 --policy.checkpointing",
    "long_tail": "--loss.whiten --loss.baseline batch_mean --loss.scale batch_std --loss.kl-coef 0.1 --loss.kl-in reward --loss.kl k1 --loss.objective clip_cov"
    " --loss.objective-params share 0.1 cov-low 0.0 --loss.entropy-share 0.5 --loss.entropy-coef 0.01 --loss.entropy-target 2.0 --loss.likelihood-coef 0.1"
    " --loss.reduction prompt_mean --updates-per-batch 2 --loss.sequence-error-limit 2",
}
# name -> (which of RUNS, further flags for two processes)
SPLIT = {
    "ddp": ("plain", "--policy.no-shard"),
    "fsdp": ("plain", ""),
    "ddp_tight": ("tight", "--policy.no-shard"),
    "fsdp_tight": ("tight", ""),
    "fsdp_offload": ("plain", "--policy.offload"),
    "ddp_long_tail": ("long_tail", "--policy.no-shard"),
    "fsdp_long_tail": ("long_tail", ""),
}


def train(model: str, out: Path, flags: str) -> list[dict]:
    config = parse(["--model", model, "--out", str(out), *FLAGS.split(), *flags.split()], "")
    run = grpo.setup(config)
    grpo.train(run)
    return read_lines(out / "metrics.jsonl")


def main(model: str, folder: Path) -> None:
    ranks = start_ranks(20.0)
    results = {}
    for name, (base, flags) in SPLIT.items():
        start = time.time()
        try:
            train(model, folder / name, f"{RUNS[base]} {flags}")
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
            print(name, results[name], flush=True)
        print(ranks.rank, name, time.time() - start, flush=True)
    (folder / f"rank_{ranks.rank}.json").write_text(json.dumps(results))
    ranks.finish()


if __name__ == "__main__":
    trainers.guarded(lambda a: main(a[0], Path(a[1])), sys.argv[1:])
