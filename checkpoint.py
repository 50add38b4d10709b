"""Checkpoints: whole or absent, resumable to the same next step, and nothing in them can execute code.

    OUT/checkpoints/step_12/model/                 what transformers and vLLM load: safetensors, config, tokenizer, chat template
                            optimizer.safetensors  AdamW's moments and step counters, by parameter name
                            state.json             counters, random state, the resolved configuration, library versions
                            manifest.json          size and SHA-256 of every other file; written last

A checkpoint is written aside as tmp_step_12, flushed to disk, and renamed; only then are older ones removed. A folder without a
manifest, or that does not match it, is passed over with a warning and the one before it is used.
"""

import dataclasses
import hashlib
import json
import os
import random
import re
import shutil
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from policy import export
from sharding import shard_like, whole, whole_parameters
from task import UserError


@dataclass
class CheckpointConfig:
    every: int = 50  # steps between checkpoints; the last step is always saved; 0: only the last
    keep: int = 2  # newest checkpoints kept; 0: all


def save(root: Path, step: int, write: Callable[[Path], None], state: dict[str, Any], keep: int) -> Path:
    """Write step_<step> atomically, then remove all but the newest `keep`.

    Args:
        write: writes everything but state.json into the folder it is given.
    """
    aside, final = root / f"tmp_step_{step}", root / f"step_{step}"
    for leftover in root.glob("tmp_step_*"):
        shutil.rmtree(leftover)
    aside.mkdir(parents=True)
    try:
        write(aside)
        (aside / "state.json").write_text(json.dumps(state, indent=1))
        files = sorted(p for p in aside.rglob("*") if p.is_file())
        manifest = {str(p.relative_to(aside)): {"size": p.stat().st_size, "sha256": digest(p)} for p in files}
        (aside / "manifest.json").write_text(json.dumps(manifest, indent=1))
        for path in [*files, aside / "manifest.json", *sorted({p.parent for p in files}), aside]:
            flush(path)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise UserError(f"cannot write the checkpoint of step {step} to {root}: {error}; the previous checkpoint stands") from error
    replaced = root / f"old_step_{step}"
    if final.exists():
        final.rename(replaced)
    aside.rename(final)
    flush(root)
    shutil.rmtree(replaced, ignore_errors=True)
    for old in steps(root)[:-keep] if keep else []:
        shutil.rmtree(root / f"step_{old}")
    return final


def steps(root: Path) -> list[int]:
    """The steps of all finished checkpoints, ascending. Other folders, such as step_1-hf or tmp_step_2, do not count."""
    found = [re.fullmatch(r"step_(\d+)", p.name) for p in root.glob("step_*")] if root.exists() else []
    return sorted(int(m[1]) for m in found if m and (root / m[0] / "manifest.json").exists())


def latest(root: Path) -> Path | None:
    """The newest whole checkpoint; damaged ones are passed over with a warning that names them."""
    for interrupted in root.glob("old_step_*"):  # a crash between the two renames of a replaced checkpoint
        home = root / interrupted.name.removeprefix("old_")
        if home.exists():
            shutil.rmtree(interrupted)
        else:
            interrupted.rename(home)
    for step in reversed(steps(root)):
        damage = damage_of(root / f"step_{step}")
        if not damage:
            return root / f"step_{step}"
        warnings.warn(f"checkpoint {root / f'step_{step}'} is damaged ({damage}): using the one before it", stacklevel=2)
    return None


def damage_of(folder: Path) -> str:
    """What differs from the manifest; "" for a whole checkpoint."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
    except (OSError, ValueError) as error:
        return f"manifest.json: {error}"
    for name, expected in manifest.items():
        path = folder / name
        if not path.exists():
            return f"{name} is missing"
        if path.stat().st_size != expected["size"] or digest(path) != expected["sha256"]:
            return f"{name} differs from its checksum"
    return ""


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ------------------------------------------------------------------------------------------------ optimizer and random state


def save_optimizer(optimizer: torch.optim.Optimizer, names: dict[torch.nn.Parameter, str], path: Path) -> None:
    """The optimizer's tensors as safetensors, under `<parameter name>/<moment>`."""
    tensors = {f"{names[p]}/{key}": value.contiguous() for p, state in optimizer.state.items() for key, value in state.items()}
    save_file(tensors, path)


