"""Rollouts: exact tokens, glue between turns, failures, budgets, seeds, and the two engines behind one interface."""

import asyncio
import json
import math

import pytest
import tiny
import torch

import policy as policies
from rollout import (
    Completion,
    DeadlineConfig,
    EngineError,
    HFEngine,
    Renderer,
    Request,
    Sampler,
    SamplingConfig,
    VLLMEngine,
    nucleus,
    parse_choice,
    rollout_metrics,
    sample_groups,
    seed_of,
)
from task import Example, SingleTurn, Step, Task, UserError, user


class ScriptedEngine:
    """Answers request after request with prepared token ids; remembers what it was asked."""

    def __init__(self, script, version=3):
        self.script, self.version, self.requests = list(script), version, []

    async def __aenter__(self):
        return self

    async def __aexit__(self, *exc):
        pass

    async def generate(self, request):
        self.requests.append(request)
        rows = self.script.pop(0)
        return [Completion(list(ids[: request.max_tokens]), [-0.5 - i for i in range(len(ids[: request.max_tokens]))],
                           [self.version] * len(ids[: request.max_tokens]), finish) for ids, finish in rows]  # fmt: skip


class Echo:
    """Says `more` twice, then is done; one point per turn."""

    turns = 0

    async def reset(self, example, seed):
        return example.messages

    async def step(self, message):
        self.turns += 1
        return Step([user("more")], {"points": 1.0}, done=self.turns == 3)

    async def close(self):
        self.closed = True


TOKENIZER = tiny.tokenizer()
IDS = {c: TOKENIZER(c, add_special_tokens=False)["input_ids"][0] for c in "abcdefgh0123456789"}
END = 2
EXAMPLE = Example([user("hi")], answer="a")


def run(engine, task, samples=2, prompts=None, **sampling):
    sampler = Sampler(engine, Renderer(TOKENIZER, "auto"), task, SamplingConfig(**sampling), DeadlineConfig(environment=1.0), seed=0)
    return asyncio.run(sample_groups(sampler, prompts or [(5, EXAMPLE)], samples))


def single(reward=lambda completion, example: float(completion == example.answer), **settings):
    return Task("t", [EXAMPLE], lambda: SingleTurn(reward), **settings)


def test_sampled_ids_are_kept_as_they_are_even_where_decoding_would_change_them():
    odd = [0, IDS["a"], 1, 1, IDS["b"], END]  # special tokens in the middle vanish from the text
    ((a, b),) = run(ScriptedEngine([[(odd, "stop"), ([IDS["a"], END], "stop")]]), single())
    assert (a.completion_ids, b.completion_ids) == (odd, [IDS["a"], END])
    assert a.logprobs_gen == [-0.5, -1.5, -2.5, -3.5, -4.5, -5.5]
    assert all(a.sampled) and a.versions == [3] * 6
    assert (a.reward({}), b.reward({})) == (0.0, 1.0)


