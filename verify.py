"""Verification: is this answer right? Exact where it can be, killable where it cannot, and never a silent 0.

    --task tasks/math.py:math --task.data problems.jsonl       boxed answers, checked by `check` below
    --task mine.py:my_reward  --task.data prompts.jsonl        your function, run by `in_workers` below

    (1) extract   the last complete \\boxed{...}, <answer>...</answer> or `#### ...`; no marker, no answer: text is never searched for the reference
    (2) compare   numbers as exact fractions, words as words, tuples and sets element by element; microseconds, in this process
    (3) prove     only what is left, expressions, goes to math-verify (sympy), in a worker process with a deadline and a memory limit

    status        worth   meaning
    ok            1       equal to the reference
    wrong         0       not equal
    no_answer     0       no complete marker, or nothing in it
    timeout       0       the answer used up its time or memory and its worker was killed, or it ended its worker itself
    error         none    the verifier failed: the rollout is excluded (VerifierError); after 32 in a row the run stops (UserError)

A worker is one process at the other end of two pipes. Requests go down as pickles; replies come up as JSON, because a worker that
has met hostile text must not be believed more than that. Its deadline starts when it starts, not while it queues. Killing it costs
its own answer and nobody else's. Workers die with the trainer, however it dies.

`fresh` workers fork for every call, so that nothing an answer does is there for the next. `locked` workers moreover lose the network,
the file system (read-only), other processes, and the right to start any: for scorers that run what the model wrote. What a locked
worker still can do: read every file its user can read, use its share of processor and memory until the limits, and write a reply of
its own choosing, so a scorer that evaluates model text in its own process can be lied to by that text. Attacks on the kernel itself
are not defended against; that takes a virtual machine.
"""

import asyncio
import atexit
import concurrent.futures
import ctypes
import functools
import inspect
import json
import logging
import os
import pickle
import platform
import queue
import re
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from task import Example, Reward, Step, UserError, find_function

Status = Literal["ok", "wrong", "no_answer", "timeout", "error"]
STATUSES: tuple[Status, ...] = ("ok", "wrong", "no_answer", "timeout", "error")
MAX_ANSWER = 300  # characters; a longer answer is wrong without being read
START_DEADLINE = 120.0  # seconds for a worker to import what it needs, on a busy machine
MAX_REPLY = 1 << 20  # bytes


class VerifierError(RuntimeError):
    """The verifier failed, not the answer: the rollout has no reward and must be excluded."""


@dataclass(frozen=True)
class Verdict:
    status: Status
    answer: str | None = None  # as extracted
    detail: str = ""

    @property
    def reward(self) -> float:
        if self.status == "error":
            raise VerifierError(self.detail)
        return float(self.status == "ok")


# ------------------------------------------------------------------------------------------------ extraction


def last_boxed(text: str) -> str | None:
    """The content of the last complete \\boxed{...} or \\fbox{...}, braces balanced; one pass, whatever the text.

    >>> texts = r"\\boxed{\\frac{1}{2}}", r"\\boxed{41} wait \\boxed{42}", r"\\boxed{\\boxed{42}}", r"\\boxed{42", r"\\boxed 5", r"\\boxed{\\{1,2\\}}"
    >>> [last_boxed(text) for text in texts]
    ['\\\\frac{1}{2}', '42', '42', None, '5', '\\\\{1,2\\\\}']
    """
    found: str | None = None
    opened: list[int] = []  # for every brace open at this point: where its box's content starts, or -1
    for match in re.finditer(r"\\(?:boxed|fbox)\s*\{|\\(?:boxed|fbox)\s*(-?[\w.]+)|\\.|[{}]", text, re.DOTALL):
        token = match[0]
        if match[1]:
            found = match[1]
        elif token == "}":
            start = opened.pop() if opened else -1
            found = text[start : match.start()] if start >= 0 else found
        elif token == "{" or token[1:5] in ("boxe", "fbox"):
            opened.append(-1 if token == "{" else match.end())
    while found and (nested := re.fullmatch(r"\s*\\(?:boxed|fbox)\s*\{(.*)\}\s*", found, re.DOTALL)):
        found = nested[1]
    return found


