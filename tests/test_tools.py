"""Tools: the calculator calculates and nothing else, Python is contained, and calls are found in every format."""

import asyncio
import doctest
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tools
import verify
from task import Example, TaskConfig, UserError, assistant, exact_integer, load_task, user
from tools import Call, Tool, ToolUse, calculate, calculator, find_calls, python_tool, tool_prompt, tool_stops

contained = pytest.mark.skipif(bool(verify.can_lock()), reason=verify.can_lock() or "contained")


def test_the_examples_in_docstrings_hold():
    assert doctest.testmod(tools).failed == 0


# ---------------------------------------------------------------- calculator


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("1+2*3", "7"), ("(1+2)*3", "9"), ("2^10", "1024"), ("7//2", "3"), ("-7%3", "2"), ("1,000*2", "2000"), ("0.1+0.2", "0.3"), ("sqrt(16)", "4"),
        ("round(2.567, 2)", "2.57"), ("max(1, 2, 3)", "3"), ("2*pi", "6.28318530718"), ("3\u00d74\u00f76", "2"), ("1e400", "inf"),
    ],
)  # fmt: skip
def test_the_calculator_calculates(expression, result):
    assert calculate(expression) == result


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').system('true')", "().__class__", "[1,2]", "lambda: 1", "x", "open('f')", "sqrt",
        "1 if 1 else 2", "'a'*9", "f'{1}'", "abs(1, x=2)", "",
        "9**9**9", "10**10**10", "2**4097", "(2**4000)*(2**4000)", "1/0", "sqrt(-1)", "(-8)**0.5", "1" * 201, "(" * 150 + ")" * 150, "max()", "1 +", "True+1",
        "2.0**10000", "pi()", "1e308*10**400",
    ],
)  # fmt: skip
def test_the_calculator_refuses_what_is_not_arithmetic_or_too_large(expression):
    start = time.perf_counter()
    assert calculate(expression).startswith("error:")
    assert time.perf_counter() - start < 0.5


@given(st.text(alphabet="0123456789+-*/%^(). esqrtmaxpi,", max_size=40))
@settings(max_examples=300, deadline=1000)
def test_the_calculator_never_raises(expression):
    assert isinstance(calculate(expression), str)


# ---------------------------------------------------------------- Python


def run(*programs, **options):
    tool = python_tool(TaskConfig(), **options)

    async def each():
        return [await tool.function(program) for program in programs]

    return asyncio.run(each())


@contained
def test_python_prints_its_last_expression_and_its_errors():
    results = run(
        "print(1)\nprint(2)", "x = 20\nx + 1", "1/0", "def f(:", "```python\nprint(5)\n```", "import math; math.pi", "exit()", "raise SystemExit", "", "None"
    )
    assert results[:3] == ["1\n2", "21", "error: ZeroDivisionError: division by zero (line 1)"]
    assert results[3].startswith("error: SyntaxError") and results[4] == "5" and results[5] == "3.141592653589793" and results[6:] == ["", "", "", ""]


@contained
def test_python_has_no_network_no_processes_no_writing_outside_and_no_memory_of_earlier_calls(tmp_path):
    canary = tmp_path / "canary"
    results = run(
        "import socket; socket.create_connection(('127.0.0.1', 80), 1)",
        "import socket; socket.socket(socket.AF_UNIX)",
        f"open({str(canary)!r}, 'w')",
        f"import os; print(os.system('touch {canary}'))",
        "import os; os.fork()",
        "import subprocess; subprocess.run(['true'])",
        "import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
        "open('a', 'wb').write(bytes(20_000_000))",
        "[open(f'f{i}', 'w') for i in range(2000)]",
    )
    assert all(result.startswith("error:") for result in results[:3] + results[4:]) and results[3] not in ("0", "")
    assert not canary.exists()
    assert run("import builtins; builtins.print = None; open('left', 'w').write('x')", "import os; print(os.listdir('.'))")[1] == "[]"
    assert run("import os; print('SECRET' in str(os.environ))")[0] == "False"


@contained
def test_python_ends_at_its_limits_of_time_memory_and_output():
    start = time.monotonic()
    results = run(
        "while True: pass",
        "x = [0] * 10**9",
        "print('x' * 10**6)",
        "import os; os._exit(0)",
        "import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
        deadline=1.0,
    )
    assert time.monotonic() - start < 12
    assert results[0].startswith("error: more than 1.0 s") and "MemoryError" in results[1] and len(results[2]) < 2100 and "error" in results[3]
    assert run("print('alive')", deadline=1.0) == ["alive"]


def test_python_is_refused_where_it_cannot_be_contained_unless_unsafe(monkeypatch):
    monkeypatch.setattr(verify, "can_lock", lambda: "no network namespace")
    verify.workers.cache_clear()
    with pytest.raises(UserError, match="no network namespace; --task.unsafe-tools"):
        load_task("python", TaskConfig())
    tool = python_tool(TaskConfig(unsafe_tools=True), deadline=5.0)
    assert asyncio.run(tool.function("print(6*7)")) == "42"
    verify.workers.cache_clear()


