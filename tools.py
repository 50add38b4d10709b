"""Tools the policy may call in the middle of an episode: a calculator, and Python in a sandbox.

    --task tasks/calculator.py:calculator          --task tasks/python.py:python

    (1) the policy writes a call            in its chat template's own format where that has one, else as a tag: <calculator>17*23</calculator>
    (2) the tool runs                       within its limits; whatever goes wrong is a text that starts with "error:"
    (3) the result is the next message      of role tool where the call was in the template's format, else from the user: <result>391</result>
    (4) a turn without a call is the answer, and is scored

Calls are understood in the formats of Hermes and Qwen (<tool_call>{json}</tool_call>), Qwen-Coder (<function=name>), Mistral ([TOOL_CALLS])
and Llama 3 ({"name": ..., "parameters": ...} alone), and as tags. A model whose template does not mention tools is told about the tags
in its system message (`Task.tool_prompt`).

The Python sandbox is a fork of its own for every call: no network (a network namespace without interfaces, and no sockets), nothing
writable but 16 MB in memory that are gone afterwards, no other processes seen, signalled or started, limits on time and memory, no
privileges. It does NOT protect against: reading any file that the trainer's user can read (keys in a home directory, for example: their
content can end up in a completion and in a log); attacks on the kernel; or heating the processor for as long as the deadline allows. Run
the trainer as a user, or in a container, that holds no secrets. Where the kernel gives no network namespace the tool is refused;
--task.unsafe-tools runs it without any of this but time and memory limits: only for models and machines you would let do anything.
"""

import ast
import contextlib
import inspect
import io
import json
import math
import operator
import re
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from task import Example, Message, Reward, Step, TaskConfig, scored
from verify import Workers, workers

MAX_RESULT = 2000  # characters of a result that the policy gets to read


@dataclass(frozen=True)
class Tool:
    """A function of one text."""

    name: str
    description: str
    parameter: str  # what the text is
    example: str
    function: Callable[[str], str | Awaitable[str]]

    @property
    def schema(self) -> dict[str, Any]:
        """As chat templates and OpenAI's interface want it."""
        properties = {self.parameter: {"type": "string", "description": f"for example {self.example}"}}
        parameters = {"type": "object", "properties": properties, "required": [self.parameter]}
        return {"type": "function", "function": {"name": self.name, "description": self.description, "parameters": parameters}}


# ------------------------------------------------------------------------------------------------ calculator

_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_NAMED: dict[str, Any] = {"sqrt": math.sqrt, "abs": abs, "round": round, "min": min, "max": max, "pi": math.pi}
MAX_BITS = 4096  # of any whole number on the way


def calculate(expression: str) -> str:
    """Arithmetic: + - * / // % ** ( ) sqrt abs round min max pi. Nothing is evaluated but numbers, and no number grows beyond 4096 bits.

    >>> calculate("17*(23+1)"), calculate("2^10"), calculate("1/3"), calculate("1/0"), calculate("9**9**9")
    ('408', '1024', '0.333333333333', 'error: division by zero', 'error: a number is too large')
    """
    try:
        if len(expression) > 200:
            raise ValueError("the expression is longer than 200 characters")
        if re.search(r"\d(?![eE][\d+-])[A-Za-z_]", expression):
            raise ValueError("a number runs into a letter; write * between them")
        text = expression.strip().replace("^", "**").replace("\u00d7", "*").replace("\u00f7", "/").replace("\u2212", "-")
        value = _value(ast.parse(re.sub(r"(?<=\d),(?=\d{3}\b)", "", text), mode="eval").body)
        return str(value) if isinstance(value, int) else f"{value:.12g}"
    except SyntaxError:
        return "error: not an arithmetic expression"
    except (ValueError, ArithmeticError, TypeError, RecursionError, MemoryError) as error:
        return f"error: {error}"


