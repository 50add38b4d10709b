"""The command that starts an engine for --cluster.engine-urls, with a fake server in vLLM's place."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from test_server import FAKE, processes_with, wait_for

from refit import free_port

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def serve(tmp_path):
    """serve(mode, **environment) -> the process and its port; the fake's command line is what vLLM's would be."""
    fake = tmp_path / "fake_server.py"
    fake.write_text(FAKE)
    started = []

    def start(mode="healthy", **environment):
        port = free_port()
        program = tmp_path / f"serve_{mode}.py"
        program.write_text(
            textwrap.dedent(f"""
            import json, sys
            sys.path.insert(0, {str(ROOT)!r})
            import cluster
            real = cluster.engine_command
            def fake(*a, **k):
                print("command:", json.dumps(real(*a, **k)), flush=True)
                return [sys.executable, {str(fake)!r}, str(a[1]), "x", {mode!r}]
            cluster.engine_command = fake
            try:
                cluster.serve(sys.argv[1:])
            except (cluster.UserError, cluster.EngineError) as error:
                sys.exit(f"error: {{error}}")
            """)
        )
        flags = ["--model", "some/model", "--port", str(port), "--max-model-len", "99", "--log", str(tmp_path / "engine.log"), "--engine.extra=--seed 3"]
        inherited = {k: v for k, v in os.environ.items() if k != "VLLM_API_KEY"} | {"OMP_NUM_THREADS": "1"} | environment
        process = subprocess.Popen([sys.executable, str(program), *flags], env=inherited, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        return process, port

    yield start, lambda: processes_with(str(fake))
    for process in started:
        if process.poll() is None:
            process.kill()


def test_an_engine_is_served_until_it_is_told_to_end_and_leaves_nothing(serve):
    start, alive = serve
    process, port = start(VLLM_API_KEY="a-secret-key")
    command = process.stdout.readline()
    for flag in (
        "--enable-scale-out",
        "processed_logprobs",
        "--weight-transfer-config",
        "gloo_transfer.WorkerExtension",
        "some/model",
        "99",
        "--seed",
        "float32",
    ):
        assert flag in command
    ready = process.stdout.readline()
    assert f"--cluster.engine-urls http://127.0.0.1:{port}" in ready
    assert len(alive()) > 0
    process.send_signal(signal.SIGTERM)
    out, errors = process.communicate(timeout=30)
    assert wait_for(lambda: alive() == [])
    assert "a-secret-key" not in command + ready + out + errors


def test_without_a_key_it_says_how_to_make_one(serve):
    start, alive = serve
    process, _ = start()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and "export VLLM_API_KEY=$(openssl rand -hex 16)" in errors
    assert alive() == []


def test_an_engine_that_ends_ends_the_command_with_its_words(serve):
    start, alive = serve
    process, _ = start("broken", VLLM_API_KEY="k")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and "no such model, said the engine" in errors
    assert alive() == []
