"""The task contract: rows and answers stay together, rewards are numbers, order is a function of (seed, index)."""

import asyncio
import doctest
import json
import math
import os
from collections import Counter
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import task as tasks
from task import (
    Example,
    SingleTurn,
    Step,
    Task,
    TaskConfig,
    UserError,
    assistant,
    evaluation,
    final_number,
    load_task,
    majority_vote,
    mixture,
    named_rewards,
    pass_at_k,
    position,
    reference_number,
    self_test,
    total,
    user,
)

ROOT = Path(__file__).parent.parent
GSM8K = Path(os.environ.get("GSM8K_DIR", ROOT / "data" / "gsm8k"))


def play(task, example, *answers, seed=0):
    async def episode():
        environment = task.environment()
        await environment.reset(example, seed)
        steps = [await environment.step(assistant(answer)) for answer in answers]
        await environment.close()
        return steps

    return asyncio.run(episode())


def rows_file(folder, rows, name="rows.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_examples_in_docstrings_hold():
    assert doctest.testmod(tasks).failed == 0


# ---------------------------------------------------------------- rewards


def test_a_reward_is_one_finite_number_or_a_dict_of_them():
    def mine():
        pass

    for good in (1, 0.0, True, Decimal("0.5"), np.float32(2), np.array(3.0), {"a": 0.0, "b": 1}):
        assert all(isinstance(v, float) for v in named_rewards(good, mine).values())
    for bad in ([1.0], [1.0, 2.0], [[1.0]], None, "1", (x for x in [1.0]), np.ones(2), {"a": [1.0]}, {"a": None}, {}, math.nan, math.inf):
        with pytest.raises(TypeError, match="mine"):
            named_rewards(bad, mine)


def test_a_reward_of_zero_and_a_weight_of_zero_are_kept():
    assert named_rewards({"score": 0.0}, None) == {"score": 0.0}
    assert total({"a": 0.0, "b": 5.0}, {"b": 0.0}) == 0.0
    assert total({"a": 2.0, "b": 5.0}, {"b": 0.1}) == pytest.approx(2.5)


def test_a_coroutine_and_a_whole_step_are_rewards_too():
    async def waits(completion, example):
        await asyncio.sleep(0)
        return {"waited": 1.0}

    def tells(completion, example):
        return Step(rewards={"told": 1.0}, metrics={"m": 3.0}, answer="x")

    for reward, step in ((waits, Step(rewards={"waited": 1.0}, done=True)), (tells, Step(rewards={"told": 1.0}, metrics={"m": 3.0}, answer="x", done=True))):
        assert play(Task("t", [], lambda r=reward: SingleTurn(r)), Example([]), "hello") == [step]


def test_extra_rewards_score_the_last_answer_under_their_own_names(tmp_path):
    (tmp_path / "more.py").write_text("async def brief(completion, example):\n    return {'brief': 1 / len(completion)}\n")
    config = TaskConfig(extra_rewards=(f"{tmp_path}/more.py:brief",), reward_weights={"brief": 0.5})
    task = load_task("arith", config)
    example = next(e for e in task.train if e.answer == 12)
    (step,) = play(task, example, "12")
    assert step.rewards == {"exact_integer": 1.0, "brief": 0.5} and total(step.rewards, task.reward_weights) == 1.25
    task = load_task("guess_number", config)
    steps = play(task, task.train[6], "4", "5", "6")
    assert ["brief" in step.rewards for step in steps] == [False, False, True]


def test_two_rewards_of_one_name_are_refused(tmp_path):
    (tmp_path / "more.py").write_text("async def exact_integer(completion, example):\n    return 1.0\n")
    task = load_task("arith", TaskConfig(extra_rewards=(f"{tmp_path}/more.py:exact_integer",)))
    with pytest.raises(UserError, match="exact_integer"):
        play(task, task.train[0], "1")


def test_the_self_test_plays_the_checks_as_training_would():
    for name in ("arith", "letter_words", "guess_number", "calculator"):
        task = load_task(name, TaskConfig())
        assert task.checks
        asyncio.run(self_test(task))
    broken = Task("broken", task.train, lambda: SingleTurn(lambda completion, example: 0.0), checks=[(task.train[0], "right", 1.0)])
    with pytest.raises(UserError, match="right.*must be worth 1.0, but scores 0"):
        asyncio.run(self_test(broken))

    async def never(completion, example):
        await asyncio.sleep(60)

    with pytest.raises(UserError, match="took more than"):
        asyncio.run(self_test(Task("slow", [], lambda: SingleTurn(never), checks=broken.checks), deadline=0.1))


# ---------------------------------------------------------------- arith and gsm8k


def test_arith_holds_out_pairs_together_with_their_mirror_images():
    task = load_task("arith", TaskConfig())
    text = [{e.messages[-1]["content"] for e in part} for part in (task.train, task.eval)]
    assert len(text[0]) == 65 and len(text[1]) == 16 and not text[0] & text[1]
    assert all(f"{question[2]}+{question[0]}=" in text[1] for question in text[1])
    assert play(task, Example([], answer=12), "12")[0].rewards == {"exact_integer": 1.0}


@pytest.mark.parametrize("text", ["41 or 42", "41=42", "1,2", "42 43", "about 42", "42%", "", "x", "4 2"])
def test_a_line_with_anything_but_one_number_is_no_answer(text):
    assert reference_number(f"#### {text}") is None


def test_the_last_marker_counts_and_no_marker_is_no_answer():
    example = Example([], answer="so #### 18")
    texts = ["#### 18", "#### 17\n#### 18", "#### $18.", "#### 18.0", "18", "the answer is 18", "#### 18\n#### 17", "#### 1,8", "####", "#### 18 or 17"]
    assert [final_number(text, example) for text in texts] == [1, 1, 1, 1, 0, 0, 0, 0, 0, 0]
    assert reference_number("#### \u22121,200.5") == Decimal("-1200.5")


@pytest.mark.skipif(not (GSM8K / "test.jsonl").exists(), reason="no GSM8K here: set GSM8K_DIR to a folder with train.jsonl and test.jsonl")
def test_every_reference_of_gsm8k_is_a_number_and_scores_itself():
    task = load_task("gsm8k", TaskConfig(data=str(GSM8K / "train.jsonl"), eval_data=str(GSM8K / "test.jsonl"), eval_size=2000))
    assert (len(task.train), len(task.eval)) == (7473, 1319)
    assert all(final_number(e.answer, e) == 1.0 and final_number("####", e) == 0.0 for e in [*task.train, *task.eval])
    asyncio.run(self_test(task))


# ---------------------------------------------------------------- rows


def test_a_prompt_keeps_its_answer_through_shuffle_hold_out_and_epochs(tmp_path):
    path = rows_file(tmp_path, [{"question": f"q{i}", "answer": f"#### {i}"} for i in range(50)])
    task = load_task("gsm8k", TaskConfig(data=path, eval_size=10))
    assert len(task.train) == 40 and len(task.eval) == 10
    for index in range(3 * 40):
        example = task.train[position(task, 5, index)]
        assert example.messages[-1]["content"][1:] == example.answer[5:]


def test_a_bad_row_is_named_before_anything_starts(tmp_path):
    with pytest.raises(UserError, match="no file nowhere.jsonl"):
        load_task("gsm8k", TaskConfig(data="nowhere.jsonl"))
    (tmp_path / "bad.jsonl").write_text('{"question": "q", "answer": "#### 1"}\nnot json\n')
    with pytest.raises(UserError, match="line 2"):
        load_task("gsm8k", TaskConfig(data=str(tmp_path / "bad.jsonl")))
    with pytest.raises(UserError, match="prompt-column"):
        load_task("gsm8k", TaskConfig(data=rows_file(tmp_path, [{"problem": "q", "answer": "#### 1"}])))
    with pytest.raises(UserError, match="no `#### number`"):
        load_task("gsm8k", TaskConfig(data=rows_file(tmp_path, [{"question": "q", "answer": "five"}])))
    with pytest.raises(UserError, match="no training examples"):
        load_task(f"{rows_reward(tmp_path)}:one", TaskConfig(data=rows_file(tmp_path, [{"question": "q", "answer": 1}]), few_shot=1))


def rows_reward(folder):
    (folder / "mine.py").write_text("def one(completion, example):\n    return 1.0\n")
    return folder / "mine.py"


def test_parquet_rows_and_message_lists_and_few_shot_examples(tmp_path):
    import datasets

    rows = [{"prompt": [user(f"q{i}")], "gold": i} for i in range(10)]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    config = TaskConfig(data=str(tmp_path / "rows.parquet"), prompt_column="prompt", answer_column="gold", isolate=None)
    task = load_task(f"{rows_reward(tmp_path)}:one", config)
    assert sorted(e.answer for e in [*task.train, *task.eval]) == list(range(10)) and task.train[0].messages == [user(f"q{task.train[0].answer}")]
    path = rows_file(tmp_path, [{"question": f"q{i}", "answer": f"#### {i}"} for i in range(10)])
    task = load_task("gsm8k", TaskConfig(data=path, few_shot=2, system_prompt="S"))
    assert [m["role"] for m in task.train[0].messages] == ["system", "user", "assistant", "user", "assistant", "user"]
    shown = {m["content"] for m in task.train[0].messages[1:-1]}
    assert not shown & {e.messages[-1]["content"] for e in [*task.train, *task.eval]}


# ---------------------------------------------------------------- order and mixtures


def counting(name, size, **fields):
    return Task(name, [Example([user(f"{name}{i}")], answer=i) for i in range(size)], lambda: SingleTurn(lambda completion, example: 1.0), **fields)


def test_every_epoch_is_another_permutation_and_the_same_after_a_restart():
    task = counting("t", 8)
    epochs = [[position(task, 3, 8 * epoch + i) for i in range(8)] for epoch in range(4)]
    assert all(sorted(epoch) == list(range(8)) for epoch in epochs) and len(set(map(tuple, epochs))) == 4
    tasks.permutation.cache_clear()
    assert [position(task, 3, i) for i in range(20, 32)] == (epochs[2] + epochs[3])[4:]
    assert [position(task, 4, i) for i in range(8)] != epochs[0]


@given(st.lists(st.tuples(st.integers(1, 30), st.floats(0.05, 20)), min_size=1, max_size=5), st.integers(0, 3), st.integers(0, 5))
def test_a_mixture_draws_by_weight_whatever_the_sizes_and_walks_each_task_evenly(parts, seed, block):
    task = mixture([counting(f"t{i}", size) for i, (size, _) in enumerate(parts)], [weight for _, weight in parts])
    drawn = [task.train[position(task, seed, 100 * block + i)] for i in range(100)]
    counts = Counter(e.task for e in drawn)
    for i, (_, weight) in enumerate(parts):
        share = 100 * weight / sum(w for _, w in parts)
        assert abs(counts[f"t{i}"] - share) <= max(1.0, len(parts) - 1) + 1
    through = Counter(e.messages[0]["content"] for e in (task.train[position(task, seed, i)] for i in range(100 * (block + 1))))
    for i, (size, _) in enumerate(parts):
        seen = [through[f"t{i}{j}"] for j in range(size)]
        assert max(seen) - min(seen) <= 1


def test_a_mixture_keeps_each_tasks_environment_turns_stops_and_metrics():
    config = TaskConfig(weights=(3, 1))
    task = load_task("arith+guess_number", config)
    counts = Counter(task.train[position(task, 0, i)].task for i in range(200))
    assert counts == {"arith": 150, "guess_number": 50}
    arith, guess = task.train[0], next(e for e in task.train if e.task == "guess_number" and e.answer == 4)
    assert (arith.stop, guess.stop, task.max_turns) == ([], ["\n"], 3)
    (step,) = play(task, arith, str(arith.answer))
    assert step.done and step.metrics["arith/reward"] == 1.0 and step.metrics["arith/exact_integer"] == 1.0
    first, last = play(task, guess, "2", "4")
    assert not first.done and first.messages == [user("higher")] and last.done
    assert last.metrics["guess_number/reward"] == pytest.approx(1.0) and first.rewards["guess"] + last.rewards["guess"] == pytest.approx(1.0)
    asyncio.run(self_test(task))


def test_a_mixture_ends_an_episode_at_its_own_tasks_limit():
    class Endless(SingleTurn):
        async def step(self, message):
            return Step([user("go on")], rewards={"r": 1.0})

    def make(name, turns):
        return Task(name, [Example([user("q")])], lambda: Endless(None), max_turns=turns)

    task = mixture([make("short", 2), make("long", 5)])
    steps = play(task, task.train[0], "a", "b")
    assert [(s.done, s.truncated) for s in steps] == [(False, False), (True, True)]


def test_dropped_examples_are_counted_and_leave_the_shares_of_a_mixture_alone():
    task = mixture([counting("a", 10), counting("b", 4)], [1, 1])
    kept = tasks.keep(task, lambda e: e.answer < 3, "too long")
    assert [e.messages[0]["content"] for e in kept.train] == ["a0", "a1", "a2", "b0", "b1", "b2"] and kept.dropped == {"too long": 8}
    counts = Counter(kept.train[position(kept, 0, i)].task for i in range(100))
    assert counts == {"a": 50, "b": 50}
    with pytest.raises(UserError, match="no training example of b is left"):
        tasks.keep(task, lambda e: e.task == "a", "too long")
    assert tasks.keep(counting("t", 3), lambda e: False, "too long").train == []


def test_retired_examples_are_passed_over_and_the_order_of_the_others_stays():
    task, index, seen = counting("t", 8), 0, []
    while index < 24:
        found, index = tasks.next_position(task, 1, index, {2, 5})
        seen.append(found)
    assert seen[:18] == [p for p in (position(task, 1, i) for i in range(24)) if p not in (2, 5)][:18]
    with pytest.raises(UserError, match="all 8"):
        tasks.next_position(task, 1, 0, set(range(8)))


def test_a_mixture_that_cannot_be_is_refused():
    for parts, weights, message in (
        ([counting("a", 1), counting("a", 1)], (), "different names"),
        ([counting("a", 1), counting("b", 1)], (1.0,), "--task.weights must be 2"),
        ([counting("a", 1), counting("b", 1)], (1.0, 0.0), "positive"),
        ([counting("a", 1, tools=[{}]), counting("b", 1)], (), "tools"),
        ([counting("a", 1, reward_weights={"r": 1}), counting("b", 1, reward_weights={"r": 2})], (), "another weight"),
    ):
        with pytest.raises(UserError, match=message):
            mixture(parts, weights)


# ---------------------------------------------------------------- evaluation


def test_pass_at_k_is_the_share_of_subsets_with_a_success():
    from itertools import combinations

    for n in range(1, 7):
        for c in range(n + 1):
            for k in range(1, n + 1):
                subsets = list(combinations([1] * c + [0] * (n - c), k))
                assert pass_at_k(c, n, k) == pytest.approx(sum(map(max, subsets)) / len(subsets))
    with pytest.raises(ValueError, match="pass@3 of 2"):
        pass_at_k(1, 2, 3)


def test_the_majority_is_of_answers_not_of_rewards():
    assert majority_vote(["a", "b", "b", "c"], [1, 0, 0, 0]) == 0.0
    assert majority_vote([None, None, "a"], [0, 0, 1]) == 1.0
    assert majority_vote([None, None], [0, 0]) == 0.0


def test_evaluation_has_a_row_a_task_and_one_for_all():
    table = evaluation(["a", "a", "b", "b"], [[1, 0], [1, 1], [0, 0], []], [["1", "2"], ["1", "1"], ["3", "3"], []], ks=(2, 4))
    assert table["a"] == {"prompts": 2, "reward": 0.75, "pass@1": 0.75, "pass@2": 1.0, "majority": 0.75}
    assert table["b"] == {"prompts": 1, "reward": 0.0, "pass@1": 0.0, "pass@2": 0.0, "majority": 0.0}
    assert table["all"]["pass@1"] == pytest.approx(0.5) and table["all"]["prompts"] == 3 and list(table) == ["a", "b", "all"]
    assert "majority" not in evaluation(["a"], [[1.0]], [[None]])["a"]
    assert evaluation([], []) == {}


# ---------------------------------------------------------------- finding a task


def test_a_task_is_found_by_name_by_path_and_with_an_argument(tmp_path):
    assert load_task("letter_words", TaskConfig()).name == "letter_words"
    assert load_task("tasks/letter_words.py:letter_words", TaskConfig()).name == "letter_words"
    assert len(load_task("sliding_puzzle:2", TaskConfig()).train[0].extra["board"]) == 4
    (tmp_path / "own.py").write_text("from task import *\ndef build(config):\n    return Task('own', [Example([user('q')])], None)\n")
    assert load_task(f"{tmp_path}/own.py:build", TaskConfig(max_turns=7, max_turn_tokens=5)).max_turns == 7


def test_a_task_file_cannot_hide_a_library():
    load_task("python", TaskConfig(unsafe_tools=True))
    with pytest.raises(UserError, match="--task.data"):
        load_task("math", TaskConfig())
    import math as library

    assert library.pi == math.pi and "tasks" not in (getattr(library, "__file__", None) or "")


def test_a_task_that_cannot_be_found_is_explained(tmp_path):
    (tmp_path / "own.py").write_text("def build(config):\n    return 5\ndef score(completion, example):\n    return 1.0\n")
    for spec, message in (
        ("nothing", "no such task; give one of arith"),
        ("../task", "no such task"),
        ("nowhere.py:f", "no file nowhere.py"),
        (f"{tmp_path}/own.py:other", "defines no function other"),
        (f"{tmp_path}/own.py:build", "must return a Task, got int"),
        (f"{tmp_path}/own.py:score", "it needs prompts"),
        ("judge", "argument follows a colon"),
        ("arith", "one task; join several"),
    ):
        with pytest.raises(UserError, match=message):
            load_task(spec, TaskConfig(weights=(1.0, 2.0) if spec == "arith" else ()))
