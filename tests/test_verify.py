"""Verification: what counts as right, and that no answer and no verifier can fool or stop a run."""

import asyncio
import doctest
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import verify
from task import Example, SingleTurn, Step, Task, TaskConfig, UserError, assistant, load_task, self_test
from verify import Verdict, VerifierError, Workers, check, check_batch, compare, extract, in_workers, last_boxed, rates, right_answer, usable

ROOT = Path(__file__).parent.parent
HOSTILE = ("9^{9^{9^{9}}}", "2^{2^{2^{2^{2^{2}}}}}", "(10^9)!", "10^{10^{10}}", "(x+1)^{5000}")


@pytest.fixture
def made():
    """Workers that end with the test."""
    pools = []

    def make(*args, **kwargs):
        pools.append(Workers(*args, **kwargs))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture
def script(tmp_path):
    def write(text, name="mine.py"):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def boxed(answer):
    return f"so it is \\boxed{{{answer}}}."


def test_the_examples_in_docstrings_hold():
    assert doctest.testmod(verify).failed == 0


# ---------------------------------------------------------------- extraction


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{41} no, \boxed{42}", "42"),
        (r"\boxed{\boxed{42}}", "42"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\left\{1\right\}}", r"\left\{1\right\}"),
        (r"\fbox{7}", "7"),
        (r"\boxed 5", "5"),
        (r"\boxed{41} then \boxed{42", "41"),
        (r"\boxed{42", None),
        (r"\boxed{}", None),
        (r"\boxed{1} \boxed{}", None),
        (r"} \boxed{3}", "3"),
        ("it is 3 or 4", None),
        (r"<think>\boxed{3}</think> I do not know", None),
        (r"<think>\boxed{3}</think> \boxed{4}", "4"),
        (r"\boxed{3}</think> \boxed{4}", "4"),
        (r"<think> \boxed{3}", None),
    ],
)
def test_the_last_complete_box_outside_the_thinking_is_the_answer(text, answer):
    assert extract(text, "boxed") == answer


def test_tags_and_hashes_take_the_last_and_nothing_without_a_marker():
    assert extract("<answer>71</answer> <answer>72</answer>", "answer") == "72"
    assert extract("<answer>71</answer> <answer>72", "answer") == "71"
    assert extract("72", "answer") is None
    assert extract("#### 1\n#### 18\nthe end", "####") == "18"
    assert extract("18", "####") is None


def test_extraction_is_linear_in_the_text():
    for text in ("\\boxed{" * 50_000, "{" * 200_000, "\\boxed{}" * 50_000, "<answer>" * 50_000, "\\" * 200_000):
        start = time.perf_counter()
        for marker in verify.MARKERS:
            extract(text, marker)
        assert time.perf_counter() - start < 2.0


@given(st.text(alphabet="\\boxed{} 4fb", max_size=60))
@settings(max_examples=200, deadline=None)
def test_extraction_never_raises_and_its_braces_balance(text):
    answer = last_boxed(text)
    bare = (answer or "").replace("\\{", "").replace("\\}", "").replace("\\\\", "")
    assert "\\" in text or answer is None
    assert bare.count("{") == bare.count("}") or "\\" in bare


# ---------------------------------------------------------------- what is equal

