"""The sliding puzzle: bring the tiles into order, one move a turn. For models that can follow a board.

    --task sliding_puzzle         3 x 3; every board that is 1 to 6 moves from order, a fifth of them held out
    --task sliding_puzzle:2       2 x 2; likewise

A move is <action>up</action> (down, left, right): the tile that can go that way goes. Anything else costs a turn and is explained.
Reward 1 for the ordered board, else 0; out of turns is truncated.
"""

import random
import re

from task import Example, Message, Step, Task, TaskConfig, UserError, user

Board = tuple[int, ...]  # row by row, 0 is the hole
TURNS, MOST_MOVES = 8, 6
RULES = (
    "Order the sliding puzzle: the tiles must read 1, 2, 3, ... row by row, with the hole 0 last. Each turn, move one tile into the hole. "
    "Write <action>up</action>, <action>down</action>, <action>left</action> or <action>right</action>: the way the tile moves.\n\n"
)
MOVES = {"up": (1, 0), "down": (-1, 0), "left": (0, 1), "right": (0, -1)}  # from the hole to the tile that moves: row, column


def sliding_puzzle(config: TaskConfig, argument: str = "3") -> Task:
    if argument not in ("2", "3", "4"):
        raise UserError(f"--task sliding_puzzle:{argument}: the size must be 2, 3 or 4")
    boards = boards_within(int(argument), MOST_MOVES)
    random.Random(0).shuffle(boards)  # not the run's seed: the same boards are held out in every run
    opening = [{"role": "system", "content": config.system_prompt}] if config.system_prompt else []

    def example(board: Board) -> Example:
        return Example([*opening, user(RULES + show(board))], extra={"board": list(board)})

    return Task(
        name="sliding_puzzle",
        train=[example(board) for board in boards[len(boards) // 5 :]],
        eval=[example(board) for board in boards[: len(boards) // 5]],
        environment=SlidingPuzzle,
        max_turns=TURNS,
        stop=["</action>"],
    )


def ordered(size: int) -> Board:
    return (*range(1, size * size), 0)


def boards_within(size: int, moves: int) -> list[Board]:
    """All boards 1 to `moves` moves away from order.

    >>> [len(boards_within(3, moves)) for moves in (1, 2, 6)]
    [2, 6, 89]
    """
    seen = edge = {ordered(size)}
    for _ in range(moves):
        edge = {after for board in edge for name in MOVES if (after := moved(board, name))} - seen
        seen = seen | edge
    return sorted(seen - {ordered(size)})


def moved(board: Board, move: str) -> Board | None:
    """The board after a move; None where no tile can go that way.

    >>> moved((1, 2, 0, 3), "right"), moved((1, 2, 0, 3), "left")
    (None, (1, 2, 3, 0))
    """
    size, hole = round(len(board) ** 0.5), board.index(0)
    row, column = hole // size + MOVES[move][0], hole % size + MOVES[move][1]
    if not (0 <= row < size and 0 <= column < size):
        return None
    tiles = list(board)
    tiles[hole], tiles[row * size + column] = tiles[row * size + column], 0
    return tuple(tiles)


def show(board: Board) -> str:
    size = round(len(board) ** 0.5)
    return "\n".join(" ".join(map(str, board[row * size : (row + 1) * size])) for row in range(size))


class SlidingPuzzle:
    async def reset(self, example: Example, seed: int) -> list[Message]:
        self.board: Board = tuple(example.extra["board"])
        self.turns, self.bad = 0, 0
        return example.messages

    async def step(self, message: Message) -> Step:
        self.turns += 1
        actions = re.findall(r"<action>\s*(\w+)\s*(?:</action>|$)", message["content"], re.IGNORECASE)
        move = actions[-1].lower() if actions else None
        after = moved(self.board, move) if move in MOVES else None
        self.bad += after is None
        self.board = after or self.board
        won = self.board == ordered(round(len(self.board) ** 0.5))
        metrics = {"puzzle/bad_moves": float(self.bad), "puzzle/solved": float(won)}
        if won or self.turns >= TURNS:
            return Step(rewards={"solved": float(won)}, done=True, truncated=not won, metrics=metrics)
        if move not in MOVES:
            words = "No move found. Write <action>up</action>, <action>down</action>, <action>left</action> or <action>right</action>."
        else:
            words = "" if after else f"No tile can go {move}."
        return Step([user(f"{words}\n{show(self.board)}".strip())], rewards={"solved": 0.0}, metrics=metrics)

    async def close(self) -> None:
        pass
