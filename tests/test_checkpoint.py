"""Checkpoints are whole or absent, whatever dies, damaged ones are passed over, and the best and newest stay."""

import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

import checkpoint
import shards
from checkpoint import CheckpointConfig, best, kept
from task import UserError

ROOT = Path(__file__).resolve().parent.parent


def work(step, metrics=None):
    """What a small checkpoint holds."""

    def write(folder):
        files = {"model/weights.bin": shards.write_bytes(folder / "model/weights.bin", [b"w" * 1000])}
        files["optimizer.safetensors"] = shards.write_bytes(folder / "optimizer.safetensors", [b"o" * 1000])
        files["state.json"] = shards.write_json(folder / "state.json", {"step": step, "metrics": metrics or {}})
        return files

    return [write]


def save(root, step, metrics=None, **settings):
    config = CheckpointConfig(**{"keep": 0, **settings})
    checkpoint.save(root, step, work(step, metrics), lambda: checkpoint.prune(root, config))
    return root / f"step_{step}"


# ------------------------------------------------------------------------------------------------ whole or absent


def test_the_newest_are_kept_in_numeric_order(tmp_path):
    for step in (9, 10, 11, 100):
        save(tmp_path, step, keep=2)
    assert checkpoint.steps(tmp_path) == [11, 100]
    assert checkpoint.latest(tmp_path).name == "step_100"


def test_only_finished_checkpoints_count(tmp_path):
    save(tmp_path, 4)
    for name in ("step_5-hf", "tmp_step_6", "step_7"):
        (tmp_path / name).mkdir()
    assert checkpoint.latest(tmp_path).name == "step_4"
    assert (tmp_path / "step_5-hf").exists()  # not ours to remove


@pytest.mark.parametrize("damage", ["truncate", "flip", "delete", "manifest"])
def test_a_damaged_checkpoint_is_passed_over_with_its_name(tmp_path, damage):
    save(tmp_path, 4)
    weights = save(tmp_path, 5) / "model" / "weights.bin"
    if damage == "truncate":
        weights.write_bytes(b"w" * 10)
    if damage == "flip":
        weights.write_bytes(b"w" * 999 + b"x")
    if damage == "delete":
        weights.unlink()
    if damage == "manifest":
        (tmp_path / "step_5" / "manifest.json").write_text("{")
    with pytest.warns(UserWarning, match="step_5"):
        assert checkpoint.latest(tmp_path).name == "step_4"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["damaged_step_5", "step_4"]


def test_a_damaged_newest_checkpoint_does_not_take_the_place_of_those_saved_after_it(tmp_path):
    for step in (4, 5, 6):
        save(tmp_path, step)
    (tmp_path / "step_6" / "state.json").unlink()
    with pytest.warns(UserWarning, match="step_6"):
        checkpoint.latest(tmp_path)
    save(tmp_path, 5, keep=1)
    assert checkpoint.latest(tmp_path).name == "step_5"


class Killed(BaseException):
    """The process dies here: nothing after it runs."""


OPERATIONS = [(Path, "rename"), (Path, "mkdir"), (Path, "open"), (shutil, "rmtree"), (os, "fsync"), (os, "unlink")]


def kill_at(patch, k):
    """The k-th file operation of any kind, and every one after it, raises Killed instead."""
    count = 0

    def dying(real):
        def call(*arguments, **options):
            nonlocal count
            count += 1
            if count > k:
                raise Killed
            return real(*arguments, **options)

        return call

    for owner, name in OPERATIONS:
        patch.setattr(owner, name, dying(getattr(owner, name)))


@pytest.mark.parametrize("step", [1, 2], ids=["the same step again", "the next step"])
def test_a_crash_at_any_file_operation_of_a_save_leaves_a_whole_checkpoint_and_so_does_one_in_the_recovery_from_it(tmp_path, step):
    """keep=1. The second save is killed at its k-th operation, for every k; the search after it at its j-th, for a few j."""
    k = 0
    while k >= 0:
        for j in (0, 1, 2, 99):
            root = tmp_path / f"{k}-{j}"
            save(root, 1)
            done = True
            for call, at in ((lambda r=root: save(r, step, keep=1), k), (lambda r=root: checkpoint.latest(r), j)):
                with pytest.MonkeyPatch.context() as patch:
                    kill_at(patch, at)
                    try:
                        call()
                    except Killed:
                        done = False
            found = checkpoint.latest(root)
            assert found is not None and checkpoint.damage_of(found) == "", (k, j)
            assert {p.name for p in root.iterdir()} <= {"step_1", "step_2"}, (k, j)
        k = -1 if done else k + 1
    assert checkpoint.latest(root).name == f"step_{step}"


