"""What test_ranks.py runs in two processes under torchrun: every check in one process group, one JSON file of results a rank."""

import json
import sys
import time
import traceback
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]

import tiny
import torch

torch.set_num_threads(1)

import grpo
import policy as policies
import sharding
from config import parse
from log import Metrics, read_lines
from ranks import Ranks, guarded, start_ranks
from rollout import Rollout
from task import UserError

FLAGS = (
    "--engine hf --steps 3 --prompts-per-step 5 --samples-per-prompt 4 --optim.lr 1e-2 --optim.warmup 1 --eval.every 3"
    " --sampling.max-completion-tokens 8 --sampling.max-prompt-tokens 64 --policy.threads 1 --deadlines.collective 20"
)
# name -> further flags; each is trained by one process and by two
RUNS = {
    "plain": "",
    "tight": "--policy.micro-batch-tokens 40 --policy.checkpointing",
    "lonely": "--prompts-per-step 1 --updates-per-batch 1 --passes 2 --loss.kl-coef 0.1",  # a rank without rows
    "long_tail": "--loss.whiten --loss.baseline batch_mean --loss.scale batch_std --loss.kl-coef 0.1 --loss.kl-in reward --loss.kl k1"
    " --loss.objective clip_cov --loss.objective-params share 0.1 cov-low 0.0 --loss.entropy-share 0.5 --loss.entropy-coef 0.01"
    " --loss.entropy-target 2.0 --loss.likelihood-coef 0.1 --loss.reduction prompt_mean --updates-per-batch 2 --loss.sequence-error-limit 2",
    "failing_step": "--eval.every 0",
}
# name -> (which of RUNS, further flags for two processes)
SPLIT = {
    "ddp": ("plain", "--policy.no-shard --log.trackers tensorboard"),
    "fsdp": ("plain", ""),
    "ddp_tight": ("tight", "--policy.no-shard"),
    "fsdp_tight": ("tight", ""),
    "ddp_lonely": ("lonely", "--policy.no-shard"),
    "fsdp_lonely": ("lonely", ""),
    "fsdp_offload": ("plain", "--policy.offload"),
    "ddp_long_tail": ("long_tail", "--policy.no-shard"),
    "fsdp_long_tail": ("long_tail", ""),
    "fsdp_failing_step": ("failing_step", ""),
}


def train(model: str, out: Path, flags: str, task: str = "digits") -> grpo.Run:
    task = f"{Path(__file__).parent}/toy_tasks.py:{task}"
    run = grpo.setup(parse(["--model", model, "--out", str(out), "--task", task, *FLAGS.split(), *flags.split()], ""))
    grpo.train(run)
    return run


def split(model: str, folder: Path, name: str) -> list[str]:
    base, flags = SPLIT[name]
    run = train(model, folder / name, f"{RUNS[base]} {flags}", "failing_now_and_then" if base == "failing_step" else "digits")
    return sorted({type(p).__name__ for p in run.policy.parameters()})


def resume(model: str, folder: Path) -> list[float]:
    """Two steps and one more, against three: sharded, then as whole copies from the same checkpoint."""
    train(model, folder / "parts", "--steps 2")
    train(model, folder / "parts", "--resume")
    train(model, folder / "other", "--steps 2 --policy.no-shard")
    train(model, folder / "other", "--resume")
    train(model, folder / "mixed", "--steps 2")
    train(model, folder / "mixed", "--resume --policy.no-shard")
    return [row["reward"] for row in read_lines(folder / "parts" / "metrics.jsonl")[1:]]


def collectives(model: str, folder: Path, ranks: Ranks) -> dict:
    metrics = Metrics()
    if ranks.rank == 0:
        for value in (1.0, 1.0, 1.0):
            metrics.mean("mean", value), metrics.sum("sum", value), metrics.max("max", value), metrics.min("min", value)
        metrics.mean("only_on_0", 4.0)
    else:
        metrics.mean("mean", 0.0), metrics.sum("sum", 0.0), metrics.max("max", 0.0), metrics.min("min", 0.0)
    refused = ""
    try:
        ranks.on_first(lambda: (_ for _ in ()).throw(UserError("no such file")))
    except UserError as error:
        refused = str(error)
    groups = [[Rollout(i, s, [1]) for s in range(2)] for i in ((3, 1) if ranks.rank else (0, 2))]
    folders = [folder / "new" / str(i) for i in range(20)]
    for path in folders:  # one writes, all read
        ranks.on_first(lambda path=path: (path.mkdir(parents=True), (path / "x.json").write_text("{}")) and None)
        assert json.loads((path / "x.json").read_text()) == {}
    return {
        "reduced": ranks.reduce(metrics).result(),
        "one_side_empty": ranks.reduce(metrics if ranks.rank == 0 else Metrics()).result()["sum"],
        "sum": ranks.sum(torch.tensor([0.1, 1.0], dtype=torch.float64) * (ranks.rank + 1)).tolist(),
        "first": ranks.on_first(lambda: f"from {ranks.rank}"),
        "refused": refused,
        "order": [[r.index for r in group] for group in ranks.exchange(groups)],
    }


