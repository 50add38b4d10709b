"""One of two processes that test_ranks.py starts: rank 1 goes wrong in the way it is told, rank 0 waits for it."""

import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent)]

import torch

from ranks import guarded, start_ranks
from task import UserError


def main(arguments: list[str]) -> None:
    ranks = start_ranks(3.0 if arguments[0] == "late" else 60.0)
    ranks.barrier("reading")
    print("ready", time.time(), flush=True)
    if ranks.rank == 1:
        time.sleep(1)  # until rank 0 is where it will be found
        if arguments[0] == "raise":
            raise KeyError("the cause")
        if arguments[0] == "user":
            raise UserError("--flag 3: give 4")
        time.sleep(60)
    if arguments[0] == "user":
        time.sleep(60)  # not in a collective at all
    ranks.barrier("training") if arguments[0] == "late" else ranks.sum(torch.zeros(1))


guarded(main, sys.argv[1:])
