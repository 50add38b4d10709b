"""Checkpoints are whole or absent, whatever dies, and damaged ones are passed over."""

import json
import os
import random
import shutil

import numpy as np
import pytest
import torch

import checkpoint
from task import UserError


def write(folder):
    (folder / "model").mkdir()
    (folder / "model" / "weights.bin").write_bytes(b"w" * 1000)
    (folder / "optimizer.safetensors").write_bytes(b"o" * 1000)


def save(root, step, keep=2):
    return checkpoint.save(root, step, write, {"step": step}, keep)


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


@pytest.mark.parametrize("damage", ["truncate", "flip", "delete", "manifest"])
def test_a_damaged_checkpoint_is_passed_over_with_its_name(tmp_path, damage):
    save(tmp_path, 4)
    folder = save(tmp_path, 5)
    weights = folder / "model" / "weights.bin"
    if damage == "truncate":
        weights.write_bytes(b"w" * 10)
    if damage == "flip":
        weights.write_bytes(b"w" * 999 + b"x")
    if damage == "delete":
        weights.unlink()
    if damage == "manifest":
        (folder / "manifest.json").write_text("{")
    with pytest.warns(UserWarning, match="step_5"):
        assert checkpoint.latest(tmp_path).name == "step_4"


class Killed(BaseException):
    """The process dies here: nothing after it runs."""


@pytest.mark.parametrize("target", ["rename", "rmtree", "fsync"])
def test_a_crash_at_any_file_operation_leaves_a_whole_checkpoint(tmp_path, monkeypatch, target):
    """keep=1, the second save of the same and of the next step, killed at its k-th operation, for every k."""
    for step in (1, 2):
        for k in range(100):
            root = tmp_path / f"{step}-{k}"
            save(root, 1, keep=1)
            count, done = 0, False

            def dying(real):
                def call(*arguments, **options):
                    nonlocal count
                    count += 1
                    if count > k:
                        raise Killed
                    return real(*arguments, **options)

                return call

            with monkeypatch.context() as patch:
                if target == "rename":
                    patch.setattr(type(root), "rename", dying(type(root).rename))
                elif target == "rmtree":
                    patch.setattr(shutil, "rmtree", dying(shutil.rmtree))
                else:
                    patch.setattr(os, "fsync", dying(os.fsync))
                try:
                    save(root, step, keep=1)
                    done = True
                except Killed:
                    pass
            found = checkpoint.latest(root)
            assert found is not None and checkpoint.damage_of(found) == ""
            if done:
                break
        assert done


def test_a_full_disk_is_a_clear_error_and_leaves_the_previous_checkpoint(tmp_path):
    save(tmp_path, 1)

    def full(folder):
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="No space left on device; the previous checkpoint stands"):
        checkpoint.save(tmp_path, 2, full, {}, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["step_1"]


def test_leftovers_of_a_killed_save_are_not_merged_into_the_next(tmp_path):
    (tmp_path / "tmp_step_2").mkdir()
    (tmp_path / "tmp_step_2" / "stale.bin").write_bytes(b"stale")
    folder = save(tmp_path, 2)
    assert not (folder / "stale.bin").exists() and "stale.bin" not in json.loads((folder / "manifest.json").read_text())


def test_the_random_state_comes_back_through_json():
    state = json.loads(json.dumps(checkpoint.random_state()))
    expected = random.random(), np.random.rand(), torch.rand(1)
    checkpoint.restore_random_state(state)
    assert (random.random(), np.random.rand(), torch.rand(1)) == expected


def test_optimizer_state_of_other_parameters_is_refused(tmp_path):
    a, b = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.AdamW(a.parameters())
    a(torch.ones(2)).sum().backward()
    optimizer.step()
    checkpoint.save_optimizer(optimizer, {p: n for n, p in a.named_parameters()}, tmp_path / "o.safetensors")
    with pytest.raises(UserError, match="other parameters"):
        checkpoint.load_optimizer(torch.optim.AdamW(b.parameters()), {p: n for n, p in b.named_parameters()}, tmp_path / "o.safetensors")
