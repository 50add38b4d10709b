"""Several engines as one, with engines that answer when they are told to."""

import asyncio

import pytest

from rollout import Balanced, Completion, EngineError, Request


class Scripted:
    """Answers with its own name as the only token, once it is let go."""

    def __init__(self, name, error=None):
        self.name, self.error, self.version = name, error, 0
        self.asked, self.entered = [], 0
        self.gate = asyncio.Event()

    async def __aenter__(self):
        self.entered += 1
        if self.error == "enter":
            raise EngineError("no way in")
        return self

    async def __aexit__(self, *exc):
        self.entered -= 1

    async def generate(self, request):
        self.asked.append(request)
        await self.gate.wait()
        if self.error == "generate":
            raise EngineError(f"engine {self.name} died")
        return [Completion([self.name], [-1.0], [self.version], "stop")] * request.n


def request(affinity, tokens=10, n=1):
    return Request(tuple(range(tokens)), n, 10, 1.0, seed=0, affinity=affinity)


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


def test_requests_spread_by_the_work_that_is_outstanding():
    async def main():
        a, b = Scripted(0), Scripted(1)
        async with Balanced([a, b]) as both:
            waiting = [asyncio.create_task(both.generate(request(i, n=n))) for i, n in enumerate([8, 1, 1, 1, 1, 1])]
            await settle()
            assert (len(a.asked), len(b.asked)) == (1, 5)  # one large request on one engine, five small ones on the other
            a.gate.set(), b.gate.set()
            await asyncio.gather(*waiting)
            assert both.work == [0, 0]

    asyncio.run(main())


def test_later_turns_of_a_prompt_go_where_its_keys_are():
    async def main():
        a, b = Scripted(0), Scripted(1)
        a.gate.set(), b.gate.set()
        async with Balanced([a, b]) as both:
            homes = {}
            for turn in range(4):
                for affinity in range(6):
                    (completion,) = await both.generate(request(affinity, tokens=10 + turn))
                    assert homes.setdefault(affinity, completion.ids) == completion.ids

    asyncio.run(main())


def test_a_request_leaves_a_home_that_is_much_busier():
    async def main():
        a, b = Scripted(0), Scripted(1)
        async with Balanced([a, b]) as both:
            waiting = [asyncio.create_task(both.generate(request(7))) for _ in range(8)]
            await settle()
            assert len(a.asked) > 0 and len(b.asked) > 0
            a.gate.set(), b.gate.set()
            await asyncio.gather(*waiting)

    asyncio.run(main())


def test_an_update_forgets_homes_and_reaches_every_engine():
    both = Balanced([Scripted(0), Scripted(1)])
    both.choose(request(3))
    both.version = 5
    assert both.homes == {} and [e.version for e in both.engines] == [5, 5] and both.version == 5


def test_ranks_start_with_different_engines():
    engines = [Scripted(i) for i in range(3)]
    assert [Balanced(engines, first=rank).engines[0].name for rank in range(3)] == [0, 1, 2]


def test_an_engine_that_dies_hands_over_its_error_and_its_work_is_forgotten():
    async def main():
        a = Scripted(0, error="generate")
        a.gate.set()
        async with Balanced([a, Scripted(1)]) as both:
            with pytest.raises(EngineError, match="engine 0 died"):
                await both.generate(request(1))
            assert both.work == [0, 0]

    asyncio.run(main())


def test_an_engine_that_cannot_be_entered_leaves_the_others():
    async def main():
        a, b = Scripted(0), Scripted(1, error="enter")
        with pytest.raises(EngineError, match="no way in"):
            async with Balanced([a, b]):
                pass
        assert a.entered == 0

    asyncio.run(main())