def shards(model: str, folder: Path, ranks: Ranks) -> dict:
    """What a rank holds after loading, that the whole is what the file says, and that sampling memory can be taken and given back."""
    config = policies.PolicyConfig()
    alone = policies.load_policy(model, config, 1.0, ranks.device)
    policy = policies.load_policy(model, config, 1.0, ranks.device, ranks)
    local = sum(p.to_local().numel() for p in policy.parameters())
    expected = dict(alone.model.named_parameters())
    same = all(torch.equal(tensor, expected[name]) for name, tensor in sharding.whole_parameters(policy.model, torch.float32, 5000))
    buffers = dict(alone.model.named_buffers())
    same_buffers = all(torch.equal(b, buffers[name]) for name, b in policy.model.named_buffers())
    (batch,) = policies.pack([Rollout(0, s, [5, 6, 7], [8, 9 + s], [True] * 2, [0.0] * 2, [0] * 2) for s in range(3)], 100)
    logprobs, _ = policy(batch)
    logprobs.sum().backward()
    optimizer = policies.make_optimizer(policy, policies.OptimConfig())
    optimizer.step()
    before = [p.full_tensor() for p in policy.parameters()]
    host = sharding.HostMemory()
    tensors = sharding.training_tensors(policy, optimizer)
    taken = host.take(tensors)
    empty = sum(t.to_local().untyped_storage().size() for t in tensors if hasattr(t, "to_local"))
    given = host.give_back()
    restored = all(torch.equal(a, p.full_tensor()) for a, p in zip(before, policy.parameters()))
    (again,) = policies.score(policy, [batch])
    low = policies.load_policy(model, policies.PolicyConfig(dtype="bfloat16"), 1.0, ranks.device, ranks)
    rounding = (policies.score(low, [batch])[0] - policies.score(alone, [batch])[0]).abs().max().item()
    return {
        "local": local, "total": sum(p.numel() for p in alone.parameters()), "same": same, "same_buffers": same_buffers,
        "taken": taken, "given": given, "empty": empty, "restored": restored, "learned": bool((again.sum() - logprobs.sum()).item()),
        "master_dtypes": sorted({str(p.dtype) for p in low.parameters()}), "rounding": rounding,
    }  # fmt: skip


def uneven(model: str, folder: Path, ranks: Ranks) -> bool:
    """An untied head, and a vocabulary that two ranks cannot halve."""
    path = str(folder / "uneven")
    ranks.on_first(lambda: tiny.save_model(Path(path), tied=False, vocabulary=131))
    policy = policies.load_policy(path, policies.PolicyConfig(), 1.0, ranks.device, ranks)
    alone = policies.load_policy(path, policies.PolicyConfig(), 1.0, ranks.device)
    (batch,) = policies.pack([Rollout(0, s, [5, 6, 7], [8, 9 + s], [True] * 2, [0.0] * 2, [0] * 2) for s in range(3)], 100)
    for one in (policy, alone):
        one(batch)[0].sum().backward()
    return all(torch.allclose(sharding.whole(p.grad), q.grad, atol=1e-6) for p, q in zip(policy.parameters(), alone.parameters(), strict=True))


def renamed(model: str, folder: Path, ranks: Ranks) -> bool:
    """A folder whose names are not the parameters' is loaded by rank 0 and scattered."""
    from safetensors.torch import load_file, save_file

    def write() -> None:
        import shutil

        shutil.copytree(model, folder / "renamed")
        tensors = load_file(Path(model, "model.safetensors"))
        save_file({name.removeprefix("model."): t for name, t in tensors.items()}, folder / "renamed" / "model.safetensors", {"format": "pt"})

    ranks.on_first(write)
    policy = policies.load_policy(str(folder / "renamed"), policies.PolicyConfig(), 1.0, ranks.device, ranks)
    expected = dict(policies.load_policy(model, policies.PolicyConfig(), 1.0, ranks.device).model.named_parameters())
    return all(torch.equal(tensor, expected[name]) for name, tensor in sharding.whole_parameters(policy.model, torch.float32))


def main(model: str, folder: Path) -> None:
    ranks = start_ranks(20.0)
    checks = {name: (lambda name=name: split(model, folder, name)) for name in SPLIT}
    checks |= {
        "resume": lambda: resume(model, folder),
        "collectives": lambda: collectives(model, folder, ranks),
        "shards": lambda: shards(model, folder, ranks),
        "uneven": lambda: uneven(model, folder, ranks),
        "renamed": lambda: renamed(model, folder, ranks),
    }
    results = {}
    for name, check in checks.items():
        start = time.time()
        try:
            results[name] = check()
        except Exception:
            results[name] = traceback.format_exc()
            print(results[name], flush=True)
        print(f"rank {ranks.rank}: {name} took {time.time() - start:.1f} s", flush=True)
    (folder / f"rank_{ranks.rank}.json").write_text(json.dumps(results))
    ranks.finish()


if __name__ == "__main__":
    guarded(lambda arguments: main(arguments[0], Path(arguments[1])), sys.argv[1:])
