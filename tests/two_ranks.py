"""Two gloo processes that save and load a tiny sharded model: `torchrun --nproc_per_node 2 two_ranks.py FOLDER` (tests/test_resume.py)."""

import json
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]

import tiny
import torch
from fake_run import FakeRun
from safetensors.torch import load_file, save_file
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

import checkpoint
import shards
from checkpoint import Saver
from ranks import leaving, start_ranks
from task import UserError

root = Path(sys.argv[1])
torch.set_num_threads(1)
rank = start_ranks(30.0).rank


def sharded(model):
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def step(model, optimizer):
    model(torch.arange(10)[None] + 10 * rank, labels=torch.arange(10)[None]).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def names(model):
    return {p: shards.clean(n) for n, p in model.named_parameters()}


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def everything(model, optimizer):
    """Every parameter and moment, whole."""
    found = {n: full(p.detach()).clone() for p, n in names(model).items()}
    return found | {f"{n}/{k}": full(v).clone() for p, n in names(model).items() for k, v in optimizer.state[p].items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def load(folder, wrap):
    model = wrap(AutoModelForCausalLM.from_pretrained(checkpoint.weights_of(folder), dtype=torch.float32))
    optimizer = adamw(model)
    shards.load_optimizer(optimizer, names(model), folder)
    return model, optimizer


# a sharded model, trained for two steps, saved: each rank its share, in the hub's own format
model = sharded(tiny.llama())
optimizer = adamw(model)
for _ in range(2):
    step(model, optimizer)
expected = everything(model, optimizer)
held, whole = [], shards.whole
shards.whole = lambda tensor, mine, copied: (held.append(tensor.numel() * mine), whole(tensor, mine, copied))[1]
run = FakeRun(model, optimizer, root / "sharded", step=2)
Saver(run).save({"reward": 0.5})
shards.whole = whole
folder = root / "sharded" / "checkpoints" / "step_2"
assert sum(held) < 0.75 * sum(t.numel() for t in expected.values()), "one rank held most of the model"
assert checkpoint.damage_of(folder) == ""
stored = {n: t for path in folder.glob("optimizer-*-of-00002.safetensors") for n, t in load_file(path).items()}
stored |= {n: t for path in folder.glob("model/model-*-of-00002.safetensors") for n, t in load_file(path).items()}
assert same(stored, expected)
if rank == 0:
    save_file({k: v.contiguous() for k, v in expected.items()}, root / "expected.safetensors")

# back into shards, and whole on every rank; each goes on as the first does
again, moments = load(folder, sharded)
assert same(everything(again, moments), expected)
assert all(p.to_local().shape == q.to_local().shape for p, q in zip(again.parameters(), model.parameters()))
assert all(moments.state[p]["exp_avg"].placements == p.placements for p in again.parameters())
step(model, optimizer)
step(again, moments)
assert same(everything(again, moments), everything(model, optimizer))
replicated, moments = load(folder, DistributedDataParallel)
assert same(everything(replicated, moments), expected)

# from replicas: the same files
run = FakeRun(replicated.module, moments, root / "replicated", step=2)
Saver(run).save({})
other = root / "replicated" / "checkpoints" / "step_2"
for path in sorted(p.relative_to(folder) for p in folder.rglob("*.safetensors")):
    assert (folder / path).read_bytes() == (other / path).read_bytes(), path

# what one process saved (test_resume.py), in shards
single, moments = load(root / "one" / "checkpoints" / "step_1", sharded)
assert same(everything(single, moments), load_file(root / "one.safetensors"))

# in the background, with one slow rank: the moment of the call is what is stored, and it appears when both are done
before = everything(model, optimizer)
saver = Saver(run := FakeRun(model, optimizer, root / "background", step=3, asynchronous=True))
write = shards.write_tensors
shards.write_tensors = lambda *a: (time.sleep(0.5 * rank), write(*a))[1]
start = time.monotonic()
saver.save({})
assert time.monotonic() - start < 0.4
step(model, optimizer)
assert not (root / "background" / "checkpoints" / "step_3").exists()
saver.wait()
dist.barrier()
shards.write_tensors = write
moved = everything(model, optimizer)
assert same(everything(*load(root / "background" / "checkpoints" / "step_3", sharded)), before) and not same(before, moved)


# a rank whose disk is full: both learn of it, at once, and the checkpoint before stands
def full_disk(*arguments):
    raise OSError(28, "No space left on device")


if rank == 1:
    shards.write_tensors = full_disk
saver = Saver(FakeRun(model, optimizer, root / "sharded", step=4))
start = time.monotonic()
try:
    saver.save({})
    raise AssertionError("nothing was raised")
except UserError as error:
    assert "rank 1: [Errno 28] No space left on device; the previous checkpoint stands" in str(error), error
assert time.monotonic() - start < 10
assert [p.name for p in (root / "sharded" / "checkpoints").iterdir()] == ["step_2"]
saver = Saver(FakeRun(model, optimizer, root / "sharded", step=4, asynchronous=True))
saver.save({})
try:
    saver.wait()
    raise AssertionError("nothing was raised")
except UserError as error:
    assert "No space left on device" in str(error)
shards.write_tensors = write
dist.barrier()

# random state: each rank gets back its own
torch.manual_seed(100 + rank)
Saver(run := FakeRun(model, optimizer, root / "random", step=1)).save({})
mine, theirs = torch.rand(3), torch.tensor(0.0)
found = checkpoint.latest(root / "random" / "checkpoints") if rank == 0 else root / "random" / "checkpoints" / "step_1"
checkpoint.restore(run, found)
assert torch.equal(torch.rand(3), mine) and len({tuple(t.tolist()) for t in shards.here().gather(mine)}) == 2
dist.barrier()
if rank == 1:
    (found / "rank-00001.json").unlink()
    try:
        checkpoint.restore(run, found)
        raise AssertionError("nothing was raised")
    except UserError as error:
        assert "rank-00001.json is missing" in str(error)
dist.barrier()

# folders that do not exist yet: nobody races
for i in range(20):
    checkpoint.save(root / "nested" / str(i) / "checkpoints", 1, [lambda f: {f"r{rank}": shards.write_json(f / f"r{rank}", rank)}])
    manifest = json.loads((root / "nested" / str(i) / "checkpoints" / "step_1" / "manifest.json").read_text())
    assert sorted(manifest) == ["r0", "r1"]

# a signal to one rank ends both after the step, saved
with Saver(run := FakeRun(model, optimizer, root / "told", step=0, total=100)) as saver:
    for run.step in range(1, 100):
        if run.step == 3 and rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.01)
        if saver.after_step({}):
            break
    assert run.step == 3, run.step
assert checkpoint.steps(root / "told" / "checkpoints") == [3]
assert threading.active_count() < 10 and shutil.disk_usage(root).free
leaving.set()
dist.barrier()
dist.destroy_process_group()
print(f"rank {rank} done", flush=True)
