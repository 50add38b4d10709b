"""What checkpoint.py sees of a run, without one."""

import time
from contextlib import nullcontext
from types import SimpleNamespace

import tiny
import torch

from checkpoint import CheckpointConfig
from config import Config


class FakeRun:
    def __init__(self, model, optimizer, out, step=0, total=10, dtype=torch.float32, **settings):
        self.config = Config(checkpoint=CheckpointConfig(**settings))
        self.policy, self.optimizer, self.out = SimpleNamespace(model=model, compute_dtype=dtype), optimizer, out
        self.step, self.total, self.cursor, self.updates, self.empty_steps, self.retired, self.ahead = step, total, step, step, 0, [], []
        self.entropy_coef = self.entropy_bonus = 0.0
        self.examples, self.tokenizer = [], tiny.tokenizer()
        self.printed = []
        self.log = SimpleNamespace(started=time.time(), print=self.printed.append)

    @property
    def parameter_names(self):
        return {p: n for n, p in self.policy.model.named_parameters()}

    def timer(self, label):
        return nullcontext()
