"""Launch scripts: valid shell, flags that exist, and as many processes as the plan of their hardware has training devices."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import tyro

from cluster import ServeConfig, make_plan
from config import check, parse

RUNS = Path(__file__).resolve().parent.parent / "runs"
PLACEMENTS = {
    "one_gpu.sh": "colocated",
    "eight_gpus.sh": "colocated",
    "six_and_two.sh": "disaggregated",
    "two_nodes.sh": "colocated",
    "slurm.sh": "external",
}


def commands(script):
    """The script's commands, one string each, continuation lines joined and variables given values."""
    text = script.read_text().replace("\\\n", " ").replace("$address", "10.0.0.4").replace('"$@"', "")
    return [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]


def flags_after(script, program):
    (line,) = [c for c in commands(script) if program in c]
    return shlex.split(line.partition(program)[2].strip().rstrip("'&").strip())


def test_every_script_is_listed_here():
    assert {p.name for p in RUNS.glob("*.sh")} == set(PLACEMENTS)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_a_script_is_valid_shell_with_its_hardware_and_strict_errors(name):
    script = RUNS / name
    assert subprocess.run(["bash", "-n", str(script)], capture_output=True).returncode == 0
    text = script.read_text()
    assert text.startswith("#!/usr/bin/env bash\n") and "set -euo pipefail" in text
    assert re.search(r"# hardware: \d+ nodes?, \d+ GPUs? \(\d+ GB\)", text)
    assert len(text.splitlines()) <= 20
    assert not re.search(r"\$(?!\()[A-Za-z{@*]", re.sub(r'"[^"]*"', '""', re.sub(r"'[^']*'", "", text)).replace("$(getent", "")), "an unquoted variable"


@pytest.mark.parametrize("name, placement", PLACEMENTS.items())
def test_the_flags_are_accepted_and_the_plan_fits_the_processes(name, placement):
    script = RUNS / name
    config = parse(flags_after(script, " grpo.py"), "")
    check(config)
    nodes, gpus = map(int, re.search(r"# hardware: (\d+) nodes?, (\d+) GPU", script.read_text()).groups())
    launch = next(c for c in commands(script) if "accelerate launch" in c)
    processes = int(re.search(r"--num_processes (\d+)", launch).group(1))
    machines = int((re.search(r"--num_machines (\d+)", launch) or [0, 1])[1])
    assert machines == nodes - (placement == "external")
    seen = {"LOCAL_WORLD_SIZE": str(processes // machines), "GROUP_WORLD_SIZE": str(machines)}
    plan = make_plan(config.engine, gpus, processes, True, config.cluster, config.engine_config, seen)
    assert plan.placement == placement and plan.nodes == machines


def test_the_engine_of_the_slurm_script_serves_the_model_that_is_trained():
    script = RUNS / "slurm.sh"
    served = tyro.cli(ServeConfig, args=flags_after(script, "cluster.py serve"))
    config = parse(flags_after(script, " grpo.py"), "")
    assert served.model == config.model and config.cluster.engine_urls == (f"http://{served.host}:{served.port}",)
    assert served.max_model_len >= config.sampling.max_prompt_tokens + config.sampling.max_completion_tokens
    assert served.engine.extra == "--data-parallel-size 2"
