"""What fits where and what bounds the speed: memory, tokens per second and refit seconds of a run, from a handful of formulas.

    python bench/plan.py --model 7B --gpus 64
    python bench/plan.py --model 7B --gpus 8 --generation-gpus 2 --samples 16
    python bench/plan.py --model models/SmolLM2-135M-Instruct --measure          # the formulas against this machine's CPU

(1) parameters      P = embedding (+ head) + layers * (attention + MLP + norms); checked against transformers
(2) training        master weights 4 P + gradients 4 P + AdamW 8 P bytes, each divided by the number of shards, plus what is gathered and activations
(3) engine          weights 2 P / tensor parallel, and the rest of its share for keys and values
(4) training time   2 flops per parameter and token forward, twice that backward, once more with checkpointing, plus attention
(5) decoding time   every step reads the weights and the keys and values of all running sequences: bytes / bandwidth
(6) refit           gather the shards, then send 2 P bytes, by the slower of the two ends

A prompt is computed once per group in training (prefix sharing) and once per group in the engine (prefix cache). The numbers of a machine
are arguments; those of an H100 are the defaults. Efficiencies (--mfu, --bandwidth-use) are assumptions: replace them by what
bench/gpu.py measures on yours. docs/scaling.md explains each line.
"""

import dataclasses
import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

GB = 1e9


@dataclass(frozen=True)
class Shape:
    """A decoder of the Llama / Qwen2 family."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head: int  # size of one head
    intermediate: int
    vocabulary: int
    tied: bool  # embedding and output head are one tensor
    qkv_bias: bool = False

    @property
    def layer(self) -> int:
        """Parameters of one decoder layer."""
        queries, keys = self.heads * self.head, self.kv_heads * self.head
        attention = self.hidden * (queries + 2 * keys) + queries * self.hidden + (queries + 2 * keys if self.qkv_bias else 0)
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer + self.embedding * (1 if self.tied else 2) + self.hidden

    @property
    def largest(self) -> int:
        return max(self.embedding, self.hidden * self.intermediate)

    @property
    def cache(self) -> int:
        """Bytes of keys and values per token, in bfloat16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head


SHAPES = {  # Qwen2.5's sizes
    "0.5B": Shape(896, 24, 14, 2, 64, 4864, 151936, True, True),
    "1.5B": Shape(1536, 28, 12, 2, 128, 8960, 151936, True, True),
    "3B": Shape(2048, 36, 16, 2, 128, 11008, 151936, True, True),
    "7B": Shape(3584, 28, 28, 4, 128, 18944, 152064, False, True),
    "14B": Shape(5120, 48, 40, 8, 128, 13824, 152064, False, True),
    "32B": Shape(5120, 64, 40, 8, 128, 27648, 152064, False, True),
    "72B": Shape(8192, 80, 64, 8, 128, 29568, 152064, False, True),
}


def shape_of(model: str) -> Shape:
    """By size, or from a model folder's config.json. Raises SystemExit with the sizes there are."""
    if model in SHAPES:
        return SHAPES[model]
    file = Path(model) / "config.json"
    if not file.exists():
        sys.exit(f"error: --model {model}: neither a folder with config.json nor one of {', '.join(SHAPES)}")
    config = json.loads(file.read_text())
    heads = config["num_attention_heads"]
    return Shape(
        config["hidden_size"], config["num_hidden_layers"], heads, config.get("num_key_value_heads") or heads,
        config.get("head_dim") or config["hidden_size"] // heads, config["intermediate_size"], config["vocab_size"],
        bool(config.get("tie_word_embeddings", False)), config.get("model_type") == "qwen2" or bool(config.get("attention_bias", False)),
    )  # fmt: skip