FULL_DISK = """
import resource, signal, sys, pathlib
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/tests"]
import torch, checkpoint, shards
from task import UserError
root = pathlib.Path(sys.argv[2])
tensors = {"w": torch.zeros(100000)}
work = [lambda folder: {"model/model.safetensors": shards.write_tensors(folder / "model/model.safetensors", tensors)}]
checkpoint.save(root, 1, work)
resource.setrlimit(resource.RLIMIT_FSIZE, (200000, 200000))  # the kernel refuses to write further, as on a full disk
try:
    checkpoint.save(root, 2, work)
except UserError as error:
    print(error)
print(sorted(p.name for p in root.iterdir()), checkpoint.latest(root).name)
"""


def test_a_full_disk_is_a_clear_error_and_leaves_the_previous_checkpoint(tmp_path):
    done = subprocess.run([sys.executable, "-c", FULL_DISK, ROOT, tmp_path / "c"], capture_output=True, text=True, timeout=60, check=True)
    assert "cannot write the checkpoint of step 2" in done.stdout and "File too large; the previous checkpoint stands" in done.stdout
    assert done.stdout.splitlines()[-1] == "['step_1'] step_1"


def test_leftovers_of_a_killed_save_are_not_merged_into_the_next(tmp_path):
    (tmp_path / "tmp_step_2").mkdir()
    (tmp_path / "tmp_step_2" / "stale.bin").write_bytes(b"stale")
    folder = save(tmp_path, 2)
    assert not (folder / "stale.bin").exists() and "stale.bin" not in json.loads((folder / "manifest.json").read_text())


# ------------------------------------------------------------------------------------------------ retention


def remaining(root, scores, higher=True, metric=True, **settings):
    """What is left after saving and pruning step by step."""
    settings = {"keep": 3, "every": 1, "metric": "train:score" if metric else "", "higher_is_better": higher} | settings
    for step, score in scores.items():
        if step % settings["every"] == 0 or settings.get("ft_every"):
            save(root, step, {} if score is None else {"score": score}, **settings)
    return checkpoint.steps(root)


def numbered(*scores):
    return dict(enumerate(scores, 1))


@pytest.mark.parametrize(
    "scores, settings, expected",
    [
        (numbered(0.5, 0.3, 0.7, 0.2, 0.4, 0.8), {"higher": False}, [2, 4, 5, 6]),
        (dict.fromkeys([1, 2, 3, 4, 10, 12], 0.5), {}, [4, 10, 12]),
        (numbered(*[None] * 6), {"keep": 0}, [1, 2, 3, 4, 5, 6]),
        ({1: 0.5, 2: 0.3, 3: None, 4: 0.2, 10: None, 11: 1.0, 12: None}, {"higher": False}, [1, 2, 4, 12]),
        ({1: 0.2, 2: None, 3: None, 4: None, 10: None, 12: None}, {"higher": False}, [1, 10, 12]),
        (numbered(*[None] * 5), {"keep": 0, "every": 100, "ft_every": 1, "ft_keep": 1}, [5]),
        (numbered(*[None] * 7), {"keep": 0, "every": 100, "ft_every": 1, "ft_keep": 2}, [6, 7]),
        (numbered(*[None] * 5), {"keep": 2, "metric": False}, [4, 5]),
        (numbered(0.5, 0.9, 0.3, 0.1, 0.2, 0.4), {"keep": 1, "ft_every": 1, "ft_keep": 1}, [2, 6]),
        (numbered(0.1, 0.2, 0.3, 0.9, 0.8, 0.4), {"keep": 2, "ft_every": 1, "ft_keep": 2}, [4, 5, 6]),
        (numbered(*[None] * 6), {"keep": 0, "every": 2, "ft_every": 1, "ft_keep": 1}, [2, 4, 6]),
        (numbered(*[None] * 8), {"keep": 1, "metric": False, "every": 2, "ft_every": 1, "ft_keep": 1}, [8]),
        (numbered(0.95, 0.5, 0.99, 0.9, 0.2, 0.3, 0.25, 0.4), {"keep": 1, "every": 2, "ft_every": 1, "ft_keep": 1}, [4, 8]),
        (numbered(0.9, 0.8, 0.1, 0.2, 0.3, 0.4), {"keep": 2, "ft_every": 1, "ft_keep": 2}, [1, 2, 5, 6]),
        (numbered(0.5, float("nan"), 0.1, float("nan")), {"keep": 2}, [1, 3, 4]),
    ],
)
def test_the_best_and_the_newest_stay(tmp_path, scores, settings, expected):
    assert remaining(tmp_path, scores, **settings) == expected


def test_one_save_without_the_metric_does_not_end_the_ranking(tmp_path):
    assert remaining(tmp_path, numbered(0.9, None, 0.1, 0.2), keep=1) == [1, 4]


