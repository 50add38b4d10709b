"""The tensors of a checkpoint as safetensors files, written by any number of processes and read by any other.

    plan        which process writes which tensors into which file: stretches of the model of equal size, layers whole
    snapshot    each file's tensors are gathered whole by the one process that writes them: nobody ever holds the model
    load        files hold whole tensors by name, so whoever reads, sharded or not, takes the part it needs

Nothing here is pickled: torch's distributed checkpoints pickle their metadata and what is no tensor, and loading a pickle runs code.
"""

import copy
import hashlib
import json
import os
import random
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

import ranks
from ranks import Ranks
from task import UserError

Entry = dict[str, Any]  # of a file: size, sha256, and for tensors their names
Files = dict[str, Entry]  # by name within the checkpoint
Work = Callable[[Path], Files]  # writes some files into the folder it is given

# ------------------------------------------------------------------------------------------------ processes and files


def here() -> Ranks:
    """The trainer processes, as this one joined them."""
    return ranks.joined or Ranks()


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_bytes(path: Path, pieces: Iterable[Any], **more: Any) -> Entry:
    """A file through to the disk, and what the manifest says of it. Writing and hashing let other threads run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    size, sha = 0, hashlib.sha256()
    with path.open("wb") as file:
        for piece in pieces:
            file.write(piece)
            sha.update(piece)
            size += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return {"size": size, "sha256": sha.hexdigest(), **more}


def write_json(path: Path, value: Any) -> Entry:
    return write_bytes(path, [json.dumps(value, indent=1).encode()])


# ------------------------------------------------------------------------------------------------ tensors

FILE_BYTES = 4 * 2**30  # of float32 weights in one file; also what a save gathers at once
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip


def plan(sizes: Mapping[str, int], count: int, limit: int = FILE_BYTES) -> list[list[list[str]]]:
    """Which tensors each rank writes, file by file: stretches of the model of equal size, layers whole.

    >>> plan({"embed": 4, "layers.0.a": 2, "layers.0.b": 2, "layers.1.a": 4, "norm": 1}, count=2, limit=6)
    [[['embed'], ['layers.0.a', 'layers.0.b']], [['layers.1.a', 'norm']]]
    """
    units: dict[str, list[str]] = {}
    for name in sizes:
        layer = re.match(r".*?\.\d+\.", name)
        units.setdefault(layer[0] if layer else name, []).append(name)
    files: list[list[list[str]]] = [[] for _ in range(count)]
    room, before, total = 0, 0, max(1, sum(sizes.values()))
    for names in units.values():
        size = sum(sizes[n] for n in names)
        own = files[min(count - 1, (before + size // 2) * count // total)]
        if not own or size > room:
            own.append([])
            room = limit
        own[-1] += names
        room -= size
        before += size
    return files


def whole(tensor: Tensor, mine: bool, copied: bool) -> Tensor | None:
    """The whole of a tensor on the CPU where it is `mine`. Collective for a sharded tensor; one that is not is taken as it is."""
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().to("cpu", copy=copied) if mine else None


def write_tensors(path: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> Entry:
    """A safetensors file, tensor by tensor, floating point in `dtype`. Unlike the library's own writer it lets training run meanwhile."""

    def stored(tensor: Tensor) -> torch.dtype:
        return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype

    order = sorted(tensors, key=lambda name: (-stored(tensors[name]).itemsize, name))  # wide types first keeps all of them aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        begin, end = end, end + tensors[name].numel() * stored(tensors[name]).itemsize
        header[name] = {"dtype": DTYPES[stored(tensors[name])], "shape": list(tensors[name].shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    def pieces() -> Iterator[Any]:
        yield len(text).to_bytes(8, "little") + text
        for name in order:
            data = tensors[name].to(stored(tensors[name])).contiguous()
            yield data.reshape(-1).view(torch.uint8).numpy().data

    return write_bytes(path, pieces(), tensors=order, bytes=end)


def snapshot(model: Any, optimizer: torch.optim.Optimizer, names: Mapping[Any, str], dtype: torch.dtype, copied: bool) -> Iterator[Work]:
    """Model and optimizer, file by file. Each step gathers one file of every rank (collective); the work it yields writes this rank's own.

    Args:
        names: of the parameters, as the optimizer's state is filed.
        dtype: of the weights in model/; in another than float32, float32 ones go to master/.
        copied: tensors are copied, because training goes on before they are written.
    """
    saved = set(model.state_dict())  # parameters and persistent buffers; a tied head is the embedding and appears once
    tensors = {n: t for n, t in [*model.named_parameters(), *model.named_buffers()] if n in saved}
    states = {name: optimizer.state[p] for p, name in names.items() if p in optimizer.state}
    files = plan({name: 4 * t.numel() for name, t in tensors.items()}, here().size)
    count = sum(len(own) for own in files)
    for turn in range(max(len(own) for own in files)):
        for owner, own in enumerate(files):
            if turn >= len(own):
                continue
            mine = owner == here().rank
            weights = {clean(n): whole(tensors[n], mine, copied) for n in own[turn]}
            moments = {f"{n}/{key}": whole(value, mine, copied) for n in map(clean, own[turn]) for key, value in states.get(n, {}).items()}
            number = sum(len(f) for f in files[:owner]) + turn + 1
            suffix = f"-{number:05}-of-{count:05}" if count > 1 else ""
            if mine:
                work = _writer(model, weights, moments, dtype, suffix)
        if turn < len(files[here().rank]):
            yield work
        else:
            yield lambda folder: {}


def _writer(model: Any, weights: dict[str, Any], moments: dict[str, Any], dtype: torch.dtype, suffix: str) -> Work:
    from transformers.core_model_loading import revert_weight_conversion

    def write(folder: Path) -> Files:
        published = revert_weight_conversion(model, weights)  # names and shapes as the hub has them, where transformers changes them
        files = {f"model/model{suffix}.safetensors": write_tensors(folder / f"model/model{suffix}.safetensors", published, dtype)}
        if dtype != torch.float32:
            files[f"master/model{suffix}.safetensors"] = write_tensors(folder / f"master/model{suffix}.safetensors", published)
        files[f"optimizer{suffix}.safetensors"] = write_tensors(folder / f"optimizer{suffix}.safetensors", moments)
        return files

    return write


def clean(name: str) -> str:
    """A parameter's name without what wrappers put into it."""
    return re.sub(r"(?<![^.])(module|_orig_mod|_checkpoint_wrapped_module)\.", "", name)


def load_optimizer(optimizer: torch.optim.Optimizer, names: Mapping[Any, str], folder: Path, without: Sequence[str] = ()) -> None:
    """Restore the optimizer's state of each parameter, its own part where the parameter is sharded.

    Args:
        names: of the parameters. without: those that had no state when it was saved.

    Raises:
        UserError: the files are missing, or hold the state of other parameters.
    """
    files = [safe_open(path, "pt") for path in sorted(folder.glob("optimizer*.safetensors"))]
    where = {key: file for file in files for key in file.keys()}  # noqa: SIM118  (it is no mapping)
    stored = {key.rpartition("/")[0] for key in where} | set(without)
    expected = {clean(name) for name in names.values()}
    if stored != expected:
        raise UserError(f"{folder}: the optimizer's state is of other parameters: {sorted(stored ^ expected)[:4]} ...")
    keys: dict[str, list[str]] = {}
    for key in where:
        keys.setdefault(key.rpartition("/")[0], []).append(key)
    for parameter, name in names.items():
        found = keys.get(clean(name), [])
        if found:
            optimizer.state[parameter] = {key.rpartition("/")[2]: part_of(where[key].get_slice(key), parameter) for key in found}


def part_of(stored: Any, like: Tensor) -> Tensor:
    """A stored tensor, placed as `like` is: its own part alone is read. A scalar (the step counter) stays on the CPU."""
    shape = stored.get_shape()
    if not shape:
        return stored[...]
    if not hasattr(like, "placements"):
        return stored[:].to(like.device)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    part = torch.zeros_like(like.detach())
    sizes, offsets = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    if 0 not in sizes:
        part.to_local().copy_(stored[tuple(slice(o, o + n) for o, n in zip(offsets, sizes))])
    return part


def side_files(model: Any, tokenizer: Any, dtype: torch.dtype) -> dict[str, bytes]:
    """What stands beside the weights: config, generation config, tokenizer, chat template. They do not change during a run."""
    config = copy.deepcopy(model.config)
    config._attn_implementation_internal = None  # ours is no attention that another program knows
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.dtype = str(dtype).removeprefix("torch.")
    with tempfile.TemporaryDirectory() as made:
        config.save_pretrained(made)
        if model.can_generate():
            model.generation_config.save_pretrained(made)
        tokenizer.save_pretrained(made)
        return {str(p.relative_to(made)): p.read_bytes() for p in Path(made).rglob("*") if p.is_file()}


def random_state() -> dict[str, Any]:
    """The random state of Python, numpy and torch as JSON."""
    kind, keys, *rest = np.random.get_state()
    state = {"python": random.getstate(), "numpy": [kind, keys.tolist(), *rest], "torch": torch.get_rng_state().numpy().tobytes().hex()}
    return state | ({"cuda": torch.cuda.get_rng_state().numpy().tobytes().hex()} if torch.cuda.is_available() else {})


def restore_random_state(state: dict[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch"]), dtype=torch.uint8))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray.fromhex(state["cuda"]), dtype=torch.uint8))