def test_environment_messages_are_appended_exactly_and_never_marked_as_sampled():
    turn = ([IDS["a"], IDS["b"], END], "stop")
    engine = ScriptedEngine([[turn], [turn], [turn]])
    ((r,),) = run(engine, Task("echo", [EXAMPLE], Echo, max_turns=5), samples=1)
    glue = TOKENIZER("\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
    sampled = [IDS["a"], IDS["b"], END]
    assert r.completion_ids == sampled + glue + sampled + glue + sampled
    assert r.sampled == ([True] * 3 + [False] * len(glue)) * 2 + [True] * 3
    assert all(math.isnan(p) != s for p, s in zip(r.logprobs_gen, r.sampled))
    assert [v == -1 for v in r.versions] == [not s for s in r.sampled]
    assert engine.requests[1].prompt_ids == tuple(r.prompt_ids + sampled + glue)
    assert (r.finish, r.turns, r.rewards) == ("done", 3, {"points": 3.0})


def test_the_tokens_of_an_episode_are_those_of_the_template_rendered_whole():
    turn = ([IDS["a"], END], "stop")
    ((r,),) = run(ScriptedEngine([[turn], [turn], [turn]]), Task("echo", [EXAMPLE], Echo, max_turns=5), samples=1)
    whole = [user("hi"), {"role": "assistant", "content": "a"}, user("more"), {"role": "assistant", "content": "a"}, user("more"), {"role": "assistant", "content": "a"}]
    text = TOKENIZER.apply_chat_template(whole, tokenize=False)
    assert TOKENIZER.decode(r.prompt_ids + r.completion_ids) == text.removesuffix("\n")


def test_a_turn_that_ends_by_a_stop_string_gets_the_templates_turn_end_unsampled():
    engine = ScriptedEngine([[([IDS["a"]], "stop")], [([IDS["b"], END], "stop")], [([IDS["b"], END], "stop")]])
    ((r,),) = run(engine, Task("echo", [EXAMPLE], Echo, max_turns=3), samples=1)
    assert r.completion_ids[:2] == [IDS["a"], END] and r.sampled[:2] == [True, False]


def test_a_turn_cut_by_length_ends_its_episode_as_truncated():
    ((r,),) = run(ScriptedEngine([[([IDS["a"]] * 9, "length")]]), Task("echo", [EXAMPLE], Echo, max_turns=5), samples=1, max_completion_tokens=4)
    assert (r.finish, r.truncated, len(r.completion_ids)) == ("length", True, 4)


def test_each_turn_may_use_what_the_ones_before_left_of_the_budget():
    turn = ([IDS["a"], END], "stop")
    engine = ScriptedEngine([[turn], [turn], [turn]])
    ((r,),) = run(engine, Task("echo", [EXAMPLE], Echo, max_turns=5), samples=1, max_completion_tokens=100)
    used = len(engine.requests[1].prompt_ids) - len(engine.requests[0].prompt_ids)
    assert [q.max_tokens for q in engine.requests] == [100, 100 - used, 100 - 2 * used]


def test_no_request_is_made_when_the_budget_is_used_up():
    turn = ([IDS["a"], END], "stop")
    engine = ScriptedEngine([[turn]])
    ((r,),) = run(engine, Task("echo", [EXAMPLE], Echo, max_turns=5), samples=1, max_completion_tokens=20)
    assert (len(engine.requests), r.finish) == (1, "length")


def test_an_episode_that_is_open_after_its_turns_is_truncated():
    turn = ([IDS["a"], END], "stop")
    ((r,),) = run(ScriptedEngine([[turn], [turn]]), Task("echo", [EXAMPLE], Echo, max_turns=2), samples=1)
    assert (r.finish, r.truncated, r.turns) == ("max_turns", True, 2)


def test_a_failing_environment_excludes_its_rollout_and_no_other():
    calls = []

    def reward(completion, example):
        calls.append(completion)
        if completion == "b":
            raise ConnectionError("judge is down")
        return 1.0

    ((a, b),) = run(ScriptedEngine([[([IDS["a"], END], "stop"), ([IDS["b"], END], "stop")]]), single(reward))
    assert a.failure == "" and a.reward({}) == 1.0
    assert "judge is down" in b.failure and b.rewards == {}
    assert rollout_metrics([[a, b]], {}).result()["rollout/failed"] == 0.5


def test_an_environment_that_does_not_answer_fails_at_its_deadline():
    async def never(completion, example):
        await asyncio.sleep(60)

    ((r,),) = run(ScriptedEngine([[([IDS["a"], END], "stop")]]), single(never), samples=1)
    assert "--deadlines.environment" in r.failure


@pytest.mark.parametrize("value", [None, [1.0], "1", {"a": None}])
def test_a_reward_that_is_not_one_number_is_a_failure_and_never_spreads(value):
    ((r,),) = run(ScriptedEngine([[([IDS["a"], END], "stop")]]), single(lambda c, e: value), samples=1)
    assert "must return one number" in r.failure


def test_a_prompt_over_the_limit_is_never_cut_but_fails_with_its_length():
    ((r,),) = run(ScriptedEngine([]), single(), samples=1, max_prompt_tokens=3)
    assert "--sampling.max-prompt-tokens" in r.failure and r.completion_ids == []


def test_groups_come_back_in_the_order_asked_and_the_same_prompt_twice_is_two_groups():
    script = [[([IDS[c], END], "stop")] for c in "abc"]
    prompts = [(0, EXAMPLE), (1, EXAMPLE), (2, EXAMPLE)]
    groups = run(ScriptedEngine(script), single(), samples=1, prompts=prompts)
    assert [g[0].index for g in groups] == [0, 1, 2]
    assert [g[0].completion_ids[0] for g in groups] == [IDS[c] for c in "abc"]


def test_seeds_differ_by_prompt_and_label_and_repeat_with_the_key():
    assert len({seed_of(0, label, i) for label in ("train", "eval") for i in range(100)}) == 200
    assert seed_of(1, "train", 3) == seed_of(1, "train", 3)


def test_an_error_of_the_engine_leaves_as_itself_and_ends_the_other_groups():
    class Broken(ScriptedEngine):
        async def generate(self, request):
            if not self.requests:
                self.requests.append(request)
                raise EngineError("gone")
            await asyncio.sleep(60)

    with pytest.raises(EngineError, match="gone"):
        run(Broken([]), single(), prompts=[(0, EXAMPLE), (1, EXAMPLE)])


def test_a_zero_weight_silences_a_reward_and_an_unlisted_one_counts_once():
    ((r,),) = run(ScriptedEngine([[([IDS["a"], END], "stop")]]), single(lambda c, e: {"x": 2.0, "y": 3.0}), samples=1)
    assert r.reward({"x": 0.0}) == 3.0


# ------------------------------------------------------------------------------------------------ rendering


def test_the_beginning_of_sequence_token_is_written_once_by_whoever_writes_it():
    renderer = Renderer(TOKENIZER, "chat")
    assert renderer.prompt([user("hi")]).count(1) == 2  # one <|im_start|> per turn, none added


def test_no_prompt_is_cut_by_the_tokenizers_own_limit():
    short = tiny.tokenizer()
    short.model_max_length, short.truncation_side = 16, "left"
    assert len(Renderer(short, "text").prompt([user("x" * 40)])) == 40


def test_chat_without_a_template_is_refused_and_auto_falls_back_to_text():
    bare = tiny.tokenizer(chat_template=None)
    with pytest.raises(UserError, match="--task.prompt-format text"):
        Renderer(bare, "chat")
    assert Renderer(bare, "auto").format == "text"


def test_a_template_that_rewrites_past_turns_is_refused_for_several_turns_only():
    rewriting = tiny.CHATML.replace("{{ message['content'] }}", "{{ message['content'] if loop.last else message['content'][:1] }}")
    renderer = Renderer(tiny.tokenizer(rewriting), "chat")
    with pytest.raises(UserError, match="several turns"):
        renderer.require_multi_turn()
    assert renderer.prompt([user("hi")])


def test_stop_ids_hold_the_tokenizers_end_the_generation_configs_and_the_templates():
    other = tiny.tokenizer()
    other.eos_token = "<|endoftext|>"
    config = type("GenerationConfig", (), {"eos_token_id": [7, 9]})()
    assert Renderer(other, "chat", generation_config=config).stop_ids == [0, 2, 7, 9]


# ------------------------------------------------------------------------------------------------ HFEngine


def hf_engine(tmp_path, temperature=1.0):
    policy = policies.load_policy(tiny.save_model(tmp_path), policies.PolicyConfig(), temperature, torch.device("cpu"))
    return policy, HFEngine(policy.model, TOKENIZER, policy.set_sampling, max_batch=8)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_the_policy_scores_its_own_samples_as_it_sampled_them(tmp_path, temperature):
    policy, engine = hf_engine(tmp_path, temperature)
    prompts = [(i, Example([user("x" * (3 * i + 1))])) for i in range(4)]
    groups = run(engine, single(), samples=4, prompts=prompts, temperature=temperature, max_completion_tokens=12)
    for batch in policies.pack([r for g in groups for r in g], 200):
        (logprobs,) = policies.score(policy, [batch])
        assert (logprobs - batch.logprobs_gen).abs().max() < 1e-5


def test_samples_depend_on_their_seed_and_not_on_what_is_sampled_beside_them(tmp_path):
    _, engine = hf_engine(tmp_path)
    prompts = [(i, Example([user("abc"[i])])) for i in range(3)]
    together = run(engine, single(), samples=3, prompts=prompts, max_completion_tokens=8)
    alone = run(engine, single(), samples=3, prompts=[prompts[2]], max_completion_tokens=8)
    assert [r.completion_ids for r in together[2]] == [r.completion_ids for r in alone[0]]
    assert len({tuple(r.completion_ids) for r in together[0]}) == 3


def test_temperature_zero_is_greedy(tmp_path):
    policy, engine = hf_engine(tmp_path)
    (a, b) = asyncio.run(engine.generate(Request((5, 6, 7), 2, 6, 0.0, 1)))
    policy.set_sampling(True)
    assert a.ids == b.ids
    assert a.ids[0] == int(policy.model(torch.tensor([[5, 6, 7]])).logits[0, -1].argmax())


def test_the_nucleus_holds_the_best_tokens_and_is_renormalised():
    logprobs = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert nucleus(logprobs, 0.8).exp()[0].tolist() == pytest.approx([0.625, 0.375, 0.0, 0.0])
    assert nucleus(logprobs, 0.4).exp()[0].tolist() == [1.0, 0.0, 0.0, 0.0]


def test_a_stop_string_ends_a_sample_with_the_token_that_completes_it(tmp_path):
    _, engine = hf_engine(tmp_path)
    (free,) = asyncio.run(engine.generate(Request((5, 6, 7), 1, 20, 1.0, 3)))
    text = TOKENIZER.decode(free.ids)
    (stopped,) = asyncio.run(engine.generate(Request((5, 6, 7), 1, 20, 1.0, 3, stop=(text[4:6],))))
    assert stopped.finish == "stop" and TOKENIZER.decode(stopped.ids).endswith(text[4:6]) and len(stopped.ids) <= len(free.ids)


def test_an_error_while_sampling_reaches_whoever_waits(tmp_path):
    _, engine = hf_engine(tmp_path)
    with pytest.raises(IndexError):
        asyncio.run(engine.generate(Request((10_000,), 1, 4, 1.0, 0)))


# ------------------------------------------------------------------------------------------------ vLLM's answers


def choice(**changes):
    content = [{"logprob": -0.1}, {"logprob": -0.2}]
    return {"token_ids": [5, 9], "finish_reason": "stop", "logprobs": {"content": content}, "weight_versions": [{"version": "4", "start": 0, "end": 2}], **changes}


def test_versions_are_given_per_token_also_across_an_update():
    spans = [{"version": "4", "start": 0, "end": 1}, {"version": "5", "start": 1, "end": 3}]
    assert parse_choice(choice(weight_versions=spans)).versions == [4, 5]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"finish_reason": "abort"}, "abort"),
        ({"logprobs": {"content": [{"logprob": -0.1}]}}, "1 log-probabilities for 2 tokens"),
        ({"weight_versions": [{"version": "default", "start": 0, "end": 2}]}, "unknown version"),
        ({"weight_versions": [{"version": "4", "start": 0, "end": 1}]}, "no weight version for token 1"),
    ],
)
def test_an_answer_with_anything_missing_is_an_error(changes, message):
    with pytest.raises(EngineError, match=message):
        parse_choice(choice(**changes))