def test_a_directory_that_only_looks_like_a_checkpoint_neither_counts_nor_goes(tmp_path):
    (tmp_path / "step_1-hf").mkdir()
    assert remaining(tmp_path, numbered(*[None] * 3), keep=1) == [3] and (tmp_path / "step_1-hf").exists()


def test_the_best_checkpoint_is_the_newer_of_equals_and_the_newest_where_none_was_measured(tmp_path):
    config = CheckpointConfig(metric="train:score", higher_is_better=False)
    assert best(tmp_path, config) is None
    for step, score in {1: 0.2, 5: 0.5, 10: 0.2, 11: None}.items():
        save(tmp_path, step, {} if score is None else {"score": score})
    with pytest.warns(UserWarning, match="not measured at step 11: ignored"):
        assert best(tmp_path, config).name == "step_10"
    with pytest.warns(UserWarning, match="taking the newest"):
        assert best(tmp_path, CheckpointConfig(metric="val:accuracy")).name == "step_11"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert best(tmp_path, CheckpointConfig()).name == "step_11"


def test_the_newest_is_never_pruned_however_bad():
    assert kept({1: 0.9, 2: 0.8, 3: 0.0}, keep=1) == {1, 3}


def test_metric_names_say_where_they_were_measured():
    assert CheckpointConfig(metric="val:accuracy").metric_key == "eval/accuracy"
    assert CheckpointConfig(metric="train:reward").metric_key == "reward"
    for wrong in ("accuracy", "val:", "eval:accuracy"):
        with pytest.raises(UserError, match="val:NAME or train:NAME"):
            CheckpointConfig(metric=wrong).metric_key  # noqa: B018


# ------------------------------------------------------------------------------------------------ tensors


def test_our_files_are_what_the_library_writes_and_reads(tmp_path):
    torch.manual_seed(0)
    tensors = {
        "a": torch.randn(3, 5), "b": torch.randn(7).to(torch.bfloat16), "c": torch.arange(3), "s": torch.tensor(2.5), "e": torch.zeros(0, 4),
        "t": torch.randn(4, 6).T, "u": torch.tensor([True, False, True]),
    }  # fmt: skip
    entry = shards.write_tensors(tmp_path / "ours.safetensors", tensors)
    loaded = load_file(tmp_path / "ours.safetensors")
    assert loaded.keys() == tensors.keys() and all(torch.equal(loaded[k], tensors[k]) and loaded[k].dtype == tensors[k].dtype for k in tensors)
    assert entry["sha256"] == checkpoint.digest(tmp_path / "ours.safetensors") and entry["size"] == (tmp_path / "ours.safetensors").stat().st_size
    shards.write_tensors(tmp_path / "low.safetensors", tensors, torch.bfloat16)
    low = load_file(tmp_path / "low.safetensors")
    assert torch.equal(low["a"], tensors["a"].to(torch.bfloat16)) and low["c"].dtype == torch.int64
    save_file({k: v.contiguous() for k, v in tensors.items()}, tmp_path / "theirs.safetensors")
    assert (tmp_path / "theirs.safetensors").stat().st_size <= entry["size"] + 64


def test_every_tensor_is_written_once_and_the_ranks_share_evenly():
    sizes = {f"layers.{i}.{part}": 10 + (part == "b") * 5 for i in range(16) for part in "ab"} | {"embed": 40, "norm": 1}
    for count in (1, 2, 3, 5, 64):
        files = shards.plan(sizes, count, limit=60)
        names = [n for own in files for file in own for n in file]
        assert sorted(names) == sorted(sizes) and len(files) == count
        assert all({n[:-1] + "a", n[:-1] + "b"} <= set(file) for own in files for file in own for n in file if n.startswith("layers"))
        assert all(len(file) == 1 or sum(sizes[n] for n in file) <= 60 for own in files for file in own)
        if count <= 5:
            loads = [sum(sizes[n] for file in own for n in file) for own in files]
            assert max(loads) <= 1.5 * sum(sizes.values()) / count