@contained
def test_a_sandbox_leaves_no_process_behind(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        f"import sys, asyncio\nsys.path.insert(0, {str(Path(tools.__file__).parent)!r})\n"
        "from tools import python_tool\nfrom task import TaskConfig\nimport verify\n"
        "async def main():\n"
        "    call = asyncio.create_task(python_tool(TaskConfig(), deadline=60).function('while True: pass'))\n"
        "    await asyncio.sleep(1.5)\n"
        "    (pool,) = [verify.workers('tools.py:execute', deadline=60, memory=512 << 20, fresh=True, locked=True)]\n"
        "    print(pool.processes[min(pool.processes)].process.pid, flush=True)\n"
        "    call.cancel()\n"
        "asyncio.run(main())\n"
    )
    ended = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=30)
    sessions = set(ended.stdout.split())
    assert len(sessions) == 1, ended.stderr
    for _ in range(50):
        left = [p for p in Path("/proc").glob("[0-9]*/stat") if alive_in(p, sessions)]
        if not left:
            break
        time.sleep(0.1)
    assert not left


def alive_in(stat, sessions):
    try:
        state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return session in sessions and state != "Z"


# ---------------------------------------------------------------- calls

TOOLS = {"calculator": calculator}
CALL = {"name": "calculator", "arguments": {"expression": "1+1"}}
GOOD = Call("calculator", "1+1", True)


@pytest.mark.parametrize(
    "text",
    [
        f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>",
        f"Let me see.\n<tool_call>{json.dumps(CALL)}",
        f"<think><calculator>5</calculator></think><tool_call>{json.dumps(CALL)}</tool_call>",
        "<tool_call>\n<function=calculator>\n<parameter=expression>\n1+1\n</parameter>\n</function>\n</tool_call>",
        f"[TOOL_CALLS][{json.dumps(CALL)}]",
        '[TOOL_CALLS]calculator{"expression": "1+1"}',
        '[TOOL_CALLS]calculator[ARGS]{"expression": "1+1"}',
        '{"name": "calculator", "parameters": {"expression": "1+1"}}',
        '<|python_tag|>{"type": "function", "name": "calculator", "parameters": {"expression": "1+1"}}',
        '<tool_call>{"name": "calculator", "arguments": "1+1"}</tool_call>',
        '<tool_call>{"name": "calculator", "arguments": "{\\"expression\\": \\"1+1\\"}"}</tool_call>',
    ],
)
def test_calls_are_found_in_the_formats_of_chat_templates(text):
    assert find_calls(text, TOOLS) == [GOOD]


def test_calls_are_found_as_tags_with_or_without_the_end_that_a_stop_string_cut():
    assert find_calls("so <calculator> 2*3 </calculator> and <calculator>4", TOOLS) == [Call("calculator", "2*3", False), Call("calculator", "4", False)]
    assert find_calls("the answer is 4, <b>4</b>, {4}", TOOLS) == []
    assert find_calls("<think><calculator>1</calculator>", TOOLS) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<tool_call>{not json}</tool_call>", "not JSON"),
        ('<tool_call>{"name": "rocket", "arguments": {}}</tool_call>', "no tool 'rocket'"),
        ('<tool_call>{"name": "calculator", "arguments": {"x": 1}}</tool_call>', "needs 'expression'"),
        ("<tool_call></tool_call>", "empty"),
        ("<tool_call>[]</tool_call>", "empty"),
        ("<tool_call>5</tool_call>", "no tool ''"),
        ("[TOOL_CALLS]" + "[" * 100_000, "not JSON"),
    ],
)
def test_a_bad_call_is_told_to_the_policy(text, problem):
    (call,) = find_calls(text, TOOLS)
    assert problem in call.problem


@given(st.text(max_size=80).map(lambda t: "<tool_call>" + t) | st.text(alphabet='<tool_call>{}[]":,namepr/', max_size=60))
@settings(max_examples=200, deadline=None)
def test_finding_calls_never_raises(text):
    assert isinstance(find_calls(text, TOOLS), list)


def test_a_schema_and_a_prompt_are_made_from_the_tool():
    function = calculator.schema["function"]
    assert function["name"] == "calculator" and function["parameters"]["required"] == ["expression"]
    assert "<calculator>17*(23+1)</calculator>" in tool_prompt([calculator]) and "</calculator>" in tool_stops([calculator])


# ---------------------------------------------------------------- the environment


def episode(environment, example, *turns):
    async def steps():
        opening = await environment.reset(example, 0)
        return [opening] + [await environment.step(assistant(turn)) for turn in turns]

    return asyncio.run(steps())


def test_results_come_back_in_the_form_of_the_call_and_the_last_turn_is_scored():
    example = Example([user("6*7?")], answer=42)
    _, first, second, last = episode(
        ToolUse([calculator], exact_integer), example, "<calculator>6*7</calculator>", f"<tool_call>{json.dumps(CALL)}</tool_call>", "42"
    )
    assert first.messages == [user("<result>42</result>")] and second.messages == [{"role": "tool", "name": "calculator", "content": "2"}]
    assert not first.done and last.done and last.rewards == {"exact_integer": 1.0, "called": 1.0} and last.metrics == {"tools/calls": 2.0, "tools/errors": 0.0}


def test_only_a_call_without_an_error_counts_as_called():
    _, first, last = episode(ToolUse([calculator], exact_integer), Example([], answer=42), "<calculator>1/0</calculator>", "42")
    assert first.messages == [user("<result>error: division by zero</result>")]
    assert last.rewards == {"exact_integer": 1.0, "called": 0.0} and last.metrics["tools/errors"] == 1.0
    assert episode(ToolUse([calculator], exact_integer), Example([], answer=42), "42")[1].rewards["called"] == 0.0


def test_a_tool_may_wait_and_its_result_is_shortened():
    async def long(text):
        await asyncio.sleep(0)
        return "x" * 10_000

    _, step = episode(ToolUse([Tool("long", "", "text", "", long)], exact_integer), Example([]), "<long>a</long>")
    assert len(step.messages[0]["content"]) < 2100 and "10000 characters" in step.messages[0]["content"]
