"""What we rest on in vLLM: its classes, fields and routes, looked at on CPU, so that a change is seen before a GPU is."""

import ast
import dataclasses
import inspect
from pathlib import Path

import pytest
import tiny
import torch

vllm = pytest.importorskip("vllm")

from vllm.distributed.weight_transfer import (  # noqa: E402
    HTTPVLLMWeightSyncClient,
    ParamMeta,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.base import TrainerWeightTransferEngine, WeightTransferEngine  # noqa: E402
from vllm.distributed.weight_transfer.ipc_engine import (  # noqa: E402
    IPCTrainerInitInfo,
    IPCTrainerWeightTransferEngine,
    IPCWeightTransferEngine,
    IPCWeightTransferInitInfo,
    IPCWeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.nccl_engine import (  # noqa: E402
    NCCLTrainerInitInfo,
    NCCLTrainerWeightTransferEngine,
    NCCLWeightTransferEngine,
    NCCLWeightTransferInitInfo,
)

import gloo_transfer  # noqa: E402
from policy import Policy  # noqa: E402
from refit import EngineClient, Weights, trainer_info  # noqa: E402

FOLDER = Path(vllm.__file__).parent


@pytest.fixture(scope="module")
def weights():
    return Weights(Policy(tiny.llama()), torch.bfloat16, buffer_bytes=1000)


def client(*sizes):
    made = EngineClient([f"http://127.0.0.1:{9000 + i}" for i in range(len(sizes))], 1.0)
    made.world_sizes = list(sizes)
    return made


def test_the_nccl_trainer_joins_with_every_worker_of_every_engine_and_one_buffer(weights):
    info = trainer_info("nccl", 0, client(2, 1), weights, 1.0)
    assert isinstance(info, NCCLTrainerInitInfo) and info.backend == "nccl" and info.is_sender
    assert (info.world_size, info.packed, info.packed_num_buffers) == (4, True, 1)
    assert info.packed_buffer_size_bytes == weights.largest() > 1000  # no tensor is larger than the buffer
    assert info.master_address == "127.0.0.1" and 0 < info.master_port < 65536


def test_the_ipc_trainer_sends_in_buckets_that_hold_the_largest_tensor(weights):
    info = trainer_info("ipc", 1, client(1), weights, 1.0)
    assert isinstance(info, IPCTrainerInitInfo) and info.backend == "ipc" and not info.is_sender
    assert info.packed and info.packed_buffer_size_bytes == weights.largest()
    wide = Weights(weights.policy, torch.bfloat16, buffer_bytes=2**30)
    assert trainer_info("ipc", 0, client(1), wide, 1.0).packed_buffer_size_bytes == 2**30


def test_the_fields_that_are_rewritten_or_pickled_on_the_way_exist():
    assert "rank_offset" in {f.name for f in dataclasses.fields(NCCLWeightTransferInitInfo)}
    NCCLWeightTransferInitInfo(master_address="a", master_port=1, rank_offset=3, world_size=4, packed=True, packed_num_buffers=1)
    assert {f.name for f in dataclasses.fields(IPCWeightTransferInitInfo)} == {"packed"}
    assert {"ipc_handles", "ipc_handles_pickled", "tensor_sizes"} <= {f.name for f in dataclasses.fields(IPCWeightTransferUpdateInfo)}


def test_handles_arrive_as_vllm_unpickles_them(monkeypatch):
    posted = []
    sender = client(1)
    sender.call = lambda method, route, body: posted.append(body)
    handles = {"GPU-1": (1, b"bytes", None)}
    sender.update_weights({"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[1]], "tensor_sizes": [2], "ipc_handles": handles})
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    assert IPCWeightTransferUpdateInfo(**posted[0]["update_info"]).ipc_handles == handles
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "0")
    with pytest.raises(ValueError, match="Refusing to deserialize"):
        IPCWeightTransferUpdateInfo(**posted[0]["update_info"])


def test_our_client_is_a_client_of_vllms_and_has_the_methods_of_its_own():
    assert isinstance(client(1), VLLMWeightSyncClient)
    for name in ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"):
        theirs, ours = (inspect.signature(getattr(cls, name)).parameters for cls in (HTTPVLLMWeightSyncClient, EngineClient))
        assert list(theirs) == list(ours), name


def test_our_weights_are_a_source_as_vllm_reads_it(weights):
    assert WeightSource.__abstractmethods__ == {"metadata", "__iter__"}
    meta = weights.metadata()
    assert all(isinstance(m, ParamMeta) for m in meta)
    sent = NCCLTrainerWeightTransferEngine._checked_iter(weights, meta)  # vLLM's own comparison of iteration and announcement
    assert [name for name, _ in sent] == [m.name for m in meta]


@pytest.mark.parametrize(
    "name, worker, trainer",
    [
        ("nccl", NCCLWeightTransferEngine, NCCLTrainerWeightTransferEngine),
        ("ipc", IPCWeightTransferEngine, IPCTrainerWeightTransferEngine),
        ("gloo", gloo_transfer.GlooEngine, gloo_transfer.GlooTrainerEngine),
    ],
)
def test_both_factories_know_every_backend(name, worker, trainer):
    assert WeightTransferEngineFactory._registry[name]() is worker
    assert WeightTransferTrainerFactory._registry[name]() is trainer
    assert list(inspect.signature(WeightTransferTrainerFactory.trainer_init).parameters) == ["init_info", "client", "source"]
    assert list(inspect.signature(trainer.trainer_init).parameters) == ["init_info", "client", "source"]
    assert list(inspect.signature(trainer.send_weights).parameters) == ["self"]


def test_the_gloo_engine_overrides_what_vllm_calls():
    assert not gloo_transfer.GlooEngine.__abstractmethods__ and not gloo_transfer.GlooTrainerEngine.__abstractmethods__
    assert WeightTransferEngine.__abstractmethods__ <= set(dir(gloo_transfer.GlooEngine))
    for name in WeightTransferEngine.__abstractmethods__:
        theirs, ours = (list(inspect.signature(getattr(cls, name)).parameters) for cls in (WeightTransferEngine, gloo_transfer.GlooEngine))
        assert len(theirs) == len(ours), name
    assert TrainerWeightTransferEngine.__abstractmethods__ == {"trainer_init", "send_weights"}


def routes(file):
    """(method, path, parameter names) of a FastAPI router's file."""
    found = {}
    for node in ast.walk(ast.parse((FOLDER / file).read_text())):
        if isinstance(node, ast.AsyncFunctionDef):
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Call) and getattr(decorator.func, "attr", "") in ("get", "post"):
                    found[decorator.func.attr, decorator.args[0].value] = {a.arg for a in node.args.args}
    return found


def test_the_control_routes_we_call_exist_with_their_parameters():
    rl = routes("entrypoints/rl/online/api_router.py")
    assert {"mode", "clear_cache"} <= rl["post", "/pause"]
    assert "new_version" in rl["post", "/update_weight_version"]
    assert "init_info" in rl["post", "/init_weight_transfer_engine"] and "update_info" in rl["post", "/update_weights"]
    assert {
        ("post", "/resume"),
        ("post", "/start_weight_update"),
        ("post", "/finish_weight_update"),
        ("get", "/weight_info"),
        ("get", "/get_world_size"),
    } <= rl.keys()
    sleep = routes("entrypoints/serve/dev/sleep/api_router.py")
    assert {"level", "mode"} <= sleep["post", "/sleep"] and ("post", "/wake_up") in sleep
    assert "config_format" in routes("entrypoints/serve/dev/server_info/api_router.py")["get", "/server_info"]


def test_sleep_and_wake_use_the_tags_and_words_we_send():
    text = (FOLDER / "entrypoints/serve/dev/sleep/api_router.py").read_text()
    assert '"awake" if fully_awake else "sleeping"' in text
    worker = (FOLDER / "v1/worker/gpu_worker.py").read_text()
    assert '"weights"' in worker and '"kv_cache"' in worker


def test_the_server_knows_every_flag_it_is_started_with():
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from cluster import ClusterConfig, EngineConfig, engine_command, make_plan

    parser = make_arg_parser(FlexibleArgumentParser())
    for made in (make_plan("vllm", 8, 8, True), make_plan("vllm", 8, 6, True, ClusterConfig(generation_devices=2)), make_plan("vllm", 0, 1, True)):
        command = engine_command("m", 1, made, EngineConfig(quantization="fp8"), 64, "bfloat16", "gloo_transfer.WorkerExtension")
        parsed = parser.parse_args(command[3:])
        assert parsed.weight_transfer_config.backend == made.backend
        assert parsed.enable_sleep_mode == (made.placement == "colocated")
    assert AsyncEngineArgs.enable_sleep_mode is False
