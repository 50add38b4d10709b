"""How fast answers are checked, and whether checking ever holds up the event loop.

    python bench/verify.py                  about 15 s on one core; from the repository root

    (1) fast path    numbers in boxes at the end of a page of reasoning: extraction and exact comparison, one process, one thread
    (2) worker       expressions that need sympy, through the worker processes
    (3) loop block   the longest time between two beats of a 1 ms heartbeat while (1), (2) and hostile answers run at once

The last line is one JSON object; targets: fast_checks_per_second >= 2000, max_loop_block_ms < 50.
"""

import asyncio
import gc
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path = [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]  # this file is called verify too

from verify import check, check_batch

REASONING = "First we compute $3 \\cdot 4 = 12$ and \\frac{1}{2} of {that}. Then we add what is left over, and so on. " * 10
FAST = [("1000", "1{,}000"), ("42", "41"), ("0.5", "\\frac12"), ("72", "72"), ("-3", "\u22123"), ("18", "\\$18"), ("7", "41=42"), ("east", "seat")]
SLOW = [("x^2-1", "(x-1)(x+1)"), ("\\frac{x}{2}", "0.5x"), ("\\sqrt{8}", "2\\sqrt{2}"), ("x^2", "x^3"), ("\\sin(x)^2", "1-\\cos(x)^2")]
HOSTILE = ["9^{9^{9^{9}}}", "(10^9)!", "2^{2^{2^{2^{2^{2}}}}}", "10^{10^{10}}"]


def pairs(table: list[tuple[str, str]], count: int) -> tuple[list[str], list[str]]:
    rows = [table[i % len(table)] for i in range(count)]
    return [reference for reference, _ in rows], [f"{REASONING}\\boxed{{{answer}}}" for _, answer in rows]


async def measure() -> dict[str, float]:
    await check_batch(*pairs(SLOW, 10))  # the workers are up
    start = time.perf_counter()
    await check_batch(*pairs(FAST, 10_000))
    fast = 10_000 / (time.perf_counter() - start)
    start = time.perf_counter()
    await check_batch(*pairs(SLOW, 1000))
    slow = 1000 / (time.perf_counter() - start)
    gaps: list[float] = []

    async def heartbeat() -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    beat = asyncio.create_task(heartbeat())
    gc.collect()
    attack = asyncio.gather(*(check("x+1", f"\\boxed{{{answer}}}", deadline=1.0) for answer in HOSTILE))
    mixed = asyncio.gather(check_batch(*pairs(FAST, 5000)), check_batch(*pairs(SLOW, 200)))
    verdicts = await attack
    await mixed
    beat.cancel()
    timeouts = sum(v.status == "timeout" for v in verdicts)
    return {
        "fast_checks_per_second": round(fast),
        "worker_checks_per_second": round(slow),
        "hostile_answers_timed_out": timeouts,
        "max_loop_block_ms": round(max(gaps) * 1000, 1),
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measure())))
