"""How much of generation and training the asynchronous schedule hides behind each other. Linux, 2 cores or more, vLLM.

    python bench/overlap.py [--model models/SmolLM2-135M-Instruct] [--steps 6]

One run measures all of it, with the same prompts: trainer pinned to core 0, vLLM to core 1.
    sync, pinned      steps one phase after the other (--schedule.max-staleness 0): gives generation alone and training alone
    async, pinned     --schedule.max-staleness 1
    sync, all cores   every phase may use both cores: what a synchronous run on this machine would really take
The first two steps of each are left out: they fill the pipeline and warm up kernels. Last line: JSON.
    async_vs_sync           steps per minute of async over sync, both pinned
    overlap_efficiency      max(generation alone, training alone) / measured async step; 1 is perfect
    async_vs_sync_all_cores the same over sync with all cores: on 2 cores it may be below 1, since each phase gives a core away
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WARM_UP = 2  # steps


def run(name: str, out: Path, a: argparse.Namespace, staleness: int, pinned: bool) -> list[dict[str, float]]:
    """One training run in its own process. Returns the metrics of its steps after the warm-up."""
    flags = f"--model {a.model} --task arith --engine vllm --out {out / name} --steps {a.steps + WARM_UP} --prompts-per-step {a.prompts}"
    flags += f" --samples-per-prompt 8 --sampling.max-completion-tokens {a.tokens} --sampling.max-prompt-tokens 122 --eval.every 0 --optim.lr 1e-6"
    flags += f" --loss.no-signal keep --loss.correction truncate --schedule.max-staleness {staleness}"
    flags += " --policy.threads 1" if pinned else ""
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
    if pinned:
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": str(a.cores[1]), "BENCH_TRAINER_CORE": str(a.cores[0])}
    # the trainer's threads are pinned after vLLM has been started, which must not inherit the mask
    code = "import os, sys, grpo, async_grpo; core = os.environ.get('BENCH_TRAINER_CORE'); real = grpo.setup\n"
    code += "def setup(config):\n    run = real(config)\n"
    code += "    [os.sched_setaffinity(int(t), {int(core)}) for t in os.listdir('/proc/self/task')] if core else None\n    return run\n"
    code += "grpo.setup = setup\nasync_grpo.main(sys.argv[1:])"
    done = subprocess.run([sys.executable, "-c", code, *flags.split()], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=a.timeout)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return [json.loads(line) for line in (out / name / "metrics.jsonl").read_text().splitlines()][WARM_UP:]


def mean(rows: list[dict[str, float]], name: str) -> float:
    return statistics.fmean(r.get(name, 0.0) for r in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "models/SmolLM2-135M-Instruct"))
    parser.add_argument("--steps", type=int, default=6, help="measured, after the warm-up")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=24, help="longest completion")
    parser.add_argument("--cores", type=int, nargs=2, default=(0, 1), help="of trainer and engine")
    parser.add_argument("--timeout", type=float, default=1200, help="seconds for one run")
    a = parser.parse_args()
    print(__doc__.split("\n\n")[0])
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        sync = run("sync", out, a, 0, pinned=True)
        overlapped = run("async", out, a, 1, pinned=True)
        everything = run("sync_all_cores", out, a, 0, pinned=False)
    print(f"{'':18s} {'step s':>8s} {'generation':>11s} {'training':>9s} {'refit':>6s} {'age':>5s} {'tokens':>7s}")
    for name, rows in (("sync, pinned", sync), ("async, pinned", overlapped), ("sync, all cores", everything)):
        seconds = [mean(rows, f"time/{part}") for part in ("step", "generation", "training", "refit")]
        print(f"{name:18s} {seconds[0]:8.2f} {seconds[1]:11.2f} {seconds[2]:9.2f} {seconds[3]:6.2f} {mean(rows, 'schedule/age'):5.2f}", end="")
        print(f" {mean(rows, 'trained_tokens'):7.0f}")
    # alone: what a phase takes when the other does nothing; the refit belongs to the trainer's side of the pipeline
    generation, training = mean(sync, "time/generation"), mean(sync, "time/training") + mean(sync, "time/refit")
    step = mean(overlapped, "time/step")
    print("generation is what the trainer waited for: in sync all of it. training includes everything up to the optimizer step.")
    numbers = {
        "async_vs_sync": mean(sync, "time/step") / step,
        "overlap_efficiency": max(generation, training) / step,
        "async_vs_sync_all_cores": mean(everything, "time/step") / step,
        "generation_alone_s": generation,
        "training_alone_s": training,
        "async_step_s": step,
        "exposed_generation_s": mean(overlapped, "time/generation"),
        "weight_sync_s": mean(overlapped, "time/refit"),
    }
    print(json.dumps({k: round(v, 3) for k, v in numbers.items()}))


if __name__ == "__main__":
    main()
