"""Metrics add up however the work was split; files hold whole lines; tables survive any text."""

import json
import math

import pytest

from log import Log, LogConfig, Metrics, Timer, cut_back, plot_run, read_lines, samples_table


def test_a_mean_over_parts_is_the_mean_of_the_whole():
    a, b = Metrics(), Metrics()
    for _ in range(3):
        a.mean("r", 1.0)
    b.mean("r", 0.0)
    b.max("m", 5)
    a.max("m", 2)
    a.min("n", 2)
    b.sum("s", 4)
    a.add(b)
    assert a.result() == {"r": 0.75, "m": 5.0, "n": 2.0, "s": 4.0}


def test_nothing_measured_is_nan_and_not_zero():
    metrics = Metrics()
    metrics.mean("r", 0.0, 0)
    metrics.max("m", -math.inf)
    assert all(math.isnan(v) for v in metrics.result().values())


def test_one_name_has_one_kind():
    metrics = Metrics()
    metrics.mean("r", 1.0)
    with pytest.raises(ValueError, match="mean and as max"):
        metrics.max("r", 1.0)


def test_a_timer_records_what_raised_too_and_adds_up():
    timer = Timer()
    for _ in range(2):
        with pytest.raises(KeyError), timer("work"):
            raise KeyError
    assert set(timer.take()) == {"time/work"} and timer.take() == {}


def test_metrics_are_cut_back_to_the_resumed_step_and_a_torn_line_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": s, "reward": s}) + "\n" for s in range(5)) + '{"step": 5, "rew')
    cut_back(path, 3)
    assert [r["step"] for r in read_lines(path)] == [0, 1, 2, 3]
    log = Log(tmp_path, LogConfig(), keep_until=2)
    log.step(3, {"reward": math.nan})
    assert read_lines(path)[-1] == {"step": 3, "reward": None}


def test_no_completion_can_break_the_table():
    row = {"prompt": "a|b", "completion": "x\n|y| <b>`", "reward": 1.0, "finish": "done"}
    assert samples_table([row]).splitlines()[-1] == "| a\\|b | x ⏎ \\|y\\| &lt;b>\\` | 1.00 | done |"


def test_the_plot_is_a_png_and_absent_without_steps(tmp_path):
    assert plot_run(tmp_path) is None
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval/accuracy": 0.1}\n{"step": 1, "reward": 0.5}\n{"step": 2, "reward": 0.7, "eval/accuracy": 0.6}\n')
    assert plot_run(tmp_path).read_bytes()[:4] == b"\x89PNG"