def load_optimizer(optimizer: torch.optim.Optimizer, names: dict[torch.nn.Parameter, str], path: Path) -> None:
    """Restore what save_optimizer wrote.

    Raises:
        UserError: parameters in the file and in the model differ.
    """
    tensors = load_file(path)
    stored = {key.rpartition("/")[0] for key in tensors}
    if stored and stored != set(names.values()):
        raise UserError(f"{path} holds the state of other parameters: {sorted(stored ^ set(names.values()))[:4]} ...")
    for parameter, name in names.items():
        state = {key.rpartition("/")[2]: value for key, value in tensors.items() if key.rpartition("/")[0] == name}
        optimizer.state[parameter] = {k: shard_like(v, parameter) if v.ndim else v for k, v in state.items()}


def random_state() -> dict[str, Any]:
    """The random state of Python, numpy and torch as JSON."""
    kind, keys, *rest = np.random.get_state()
    return {"python": random.getstate(), "numpy": [kind, keys.tolist(), *rest], "torch": torch.get_rng_state().numpy().tobytes().hex()}


def restore_random_state(state: dict[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch"]), dtype=torch.uint8))


# ------------------------------------------------------------------------------------------------ a run

COUNTERS = ("step", "cursor", "ahead", "updates", "empty_steps", "entropy_coef", "entropy_bonus", "retired")  # besides weights and optimizer


def save_run(run: Any) -> None:
    """Save a run: its policy as a folder for transformers and vLLM, its optimizer, counters, random state and configuration.

    All ranks call it and gather what is sharded (whole, on rank 0's CPU); rank 0 writes.
    """
    run.ranks.barrier("checkpoint")
    weights = gathered(run) if run.policy.sharded else None

    def write(folder: Path) -> None:
        if weights is None:
            export(run.policy, folder / "model", run.tokenizer, torch.float32)
            save_optimizer(run.optimizer, run.parameter_names, folder / "optimizer.safetensors")
        else:
            export(run.policy, folder / "model", run.tokenizer, torch.float32, weights[0])
            save_file(weights[1], folder / "optimizer.safetensors")

    counters = {name: getattr(run, name) for name in COUNTERS}
    versions = {name: sys.modules[name].__version__ for name in ("torch", "transformers", "numpy")}
    state = {**counters, "random": random_state(), "config": dataclasses.asdict(run.config), "versions": versions}
    with run.timer("checkpoint"):
        if run.ranks.is_main:
            save(run.out / "checkpoints", run.step, write, state, run.config.checkpoint.keep)
        run.ranks.barrier("checkpoint written")


def gathered(run: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A sharded policy's weights and moments, whole, on rank 0; empty elsewhere. A collective, one tensor at a time."""
    found: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = {}, {}
    for name, tensor in whole_parameters(run.policy.model, torch.float32, 0):
        if run.ranks.is_main:
            found[0][name] = tensor.cpu()
    for p, name in run.parameter_names.items():
        for key, value in run.optimizer.state.get(p, {}).items():
            tensor = whole(value).contiguous()
            if run.ranks.is_main:
                found[1][f"{name}/{key}"] = tensor.cpu()
    return found


def find(config: Any, out: Path) -> Path | None:
    """The checkpoint to resume from. Raises UserError where there is none, or where the run would not be the same run."""
    if not config.resume:
        return None
    found = latest(out / "checkpoints")
    if found is None:
        raise UserError(f"--resume: no whole checkpoint in {out / 'checkpoints'}; start without --resume in another --out")
    stored = json.loads((found / "state.json").read_text())["config"]
    now = json.loads(json.dumps(dataclasses.asdict(config)))
    for name in ("model", "task", "seed", "task_config", "prompts_per_step", "samples_per_prompt"):
        if stored[name] != now[name]:
            raise UserError(f"--resume: {name} was {stored[name]!r} and is {now[name]!r}: the run could not go on as it began")
    return found


def restore(run: Any, folder: Path) -> None:
    """Counters, optimizer and random state; the weights were loaded with the policy."""
    state = json.loads((folder / "state.json").read_text())
    for name in COUNTERS:
        setattr(run, name, state[name])
    load_optimizer(run.optimizer, run.parameter_names, folder / "optimizer.safetensors")
    restore_random_state(state["random"])
    run.log.print(f"resumed after step {run.step} from {folder}")
