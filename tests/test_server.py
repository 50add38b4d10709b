"""A server's processes: started, watched, and gone with the trainer, however it ends. A small fake that forks the same three kinds."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from cluster import EngineConfig, Server, engine_command, engine_environment, make_plan
from rollout import EngineError
from task import UserError

ROOT = Path(__file__).resolve().parent.parent
FAKE = """
import http.server, os, sys, time
port, mark, mode = int(sys.argv[1]), sys.argv[2], sys.argv[3]
if mode == "broken":
    print("ValueError: no such model, said the engine", flush=True); sys.exit(3)
if os.fork() == 0:                       # the engine core
    if os.fork() == 0:                   # its worker
        time.sleep(600)
    time.sleep(600)
if mode == "deaf":
    time.sleep(600)
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *a): pass
http.server.HTTPServer(("127.0.0.1", port), Health).serve_forever()
"""


@pytest.fixture
def fake(tmp_path):
    """start(mode) -> Server, and alive() -> the number of its processes (found by a mark in their command line)."""
    script = tmp_path / "fake_server.py"
    script.write_text(FAKE)

    def start(mode="healthy"):
        return Server(lambda port: [sys.executable, str(script), str(port), str(tmp_path), mode], dict(os.environ), tmp_path / "engine.log")

    return start, lambda: processes_with(str(script))


def processes_with(mark):
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (entry / "cmdline").read_text() and (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.append(int(entry.name))
        except OSError:
            continue
    return [p for p in found if p != os.getpid()]


def wait_for(condition, seconds=12):
    give_up = time.monotonic() + seconds
    while time.monotonic() < give_up:
        if condition():
            return True
        time.sleep(0.1)
    return False


def test_stop_leaves_no_process_behind(fake):
    start, alive = fake
    with start() as server:
        server.wait_until_healthy(20)
        assert len(alive()) == 4  # the keeper and three of the server's
    assert alive() == []


def test_a_server_that_cannot_start_is_an_error_with_its_own_words(fake):
    start, alive = fake
    with start("broken") as server, pytest.raises(EngineError, match="no such model, said the engine"):
        server.wait_until_healthy(20)
    assert alive() == []


def test_a_server_that_never_answers_is_stopped_at_the_deadline(fake):
    start, alive = fake
    began = time.monotonic()
    with start("deaf") as server, pytest.raises(EngineError, match="--deadlines.engine-start"):
        server.wait_until_healthy(1.5)
    assert time.monotonic() - began < 20
    assert alive() == []


def test_killing_the_first_process_ends_the_others_and_is_noticed(fake):
    start, alive = fake
    with start() as server:
        server.wait_until_healthy(20)
        (first,) = [p for p in alive() if parent_of(p) == server.process.pid]
        os.kill(first, signal.SIGKILL)
        assert wait_for(lambda: alive() == [])
        with pytest.raises(EngineError, match="the engine ended"):
            server.check_alive()


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize("ending", ["return", "exception", "SIGINT", "SIGTERM", "SIGKILL"])
def test_nothing_outlives_the_trainer(fake, tmp_path, ending):
    _, alive = fake
    trainer = tmp_path / "trainer.py"
    trainer.write_text(
        textwrap.dedent(f"""
        import os, signal, sys, time
        from pathlib import Path
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite that runs in the background inherits that it is ignored
        sys.path.insert(0, {str(ROOT)!r})
        from cluster import Server, stop_on_signals
        stop_on_signals()
        script = {str(tmp_path / "fake_server.py")!r}
        with Server(lambda port: [sys.executable, script, str(port), "x", "healthy"], dict(os.environ), Path({str(tmp_path / "e.log")!r})) as server:
            server.wait_until_healthy(20)
            print("healthy", flush=True)
            if {ending!r} == "exception":
                raise RuntimeError("training failed")
            time.sleep(0 if {ending!r} == "return" else 60)
        """)
    )
    process = subprocess.Popen([sys.executable, str(trainer)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "healthy\n"
    if ending.startswith("SIG"):
        process.send_signal(getattr(signal, ending))
    process.communicate(timeout=30)
    assert wait_for(lambda: alive() == [])
    assert (process.returncode == 0) == (ending == "return")


def test_a_child_sees_nothing_of_the_launcher_and_no_secret_is_on_its_command_line():
    inherited = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_PORT": "1", "OMP_NUM_THREADS": "1", "ACCELERATE_X": "1", "CUDA_VISIBLE_DEVICES": "2,3"}
    child = engine_environment(inherited, "secret-key", EngineConfig(), cpu=True)
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "OMP_NUM_THREADS", "ACCELERATE_X"} & set(child)
    assert child["CUDA_VISIBLE_DEVICES"] == "2,3" and child["VLLM_API_KEY"] == "secret-key"
    command = engine_command("m", 1, make_plan("vllm", 0, 1, True), EngineConfig(), 64, "float32", "x")
    assert "secret-key" not in " ".join(command)


def test_the_plan_takes_vllm_where_it_is_and_says_why_not_otherwise():
    assert make_plan("auto", 0, 1, True).engine == "vllm"
    assert make_plan("auto", 0, 1, False).engine == "hf"
    with pytest.raises(UserError, match="--engine hf"):
        make_plan("vllm", 0, 1, False)
    assert make_plan("hf", 0, 2, False).processes == 2
