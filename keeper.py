"""Keep a server's whole process group alive exactly as long as the process that started it. Standard library only.

    python keeper.py PARENT_PID COMMAND ...

vLLM's server is three kinds of process, and killing the first leaves the others running. The keeper leads a process group that
holds them all. It ends the group when the command exits, when it is told to (SIGTERM), or when its own parent is gone, however
the parent died.
"""

import os
import signal
import subprocess
import sys
import time

POLL = 0.5  # seconds between looks at parent and child
GRACE = 5.0  # seconds a group gets between SIGTERM and SIGKILL


def main(parent: int, command: list[str]) -> int:
    told: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda n, _: told.append(n))
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the child inherits it: pre-emption tells the trainer, which then needs its engine to finish a step
    child = subprocess.Popen(command)
    while child.poll() is None and not told and os.getppid() == parent:
        time.sleep(POLL)
    end_group(child)
    return child.returncode or 0


def end_group(child: subprocess.Popen) -> None:
    """SIGTERM for everyone, then SIGKILL for whoever is left, the keeper included."""
    if os.getpgrp() != os.getpid():  # not a group of our own: touch nobody else's processes
        child.kill()
        return
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(os.getpgrp(), signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    while time.monotonic() < deadline and others_in_group():
        child.poll()  # reap
        time.sleep(0.1)
    if others_in_group():
        os.killpg(os.getpgrp(), signal.SIGKILL)


def others_in_group() -> list[int]:
    """Living members of our process group besides ourselves."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                with open(f"/proc/{entry}/stat") as file:
                    state, _, group = file.read().rpartition(")")[2].split()[:3]
            except OSError:  # it ended while we looked
                continue
            if int(group) == os.getpgrp() and state != "Z":
                found.append(int(entry))
    return found


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