@dataclass
class Machine:
    """Where and what. Sizes in GB are 1e9 bytes; speeds are per GPU."""

    model: str = "7B"  # a size of Qwen2.5 (0.5B 1.5B 3B 7B 14B 32B 72B) or a model folder
    gpus: int = 8
    generation_gpus: int = 0  # 0: colocated, every GPU trains and generates in turn
    node: int = 8  # GPUs per node
    memory_gb: float = 80.0
    tflops: float = 989.0  # bfloat16 peak
    mfu: float = 0.35  # share of it that training reaches
    memory_bandwidth: float = 3350.0  # GB/s
    bandwidth_use: float = 0.6  # share of it that decoding reaches
    link: float = 300.0  # GB/s between GPUs of a node, one direction
    network: float = 45.0  # GB/s between nodes, per GPU
    prompts: int = 32  # per step
    samples: int = 8  # per prompt
    prompt_tokens: int = 256  # mean
    completion_tokens: int = 512  # mean
    longest: int = 1024  # completion tokens of the longest: a synchronous step waits for it
    micro_batch_tokens: int = 16384
    checkpointing: bool = True  # activations are computed again in the backward pass
    reference: bool = False  # a reference model for the KL term
    utilization: float = 0.6  # of the engine's GPU
    tensor_parallel: int = 1  # GPUs per engine
    max_num_seqs: int = 256  # sequences an engine decodes at once
    measure: bool = False  # compare with this machine instead: parameters, peak memory of a training step, refit over gloo


def training_bytes(shape: Shape, shards: int, micro_batch_tokens: int, checkpointing: bool, reference: bool = False, compute: int = 2) -> dict[str, float]:
    """Bytes per training device, by what they are for. compute: bytes of the computation's numbers (2 bfloat16, 4 float32)."""
    p, tokens = shape.parameters, micro_batch_tokens
    # kept for the backward pass per token and layer: inputs of both norms, normed inputs, q, k, v, attention's output, gate, up and their product
    inside = 4 * shape.hidden + (2 * shape.heads + 2 * shape.kv_heads) * shape.head + 4 * shape.intermediate
    kept = shape.hidden * shape.layers + inside if checkpointing else inside * shape.layers
    casts = 0 if compute == 4 else 2  # bfloat16 copies of float32 masters
    gathered = p if shards == 1 else 2 * shape.layer + shape.embedding * (1 if shape.tied else 2)
    return {
        "master weights": 4 * p / shards,
        "gradients": 4 * p / shards,
        "optimizer": 8 * p / shards,
        "gathered or cast": casts * gathered,
        "activations": compute * kept * tokens,
        "head": 3 * 4 * 2**24 + 4 * shape.embedding,  # logits of one chunk, and the head's gradient in float32
        "reference": 4 * p / shards if reference else 0.0,
    }


def engine_bytes(shape: Shape, m: Machine) -> dict[str, float]:
    """Bytes per generating device: weights, and what is left of its share for keys and values."""
    weights = 2 * shape.parameters / m.tensor_parallel
    return {"engine weights": weights, "keys and values": m.utilization * m.memory_gb * GB - weights - 2 * GB}


def training_flops(shape: Shape, groups: int, samples: int, prompt: int, completion: int, checkpointing: bool) -> float:
    """Of one optimizer step, prompts computed once per group: matrix products of all tokens, attention, and the head on sampled tokens."""
    tokens = groups * (prompt + samples * completion)
    matrices = 2 * shape.layers * shape.layer * tokens
    pairs = groups * (prompt**2 / 2 + samples * (completion * prompt + completion**2 / 2))  # (query, key) pairs
    attention = 4 * shape.layers * shape.heads * shape.head * pairs
    head = 2 * shape.embedding * groups * samples * completion
    passes = 4 if checkpointing else 3  # forward, backward twice its cost; with checkpointing forward once more
    return passes * (matrices + attention) + 4 * head  # the head always computes its logits again