def last_tag(text: str) -> str | None:
    """The content of the last complete <answer>...</answer>."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    return text[start + len("<answer>") : end] if start >= 0 else None


def last_hashes(text: str) -> str | None:
    """The rest of the line after the last `####`."""
    return text.rpartition("####")[2].strip().partition("\n")[0] if "####" in text else None


MARKERS: dict[str, Callable[[str], str | None]] = {"boxed": last_boxed, "answer": last_tag, "####": last_hashes}


def extract(completion: str, marker: str = "boxed") -> str | None:
    """The answer as marked, outside of any <think> block: what stands in the thinking is not an answer. None where there is none.

    >>> [extract(t) for t in (r"it is 3 or 4", r"<think>\\boxed{3}</think> \\boxed{4}", r"<think> \\boxed{3}", r"\\boxed{ }")]
    [None, '4', None, None]
    """
    _, closed, after = completion.rpartition("</think>")
    said = after if closed else completion.partition("<think>")[0]
    answer = MARKERS[marker](said)
    return answer.strip() or None if answer is not None else None


# ------------------------------------------------------------------------------------------------ comparison without sympy

_PLAIN = [(r"\$", ""), ("$", ""), ("\u2212", "-"), ("\u00a0", " "), ("{,}", ","), (r"\%", "%"), (r"\!", ""), (r"\,", " "), (r"\;", " "), (r"\:", " ")]
_PLAIN += [(r"\ ", " "), ("~", " "), (r"\left", ""), (r"\right", ""), (r"\dfrac", r"\frac"), (r"\tfrac", r"\frac"), (r"\(", ""), (r"\)", "")]
_PLAIN += [(r"^{\circ}", ""), (r"^\circ", ""), ("\u00b0", ""), ("\u03c0", r"\pi"), ("\u221a", r"\sqrt"), ("\u00d7", r"\times")]
_WORDS = r"\\(?:text|textbf|textit|mathrm|mbox|textrm)\s*\{([^{}]*)\}"


def tidy(text: Any) -> str:
    """Cosmetics off: dollars, spaces, degree signs, \\left and \\right, one \\text{...} without digits before or after a value."""
    text = str(text)
    for old, new in _PLAIN:
        text = text.replace(old, new)
    text = " ".join(text.split()).removesuffix(".").strip()
    whole = re.fullmatch(_WORDS, text)
    if whole:
        return whole[1].strip().removesuffix(".").strip()
    for pattern in (rf"{_WORDS}\s*(.+)", rf"(.+?)\s*{_WORDS}"):
        match = re.fullmatch(pattern, text)
        if match:
            words, value = match.groups() if pattern.startswith("\\\\") else match.groups()[::-1]
            if not re.search(r"\d|[\\=]|\b(?:not|or|and)\b", words) and "\\text" not in value:
                return value.strip()
    return r"\pi" if text == "pi" else text


_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)?(?:\.\d+)?"
_NUMBER = re.compile(rf"([+-]? ?)({_DIGITS})(?:[eE]([+-]?\d{{1,3}})| ?(?:\\times|\\cdot|\*) ?10\^\{{?([+-]?\d{{1,3}})\}}?)?")
_FRACTION = re.compile(rf"([+-]?) ?(\d*) ?\\frac ?(?:\{{({_DIGITS})\}} ?\{{({_DIGITS})\}}|(\d)(\d)) ?|([+-]?) ?({_DIGITS}) ?/ ?({_DIGITS})")


def number(text: str) -> Fraction | None:
    """The exact value of one number, as tidied text: 1,000; 1 000; -.5; 1e3; 2 \\times 10^{3}; 3/4; \\frac34; 1\\frac{1}{2}. None for anything else.

    >>> [str(number(t)) for t in ("1,000", "1 000", "-.50", "1e3", r"\\frac12", r"1\\frac{1}{2}", "41=42", "1,2", "12:30", "x")]
    ['1000', '1000', '-1/2', '1000', '1/2', '3/2', 'None', 'None', 'None', 'None']
    """
    if match := _NUMBER.fullmatch(text):
        sign, digits, exponent, power = match.groups()
        if digits:
            value = Fraction(digits.replace(",", "").replace(" ", "")) * Fraction(10) ** int(exponent or power or 0)
            return -value if sign.strip() == "-" else value
    if match := _FRACTION.fullmatch(text):
        sign1, whole, over1, under1, over2, under2, sign2, over3, under3 = match.groups()
        over, under = (over1 or over2 or over3 or "").replace(",", "").replace(" ", ""), (under1 or under2 or under3 or "").replace(",", "").replace(" ", "")
        if over and under and Fraction(under):
            value = int(whole or 0) + Fraction(over) / Fraction(under)
            return -value if "-" in (sign1, sign2) else value
    return None


def is_rounded(text: str, value: Fraction) -> bool:
    """Whether a decimal of at least 6 significant digits is `value` rounded to its own last digit: 0.3333333 for 1/3, but not 0.333."""
    decimal = re.fullmatch(r"-?\d*\.(\d+)", text)
    written = number(text)
    if not decimal or written is None or len(text.replace("-", "").replace(".", "").lstrip("0")) < 6:
        return False
    return abs(written - value) <= Fraction(1, 2 * 10 ** len(decimal[1]))


def split_top(text: str) -> list[str]:
    """The parts between commas that no bracket encloses."""
    parts, depth, start = [], 0, 0
    for at, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            parts.append(text[start:at].strip())
            start = at + 1
    return [*parts, text[start:].strip()]


def is_enclosed(text: str) -> bool:
    """Whether the first bracket, ( or [, is closed by the last character and not before: (1,2], but not (1,2) + (3,4).

    >>> is_enclosed("(1,2]"), is_enclosed("(1,2)(3,4)"), is_enclosed("x")
    (True, False, False)
    """
    depth = 0
    for at, char in enumerate(text):
        depth += (char in "([") - (char in ")]")
        if depth == 0:
            return at == len(text) - 1 > 0
    return False


def option(text: str) -> str:
    """(B), B), B. and B are one answer."""
    match = re.fullmatch(r"\(?([A-Za-z])[).]?", text)
    return match[1] if match else text


def is_words(text: str) -> bool:
    """Text to be compared as text: sympy would multiply the letters, and find that east is seat."""
    return bool(re.fullmatch(r"[^\W\d_][^\d_\\^=+*/<>()\[\]{}|]*", option(text))) or bool(re.fullmatch(r"\d{1,2}(?::\d\d)+(?: ?[AaPp]\.?[Mm]\.?)?", text))


def usable(reference: Any) -> bool:
    """Whether a reference answer can be verified against: not empty, short, its braces balanced, no bare prose.

    >>> [usable(r) for r in ("", None, "see figure", "\\\\boxed{", "5", r"\\text{no solution}", r"\\frac{1}{2}")]
    [False, False, False, False, True, True, True]
    """
    if reference is None or not str(reference).strip() or len(str(reference)) > MAX_ANSWER:
        return False
    text, bare = tidy(reference), re.sub(r"\\.", "", str(reference))
    prose = is_words(text) and " " in text and "\\" not in str(reference) and ":" not in text
    return bool(text) and bare.count("{") == bare.count("}") and "boxed" not in text and not prose


Symbolic = Callable[[str, str], bool]


def compare(reference: str, answer: str, symbolic: Symbolic | None = None) -> bool | None:
    """Whether two answers are equal; None where only `symbolic` could tell and is not given.

    A reference without a percent sign takes no percentage; lists keep their order and sets do not; a variable before one `=` may be left out.

    >>> compare("1000", "1{,}000"), compare("42", "41=42"), compare("east", "seat"), compare("(1,2)", "(2,1)"), compare(r"\\{1,2\\}", r"\\{2,1\\}")
    (True, False, False, False, True)
    >>> compare("x^2", "x*x")
    """
    reference, answer = tidy(reference), tidy(answer)
    if len(answer) > MAX_ANSWER or not answer:
        return False
    if answer == reference:
        return True
    if is_words(reference):
        return option(answer).casefold() == option(reference).casefold()
    if re.search(r"\bor\b|\\text ?\{ ?or ?\}", reference):
        parts, others = (split_top(re.sub(r"\\text ?\{ ?or ?\}|\bor\b", ",", side)) for side in (reference, answer))
        return _sequences(parts, others, symbolic, ordered=False)
    names = [re.match(r"([A-Za-z]) ?= ?(?=[^=]*$)", side) for side in (reference, answer)]
    if names[1] and (not names[0] or names[0][1] == names[1][1]):
        answer = answer[names[1].end() :]
    if names[0]:
        reference = reference[names[0].end() :]
    value = number(reference.removesuffix("%").strip())
    if value is not None:
        return _equal_number(value, reference, answer, symbolic)
    if reference.startswith("\\{") and reference.endswith("\\}"):
        if not (answer.startswith("\\{") and answer.endswith("\\}")):
            return False
        return _sequences(split_top(reference[2:-2]), split_top(answer[2:-2]), symbolic, ordered=False)
    if is_enclosed(reference) and len(parts := split_top(reference[1:-1])) > 1:
        if not is_enclosed(answer) or answer[0] + answer[-1] != reference[0] + reference[-1]:
            return False
        return _sequences(parts, split_top(answer[1:-1]), symbolic)
    parts, others = split_top(reference), split_top(answer)
    if len(parts) > 1 or len(others) > 1:
        return _sequences(parts, others, symbolic)
    if not _may_be(reference, answer):
        return False
    return None if symbolic is None else symbolic(reference, answer)


def _equal_number(value: Fraction, reference: str, answer: str, symbolic: Symbolic | None) -> bool | None:
    if reference.endswith("%"):
        other = number(answer.removesuffix("%").strip())
        return other is not None and other == (value if answer.endswith("%") else value / 100)
    other = number(answer)
    if other is not None:
        terminates = 10**400 % value.denominator == 0
        return other == value or (not terminates and is_rounded(answer, value))
    # arithmetic such as \sqrt{4} is evaluated, but nothing with letters, equations or lists in it
    if ".." in answer or re.search(r"[^\d\s.+\-*/^(){}\\a-z]", answer) or re.search(r"[a-z]", re.sub(r"\\(?:frac|sqrt|cdot|times|div|pi|binom)", "", answer)):
        return False
    return None if symbolic is None else symbolic(reference, answer)


def _sequences(parts: list[str], others: list[str], symbolic: Symbolic | None, ordered: bool = True) -> bool | None:
    if len(parts) != len(others):
        return False
    if ordered:
        verdicts = [compare(part, other, symbolic) for part, other in zip(parts, others)]
        return False if False in verdicts else None if None in verdicts else True
    rest = list(others)
    for part in parts:  # equality is transitive, so the first partner found is as good as any
        verdicts = [compare(part, other, symbolic) for other in rest]
        if True not in verdicts:
            return None if None in verdicts else False
        rest.pop(verdicts.index(True))
    return True


def _may_be(reference: str, answer: str) -> bool:
    """Whether sympy may look at an answer: it reads words as products, chains of = as truths, and % as nothing."""
    bare = re.sub(r"\\[a-zA-Z]+", " ", answer)
    words = set(re.findall(r"[a-zA-Z]{2,}", bare)) - set(re.findall(r"[a-zA-Z]{2,}", reference)) - _FUNCTIONS
    if any(mark in answer and mark not in reference for mark in ("%", ":", "...", "\\text", "\\ldots", "\\boxed")):
        return False
    return answer.count("=") <= reference.count("=") and not {w for w in words if not set(w) <= set(reference)} and not words & {"or", "and", "not"}


_FUNCTIONS = {"sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp", "sqrt", "pi"}


# ------------------------------------------------------------------------------------------------ math-verify, in a worker


def math_equal(reference: str, answer: str) -> bool:
    """`compare` with sympy at hand. Runs in a worker: it may take for ever, and it cannot be interrupted in a thread.

    Raises:
        ValueError: the reference itself cannot be read, so that no answer to it could be judged.
    """
    return bool(compare(reference, answer, _symbolic))


def _symbolic(reference: str, answer: str) -> bool:
    import math_verify  # half a second: only workers pay it
    import sympy

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at every call that its own time limits are off

    def parsed(text: str) -> list[Any]:
        # its own time limits are signals, which work in a main thread only and cancel other people's alarms: both are off
        return [p for p in math_verify.parse(f"${text}$", parsing_timeout=None, raise_on_error=False) if not isinstance(p, str)]

    gold = parsed(reference)
    if not gold:
        raise ValueError(f"the reference answer {reference!r} cannot be read as mathematics")
    if isinstance(gold[0], sympy.Expr) and gold[0].is_number and number(answer) is not None and "." in answer:
        return is_rounded(answer, Fraction(str(sympy.N(gold[0], 40)))) if gold[0].is_real else False
    # 15 decimals: the default of 6 finds 0.0000001 equal to 0.0000002
    return math_verify.verify(gold, parsed(answer), float_rounding=15, timeout_seconds=None, raise_on_error=False)


def _warm() -> None:
    _symbolic("\\frac{x}{2}", "0.5x")  # imports and first-use tables, before any deadline runs


math_equal.warm = _warm  # type: ignore[attr-defined]


async def check(reference: Any, completion: str, marker: str = "boxed", deadline: float = 2.0) -> Verdict:
    """What a completion is worth against a reference answer. Never raises for anything the completion holds.

    Raises:
        UserError: the last 32 calls of the workers all failed.
    """
    answer = extract(completion, marker)
    if answer is None:
        return Verdict("no_answer")
    if not usable(reference):
        return Verdict("error", answer, f"reference answer {reference!r:.80} cannot be verified against")
    if len(answer) > MAX_ANSWER:
        return Verdict("wrong", answer[:MAX_ANSWER])
    equal = compare(str(reference), answer)
    if equal is None:
        reply = await workers("verify.py:math_equal", deadline=deadline).call(tidy(reference), tidy(answer))
        if reply.status != "ok":
            return Verdict(reply.status, answer, reply.detail)
        equal = reply.value
    return Verdict("ok" if equal else "wrong", answer)


async def check_batch(references: Sequence[Any], completions: Sequence[str], marker: str = "boxed", deadline: float = 2.0) -> list[Verdict]:
    """`check` for many.

    Raises:
        VerifierError: every single one is an error: a batch of zeros would look like a batch of wrong answers.
    """
    checks = []
    for number, (reference, completion) in enumerate(zip(references, completions, strict=True), 1):
        checks.append(asyncio.create_task(check(reference, completion, marker, deadline)))
        if number % 20 == 0:
            await asyncio.sleep(0)  # a millisecond or two of comparisons, then others get their turn
    verdicts = await asyncio.gather(*checks)
    if verdicts and all(v.status == "error" for v in verdicts):
        raise VerifierError(f"all {len(verdicts)} verifications failed; the first: {verdicts[0].detail}")
    return verdicts


def rates(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """The share of each status: {"verify/ok": 0.5, ...}."""
    return {f"verify/{status}": sum(v.status == status for v in verdicts) / max(1, len(verdicts)) for status in STATUSES}


def right_answer(marker: str = "boxed", deadline: float = 2.0) -> Reward:
    """A reward: 1 if the marked answer equals example.answer. Statuses become metrics, an error excludes the rollout."""

    async def correct(completion: str, example: Example) -> Step:
        verdict = await check(example.answer, completion, marker, deadline)
        return Step(rewards={"correct": verdict.reward}, metrics=rates([verdict]), answer=verdict.answer and tidy(verdict.answer))

    return correct


def thought_first(text: str) -> bool:
    """Whether an assistant turn is one <think> block followed by something. Where the template opens the block, the turn begins with it too.

    >>> [thought_first(t) for t in ("<think>x</think> 4", "x</think> 4", "<think>x</think>", "<think>x<think>y</think> 4", "4")]
    [True, False, False, False, False]
    """
    return bool(re.fullmatch(r"\s*<think>(?:(?!</?think>).)*</think>(?:(?!</?think>).)*\S\s*", text, re.DOTALL))


# ------------------------------------------------------------------------------------------------ workers, seen from the trainer


@dataclass(frozen=True)
class Reply:
    status: Status  # ok, timeout or error
    value: Any = None
    detail: str = ""


class Workers:
    """Processes that run one function, each killed when a call exceeds its deadline, and at once replaced.

    Usable from any thread and any event loop; awaiting a call never blocks the loop.

    Args:
        target: path.py:function; called with what `call` is given, its result must be JSON.
        count: processes.
        deadline: seconds of one call, from its start.
        memory: bytes of address space of each process.
        fresh: fork for every call, so that calls leave nothing behind.
        locked: without network, writing, or other processes (see the header). Refused where the kernel cannot, see `can_lock`.
    """

    breaker = 32  # errors in a row after which the run stops

    def __init__(self, target: str, count: int = 2, deadline: float = 10.0, memory: int = 2 << 30, fresh: bool = False, locked: bool = False):
        if locked and (reason := can_lock()):
            raise UserError(f"{target} runs what the model wrote, and this machine cannot contain it: {reason}; --task.unsafe-tools runs it all the same")
        self.options = {"target": target, "deadline": deadline, "memory": memory, "fresh": fresh, "locked": locked, "parent": os.getpid()}
        self.target, self.deadline = target, deadline
        self.failures = 0
        self.closed = False
        self.jobs: queue.SimpleQueue[tuple[bytes, concurrent.futures.Future[Reply]] | None] = queue.SimpleQueue()
        self.processes: dict[int, WorkerProcess] = {}
        self.threads = [threading.Thread(target=self._serve, args=(i,), name=f"worker {i} of {target}", daemon=True) for i in range(count)]
        for thread in self.threads:
            thread.start()
        atexit.register(self.close)

    async def call(self, *args: Any) -> Reply:
        """One call; queues while all workers are busy, which does not count against its deadline.

        Raises:
            UserError: this and the calls before it all failed.
        """
        future: concurrent.futures.Future[Reply] = concurrent.futures.Future()
        self.jobs.put((pickle.dumps(args), future))
        reply = await asyncio.wrap_future(future)
        self.failures = self.failures + 1 if reply.status == "error" else 0
        if self.failures >= self.breaker:
            raise UserError(f"{self.target} failed {self.failures} times in a row, so there are no rewards to train on: {reply.detail}")
        return reply

    def _serve(self, slot: int) -> None:
        """One thread, one process: it sleeps in poll, so it costs the event loop nothing."""
        process: WorkerProcess | None = None
        while (job := self.jobs.get()) is not None:
            payload, future = job
            if not future.set_running_or_notify_cancel():
                continue  # whoever asked has gone
            try:
                process = process or self._start(slot)
                reply = process.ask(payload, self.deadline + (1.0 if self.options["fresh"] else 0.0))  # a fresh worker watches its fork itself
            except Exception as error:  # everything goes to the caller: this thread must live
                reply = Reply("error", detail=f"{type(error).__name__}: {error}")
            if process is not None and not process.usable:
                process.kill()
                process = None
            future.set_result(reply)
            if process is None and not self.closed:
                try:
                    process = self._start(slot)  # before the next call needs it
                except VerifierError:
                    process = None  # the next call will try again, and say why not
        if process is not None:
            process.kill()

    def _start(self, slot: int) -> "WorkerProcess":
        process = self.processes[slot] = WorkerProcess(self.options)
        if self.closed:
            process.kill()
            raise VerifierError("closed")
        process.wait_until_ready()
        return process

    def close(self) -> None:
        """Kill every worker now, whatever it is doing."""
        self.closed = True
        for _ in self.threads:
            self.jobs.put(None)
        for process in list(self.processes.values()):
            process.kill()
        atexit.unregister(self.close)


class WorkerProcess:
    def __init__(self, options: dict[str, Any]):
        environment = {k: v for k, v in os.environ.items() if k in ("PATH", "PYTHONPATH", "LANG")} if options["locked"] else dict(os.environ)
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            environment.pop(name, None)
        # no device for a scorer, one thread each, and sets in the same order every time
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        self.usable = True
        self.target = options["target"]
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--worker", json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # its own group, so that whatever it starts is killed with it
        )
        assert self.process.stdin and self.process.stdout
        self.down, self.up = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self.down, False)
        os.set_blocking(self.up, False)

    def wait_until_ready(self) -> None:
        reply = self._receive(time.monotonic() + START_DEADLINE)
        if reply.status != "ok":
            self.kill()
            raise VerifierError(f"a worker for {self.target} did not start: {reply.detail or reply.status}")

    def ask(self, payload: bytes, deadline: float) -> Reply:
        end = time.monotonic() + deadline
        view = memoryview(struct.pack(">I", len(payload)) + payload)
        while view:
            if not self._wait(self.down, select.POLLOUT, end):
                return self._lost("timeout", "its worker did not take the call")
            try:
                view = view[os.write(self.down, view) :]
            except BrokenPipeError:
                return self._lost("error", f"a worker for {self.target} was gone")
        return self._receive(end)

    def _receive(self, end: float) -> Reply:
        received = bytearray()
        while len(received) < 4 or len(received) < 4 + struct.unpack(">I", received[:4])[0]:
            if len(received) >= 4 and struct.unpack(">I", received[:4])[0] > MAX_REPLY:
                return self._lost("error", f"a worker for {self.target} replied with more than {MAX_REPLY} bytes")
            if not self._wait(self.up, select.POLLIN, end):
                return self._lost("timeout", f"no answer from {self.target} within its deadline")
            chunk = os.read(self.up, 1 << 16)
            if not chunk:
                self.kill()  # its pipe is closed before its status can be read
                return self._lost("error", f"a worker for {self.target} died (status {self.process.returncode})")
            received += chunk
        try:
            fields = json.loads(received[4:])
            return Reply(fields["status"] if fields["status"] in ("ok", "timeout") else "error", fields.get("value"), str(fields.get("detail", "")))
        except (ValueError, KeyError, TypeError) as error:
            return self._lost("error", f"a worker for {self.target} replied {error}")

    def _wait(self, descriptor: int, event: int, end: float) -> bool:
        poll = select.poll()
        poll.register(descriptor, event)
        return bool(poll.poll(max(0.0, end - time.monotonic()) * 1000))

    def _lost(self, status: Status, detail: str) -> Reply:
        self.usable = False
        return Reply(status, detail=detail)

    def kill(self) -> None:
        self.usable = False
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait(timeout=10)


@functools.cache
def workers(target: str, deadline: float = 10.0, memory: int = 2 << 30, fresh: bool = False, locked: bool = False) -> Workers:
    """The workers of a target, shared by all who ask: one a processor core, 2 to 8, each started when the others are busy."""
    return Workers(target, max(2, min(8, os.cpu_count() or 1)), deadline, memory, fresh, locked)


def in_workers(spec: str, deadline: float = 10.0) -> Reward:
    """A reward function, by path.py:name, as one that runs in workers.

    A call that fails or exceeds its deadline raises VerifierError: nobody knows what it would have been worth, so it is not 0.
    """

    async def reward(completion: str, example: Example) -> Any:
        reply = await workers(spec, deadline=deadline).call(completion, example)
        if reply.status != "ok":
            raise VerifierError(f"reward {spec}: {reply.status}: {reply.detail}")
        return Step(**reply.value["Step"]) if isinstance(reply.value, dict) and set(reply.value) == {"Step"} else reply.value

    reward.__name__ = spec.rpartition(":")[2]
    return reward


# ------------------------------------------------------------------------------------------------ workers, seen from within


def work(options: dict[str, Any]) -> None:
    """The worker process: answer calls from stdin until it closes."""
    calls, replies = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)  # what a scorer prints is not a reply
    die_with(options["parent"])
    os.nice(5)  # an event loop that wakes up comes before a worker that grinds
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (options["memory"], options["memory"]))
    try:
        function, _, _ = find_function(options["target"], "worker")
        getattr(function, "warm", lambda: None)()
        if options["locked"]:
            enclose()
        _reply(replies, {"status": "ok"})
    except BaseException as error:  # the trainer must learn why, whatever it is
        _reply(replies, {"status": "error", "detail": f"{type(error).__name__}: {error}"})
        return
    while header := _read(calls, 4):
        payload = _read(calls, struct.unpack(">I", header)[0])
        if options["fresh"]:
            os.write(replies, _frame_of_fork(function, payload, options, (calls, replies)))
        else:
            _reply(replies, _result(function, payload))


def _result(function: Any, payload: bytes) -> dict[str, Any]:
    try:
        value = function(*pickle.loads(payload))
        if inspect.isawaitable(value):
            value = asyncio.run(_awaited(value))
        return json.loads(json.dumps({"status": "ok", "value": {"Step": asdict(value)} if isinstance(value, Step) else value}, default=_as_float))
    except MemoryError:
        return {"status": "timeout", "detail": "out of memory"}
    except RecursionError:
        return {"status": "timeout", "detail": "nested too deeply"}
    except BaseException as error:  # a scorer may raise anything, SystemExit and math-verify's own BaseException included
        return {"status": "error", "detail": f"{type(error).__name__}: {error}"[:1000]}


async def _awaited(value: Any) -> Any:
    return await value


def _as_float(value: Any) -> float:
    """Scalars of numpy and torch as JSON numbers; anything larger raises."""
    if getattr(value, "size", 1) not in (1,) and not callable(getattr(value, "size", 1)):
        raise TypeError(f"cannot send a {type(value).__name__} of several values")
    return float(value)


def _frame_of_fork(function: Any, payload: bytes, options: dict[str, Any], descriptors: tuple[int, int]) -> bytes:
    """Run the call in a fork and return its reply, framed; the fork is killed at the deadline."""
    up, down = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setpgid(0, 0)
            die_with(os.getppid())
            for descriptor in (up, *descriptors):
                os.close(descriptor)  # or it could answer for others
            os.dup2(0, 2)
            os.dup2(0, 1)
            limit = int(options["deadline"]) + 1
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
            if options["locked"]:
                seal()
            _reply(down, _result(function, payload))
        finally:
            os._exit(0)
    os.close(down)
    end, received, reason = time.monotonic() + options["deadline"], bytearray(), ""
    poll = select.poll()
    poll.register(up, select.POLLIN)
    while not reason:
        if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
            reason = "timeout"
        elif not (chunk := os.read(up, 1 << 16)) or len(received) > MAX_REPLY:
            reason = "end"
        else:
            received += chunk
    try:
        os.killpg(child, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(up)
    if reason == "timeout":
        return _frame({"status": "timeout", "detail": f"more than {options['deadline']} s"})
    if len(received) < 4 or len(received) != 4 + struct.unpack(">I", received[:4])[0]:
        return _frame({"status": "timeout", "detail": f"the process ended without a reply (wait status {status})"})
    return bytes(received)


def _frame(fields: dict[str, Any]) -> bytes:
    body = json.dumps(fields).encode()
    return struct.pack(">I", len(body)) + body


def _reply(descriptor: int, fields: dict[str, Any]) -> None:
    view = memoryview(_frame(fields))
    while view:
        view = view[os.write(descriptor, view) :]


def _read(descriptor: int, size: int) -> bytes:
    """Exactly `size` bytes; none at the end."""
    received = bytearray()
    while len(received) < size:
        chunk = os.read(descriptor, size - len(received))
        if not chunk:
            return b""
        received += chunk
    return bytes(received)


# ------------------------------------------------------------------------------------------------ taking powers away (Linux)

_libc = ctypes.CDLL(None, use_errno=True)
_NEWNS, _NEWUSER, _NEWIPC, _NEWNET = 0x00020000, 0x10000000, 0x08000000, 0x40000000
_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # audit number, column below
_FORBIDDEN = {  # name: number on x86_64, on aarch64; -1 where there is none
    "fork": (57, -1), "vfork": (58, -1), "execve": (59, 221), "execveat": (322, 281), "socket": (41, 198), "connect": (42, 203),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "ptrace": (101, 117), "kcmp": (312, 272),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "setpriority": (141, 140), "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119), "sched_setattr": (314, 274), "sched_setaffinity": (203, 122), "ioprio_set": (251, 30),
    "setrlimit": (160, 164), "prlimit64": (302, 261), "mount": (165, 40), "umount2": (166, 39), "chroot": (161, 51), "pivot_root": (155, 41),
    "unshare": (272, 97), "setns": (308, 268), "mount_setattr": (442, 442), "open_tree": (428, 428), "move_mount": (429, 429),
    "fsopen": (430, 430), "fsmount": (432, 432), "open_by_handle_at": (304, 265), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "perf_event_open": (298, 241), "bpf": (321, 280), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
}  # fmt: skip


def _call(name: str, *args: Any) -> None:
    if getattr(_libc, name)(*args) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def die_with(parent: int) -> None:
    """This process is killed when its parent ends, however it ends."""
    _call("prctl", 1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)  # it ended before the line above


def enclose() -> None:
    """A network without a wire, and a file system that cannot be written and shows no processes.

    Raises:
        OSError: the kernel does not allow it.
    """
    uid, gid = os.getuid(), os.getgid()
    try:
        _call("unshare", _NEWUSER | _NEWNS | _NEWNET | _NEWIPC)
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            Path(f"/proc/self/{name}").write_text(text)
    except OSError:
        _call("unshare", _NEWNS | _NEWNET | _NEWIPC)  # root needs no user namespace, where those are switched off
    attributes = struct.pack("QQQQ", 1, 0, 1 << 18, 0)  # set read-only, make private
    _call("syscall", 442, -100, b"/", 0x8000, attributes, len(attributes))  # mount_setattr, recursively
    _mount_workspace()


def _mount_workspace() -> None:
    """A private 16 MiB in memory, in place of /proc: room for files, and no view of other processes."""
    _call("mount", b"tmpfs", b"/proc", b"tmpfs", 2 | 4, b"size=16m,nr_inodes=1000,mode=700")  # MS_NOSUID | MS_NODEV


def seal() -> None:
    """Give up, for good, everything an untrusted program could turn against others: privileges, processes, sockets, mounts.

    Raises:
        OSError: the kernel does not allow it.
    """
    _call("unshare", _NEWNS)
    _mount_workspace()
    os.chdir("/proc")
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 20, 16 << 20))
    for capability in range(64):
        _libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP; fails beyond the last one
    _call("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))
    _call("prctl", 38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    audit, column = _ARCHITECTURES[platform.machine()]
    deny, absent, allow, kill = 0x00050001, 0x00050026, 0x7FFF0000, 0x80000000  # EPERM, ENOSYS (the C library then uses clone)
    code = [(0x20, 0, 0, 4), (0x15, 1, 0, audit), (0x06, 0, 0, kill), (0x20, 0, 0, 0), (0x35, 0, 1, 0x40000000), (0x06, 0, 0, deny)]
    for numbers in _FORBIDDEN.values():
        if numbers[column] >= 0:
            code += [(0x15, 0, 1, numbers[column]), (0x06, 0, 0, deny)]
    code += [(0x15, 0, 1, 435), (0x06, 0, 0, absent)]  # clone3 hides its flags behind a pointer
    code += [(0x15, 0, 3, (56, 220)[column]), (0x20, 0, 0, 16), (0x45, 1, 0, 0x00010000), (0x06, 0, 0, deny), (0x06, 0, 0, allow)]  # clone: threads only
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    _call("prctl", 22, 2, ctypes.c_char_p(struct.pack("HxxxxxxQ", len(code), ctypes.addressof(program))), 0, 0)  # PR_SET_SECCOMP, filter


@functools.cache
def can_lock() -> str:
    """Why this machine cannot lock a worker; empty where it can. Found out by doing it, in a process of its own."""
    if platform.system() != "Linux" or platform.machine() not in _ARCHITECTURES:
        return f"it needs Linux on x86_64 or aarch64, not {platform.system()} on {platform.machine()}"
    command = [sys.executable, str(Path(__file__).resolve()), "--can-lock"]
    try:
        tried = subprocess.run(command, capture_output=True, text=True, timeout=START_DEADLINE)
    except subprocess.TimeoutExpired:
        return "trying to lock a process did not end"
    return "" if tried.returncode == 0 else (tried.stderr.strip().splitlines() or [f"exit code {tried.returncode}"])[-1]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(json.loads(sys.argv[2]))
    elif sys.argv[1:2] == ["--can-lock"]:
        enclose()
        seal()
        os._exit(0)