def trained(tied=True, seed=0):
    """A model after one step with two parameter groups, and its optimizer."""
    model = tiny.llama(tied, seed)
    groups = [{"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1}, {"params": [p for p in model.parameters() if p.ndim < 2]}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    model(torch.arange(10)[None], labels=torch.arange(10)[None]).loss.backward()
    optimizer.step()
    return model, optimizer, {p: n for n, p in model.named_parameters()}


def export(folder, model, optimizer, names, dtype=torch.float32):
    beside = shards.side_files(model, tiny.tokenizer(), dtype)
    for write in shards.snapshot(model, optimizer, names, dtype, copied=False):
        write(folder)
    for name, data in beside.items():
        (folder / "model" / name).write_bytes(data)
    return folder


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_loads_what_is_exported_with_equal_logits_and_everything_beside_it(tmp_path, tied, dtype):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, optimizer, names = trained(tied)
    export(tmp_path, model, optimizer, names, dtype)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.dtype == dtype and loaded.config.architectures == ["LlamaForCausalLM"]
    assert ("lm_head.weight" in load_file(tmp_path / "model" / "model.safetensors")) != tied
    assert (loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()) == tied
    ids = torch.arange(20)[None]
    again = tiny.llama(tied)
    again.load_state_dict({n: t.to(dtype).float() for n, t in model.state_dict().items()})  # rotary frequencies, which are no weights, stay float32
    assert torch.equal(loaded.float()(ids).logits, again(ids).logits)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.chat_template == tiny.CHATML and tokenizer.eos_token_id == tiny.tokenizer().eos_token_id
    assert loaded.generation_config.eos_token_id == 2
    if dtype != torch.float32:  # the masters are what the run goes on with
        masters = load_file(tmp_path / "master" / "model.safetensors")
        assert masters["model.norm.weight"].dtype == torch.float32 and checkpoint.weights_of(tmp_path).endswith("master")


def test_optimizer_state_comes_back_bit_for_bit_by_name_and_a_missing_file_is_an_error(tmp_path):
    model, optimizer, names = trained()
    export(tmp_path, model, optimizer, names)
    other = torch.optim.AdamW(list(reversed(list(model.parameters()))))  # another order of parameters
    shards.load_optimizer(other, names, tmp_path)
    for p in model.parameters():
        assert all(torch.equal(other.state[p][key], value) for key, value in optimizer.state[p].items())
    (tmp_path / "optimizer.safetensors").unlink()
    with pytest.raises(UserError, match="other parameters"):
        shards.load_optimizer(other, names, tmp_path)


def test_optimizer_state_of_other_parameters_is_refused(tmp_path):
    model, optimizer, names = trained(tied=True)
    export(tmp_path, model, optimizer, names)
    model, optimizer, names = trained(tied=False)
    with pytest.raises(UserError, match="lm_head.weight"):
        shards.load_optimizer(optimizer, names, tmp_path)


def test_a_parameter_without_moments_is_known_as_such(tmp_path):
    model, optimizer, names = trained()
    del optimizer.state[model.model.norm.weight]
    export(tmp_path, model, optimizer, names)
    with pytest.raises(UserError, match="model.norm.weight"):
        shards.load_optimizer(optimizer, names, tmp_path)
    shards.load_optimizer(optimizer, names, tmp_path, without=["model.norm.weight"])


def test_names_lose_what_wrappers_put_into_them():
    for name in ("module.a.b", "_orig_mod.a.b", "a._checkpoint_wrapped_module.b", "module._orig_mod.a.b"):
        assert shards.clean(name) == "a.b"
    assert shards.clean("submodule.a") == "submodule.a"


def test_the_random_state_comes_back_through_json():
    state = json.loads(json.dumps(checkpoint.random_state()))
    expected = random.random(), np.random.rand(), torch.rand(1)
    checkpoint.restore_random_state(state)
    assert (random.random(), np.random.rand(), torch.rand(1)) == expected


# ------------------------------------------------------------------------------------------------ in the background


def test_a_save_in_the_background_stores_the_moment_it_was_asked_for(tmp_path):
    """The writer is held back while training changes everything in place."""
    model, optimizer, names = trained()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    moment = optimizer.state[model.model.norm.weight]["exp_avg"].clone()
    held = threading.Event()
    jobs = [lambda folder: held.wait(30) and {}, *shards.snapshot(model, optimizer, names, torch.float32, copied=True)]
    writer = threading.Thread(target=checkpoint.finish, args=(checkpoint.begin(tmp_path, 1), jobs))
    writer.start()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
            optimizer.state[p]["exp_avg"].zero_()
    held.set()
    writer.join()
    stored = load_file(tmp_path / "step_1" / "model" / "model.safetensors")
    assert all(torch.equal(stored[n], before[n]) for n in before)
    assert torch.equal(load_file(tmp_path / "step_1" / "optimizer.safetensors")["model.norm.weight/exp_avg"], moment)


def test_writing_lets_python_run(tmp_path):
    """A thread that counts goes on while another writes: the library's own writer would hold it up for the whole file."""
    big = {"w": torch.zeros(2**25)}  # 128 MB
    writer = threading.Thread(target=shards.write_tensors, args=(tmp_path / "w.safetensors", big))
    longest, last = 0.0, time.perf_counter()
    writer.start()
    while writer.is_alive():
        time.sleep(0.001)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    start = time.perf_counter()
    shards.write_tensors(tmp_path / "w.safetensors", big)
    assert longest < 0.5 * (time.perf_counter() - start) + 0.1
