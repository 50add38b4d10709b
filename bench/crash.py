"""A run that is killed again and again, and resumed until done, is the run that nobody touched.

    python bench/crash.py                  # 100 kills; about 5 minutes on 2 cores
    python bench/crash.py --kills 8        # the short form, as in the test suite

A tiny random model trains on a toy task (--engine hf). Each attempt is a fork of this process, which has imported everything, and is
killed with SIGKILL: half of them at a random time, half at a random file operation of a save. Half of the attempts save in the
background. The last line of output is JSON:

    kills         processes killed
    in_saving     of them, while a checkpoint was being written, committed or pruned
    resumes       attempts that went on from a checkpoint
    lost_steps    steps taken again, because a kill came between them and their checkpoint
    runs          whole runs, each compared with the uninterrupted one:
    differences   files and metrics that differ from it, of final weights, optimizer, trained prompts and completions, metrics; must be 0
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.setdefault("OMP_NUM_THREADS", "1")

import tiny  # noqa: E402
import torch  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402, F401  (imported here, once, and not by every attempt)

import checkpoint  # noqa: E402
import grpo  # noqa: E402
from log import read_lines  # noqa: E402

LIMIT = 120.0  # seconds for one attempt


def flags(model: str, out: Path, steps: int, *more: str) -> list[str]:
    text = f"--model {model} --task {ROOT}/tests/toy_tasks.py:digits --engine hf --out {out} --steps {steps} --prompts-per-step 2 --samples-per-prompt 4"
    text += " --sampling.max-completion-tokens 4 --sampling.max-prompt-tokens 64 --optim.lr 1e-2 --optim.warmup 1 --eval.every 5 --policy.threads 1"
    text += " --checkpoint.every 2 --checkpoint.keep 2 --checkpoint.metric train:reward"
    return [*text.split(), *more]


def attempt(arguments: list[str], log: Path, kill_after: float | None = None, kill_at_operation: int | None = None) -> int:
    """One run in a fork of this process. Returns its exit code, or minus the signal that ended it."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(handle, 1)
            os.dup2(handle, 2)
            if kill_at_operation is not None:
                die_in_saving(kill_at_operation)
            grpo.main(arguments)
            code = 0
        except BaseException:  # whatever it is: the parent judges by the exit code, the log tells why
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    give_up = time.monotonic() + (LIMIT if kill_after is None else kill_after)
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > give_up:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            if kill_after is None:
                raise TimeoutError(f"an attempt took more than {LIMIT:.0f} s; see {log}")
            return -signal.SIGKILL
        time.sleep(0.002)


def die_in_saving(count: int) -> None:
    """This process kills itself at the count-th file operation that checkpoints make."""
    left = count

    def dying(real):
        def call(*arguments, **options):
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        return call

    os.fsync = dying(os.fsync)
    Path.rename = dying(Path.rename)
    checkpoint.shutil = type("Shutil", (), {"rmtree": staticmethod(dying(shutil.rmtree))})


def last_step(out: Path) -> int:
    return max((row["step"] for row in read_lines(out / "metrics.jsonl")), default=0)


def saved_step(out: Path) -> int:
    """Of the newest finished checkpoint, as a resumed run will find it."""
    root = out / "checkpoints"
    interrupted = [int(p.name.removeprefix("old_step_")) for p in root.glob("old_step_*")] if root.exists() else []
    return max([*checkpoint.steps(root), *interrupted], default=0)


def differences(whole: Path, other: Path, steps: int) -> list[str]:
    """What differs between two finished runs; times are never part of an equality."""

    def timeless(rows):
        return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]

    found = []
    for name in (f"checkpoints/step_{steps}/model/model.safetensors", f"checkpoints/step_{steps}/optimizer.safetensors", "rollouts.jsonl"):
        if (whole / name).read_bytes() != (other / name).read_bytes():
            found.append(name)
    for name in ("metrics.jsonl", "eval.jsonl"):
        a, b = timeless(read_lines(whole / name)), timeless(read_lines(other / name))
        found += [f"{name}: {len(b)} lines, not {len(a)}"] if len(a) != len(b) else [f"{name}: {x} is {y}" for x, y in zip(a, b) if x != y]
    if sorted(checkpoint.steps(whole / "checkpoints")) != sorted(checkpoint.steps(other / "checkpoints")):
        found.append("other checkpoints were kept")
    return found


def campaign(folder: Path, kills: int, steps: int, seed: int) -> dict[str, object]:
    """Runs killed at random until there were so many kills and the last of them has finished."""
    torch.set_num_threads(1)
    model = tiny.save_model(folder / "tiny", hidden=32)
    draw, log = random.Random(seed), folder / "attempts.log"
    begun = time.monotonic()
    if (code := attempt(flags(model, folder / "whole", steps), log)) != 0:
        raise RuntimeError(f"the uninterrupted run ended with {code}; see {log}")
    duration = time.monotonic() - begun
    count = dict(kills=0, in_saving=0, resumes=0, lost_steps=0, runs=0)
    found: list[str] = []
    while count["kills"] < kills or not count["runs"]:
        out = folder / f"run-{count['runs']}"
        while True:
            started = (out / "config.json").exists()
            count["resumes"] += saved_step(out) > 0
            more = ["--resume"] * started + ["--checkpoint.asynchronous"] * (draw.random() < 0.5)
            arguments = flags(model, out, steps, *more)
            killing = count["kills"] < kills
            in_saving = draw.random() < 0.5
            if killing and in_saving:
                code = attempt(arguments, log, kill_at_operation=draw.randrange(60))
            else:
                code = attempt(arguments, log, kill_after=draw.uniform(0, duration) if killing else None)
            if code == 0:
                break
            if code != -signal.SIGKILL:
                raise RuntimeError(f"an attempt ended with {code}; see {log}")
            count["kills"] += 1
            count["in_saving"] += in_saving
            count["lost_steps"] += last_step(out) - saved_step(out)
        found += [f"run {count['runs']}: {what}" for what in differences(folder / "whole", out, steps)]
        count["runs"] += 1
    for what in found[:20]:
        print(what)
    return {**count, "differences": len(found), "steps": steps, "seconds": round(time.monotonic() - begun, 1)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = campaign(Path(folder), options.kills, options.steps, options.seed)
    print(json.dumps(result))
    sys.exit(0 if result["differences"] == 0 else 1)
