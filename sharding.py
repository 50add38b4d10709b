"""A policy in shards (FSDP2): wrapped, loaded slice by slice, gathered whole, and moved out of the way while an engine generates.

    load     model on the meta device -> fully_shard each decoder layer and the wrapper around all -> every rank reads its own slices
    train    parameters are gathered layer by layer in the compute dtype; gradients are reduced to shards in float32, averaged over ranks
    gather   whole tensors on every rank, in bounded buckets: for the engine, for a checkpoint
    host     storages copied to (pinned) CPU memory and emptied in place, so that every view of them stays what it was

Nothing but layers and the wrapper is a group of its own: the tied head is used inside the wrapper's forward, with the embedding's shard.
"""

import copy
import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from ranks import Ranks
from task import UserError


def on_meta(config: Any) -> Any:
    """The transformers model without memory: shapes, names, configuration."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def decoder_layers(model: Any) -> nn.ModuleList:
    """The list of decoder layers. Raises UserError for a model that keeps them elsewhere."""
    layers = getattr(model.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise UserError(f"{type(model).__name__} has no list of decoder layers to shard: use --policy.no-shard")
    return layers


def shard(policy: Any, ranks: Ranks, compute_dtype: torch.dtype, offload: bool) -> None:
    """fully_shard on each decoder layer and on the wrapper. Float32 shards; gathered parameters in the compute dtype.

    Args:
        offload: parameters, gradients and optimizer state live on the CPU, layers visit the device.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    low = None if compute_dtype == torch.float32 else compute_dtype
    settings: dict[str, Any] = dict(
        mesh=init_device_mesh(ranks.device.type, (ranks.size,)),
        mp_policy=MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32, cast_forward_inputs=False),
        offload_policy=CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda") if offload else OffloadPolicy(),
    )
    for layer in decoder_layers(policy.model):
        fully_shard(layer, **settings)
    fully_shard(policy, **settings)


def settle(policy: nn.Module) -> None:
    """After a forward pass without a backward the wrapper's own parameters (embedding, head) are still whole: back to shards."""
    if isinstance(policy, FSDPModule):
        policy.reshard()


def load_shards(policy: Any, path: str, ranks: Ranks, offload: bool) -> None:
    """Fill a sharded model on the meta device from a model folder: each rank reads its own rows of every tensor, no more.

    A model that transformers stores under other names than its parameters' is loaded whole by rank 0 and scattered, tensor by tensor.
    """
    model, home = policy.model, torch.device("cpu") if offload else ranks.device
    stored = stored_tensors(path)
    parameters = dict(model.named_parameters())
    whole: dict[str, Tensor] | None = None
    if not set(parameters) <= set(stored):
        from transformers import AutoModelForCausalLM

        whole = dict(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).named_parameters()) if ranks.is_main else {}
    filled: dict[int, nn.Parameter] = {}
    for name, parameter in parameters.items():
        assert isinstance(parameter, DTensor)
        if whole is not None:
            source = whole[name].detach().to(ranks.device) if ranks.is_main else torch.empty(parameter.shape, device=ranks.device)
            value = distribute_tensor(source, parameter.device_mesh, parameter.placements).to(home)
        else:
            rows = -(-parameter.shape[0] // ranks.size)  # torch.chunk's rule, which fully_shard follows
            begin, count = min(ranks.rank * rows, parameter.shape[0]), parameter.to_local().shape[0]
            local = read_rows(stored[name], name, begin, begin + count) if count else torch.empty(parameter.to_local().shape)
            if tuple(local.shape) != tuple(parameter.to_local().shape):
                raise UserError(f"--model {path}: {name} has shape {tuple(local.shape)}, the model expects {tuple(parameter.to_local().shape)}")
            local = local.to(home, torch.float32, copy=True)  # on a CPU too: what was read is a view of the file
            value = DTensor.from_local(local, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride(), run_check=False)
        filled[id(parameter)] = nn.Parameter(value)
    tied = {name: filled[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}  # one object where two names share weights
    model.load_state_dict(tied, strict=False, assign=True)
    fill_buffers(model, stored, ranks.device)
    left = [name for name, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta]
    if left:
        raise UserError(f"--model {path}: nothing was loaded for {', '.join(left[:4])}: use --policy.no-shard")


def stored_tensors(path: str) -> dict[str, Path]:
    """Tensor name -> safetensors file that holds it; a hub model is downloaded."""
    from safetensors import safe_open

    folder = Path(path)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(path, allow_patterns=["*.safetensors", "*.json"]))
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    if not (folder / "model.safetensors").exists():
        return {}
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: folder / "model.safetensors" for name in file.keys()}  # noqa: SIM118


def read_rows(path: Path, name: str, begin: int, end: int) -> Tensor:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        rows: Tensor = file.get_slice(name)[begin:end]
        return rows