def decode_seconds(shape: Shape, m: Machine, sequences: int) -> tuple[float, int]:
    """Seconds that one engine takes for so many completions of one step, and how many run at once."""
    mean = m.prompt_tokens + m.completion_tokens / 2
    room = engine_bytes(shape, m)["keys and values"] * m.tensor_parallel
    running = int(min(sequences, m.max_num_seqs, max(0.0, room) // (shape.cache * (m.prompt_tokens + m.completion_tokens))))
    if running < 1:
        return math.inf, 0
    speed = m.memory_bandwidth * GB * m.bandwidth_use * m.tensor_parallel
    step = (2 * shape.parameters + running * mean * shape.cache) / speed
    compute = 2 * shape.parameters * running / (m.tflops * 1e12 * m.mfu * m.tensor_parallel)  # many sequences: arithmetic bounds it
    step = max(step, compute)
    work = sequences * m.completion_tokens / running * step
    tail = (m.longest - m.completion_tokens) * 2 * shape.parameters / speed  # the last sequences run almost alone
    prefill = 2 * shape.parameters * sequences / m.samples * m.prompt_tokens / (m.tflops * 1e12 * m.mfu * m.tensor_parallel)
    return work + tail + prefill, running


def refit_seconds(shape: Shape, m: Machine, training: int) -> dict[str, float]:
    """Seconds to gather the shards and to send the weights. Colocated: copies on the device; else a broadcast from one trainer."""
    wire = 2 * shape.parameters
    gather = wire * (training - 1) / training / ((m.link if training <= m.node else m.network) * GB)
    if not m.generation_gpus:
        return {"gather": gather, "send": 3 * 2 * wire / (m.memory_bandwidth * GB)}  # into the bucket, out of it, into the engine's layout
    road = m.link if m.gpus <= m.node else m.network
    return {"gather": gather, "send": wire / (road * GB)}


def plan(m: Machine) -> dict[str, object]:
    """Everything for one machine; seconds are of one step."""
    shape = shape_of(m.model)
    training = m.gpus - m.generation_gpus
    generating = m.generation_gpus or m.gpus
    if training < 1 or generating % m.tensor_parallel:
        sys.exit(f"error: {training} GPUs train, {generating} generate with --tensor-parallel {m.tensor_parallel}: does not fit --gpus {m.gpus}")
    memory = training_bytes(shape, training, m.micro_batch_tokens, m.checkpointing, m.reference)
    engine = engine_bytes(shape, m)
    state = sum(v for k, v in memory.items() if k in ("master weights", "gradients", "optimizer", "reference"))
    peak_training, peak_engine = sum(memory.values()), m.utilization * m.memory_gb * GB
    refit_peak = memory["master weights"] + engine["engine weights"] + 2 * max(GB, 2 * shape.largest) if not m.generation_gpus else 0.0
    flops = training_flops(shape, m.prompts, m.samples, m.prompt_tokens, m.completion_tokens, m.checkpointing)
    train = flops / (training * m.tflops * 1e12 * m.mfu)
    engines = generating // m.tensor_parallel
    generate, running = decode_seconds(shape, m, math.ceil(m.prompts * m.samples / engines))
    refit = refit_seconds(shape, m, training)
    sampled = m.prompts * m.samples * m.completion_tokens
    in_turn = generate + train + sum(refit.values())
    fits = max(peak_training, refit_peak) < 0.95 * m.memory_gb * GB and engine["keys and values"] > 0
    return {
        "parameters": shape.parameters,
        "placement": f"{training} train, {generating} generate" if m.generation_gpus else f"{m.gpus} train and generate in turn",
        "training memory GB": {k: round(v / GB, 2) for k, v in memory.items()} | {"sum": round(peak_training / GB, 2)},
        "engine memory GB": {k: round(v / GB, 2) for k, v in engine.items()} | {"sum": round(peak_engine / GB, 2)},
        "refit peak GB": round(refit_peak / GB, 2),
        "host memory GB per node": round(state * min(m.node, m.gpus) / GB, 1) if not m.generation_gpus else 0.0,
        "fits": fits,
        "sequences at once per engine": running,
        "generation seconds": round(generate, 2),
        "training seconds": round(train, 2),
        "refit seconds": {k: round(v, 3) for k, v in refit.items()},
        "tokens per second, generation alone": round(sampled / generate) if generate else 0,
        "tokens per second, training alone": round(sampled / train),
        "tokens per second, in turn": round(sampled / in_turn) if math.isfinite(in_turn) else 0,
        "tokens per second, overlapped": round(sampled / (max(generate, train) + refit["send"])) if m.generation_gpus and math.isfinite(generate) else 0,
        "bound by": "generation" if generate > train else "training",
    }


# ------------------------------------------------------------------------------------------------ against this machine


def resident() -> float:
    """Bytes of memory this process holds now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096.0


def peak_resident() -> float:
    """Bytes it held at most since reset_peak()."""
    with open("/proc/self/status") as file:
        return next(float(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def measure(model: str, tokens: int = 512) -> dict[str, float]:
    """One training step in float32 on CPU, and one refit over gloo to a receiver in a thread: what the formulas say, and what was seen."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    import threading

    import torch

    import policy as policies
    from refit import Weights, free_port
    from rollout import Rollout

    shape, device = shape_of(model), torch.device("cpu")
    before = resident()
    policy = policies.load_policy(model, policies.PolicyConfig(), 1.0, device)
    optimizer = policies.make_optimizer(policy, policies.OptimConfig())
    rollouts = [Rollout(0, s, [5] * (tokens // 4), [7] * (tokens // 4), [True] * (tokens // 4), [0.0] * (tokens // 4), [0] * (tokens // 4)) for s in range(3)]

    def step() -> None:
        (batch,) = policies.pack(rollouts, tokens)
        policy(batch)[0].sum().backward()
        policies.optimizer_step(policy, optimizer, 1e-6, 1.0)

    step()  # the optimizer's state is made by the first step
    reset_peak()
    began = time.perf_counter()
    step()
    seconds = time.perf_counter() - began
    used = peak_resident() - before
    expected = training_bytes(shape, 1, tokens, checkpointing=False, compute=4)
    flops = training_flops(shape, 1, 3, tokens // 4, tokens // 4, checkpointing=False)

    import gloo_transfer

    weights, port = Weights(policy, torch.float32), free_port()
    group: list[object] = []
    receiver = threading.Thread(target=lambda: group.append(gloo_transfer.join("127.0.0.1", port, 1, 2, 60.0)))
    receiver.start()
    sender = gloo_transfer.join("127.0.0.1", port, 0, 2, 60.0)
    receiver.join()
    shapes = list(weights.shapes().values())

    def receive() -> None:
        for size in shapes:
            gloo_transfer.broadcast(group[0], torch.empty(size))

    receiver = threading.Thread(target=receive)
    receiver.start()
    began = time.perf_counter()
    for _, tensor in weights:
        gloo_transfer.broadcast(sender, tensor.contiguous())
    receiver.join()
    refit = time.perf_counter() - began
    return {
        "parameters by formula": shape.parameters,
        "parameters counted": sum(p.numel() for p in policy.parameters()),
        "training GB by formula": round(sum(expected.values()) / GB, 2),
        "training GB measured": round(used / GB, 2),
        "training GFLOP/s": round(flops / seconds / 1e9, 1),
        "refit GB on the wire": round(4 * shape.parameters / GB, 2),
        "refit seconds measured": round(refit, 2),
        "refit GB/s": round(4 * shape.parameters / GB / refit, 2),
    }


def main(arguments: list[str]) -> None:
    import tyro

    machine = tyro.cli(Machine, args=arguments, description=__doc__)
    found = measure(machine.model) if machine.measure else plan(machine)
    for name, value in found.items():
        print(f"{name:<38}{'  '.join(f'{k} {v}' for k, v in value.items()) if isinstance(value, dict) else value}")
    print(json.dumps({"machine": dataclasses.asdict(machine), **found}))


if __name__ == "__main__":
    main(sys.argv[1:])
