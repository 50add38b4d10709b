"""The tasks beside the core: each can be won and lost, opens alike for its whole group, and runs through the sampler."""

import asyncio
import doctest
import importlib
import json
import math
import sys
import textwrap
from pathlib import Path

import pytest
import tiny
from aiohttp import web

import verify
from task import Example, SingleTurn, Step, TaskConfig, UserError, assistant, load_file, load_reward, load_task, self_test, user

ROOT = Path(__file__).parent.parent


def play(task, example, *answers, seed=0):
    async def episode():
        environment = task.environment()
        await environment.reset(example, seed)
        steps = [await environment.step(assistant(answer)) for answer in answers]
        await environment.close()
        return steps

    return asyncio.run(episode())


def rows_file(folder, rows):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "rows.jsonl")


@pytest.mark.parametrize("name", sorted(p.stem for p in (ROOT / "tasks").glob("*.py")))
def test_the_examples_in_docstrings_hold(name):
    assert doctest.testmod(load_file(ROOT / "tasks" / f"{name}.py")).failed == 0


@pytest.mark.parametrize("spec", ["letter_words", "guess_number", "sliding_puzzle", "sliding_puzzle:2", "calculator"])
def test_a_task_loads_alike_every_time_and_passes_its_own_test(spec):
    task, again = load_task(spec, TaskConfig()), load_task(spec, TaskConfig())
    assert task.train == again.train and task.eval == again.eval and task.train and task.eval
    asyncio.run(self_test(task))
    if spec != "guess_number":  # the game is its seven secrets: there are no others to hold out
        assert not {repr(e) for e in task.train} & {repr(e) for e in task.eval}


# ---------------------------------------------------------------- words, guessing, puzzles


def test_words_are_counted_once_and_rambling_does_not_pay(tmp_path):
    task = load_task("letter_words", TaskConfig())
    example = next(e for e in task.train if e.answer == "t")
    rewards = [play(task, example, text)[0].rewards["words"] for text in ("table, tree, tiger, train, town", "Table table TABLE", "tree moon", "t tt", "")]
    assert rewards == [1.0, 0.2, 0.2, 0.0, 0.0]
    (tmp_path / "words").write_text("tree\ntable\n")
    known = load_task(f"letter_words:{tmp_path / 'words'}", TaskConfig())
    assert play(known, example, "tree, table, tasque, trusque, tomque")[0].rewards["words"] == 0.4
    with pytest.raises(UserError, match="no such file"):
        load_task("letter_words:nowhere", TaskConfig())