def fill_buffers(model: Any, stored: dict[str, Path], device: torch.device) -> None:
    """Buffers are read where the folder has them; the others (rotary frequencies) are computed again by transformers' own initialiser."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            key = f"{prefix}.{name}".strip(".")
            made = read_rows(stored[key], key, 0, buffer.shape[0]) if key in stored else torch.full_like(buffer, torch.nan, device=device)
            module._buffers[name] = made.to(device, buffer.dtype)
        if any(b.is_floating_point() and b.isnan().any() for b in module.buffers(recurse=False)):
            with torch.no_grad():
                model._init_weights(module)
        if any(b.is_floating_point() and b.isnan().any() for b in module.buffers(recurse=False)):
            raise UserError(f"{type(module).__name__} has a buffer that cannot be computed again: use --policy.no-shard")


# ------------------------------------------------------------------------------------------------ gathered whole


def whole(tensor: Tensor) -> Tensor:
    """The full tensor, on every rank; a collective where it is sharded."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def refuse_mixture(model: nn.Module) -> None:
    """Ranks would gather different tensors, or none: raises RuntimeError."""
    if len({isinstance(p, DTensor) for p in model.parameters()}) > 1:
        raise RuntimeError("some parameters are shards and some are whole: a forward pass was not followed by backward or settle")


def whole_parameters(model: nn.Module, dtype: torch.dtype, bucket_bytes: int = 2**30) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor in `dtype`) of every parameter, tied ones once. All ranks iterate alike.

    Shards are cast before they are gathered (half the traffic in bfloat16), and a bucket is gathered completely before its tensors are
    handed out: whoever sends them on never has a gather in flight.
    """
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    refuse_mixture(model)
    for name, parameter in model.named_parameters():
        bucket.append((name, whole(parameter.detach().to(dtype))))
        size += parameter.numel() * dtype.itemsize
        if size >= bucket_bytes:
            yield from bucket
            bucket, size = [], 0
    yield from bucket


def shard_like(value: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of a whole tensor that every rank has, placed as the parameter is. No communication."""
    if not isinstance(parameter, DTensor):
        return value.to(parameter.device)
    return distribute_tensor(value.to(parameter.to_local().device), parameter.device_mesh, parameter.placements, src_data_rank=None)


class WholeCopy:
    """A whole copy of a sharded policy on every rank, for HFEngine to sample from: sampling token by token cannot gather layer by layer,
    since ranks sample different numbers of tokens. It costs a full float32 model per rank, so it is for small ones.

    Called like cluster.Refit, once before each generation phase whose weights are new; a collective."""

    asleep = False

    def __init__(self, policy: Any, device: torch.device):
        from transformers import AutoModelForCausalLM

        self.policy = policy
        config = copy.deepcopy(policy.model.config)  # the trainer's own would be told to attend as this copy does
        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").to(device).eval()

    @torch.no_grad()
    def __call__(self, version: int) -> None:
        mine = dict(self.model.named_parameters())
        for name, tensor in whole_parameters(self.policy.model, torch.float32):
            mine[name].copy_(tensor)

    def rest(self) -> None:
        """Training begins: a copy has nothing to give up."""


# ------------------------------------------------------------------------------------------------ out of the way


class HostMemory:
    """Moves tensors to CPU memory and back by their storages: copied to a pinned buffer, then emptied in place. Parameters, their views
    inside FSDP2, gradients and optimizer state stay the same objects. Buffers are kept, since pinning memory is slow.

    >>> host, x = HostMemory(), torch.ones(4)
    >>> host.take([x, x[2:]]), x.untyped_storage().size()
    (16, 0)
    >>> host.give_back(), x
    (16, tensor([1., 1., 1., 1.]))
    """

    def __init__(self) -> None:
        self.buffers: dict[int, Tensor] = {}  # by size and order of use: reused by the next phase
        self.out: list[tuple[torch.UntypedStorage, Tensor]] = []
        self.seconds = 0.0

    def take(self, tensors: Iterable[Tensor]) -> int:
        """Empty the tensors' storages on the device. Until give_back they must not be read. Returns the bytes moved."""
        start, moved = time.perf_counter(), 0
        known = {id_of(storage) for storage, _ in self.out}
        device = torch.device("cpu")
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storage = local.untyped_storage()
            if storage.size() == 0 or id_of(storage) in known:
                continue
            known.add(id_of(storage))
            place, device = len(self.out), local.device
            buffer = self.buffers.get(place)
            if buffer is None or len(buffer) != storage.size():
                buffer = self.buffers[place] = torch.empty(storage.size(), dtype=torch.uint8, pin_memory=local.is_cuda)
            flat = torch.empty(0, dtype=torch.uint8, device=local.device).set_(storage)
            buffer.copy_(flat, non_blocking=True)
            self.out.append((storage, buffer))
            moved += storage.size()
        if device.type == "cuda":
            torch.cuda.synchronize()
        for storage, _ in self.out:
            storage.resize_(0)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        self.seconds += time.perf_counter() - start
        return moved

    def give_back(self) -> int:
        """Fill every emptied storage again. Returns the bytes moved."""
        start, moved = time.perf_counter(), 0
        for storage, buffer in self.out:
            storage.resize_(len(buffer))
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).copy_(buffer, non_blocking=True)
            moved += len(buffer)
        if any(storage.device.type == "cuda" for storage, _ in self.out):
            torch.cuda.synchronize()
        self.out = []
        self.seconds += time.perf_counter() - start
        return moved


def id_of(storage: torch.UntypedStorage) -> int:
    return storage._cdata


def training_tensors(policy: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Parameters, gradients and optimizer state on a device."""
    parameters = list(policy.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    state = [value for moments in optimizer.state.values() for value in moments.values() if isinstance(value, Tensor)]
    return [*parameters, *gradients, *state]