def _value(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value: Any = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = -_value(node.operand) if isinstance(node.op, ast.USub) else _value(node.operand)
    elif isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > MAX_BITS:
            raise ValueError("a number is too large")
        value = _BINARY[type(node.op)](left, right)
    elif isinstance(node, ast.Name) and node.id == "pi":
        value = math.pi
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and callable(_NAMED.get(node.func.id)) and not node.keywords:
        value = _NAMED[node.func.id](*(_value(argument) for argument in node.args))
    else:
        raise ValueError("only numbers, + - * / // % ** ( ) and sqrt abs round min max pi")
    if isinstance(value, complex):
        raise ValueError("not a real number")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ValueError("a number is too large")
    return value


calculator = Tool("calculator", "Evaluates an arithmetic expression.", "expression", "17*(23+1)", calculate)


# ------------------------------------------------------------------------------------------------ Python


def python_tool(config: TaskConfig, deadline: float = 5.0, memory: int = 512 << 20) -> Tool:
    """Python in the sandbox described above.

    Raises:
        UserError: the kernel cannot contain it and --task.unsafe-tools is not set.
    """
    pool: Workers = workers("tools.py:execute", deadline=deadline, memory=memory, fresh=True, locked=not config.unsafe_tools)

    async def run(code: str) -> str:
        reply = await pool.call(code)
        return str(reply.value) if reply.status == "ok" else f"error: {reply.detail}"

    return Tool("python", "Runs Python code and returns what it prints.", "code", "print(sum(range(10)))", run)


def execute(code: str) -> str:
    """What a program prints, or the last line of its traceback. A last line that is an expression is printed, as an interpreter does.

    >>> execute("x = 2\\nx * 21"), execute("1/0"), execute("print('a')\\nexit()")
    ('42', 'error: ZeroDivisionError: division by zero (line 1)', 'a')
    """
    code = re.sub(r"^\s*```(?:python)?\n(.*?)```\s*$", r"\1", code, flags=re.DOTALL)
    printed, problem = io.StringIO(), ""
    try:
        tree = ast.parse(code)
        if tree.body and isinstance(tree.body[-1], ast.Expr):
            show = ast.parse("(lambda value: None if value is None else print(value))(0)", mode="eval").body
            assert isinstance(show, ast.Call)
            show.args = [tree.body[-1].value]
            tree.body[-1].value = show
        with contextlib.redirect_stdout(printed):
            exec(compile(ast.fix_missing_locations(tree), "<code>", "exec"), {"__name__": "__main__"})
    except SystemExit:
        pass
    except BaseException as error:  # the program's own, whatever it is: it is a result
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<code>"]
        problem = f"error: {type(error).__name__}: {error}" + (f" (line {lines[-1]})" if lines else "")
    return "\n".join(part for part in (shortened(printed.getvalue().strip()), shortened(problem)) if part)


def shortened(text: str) -> str:
    return text if len(text) <= MAX_RESULT else f"{text[:MAX_RESULT]} ... ({len(text)} characters)"


# ------------------------------------------------------------------------------------------------ calls


@dataclass(frozen=True)
class Call:
    name: str
    argument: str
    native: bool  # in a chat template's own format, so that the result is a message of role tool
    problem: str = ""  # why it cannot be run


def find_calls(text: str, tools: dict[str, Tool]) -> list[Call]:
    """The calls of an assistant turn, outside of its thinking; see the header for the formats.

    >>> find_calls('<tool_call>{"name": "calculator", "arguments": {"expression": "1+1"}}</tool_call>', {"calculator": calculator})
    [Call(name='calculator', argument='1+1', native=True, problem='')]
    >>> find_calls("so <calculator>2*3</calculator>", {"calculator": calculator})
    [Call(name='calculator', argument='2*3', native=False, problem='')]
    """
    _, closed, after = text.rpartition("</think>")
    text = after if closed else text.partition("<think>")[0]
    blocks = re.findall(r"<tool_call>(.*?)(?:</tool_call>|$)", text, re.DOTALL)
    if blocks:
        return [_from_markup(block, tools) if "<function=" in block else _from_json(block, tools) for block in blocks]
    if "[TOOL_CALLS]" in text:
        tail = text.partition("[TOOL_CALLS]")[2].strip()
        named = re.match(r"([\w.-]+)\s*(?:\[ARGS\])?\s*(\{.*)", tail, re.DOTALL)
        if named:
            tail = json.dumps({"name": named[1], "arguments": named[2]})
        return _from_list(tail, tools)
    bare = text.replace("<|python_tag|>", "").strip()
    if bare.startswith("{") and '"name"' in bare and ('"parameters"' in bare or '"arguments"' in bare):
        return [_from_json(bare, tools)]
    tags = "|".join(map(re.escape, tools))
    # a stop string ends the turn at the closing tag, so a missing one is as good as there
    found = re.findall(rf"<({tags})>(.*?)(?:</\1>|$)", text, re.DOTALL)
    return [Call(name, argument.strip(), False) for name, argument in found]


def _from_list(text: str, tools: dict[str, Tool]) -> list[Call]:
    try:
        calls, _ = json.JSONDecoder().raw_decode(text)
    except (json.JSONDecodeError, RecursionError) as error:
        return [Call("", "", True, f"the call is not JSON: {error}")]
    return [_from_fields(call, tools) for call in (calls if isinstance(calls, list) else [calls])]


def _from_json(text: str, tools: dict[str, Tool]) -> Call:
    return _from_list(text.strip(), tools)[0] if text.strip() not in ("", "[]") else Call("", "", True, "the call is empty")


def _from_markup(text: str, tools: dict[str, Tool]) -> Call:
    name = re.search(r"<function=([^>\s]+)>", text)
    parameters = dict(re.findall(r"<parameter=([^>\s]+)>\s*(.*?)\s*</parameter>", text, re.DOTALL))
    return _from_fields({"name": name[1] if name else "", "arguments": parameters}, tools)


def _from_fields(call: Any, tools: dict[str, Tool]) -> Call:
    fields = call.get("function", call) if isinstance(call, dict) else {}
    name, arguments = str(fields.get("name", "")), fields.get("arguments", fields.get("parameters", {}))
    if name not in tools:
        return Call(name, "", True, f"there is no tool {name!r}; there is {', '.join(tools)}")
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (json.JSONDecodeError, RecursionError):
        pass  # some models give the text itself
    if isinstance(arguments, dict):
        if tools[name].parameter not in arguments:
            return Call(name, "", True, f"{name} needs {tools[name].parameter!r}")
        arguments = arguments[tools[name].parameter]
    return Call(name, str(arguments).strip(), True)


# ------------------------------------------------------------------------------------------------ the environment


class ToolUse:
    """An environment in which the policy may call tools before it answers; the first turn without a call is the answer.

    Rewards are those of `reward` on the last turn, and `called`: 1 if at least one call ran without error (weigh it small, or 0).
    """

    def __init__(self, tools: Sequence[Tool], reward: Reward):
        self.tools = {tool.name: tool for tool in tools}
        self.reward = reward
        self.calls = self.errors = 0

    async def reset(self, example: Example, seed: int) -> list[Message]:
        self.example = example
        return example.messages

    async def step(self, message: Message) -> Step:
        calls = find_calls(message["content"], self.tools)
        if not calls:
            step = await scored(self.reward, message["content"], self.example)
            called = {"called": float(self.calls > self.errors)}
            return replace(step, done=True, rewards=step.rewards | called, metrics=step.metrics | self.metrics())
        results = [await self.run(call) for call in calls]
        self.calls += len(calls)
        self.errors += sum(result.startswith("error:") for result in results)
        return Step([reply(call, result) for call, result in zip(calls, results, strict=True)], metrics=self.metrics())

    async def run(self, call: Call) -> str:
        if call.problem:
            return f"error: {call.problem}"
        result = self.tools[call.name].function(call.argument)
        return shortened(str(await result if inspect.isawaitable(result) else result))

    def metrics(self) -> dict[str, float]:
        return {"tools/calls": float(self.calls), "tools/errors": float(self.errors)}

    async def close(self) -> None:
        pass


def reply(call: Call, result: str) -> Message:
    if call.native:
        return {"role": "tool", "name": call.name, "content": result}
    return {"role": "user", "content": f"<result>{result}</result>"}


def tool_prompt(tools: Sequence[Tool]) -> str:
    """How tags are explained to a model whose chat template does not know tools."""
    lines = [f"<{tool.name}>{tool.example}</{tool.name}>  {tool.description}" for tool in tools]
    return "You can use tools. Write a tag, and the result comes back:\n" + "\n".join(lines) + "\nWhen you know the answer, give it without a tag."


def tool_stops(tools: Sequence[Tool]) -> list[str]:
    """A turn ends with its call, before the policy can make up the result."""
    return ["</tool_call>", *(f"</{tool.name}>" for tool in tools)]
