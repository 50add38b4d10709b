"""Seconds per refit of a running vLLM server, against one flat gloo broadcast of the same bytes. SmolLM2-135M in float32, 538 MB.

    .venv/bin/python bench/refit.py

Refit: everything between two steps of training: pause, transfer of every weight into the engine's packed layers, version,
resume. Broadcast: one tensor of all the weights to an idle second process with as many threads, over the same kind of gloo
group on loopback, from and into memory that is already mapped. They take turns; medians.

    refit_vs_broadcast   predicted 3 on two cores: bytes travel in 0.2 s; vLLM's loader then copies every weight once more and packs
                         it for oneDNN, 0.35 s with nothing to wait for; control calls and the head's packing are 0.1 s.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from smollm2 import folder

import cluster
import gloo_transfer
from policy import PolicyConfig, load_policy
from rollout import DeadlineConfig

REPEATS = 7


def receive(port: int, elements: int) -> None:
    """The idle second process: receive as often as the parent sends."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    group, flat = gloo_transfer.join("127.0.0.1", port, 1, 2, 600.0), torch.empty(elements)
    for _ in range(REPEATS + 1):
        gloo_transfer.broadcast(group, flat)


def main() -> None:
    cluster.set_threads(0)
    with tempfile.TemporaryDirectory() as aside:
        model, plan = folder(Path(aside) / "model"), cluster.make_plan("vllm", 0, 1, cluster.vllm_installed())
        print(f"starting vLLM with {model}", flush=True)
        server, _ = cluster.start_vllm(model, plan, cluster.EngineConfig(), "float32", 256, Path(aside) / "engine.log")
        with server:
            policy = load_policy(model, PolicyConfig(), 1.0, torch.device("cpu"))
            server.wait_until_healthy(600)
            refit = cluster.Refit(server.url, policy, torch.float32, "gloo", DeadlineConfig())
            flat = torch.cat([p.detach().flatten() for p in policy.parameters()])
            port = cluster.free_port()
            with subprocess.Popen([sys.executable, __file__, str(port), str(len(flat))]) as receiver:
                group = gloo_transfer.join("127.0.0.1", port, 0, 2, 600.0)
                refits, broadcasts = [], []
                for version in range(REPEATS + 1):
                    start = time.perf_counter()
                    refit(version)
                    middle = time.perf_counter()
                    gloo_transfer.broadcast(group, flat)
                    refits.append(middle - start)
                    broadcasts.append(time.perf_counter() - middle)
                receiver.wait(60)
    seconds, least = statistics.median(refits[1:]), statistics.median(broadcasts[1:])  # the first of each is the warm-up
    megabytes = flat.numel() * flat.element_size() / 1e6
    print(f"refit of {megabytes:.0f} MB: {seconds:.2f} s ({', '.join(f'{r:.2f}' for r in refits)})")
    print(f"flat broadcast: {least:.2f} s ({', '.join(f'{b:.2f}' for b in broadcasts)})")
    print(json.dumps({"refit_seconds": round(seconds, 3), "broadcast_seconds": round(least, 3), "refit_vs_broadcast": round(seconds / least, 2)}))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        receive(int(sys.argv[1]), int(sys.argv[2]))
    else:
        main()