def test_guessing_by_halves_always_wins_and_its_rewards_add_up_to_one():
    task = load_task("guess_number", TaskConfig())
    for example in task.train:
        low, high, guesses = 1, 7, []
        while not guesses or guesses[-1] != example.answer:
            guesses.append((low + high) // 2)
            low, high = (guesses[-1] + 1, high) if guesses[-1] < example.answer else (low, guesses[-1] - 1)
        steps = play(task, example, *map(str, guesses))
        assert steps[-1].done and sum(s.rewards["guess"] for s in steps) == pytest.approx(1.0) and not any(s.done for s in steps[:-1])


def test_bad_guesses_earn_nothing_and_losing_is_not_being_cut_off():
    task = load_task("guess_number", TaskConfig())
    steps = play(task, task.train[6], "4", "3", "nine 9 9")
    assert [s.rewards["guess"] for s in steps] == [0.1, 0.0, 0.0] and steps[0].messages == [user("higher")]
    assert steps[2].done and not steps[2].truncated
    assert steps[2].metrics == {"guess/valid": pytest.approx(2 / 3), "guess/sensible": pytest.approx(1 / 3), "guess/found": 0.0}
    assert "invalid" in play(task, task.train[6], "12")[0].messages[0]["content"]


def test_a_puzzle_is_solved_by_its_moves_and_explains_bad_ones():
    task = load_task("sliding_puzzle", TaskConfig())
    module = load_file(ROOT / "tasks" / "sliding_puzzle.py")
    for example in task.train[:10]:
        path = shortest(module, tuple(example.extra["board"]))
        steps = play(task, example, *(f"I go <ACTION>{move}</action>" for move in path))
        assert steps[-1].done and not steps[-1].truncated and steps[-1].rewards["solved"] == 1.0
    first, *_, last = play(task, task.train[0], *["no move"] * 8)
    assert "No move found" in first.messages[0]["content"] and first.rewards["solved"] == 0.0
    assert last.done and last.truncated and last.metrics["puzzle/bad_moves"] == 8.0
    assert play(task, task.train[0], "<action>up</action> <action>left")[0].messages  # the closing tag may be the stop string


def shortest(module, board):
    paths = {board: []}
    for state in (queue := [board]):
        if state == module.ordered(3):
            return paths[state]
        for move in module.MOVES:
            after = module.moved(state, move)
            if after and after not in paths:
                paths[after] = [*paths[state], move]
                queue.append(after)


# ---------------------------------------------------------------- mathematics


def test_math_reads_solutions_or_answers_and_drops_and_counts_rows_without_one(tmp_path):
    rows = [{"problem": f"p{i}", "solution": f"because \\boxed{{\\frac{{{i}}}{{7}}}}"} for i in range(10)]
    bad = [{"problem": "p", "solution": s} for s in ("", None, "see figure", "\\boxed{")]
    task = load_task("math", TaskConfig(data=rows_file(tmp_path, rows + bad)))
    assert len(task.train) + len(task.eval) == 10 and task.dropped == {"answer not usable": 4}
    assert all(e.answer == f"\\frac{{{e.messages[-1]['content'][1:]}}}{{7}}" for e in task.train)
    asyncio.run(self_test(task))
    step = play(task, task.train[0], f"\\boxed{{{task.train[0].answer}}}")[0]
    assert step.rewards == {"correct": 1.0} and step.metrics["verify/ok"] == 1.0 and step.answer
    with pytest.raises(UserError, match="none of its 4 rows"):
        load_task("math", TaskConfig(data=rows_file(tmp_path, bad)))


def test_math_takes_its_marker_from_the_argument(tmp_path):
    path = rows_file(tmp_path, [{"question": f"p{i}", "answer": str(i)} for i in range(10)])
    for marker, text in (("answer", "<answer>%s</answer>"), ("####", "#### %s"), ("boxed", "\\boxed{%s}")):
        task = load_task(f"math:{marker}", TaskConfig(data=path))
        asyncio.run(self_test(task))
        assert play(task, task.train[0], text % task.train[0].answer)[0].rewards == {"correct": 1.0}
        assert play(task, task.train[0], task.train[0].answer)[0].metrics["verify/no_answer"] == 1.0
    with pytest.raises(UserError, match="marker must be one of"):
        load_task("math:nothing", TaskConfig(data=path))


def test_thinking_first_is_a_reward_of_its_own(tmp_path):
    path = rows_file(tmp_path, [{"question": f"p{i}", "answer": str(i)} for i in range(10)])
    task = load_task("math", TaskConfig(data=path, extra_rewards=("tasks/math.py:thinks",), reward_weights={"thinks": 0.1}))
    texts = ["<think>x</think> \\boxed{%s}", "x</think> \\boxed{%s}", "<think>\\boxed{%s}</think>"]
    rewards = [play(task, task.train[0], text % task.train[0].answer)[0].rewards for text in texts]
    assert rewards == [{"correct": 1.0, "thinks": 1.0}, {"correct": 1.0, "thinks": 0.0}, {"correct": 0.0, "thinks": 0.0}]


@pytest.mark.skipif(bool(verify.can_lock()), reason=verify.can_lock() or "contained")
def test_python_problems_can_be_solved_with_python(tmp_path):
    task = load_task("python", TaskConfig())
    asyncio.run(self_test(task))
    call, answer = play(task, task.train[0], "<python>print(6*7)</python>", f"\\boxed{{{task.train[0].answer}}}")
    assert call.messages == [user("<result>42</result>")] and answer.rewards == {"correct": 1.0, "called": 1.0} and answer.metrics["verify/ok"] == 1.0
    task = load_task("python", TaskConfig(data=rows_file(tmp_path, [{"question": "q", "answer": "7"}] * 10)))
    assert play(task, task.train[0], "\\boxed{7}")[0].rewards == {"correct": 1.0, "called": 0.0}


# ---------------------------------------------------------------- reasoning-gym

FAKE_PACKAGE = """
import os, random
class Dataset:
    def __init__(self, name, size, seed, top=9): self.name, self.size, self.seed, self.top = name, size, seed, top
    def __getitem__(self, i):
        draw = random.Random(self.seed + i)
        a, b = draw.randint(1, self.top), draw.randint(1, self.top)
        return {"question": f"{a}+{b}", "answer": str(a + b), "metadata": {"source_dataset": self.name}}
    def score_answer(self, answer, entry):
        if self.name == "raises": raise ValueError(answer)
        value = eval(answer)
        return 1.0 if str(value) == entry["answer"] else 0.01
def create_dataset(name, size=500, seed=None, **config): return Dataset(name, size, seed, **config)
class factory: DATASETS = {"countdown": Dataset, "sums": Dataset, "raises": Dataset}
"""


@pytest.fixture
def gym_package(tmp_path, monkeypatch):
    """A package of reasoning-gym's shape, whose scorer evaluates the answer as the real one's do."""
    (tmp_path / "reasoning_gym.py").write_text(FAKE_PACKAGE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "reasoning_gym", raising=False)
    verify.workers.cache_clear()
    module = load_file(ROOT / "tasks" / "reasoning_gym.py")
    module.dataset_of.cache_clear()
    yield module
    verify.workers.cache_clear()
    sys.modules.pop("reasoning_gym", None)


@pytest.mark.skipif(bool(verify.can_lock()), reason=verify.can_lock() or "contained")
def test_procedural_data_sets_are_split_by_question_and_scored_by_their_own_scorer(gym_package):
    task = load_task("reasoning_gym:sums:top=99", TaskConfig(eval_size=50))
    questions = [{e.messages[-1]["content"] for e in part} for part in (task.train, task.eval)]
    assert len(task.train) == 1000 and questions[1] and not questions[0] & questions[1]
    few = load_task("reasoning_gym:sums:size=100,top=4", TaskConfig())
    assert len({e.messages[-1]["content"] for e in few.eval}) == 3 and len(few.train) < 100
    asyncio.run(self_test(task))
    example = task.train[0]
    step, wrong, none = (play(task, example, text)[0] for text in (f"<answer>{example.answer}</answer>", "<answer>0</answer>", "0"))
    assert step.rewards == {"solved": 1.0} and wrong.rewards == {"solved": 0.01} and none.metrics["verify/no_answer"] == 1.0


@pytest.mark.skipif(bool(verify.can_lock()), reason=verify.can_lock() or "contained")
def test_an_answer_that_is_code_runs_nothing_and_an_endless_one_ends(gym_package, tmp_path):
    canary = tmp_path / "canary"
    task = load_task("reasoning_gym:sums", TaskConfig(reward_deadline=1.0))  # not on the list of evaluating scorers: only the lock protects
    attacks = [f"__import__('os').system('touch {canary}')", f"open({str(canary)!r}, 'w')", "9**9**9**9", "__import__('os')._exit(0)"]
    steps = [play(task, task.train[0], f"<answer>{attack}</answer>")[0] for attack in attacks]
    assert not canary.exists() and all(s.rewards["solved"] <= 0.01 for s in steps)
    assert [s.metrics["verify/timeout"] for s in steps] == [0.0, 0.0, 1.0, 1.0] and steps[1].metrics["verify/scorer_raised"] == 1.0
    listed = load_task("reasoning_gym:countdown", TaskConfig())
    assert play(listed, listed.train[0], f"<answer>{attacks[0]}</answer>")[0].rewards == {"solved": 0.0}
    raises = load_task("reasoning_gym:raises", TaskConfig())
    assert play(raises, raises.train[0], "<answer>x</answer>")[0].metrics["verify/scorer_raised"] == 1.0


def test_a_scorer_that_evaluates_is_refused_where_it_cannot_be_contained(gym_package, monkeypatch):
    monkeypatch.setattr(gym_package, "can_lock", lambda: "no network namespace")
    with pytest.raises(UserError, match="no network namespace"):
        load_task("reasoning_gym:countdown", TaskConfig())
    with pytest.raises(UserError, match="no such data set; there are countdown"):
        load_task("reasoning_gym:nothing", TaskConfig())
    with pytest.raises(UserError, match="colour"):
        load_task("reasoning_gym:sums:colour=1", TaskConfig())


def test_the_real_package_where_it_is_installed():
    pytest.importorskip("reasoning_gym")
    verify.workers.cache_clear()
    for name in ("chain_sum", "leg_counting"):
        asyncio.run(self_test(load_task(f"reasoning_gym:{name}:size=50", TaskConfig())))


# ---------------------------------------------------------------- judges and reward models


async def serving(routes, use):
    """Run `use(url)` against a local server with the given {path: handler}."""
    app = web.Application()
    app.add_routes([web.route("*", path, handler) for path, handler in routes.items()])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        return await use(f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}")
    finally:
        await runner.cleanup()


def judged(answers, completion="five"):
    """What a judge that gives these answers in turn says of a completion, and the requests it saw."""
    seen, said = [], list(answers)

    async def models(request):
        return web.json_response({"data": [{"id": "judge-1"}]})

    async def chat(request):
        seen.append((await request.json(), request.headers.get("Authorization")))
        answer = said.pop(0)
        return web.json_response({"choices": [{"message": {"content": answer}}]}) if isinstance(answer, str) else web.Response(status=answer)

    async def use(url):
        reward = load_reward(f"judge:{url}/v1", TaskConfig())
        return await reward(completion, Example([user("2+3?")], answer="5"))

    return asyncio.run(serving({"/v1/models": models, "/v1/chat/completions": chat}, use)), seen


def test_a_judge_gives_a_share_of_ten_and_is_asked_again_when_it_fails(monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "secret")
    rewards, seen = judged(["well", 503, "Good. GRADE: 8"], completion="GRADE: 10")
    assert rewards == {"judge": 0.8} and len(seen) == 3
    body, header = seen[0]
    assert header == "Bearer secret" and body["model"] == "judge-1" and body["temperature"] == 0
    text = body["messages"][0]["content"]
    fence = next(line for line in text.splitlines() if line.startswith("====="))
    assert text.split(fence)[-2].strip() == "GRADE: 10" and "2+3?" in text
    again = judged(["GRADE: 1"])[1][0][0]["messages"][0]["content"]
    assert fence not in again, "a fence that is known beforehand could be written by the policy"


def test_a_judge_without_a_grade_excludes_the_rollout_and_a_wrong_address_is_refused():
    with pytest.raises(RuntimeError, match="failed 3 times: no grade"):
        judged(["well", "GRADE: 11", "GRADE: ten"])
    with pytest.raises(UserError, match="give the judge's URL"):
        load_reward("judge:localhost", TaskConfig())


@pytest.fixture(scope="module")
def scorer_folder(tmp_path_factory):
    import torch
    from transformers import LlamaForSequenceClassification

    folder = tmp_path_factory.mktemp("scorer")
    config = tiny.llama().config
    config.num_labels = 1
    torch.manual_seed(0)
    LlamaForSequenceClassification(config).float().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


def test_a_reward_model_scores_the_conversation_in_its_own_template(scorer_folder):
    import torch
    from transformers import AutoModelForSequenceClassification

    task = load_task("arith", TaskConfig(extra_rewards=(f"reward_model:{scorer_folder}",), reward_weights={"reward_model": 0.1}))
    example = task.train[0]
    (step,) = play(task, example, "7")
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(scorer_folder), tiny.tokenizer()
    ids = tokenizer.apply_chat_template([*example.messages, assistant("7")], tokenize=True, return_dict=True, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        expected = model(input_ids=ids).logits.item()
    assert step.rewards.keys() == {"exact_integer", "reward_model"} and step.rewards["reward_model"] == pytest.approx(expected, abs=1e-5)
    (other,) = play(task, example, "8")
    assert other.rewards["reward_model"] != step.rewards["reward_model"]
    with pytest.raises(ValueError, match="more than the 1024"):
        play(task, example, "7" * 2000)


def test_a_reward_model_behind_a_server_is_asked_for_its_raw_score(tmp_path):
    seen = []

    async def classify(request):
        seen.append(await request.json())
        return web.json_response({"data": [{"probs": [-1.5]}]})

    async def two(request):
        return web.json_response({"data": [{"probs": [0.1, 0.9]}]})

    async def broken(request):
        return web.Response(status=400, text="no template")

    async def use(url):
        return await load_reward(f"reward_model:{url}", TaskConfig())("five", Example([user("2+3?")]))

    assert asyncio.run(serving({"/classify": classify}, use)) == {"reward_model": -1.5}
    assert seen[0]["messages"] == [user("2+3?"), assistant("five")] and seen[0]["use_activation"] is False
    with pytest.raises(UserError, match="has 2 scores"):
        asyncio.run(serving({"/classify": two}, use))
    with pytest.raises(RuntimeError, match="HTTP 400: no template"):
        asyncio.run(serving({"/classify": broken}, use))
    for name in ("judge:http://127.0.0.1:1/v1", "reward_model:http://127.0.0.1:1"):
        task = load_task(name, TaskConfig(data=rows_file(tmp_path, [{"question": "q", "answer": "a"}] * 10)))
        assert task.train and isinstance(task.environment(), SingleTurn)


# ---------------------------------------------------------------- adapters


class MessageGame:
    """Of the shape of skyrl-gym: count down in turns."""

    def __init__(self, start):
        self.left = start

    def init(self, prompt):
        return [*prompt, user(f"start at {self.left}")], {}

    def step(self, action):
        self.left -= 1
        done = self.left == 0
        return {"observations": [] if done else [user(f"{self.left} left")], "reward": float(action == "go"), "done": done, "metadata": {}}

    def close(self):
        self.left = "closed"


class TextGame:
    """Of the shape of gem and Gymnasium: a number drawn from the seed."""

    def __init__(self, top):
        self.top = top

    def reset(self, seed=None):
        self.secret = seed % self.top
        return f"guess below {self.top}, seed {seed}", {"info": 1}

    def step(self, action):
        right = action == str(self.secret)
        return ("yes" if right else "no"), float(right), right, action == "give up", {}


def test_an_environment_of_messages_is_adapted():
    module = load_file(ROOT / "tasks" / "message_env.py")

    async def episode():
        environment = module.MessageEnvironment(MessageGame)
        opening = await environment.reset(Example([user("hello")], extra={"start": 2}), 0)
        steps = [await environment.step(assistant(text)) for text in ("go", "no")]
        await environment.close()
        return opening, steps, environment.env.left

    opening, steps, left = asyncio.run(episode())
    assert opening == [user("hello"), user("start at 2")] and left == "closed"
    assert steps == [Step([user("1 left")], {"environment": 1.0}), Step([], {"environment": 0.0}, done=True)]


def test_a_text_environment_is_adapted_and_opens_by_its_seed_alone():
    module = load_file(ROOT / "tasks" / "gym_env.py")

    async def episode(seed, *texts):
        environment = module.GymEnvironment(TextGame)
        opening = await environment.reset(Example([], extra={"top": 5}), seed)
        steps = [await environment.step(assistant(text)) for text in texts]
        await environment.close()
        return opening, steps

    opening, steps = asyncio.run(episode(13, "0", "3"))
    assert opening == asyncio.run(episode(13))[0] and opening != asyncio.run(episode(14))[0]
    assert steps == [Step([user("no")], {"environment": 0.0}), Step([user("yes")], {"environment": 1.0}, done=True)]
    _, (given_up,) = asyncio.run(episode(13, "give up"))
    assert given_up.done and given_up.truncated


def test_adapters_stay_under_forty_lines():
    for name in ("message_env", "gym_env"):
        assert len((ROOT / "tasks" / f"{name}.py").read_text().splitlines()) < 40


# ---------------------------------------------------------------- through the sampler


class Scripted:
    """An engine that says what it is told to, turn by turn, and remembers what it was asked."""

    version = 0

    def __init__(self, *turns):
        self.turns, self.asked = list(turns), []

    async def __aenter__(self):
        return self

    async def __aexit__(self, *exc):
        pass

    async def generate(self, request):
        rollout = importlib.import_module("rollout")
        self.asked.append(request)
        ids = self.turns.pop(0)
        return [rollout.Completion(list(ids), [-0.5] * len(ids), [0] * len(ids), "stop") for _ in range(request.n)]


def sampler_of(task, engine, tokenizer, **settings):
    rollout = importlib.import_module("rollout")
    sampling = rollout.SamplingConfig(**{"max_prompt_tokens": 900, "max_completion_tokens": 400} | settings)
    return rollout.Sampler(engine, rollout.Renderer(tokenizer, "chat", task.tools), task, sampling, rollout.DeadlineConfig(), seed=0)


def test_a_tool_episode_trains_exactly_the_sampled_tokens_and_never_the_results():
    rollout, tokenizer, task = importlib.import_module("rollout"), tiny.tokenizer(), load_task("calculator", TaskConfig())
    end = tokenizer.eos_token_id
    said = [tokenizer(text)["input_ids"] for text in ("<calculator>6*7</calculator>", str(task.train[0].answer))]
    said[1].append(end)
    engine = Scripted(*said)
    ((r,),) = asyncio.run(rollout.sample_groups(sampler_of(task, engine, tokenizer), [(0, task.train[0])], 1))
    assert [i for i, sampled in zip(r.completion_ids, r.sampled) if sampled] == said[0] + said[1]
    assert "<result>42</result>" in tokenizer.decode([i for i, sampled in zip(r.completion_ids, r.sampled) if not sampled])
    assert r.rewards == {"exact_integer": 1.0, "called": 1.0} and r.turns == 2 and r.finish == "done"
    assert list(engine.asked[1].prompt_ids) == [*r.prompt_ids, *r.completion_ids[: -len(said[1])]] and "</calculator>" in engine.asked[0].stop


def test_a_verifier_that_fails_excludes_its_rollout_and_is_never_a_zero(tmp_path):
    rollout, tokenizer = importlib.import_module("rollout"), tiny.tokenizer()
    (tmp_path / "mine.py").write_text("def moody(completion, example):\n    if completion == 'b': raise OSError('no dictionary')\n    return 1.0\n")
    task = load_task(f"{tmp_path}/mine.py:moody", TaskConfig(data=rows_file(tmp_path, [{"question": "q", "answer": "a"}] * 10)))
    groups = [asyncio.run(rollout.sample_groups(sampler_of(task, Scripted(tokenizer(text)["input_ids"]), tokenizer), [(0, task.train[0])], 1)) for text in "ab"]
    (good,), (bad,) = (group[0] for group in groups)
    assert good.rewards == {"moody": 1.0} and bad.finish == "failed" and "no dictionary" in bad.failure and bad.rewards == {}


@pytest.mark.parametrize("spec", ["letter_words", "guess_number", "sliding_puzzle:2", "calculator", "arith+guess_number"])
def test_a_task_runs_through_the_sampler_with_its_turns_kept_token_for_token(spec):
    rollout = pytest.importorskip("rollout")
    task, tokenizer = load_task(spec, TaskConfig()), tiny.tokenizer()
    engine = rollout.HFEngine(tiny.llama(), tokenizer, lambda on: None)
    renderer = rollout.Renderer(tokenizer, "chat", None)
    sampling = rollout.SamplingConfig(max_prompt_tokens=900, max_completion_tokens=60)
    sampler = rollout.Sampler(engine, renderer, task, sampling, rollout.DeadlineConfig(), seed=0)
    groups = asyncio.run(rollout.sample_groups(sampler, [(0, task.train[0]), (1, task.train[-1])], 2))
    for r in (r for group in groups for r in group):
        assert not r.failure and r.turns >= 1 and r.finish
        assert all(math.isnan(p) != s for p, s in zip(r.logprobs_gen, r.sampled, strict=True)) and any(r.sampled)
        assert r.prompt_ids == renderer.prompt(task.train[0 if r.index == 0 else -1].messages)


def test_no_library_is_hidden_by_a_task_of_its_name():
    for name in ("math", "calculator", "python"):
        load_file(ROOT / "tasks" / f"{name}.py")
    assert importlib.import_module("math").pi == math.pi


def test_a_task_of_twenty_lines_is_enough(tmp_path):
    (tmp_path / "mine.py").write_text(
        textwrap.dedent(
            """
            from task import Example, Step, Task, user

            class Echo:
                async def reset(self, example, seed):
                    self.word = example.answer
                    return example.messages

                async def step(self, message):
                    right = message["content"].strip() == self.word
                    return Step([user("again")], {"echo": float(right)}, done=right)

                async def close(self):
                    pass

            def echo(config):
                words = [Example([user(f"Say {word}")], answer=word) for word in ("one", "two")]
                return Task("echo", words, Echo, eval=words, max_turns=3)
            """
        )
    )
    task = load_task(f"{tmp_path}/mine.py:echo", TaskConfig())
    assert [s.rewards["echo"] for s in play(task, task.train[0], "two", "one")] == [0.0, 1.0]
