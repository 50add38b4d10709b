"""vLLM weight transfer over gloo: what its NCCL engine does, for engines that run on a CPU.

vLLM's worker imports this module (`--worker-extension-cls gloo_transfer.WorkerExtension`), which registers the backend "gloo" with
both of vLLM's factories. The trainer is rank 0 of a group of its own; the engine's workers are ranks 1...

After the last tensor the tied output head is packed again: vLLM's CPU backend keeps a packed copy of every linear weight, and its
layerwise reload forgets the head's, which would go on sampling with old weights. (vLLM 0.32)
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
from vllm.distributed.utils import stateless_init_torch_distributed_process_group
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    timeout: float  # seconds for joining, and for each tensor


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


@dataclass
class GlooTrainerInitInfo(TrainerInitInfo):
    backend: ClassVar[str] = "gloo"
    master_address: str
    master_port: int
    world_size: int  # 1 + workers of the engine
    timeout: float = 600.0


def join(address: str, port: int, rank: int, size: int, timeout: float) -> Any:
    # torchrun tells its processes that it keeps the store; of this group's, rank 0 does, and would wait for a store that nobody starts
    kept = os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    try:
        return stateless_init_torch_distributed_process_group(address, port, rank, size, "gloo", timeout=timedelta(seconds=timeout))
    finally:
        if kept is not None:
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = kept


def broadcast(group: Any, tensor: torch.Tensor) -> None:
    options = torch.distributed.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    group.broadcast([tensor], options).wait()


class GlooEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """The worker's side."""

    init_info_cls, update_info_cls = GlooInitInfo, GlooUpdateInfo
    group: Any = None

    def init_transfer_engine(self, info: GlooInitInfo) -> None:
        rank = self.parallel_config.data_parallel_index * self.parallel_config.world_size + self.parallel_config.rank + info.rank_offset
        self.group = join(info.master_address, info.master_port, rank, info.world_size, info.timeout)

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, info: GlooUpdateInfo) -> None:
        self.model.load_weights(self.receive(info))

    def receive(self, info: GlooUpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
        for name, dtype, shape in zip(info.names, info.dtype_names, info.shapes, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            broadcast(self.group, tensor)
            yield name, tensor

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        self.pack_head_again()

    def pack_head_again(self) -> None:
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        self.group = None


class GlooTrainerEngine(TrainerWeightTransferEngine[GlooTrainerInitInfo]):
    """The trainer's side. Every trainer rank iterates the source; rank 0 sends."""

    init_info_cls = GlooTrainerInitInfo
    group: Any = None

    @classmethod
    def trainer_init(cls, init_info: GlooTrainerInitInfo, *, client: Any, source: Any = None) -> "GlooTrainerEngine":
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        if engine.is_sender:
            where = (init_info.master_address, init_info.master_port)
            worker = GlooInitInfo(*where, rank_offset=1, world_size=init_info.world_size, timeout=init_info.timeout)
            with ThreadPoolExecutor(1) as pool:  # both sides must join at the same time
                joined = pool.submit(client.init_weight_transfer_engine, asdict(worker))
                engine.group = join(*where, 0, init_info.world_size, init_info.timeout)
                joined.result()
        return engine

    def send_weights(self) -> None:
        if not self.is_sender:
            for _ in self.source:
                pass
            return
        metadata = self.source.metadata()
        info = GlooUpdateInfo([m.name for m in metadata], [str(m.dtype).removeprefix("torch.") for m in metadata], [list(m.shape) for m in metadata])
        self.client.start_weight_update()
        pool = ThreadPoolExecutor(1)
        try:
            received = pool.submit(self.client.update_weights, asdict(info))
            for (name, tensor), expected in zip(self.source, metadata, strict=True):
                if (name, tensor.dtype, tuple(tensor.shape)) != (expected.name, expected.dtype, tuple(expected.shape)):
                    raise RuntimeError(f"sending {name} {tensor.dtype} {tuple(tensor.shape)}, announced {expected}")
                broadcast(self.group, tensor.contiguous())
            received.result()
        finally:
            pool.shutdown(wait=False)  # after a failure the other side may never answer
        self.client.finish_weight_update()


class WorkerExtension:
    """Nothing to add to the worker: naming this class makes it import this module."""


if "gloo" not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine("gloo", GlooEngine)
    WeightTransferTrainerFactory.register_engine("gloo", GlooTrainerEngine)