EQUAL = [
    ("1000", "1,000"), ("1000", "1{,}000"), ("1000", "1 000"), ("1000", "1000.0"), ("1000", r"1\,000"), ("1/2", "0.5"), ("0.5", r"\frac12"),
    ("0.5", r"\dfrac{1}{2}"), (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"), (r"\{1,2,3\}", r"\{3,2,1\}"), ("5", "x=5"), ("x=5", "5"), ("18", r"\$18"),
    ("18", "$18$"), ("2", r"\sqrt{4}"), ("2", r"\sqrt4"), ("(x+1)^2", "x^2+2x+1"), (r"\frac{1}{3}", "0.3333333"), ("-5", "\u22125"), ("1000", "1e3"),
    ("3000", r"3\times 10^{3}"), ("42", r"\text{The answer is }42"), ("A", "A"), ("A", r"\text{(A)}"), ("B", "(B)"), ("Monday", r"\text{Monday}"),
    ("Monday", "monday."), (r"50\%", "0.5"), (r"50\%", r"50\%"), ("$1,2$", "1,2"), ("3 or 4", "3 or 4"), ("3 or 4", "4,3"), (r"\pi", "3.14159"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}"), ("14", r"14\text{ apples}"), ("45", r"45^\circ"), ("1.5", r"1\frac{1}{2}"),
    (r"(-\infty,0)\cup(1,2)", r"(1,2)\cup(-\infty,0)"), ("10^{20}", "100000000000000000000"), (r"(1,\sqrt{4})", "(1,2)"), ("12:30", "12:30"), ("0", "-0"),
]  # fmt: skip
DIFFERENT = [
    ("42", "41=42"), ("42", "x=41=42"), ("50", r"50\%"), ("50", "50%"), ("0.5", r"50\%"), ("42", r"42\%"), ("42", "42 or 41"), ("42", "answer: 42 or 41"),
    ("14", r"14\text{ apples and 3 pears}"), ("east", "seat"), ("yes", "eys"), ("1,2,3", "3,2,1"), ("$1,2,3$", "3,2,1"), ("0.0000001", "0.0000002"),
    ("12", "12:30"), ("(1,2)", "(2,1)"), ("[0,1)", "(0,1)"), ("1/3", "0.333"), ("10^{20}", "10^{20}+1"), ("4", "3 or 4"), ("4", "3, 4"), ("4", r"\{3,4\}"),
    ("4", "not 4"), ("4", r"\text{not }4"), ("12", "12x"), ("12", "1,2"), ("42", "4 2"), (r"\{1,2\}", "(1,2)"), ("x", "y"), ("x=5", "y=5"),
    (r"\sqrt{2}", "1.41"), (r"\frac{\sqrt{2}}{10000000}", r"\frac{\sqrt{3}}{10000000}"), ("A", "AB"), ("A", "A or B"), ("2x+1", "2x+1=2x+1"),
    ("x^2", r"x^2 \text{ or } x^3"), ("5", ""), ("5", "5" * 400), ("5", "\\boxed{5}+0"), ("2", "1+1=2"), ("7", "7..."), (r"\frac{1}{2}", r"\frac{1}{0}"),
]  # fmt: skip


@pytest.fixture(scope="module")
def symbolic():
    return verify._symbolic


@pytest.mark.parametrize(("reference", "answer"), EQUAL)
def test_equal_answers_are_accepted(reference, answer, symbolic):
    assert compare(reference, answer, symbolic) is True


@pytest.mark.parametrize(("reference", "answer"), DIFFERENT)
def test_different_answers_are_rejected(reference, answer, symbolic):
    assert compare(reference, answer, symbolic) is False


def test_numbers_never_need_sympy():
    for reference, answer in [*EQUAL, *DIFFERENT]:
        if verify.number(verify.tidy(reference)) is not None and verify.number(verify.tidy(answer)) is not None:
            assert compare(reference, answer) is not None


@given(st.decimals(allow_nan=False, allow_infinity=False, places=6, min_value=-(10**9), max_value=10**9), st.integers(-(10**6), 10**6))
@settings(deadline=None)
def test_a_number_equals_its_own_spellings_and_no_other_number(value, other):
    plain = format(value, "f")
    assert compare(plain, plain + "0") and compare(plain, f"${plain}$") and compare(plain, format(value, ",f").replace(",", "{,}"))
    assert compare(plain, str(other)) is (value == other)


def test_a_text_with_every_number_in_it_is_no_answer():
    everything = " ".join(map(str, range(100)))
    assert all(asyncio.run(check(str(gold), everything)).status == "no_answer" for gold in (0, 50, 99))


def test_references_that_cannot_be_verified_against_are_recognised():
    assert [usable(r) for r in ("", None, "see figure", "\\boxed{", "5")] == [False, False, False, False, True]


def test_an_unusable_reference_is_an_error_and_never_a_reward():
    for reference in ("", None, "see figure", "\\boxed{"):
        verdict = asyncio.run(check(reference, boxed("5")))
        assert verdict.status == "error"
        with pytest.raises(VerifierError):
            _ = verdict.reward


# ---------------------------------------------------------------- called as training calls it


def test_right_and_wrong_answers_through_the_event_loop_and_the_workers():
    rows = [("x^2-1", "(x-1)(x+1)"), (r"\frac{x}{2}", "0.5x"), ("42", "42"), ("x^2", "x*x"), ("x^2", "x^3"), ("42", "41")]
    verdicts = asyncio.run(check_batch([r for r, _ in rows], [boxed(a) for _, a in rows]))
    assert [v.status for v in verdicts] == ["ok"] * 4 + ["wrong"] * 2
    assert rates(verdicts)["verify/ok"] == pytest.approx(4 / 6)


def test_workers_serve_one_event_loop_after_another():
    for _ in range(3):
        assert asyncio.run(check("x^2", boxed("x*x"))).status == "ok"


def test_hostile_answers_cost_their_deadline_and_nothing_else():
    async def attack():
        gaps, last = [], time.perf_counter()

        async def heartbeat():
            nonlocal last
            while True:
                await asyncio.sleep(0.005)
                now = time.perf_counter()
                gaps.append(now - last)
                last = now

        beat = asyncio.create_task(heartbeat())
        start = time.perf_counter()
        bad = asyncio.gather(*(check("x+1", boxed(h), deadline=0.5) for h in HOSTILE))
        good = await asyncio.gather(*(check("7", boxed("7")) for _ in range(50)))
        quick = time.perf_counter() - start
        verdicts = await bad
        beat.cancel()
        return verdicts, good, quick, max(gaps), time.perf_counter() - start

    asyncio.run(check("x+1", boxed("1+x+0"), deadline=0.5))  # workers up
    verdicts, good, quick, gap, took = asyncio.run(attack())
    assert all(v.status in ("timeout", "wrong") and v.reward == 0.0 for v in verdicts) and any(v.status == "timeout" for v in verdicts)
    assert all(v.status == "ok" for v in good) and quick < 1.0
    assert gap < 0.5 and took < 15
    assert asyncio.run(check("x+1", boxed("1+x"), deadline=0.5)).status == "ok"


def test_nested_brackets_and_code_are_wrong_and_run_nothing(tmp_path):
    canary = tmp_path / "canary"
    answers = ["(" * 140 + "x" + ")" * 140, f"__import__('os').system('touch {canary}')", f"open('{canary}','w')", "{" * 100 + "}" * 100]
    verdicts = asyncio.run(check_batch(["x+1"] * len(answers), [boxed(a) for a in answers]))
    assert all(v.status in ("wrong", "timeout") for v in verdicts) and not canary.exists()


def test_a_batch_of_errors_alone_raises_and_one_error_among_answers_does_not():
    with pytest.raises(VerifierError, match="all 2"):
        asyncio.run(check_batch(["", None], [boxed("1"), boxed("2")]))
    assert [v.status for v in asyncio.run(check_batch(["", "2"], [boxed("1"), boxed("2")]))] == ["error", "ok"]


def test_statuses_become_metrics_and_the_answer_is_told():
    step = asyncio.run(scored_step(boxed("1{,}000"), "1000"))
    assert step.rewards == {"correct": 1.0} and step.metrics["verify/ok"] == 1.0 and step.metrics["verify/timeout"] == 0.0 and step.answer == "1,000"
    assert asyncio.run(scored_step("1000", "1000")).metrics["verify/no_answer"] == 1.0


async def scored_step(completion, reference):
    return await right_answer()(completion, Example([], answer=reference))


# ---------------------------------------------------------------- workers


def test_one_stuck_row_is_flagged_and_the_others_are_right(script, made):
    path = script("import time\ndef slow(n):\n    time.sleep(60 * (n == 3))\n    return n\n")
    pool = made(f"{path}:slow", deadline=1.0)
    start = time.monotonic()

    async def batch():
        return await asyncio.gather(*(pool.call(n) for n in range(8)))

    replies = asyncio.run(batch())
    assert [r.value for r in replies] == [0, 1, 2, None, 4, 5, 6, 7] and replies[3].status == "timeout"
    assert time.monotonic() - start < 5
    assert asyncio.run(pool.call(4)).value == 4


def test_waiting_in_the_queue_does_not_count_against_the_deadline(script, made):
    path = script("import time\ndef slow(n):\n    time.sleep(0.3)\n    return n\n")
    pool = made(f"{path}:slow", deadline=0.9, count=1)

    async def batch():
        return await asyncio.gather(*(pool.call(n) for n in range(5)))

    assert [r.status for r in asyncio.run(batch())] == ["ok"] * 5


def test_memory_and_death_and_exceptions_are_statuses(script, made):
    path = script(
        "import os\n"
        "def act(what):\n"
        "    if what == 'memory': return len(bytearray(1 << 34))\n"
        "    if what == 'die': os._exit(3)\n"
        "    if what == 'exit': raise SystemExit(0)\n"
        "    if what == 'raise': raise KeyError('gone')\n"
        "    if what == 'deep': return act_deep()\n"
        "    if what == 'print': print('noise')\n"
        "    return 'fine'\n"
        "def act_deep(): return [act_deep()]\n"
    )
    pool = made(f"{path}:act", count=1)
    replies = {what: asyncio.run(pool.call(what)) for what in ("memory", "die", "exit", "raise", "deep", "print")}
    assert {what: r.status for what, r in replies.items()} == {
        "memory": "timeout", "die": "error", "exit": "error", "raise": "error", "deep": "timeout", "print": "ok",
    }  # fmt: skip
    assert "KeyError" in replies["raise"].detail and "status 3" in replies["die"].detail


def test_failures_in_a_row_stop_the_run(script, made):
    pool = made(f"{script('def broken(): raise OSError(5)')}:broken", count=1)

    async def calls():
        for _ in range(pool.breaker - 1):
            assert (await pool.call()).status == "error"
        with pytest.raises(UserError, match="32 times in a row.*OSError"):
            await pool.call()

    asyncio.run(calls())


def test_a_target_that_cannot_be_imported_is_an_error_with_its_reason(script, made):
    pool = made(f"{script('import no_such_module')}:f", count=1)
    assert "no_such_module" in asyncio.run(pool.call()).detail


def test_a_fresh_worker_forgets_what_an_answer_did_and_survives_it(script, made):
    path = script("import time\nseen = []\ndef act(n):\n    seen.append(n)\n    time.sleep(60 * (n < 0))\n    return len(seen)\n")
    pool = made(f"{path}:act", count=1, fresh=True, deadline=0.5)
    assert [asyncio.run(pool.call(n)).value for n in (1, 2, 3)] == [1, 1, 1]
    process = pool.processes[0].process.pid
    assert asyncio.run(pool.call(-1)).status == "timeout"
    assert asyncio.run(pool.call(1)).value == 1 and pool.processes[0].process.pid == process


@pytest.mark.skipif(bool(verify.can_lock()), reason=verify.can_lock())
def test_a_locked_worker_has_no_network_no_writing_no_processes_and_no_signals(script, made, tmp_path):
    path = script(
        "import os, socket, subprocess, resource, ctypes, multiprocessing\n"
        "def attempt(what, where):\n"
        "    try:\n"
        "        if what == 'socket': socket.create_connection(('127.0.0.1', int(where)), 1)\n"
        "        if what == 'unix': socket.socket(socket.AF_UNIX).connect(where)\n"
        "        if what == 'write': open(where, 'w').write('x')\n"
        "        if what == 'system': return os.system('touch ' + where)\n"
        "        if what == 'run': subprocess.run(['touch', where])\n"
        "        if what == 'fork': os.fork()\n"
        "        if what == 'kill': os.kill(int(where), 0)\n"
        "        if what == 'killall': os.kill(-1, 0)\n"
        "        if what == 'priority': os.setpriority(os.PRIO_PROCESS, int(where), 5)\n"
        "        if what == 'environ': open(f'/proc/{where}/environ').read()\n"
        "        if what == 'remount':\n"
        "            if ctypes.CDLL(None).mount(b'x', b'/', b'', 32, 0): raise OSError\n"
        "        if what == 'limit': resource.prlimit(int(where), resource.RLIMIT_NOFILE, (64, 64))\n"
        "        if what == 'fill': open('/proc/big', 'wb').write(bytes(17 << 20))\n"
        "        if what == 'scratch': open('/proc/small', 'w').write('x'); return open('/proc/small').read()\n"
        "        return 'done'\n"
        "    except OSError as error: return 'refused'\n"
    )
    pool = made(f"{path}:attempt", count=1, fresh=True, locked=True, deadline=5)
    canary = tmp_path / "canary"

    async def attempts():
        wheres = {
            "socket": "80",
            "kill": str(os.getpid()),
            "priority": str(os.getpid()),
            "environ": str(os.getpid()),
            "limit": str(os.getpid()),
            "killall": "0",
        }
        names = ["socket", "unix", "write", "run", "fork", "kill", "killall", "priority", "environ", "remount", "limit", "fill", "scratch", "system"]
        return {name: (await pool.call(name, wheres.get(name, str(canary)))) for name in names}

    replies = asyncio.run(attempts())
    assert replies.pop("scratch").value == "x"
    assert replies.pop("system").value != 0
    assert {name: r.value for name, r in replies.items()} == dict.fromkeys(replies, "refused")
    assert not canary.exists()


def test_workers_end_with_the_trainer_however_it_ends(script):
    path = script("import time\ndef slow():\n    time.sleep(60)\n")
    program = script(
        f"import asyncio, sys, os, threading\nsys.path.insert(0, {str(ROOT)!r})\n"
        "from verify import Workers\n"
        f"pool = Workers({path + ':slow'!r}, count=1)\n"
        "async def main():\n"
        "    call = asyncio.create_task(pool.call())\n"
        "    while not (pool.processes and pool.processes[0].process.poll() is None): await asyncio.sleep(0.05)\n"
        "    await asyncio.sleep(1.0)\n"
        "    print(pool.processes[0].process.pid, flush=True)\n"
        "    os.kill(os.getpid(), 9) if sys.argv[1] == 'killed' else call.cancel()\n"
        "asyncio.run(main())\n",
        "program.py",
    )
    for how in ("killed", "normally"):
        start = time.monotonic()
        ended = subprocess.run([sys.executable, program, how], capture_output=True, text=True, timeout=30)
        worker = int(ended.stdout)
        assert time.monotonic() - start < 10, "the exit must not wait for a stuck call"
        for _ in range(50):
            if not running(worker):
                break
            time.sleep(0.1)
        assert not running(worker)


def running(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False


# ---------------------------------------------------------------- user reward functions


def test_a_users_reward_function_runs_in_a_worker(script, tmp_path):
    path = script("import os\ndef mine(completion, example):\n    return {'pid': os.getpid(), 'right': float(completion == example.answer)}\n")
    (tmp_path / "rows.jsonl").write_text('{"question": "q", "answer": "7"}\n')
    task = load_task(f"{path}:mine", TaskConfig(data=str(tmp_path / "rows.jsonl")))
    step = asyncio.run(play(task, "7"))
    assert step.rewards["right"] == 1.0 and step.rewards["pid"] != os.getpid() and step.done


async def play(task, answer):
    environment = task.environment()
    await environment.reset(task.train[0], 0)
    return await environment.step(assistant(answer))


def test_a_users_function_may_return_a_step_and_a_wrong_type_names_it(script):
    path = script(
        "from task import Step\n"
        "def told(completion, example): return Step(rewards={'a': 0.0}, metrics={'m': 2.0}, answer='x')\n"
        "def listed(completion, example): return [1.0]\n"
        "def nothing(completion, example): return None\n"
        "def notnumber(completion, example): return float('nan')\n"
    )
    environment = SingleTurn(in_workers(f"{path}:told"))
    asyncio.run(environment.reset(Example([]), 0))
    assert asyncio.run(environment.step(assistant("x"))) == Step(rewards={"a": 0.0}, metrics={"m": 2.0}, answer="x", done=True)
    for name in ("listed", "nothing", "notnumber"):
        environment = SingleTurn(in_workers(f"{path}:{name}"))
        asyncio.run(environment.reset(Example([]), 0))
        with pytest.raises(TypeError, match=name):
            asyncio.run(environment.step(assistant("x")))


def test_a_users_function_that_fails_or_hangs_excludes_its_rollout(script):
    path = script("import time\ndef hangs(completion, example): time.sleep(60)\ndef fails(completion, example): raise RuntimeError('no dictionary')\n")
    for name, status in (("hangs", "timeout"), ("fails", "no dictionary")):
        with pytest.raises(VerifierError, match=status):
            asyncio.run(in_workers(f"{path}:{name}", deadline=0.5)("x", Example([])))


def test_the_self_test_stops_a_verifier_that_cannot_tell_right_from_wrong(script):
    example = Example([], answer="5")
    checks = [(example, boxed("5"), 1.0), (example, boxed("6"), 0.0)]
    asyncio.run(self_test(Task("t", [example], lambda: SingleTurn(right_answer()), checks=checks)))
    for body, message in (("return 0.0", "must be worth 1.0"), ("return 1.0", "must be worth 0.0"), ("raise ValueError('broken')", "broken")):
        name = "f" + str(abs(hash(body)))
        path = script(f"def {name}(completion, example): {body}\n", f"{name}.py")
        with pytest.raises(UserError, match=message):
            asyncio.run(self_test(Task("t", [example], lambda spec=f"{path}:{name}": SingleTurn(in_workers(spec)), checks=checks)))


def test_a_verdict_of_error_has_no_reward():
    with pytest.raises(VerifierError, match="why"):
        _ = Verdict("error", detail="why").reward
    assert [Verdict(s).reward for s in ("ok", "wrong", "no_answer", "timeout")] == [1.0, 0.0, 0.0, 0.0]