class FlakyServer:
    """An HTTP server on loopback that answers with prepared (status, body) pairs; body None: never."""

    def __init__(self, answers):
        self.answers, self.bodies = list(answers), []

    async def handle(self, request):
        from aiohttp import web

        self.bodies.append(await request.json())
        status, body = self.answers.pop(0)
        if body is None:
            await asyncio.sleep(30)
        return web.Response(status=status, text=json.dumps(body), content_type="application/json")

    async def ask(self, deadline=5.0, check_alive=lambda: None):
        from aiohttp import web

        app = web.Application()
        app.router.add_post("/inference/v1/generate", self.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        try:
            async with VLLMEngine(f"http://127.0.0.1:{port}", "key", deadline, check_alive) as engine:
                return await engine.generate(Request((1, 2), 1, 4, 0.7, 11, stop=("x",), stop_ids=(2,)))
        finally:
            await asyncio.wait_for(runner.cleanup(), 5)


def test_a_request_carries_every_setting_and_survives_two_failures():
    server = FlakyServer([(500, {}), (503, {}), (200, {"choices": [choice()]})])
    (completion,) = asyncio.run(server.ask())
    assert completion.ids == [5, 9] and len(server.bodies) == 3
    sent = server.bodies[0]["sampling_params"]
    assert (sent["temperature"], sent["seed"], sent["n"], sent["max_tokens"], sent["stop"], sent["stop_token_ids"]) == (0.7, 11, 1, 4, ["x"], [2])


def test_retries_are_bounded_and_a_refusal_is_final():
    with pytest.raises(EngineError, match="failed 3 times: HTTP 500"):
        asyncio.run(FlakyServer([(500, {})] * 3).ask())
    server = FlakyServer([(400, {"error": "too long"})])
    with pytest.raises(EngineError, match="too long"):
        asyncio.run(server.ask())
    assert len(server.bodies) == 1


def test_a_silent_engine_is_an_error_that_names_the_deadline(monkeypatch):
    monkeypatch.setattr(VLLMEngine, "retries", 0)
    with pytest.raises(EngineError, match="--deadlines.request"):
        asyncio.run(FlakyServer([(200, None)]).ask(deadline=0.5))


def test_a_dead_engine_is_reported_with_its_last_words_instead_of_retried():
    def dead():
        raise EngineError("the engine ended: out of memory")

    with pytest.raises(EngineError, match="out of memory"):
        asyncio.run(FlakyServer([(500, {})] * 3).ask(check_alive=dead))
