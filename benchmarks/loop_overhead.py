"""CPU time of a turn outside of model and tool: template, tokens, parsing, masks; verl's stock tool loop beside ours.

    python benchmarks/loop_overhead.py [--turns 50] [--rounds 7] [--observation 600] [--model FOLDER] [--json FILE]

Both loops run whole trajectories against a server that answers at once with the same ids (a thought and a call), and
with a tool that returns at once a text of ``--observation`` characters. What a turn costs is the CPU time of this
process from the server's answer to its next request, threads included: reading the turn, running the call, encoding the
observation, building the next request. The two loops take turns within a round; figures are medians over rounds.

The target is 2 ms a turn, and the last turns of a long conversation must cost what the first ones do. ``--model`` takes
any model folder whose chat template is ChatML (stock: Qwen3's token builder); by default it is the offline world's.
Ours cuts an observation to the recipe's ``max_observation_tokens``. Stock's limit, which counts characters, is set out
of the way; ``--observation 8000`` shows what that costs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer
from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.tools.function_tool import FunctionTool
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.workers.rollout.replica import TokenOutput

from rltr_verl._compose import compose_recipe
from rltr_verl.rollout.planner_loop import PlannerLoop
from rltr_verl.tooling import load_tools
from rltr_verl.world import build_world

TARGET_MS = 2.0
WORDS = "The record of the town says that 41 degrees were measured in 1987, and 结果 were written down by the clerk. "
TURN = (
    "I need the temperature of the town before I can add to it, so I search for the record first.\n"
    '<tool_call>\n{"name": "look_up", "arguments": {"query": "temperature of the town, record of 1987"}}\n</tool_call>'
    "<|im_end|>"
)
TOOL = '''
from rltr_verl import tool

TEXT = """{text}"""


@tool
async def look_up(query: str) -> str:
    """Look something up.

    Args:
        query: what to look for.
    """
    return TEXT
'''


class Server:
    """Answers at once; keeps the CPU time from each answer to the next request."""

    def __init__(self, turn: list[int], last: list[int], turns: int) -> None:
        self.turn, self.last, self.turns = turn, last, turns
        self.reset()

    def reset(self) -> None:
        self.spent: list[float] = []
        self.left = time.process_time()

    async def generate(self, **request: Any) -> TokenOutput:
        self.spent.append(time.process_time() - self.left)
        ids = self.turn if len(self.spent) <= self.turns else self.last
        output = TokenOutput(token_ids=list(ids), log_probs=[-0.5] * len(ids), stop_reason="completed")
        self.left = time.process_time()
        return output


def main() -> None:
    args = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        spent = asyncio.run(measure(args, Path(folder)))
    report(spent, args)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--observation", type=int, default=600, help="characters of a tool's result")
    parser.add_argument("--model", help="model folder for its tokenizer; the offline world's if left out")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


async def measure(args: argparse.Namespace, folder: Path) -> dict[str, list[list[float]]]:
    """Per loop and turn the milliseconds of every round; a round before the first one is thrown away."""
    loops = contenders(args, folder)
    spent: dict[str, list[list[float]]] = {name: [[] for _ in range(args.turns)] for name in loops}
    for number in range(args.rounds + 1):
        for name, (loop, server) in loops.items():
            server.reset()
            await loop()
            if len(server.spent) != args.turns + 1:
                raise SystemExit(f"{name} took {len(server.spent)} turns instead of {args.turns + 1}")
            for turn, seconds in enumerate(server.spent[1:] if number else []):
                spent[name][turn].append(seconds * 1e3)
    return spent


def contenders(args: argparse.Namespace, folder: Path) -> dict[str, tuple[Callable[[], Any], Server]]:
    """Per name a coroutine function that runs one trajectory, and its server."""
    world = build_world(folder / "world", seed=1)
    tokenizer = AutoTokenizer.from_pretrained(args.model or world.model)
    file = folder / "look_up.py"
    file.write_text(TOOL.format(text=(WORDS * (args.observation // len(WORDS) + 1))[: args.observation]), "utf-8")
    config = compose_recipe("rltr_planner", ["scale=cpu", f"rltr.world={world.folder}", *_overrides(args, file)])
    row = {
        "raw_prompt": [{"role": "user", "content": "How warm was it in the town in 1987, and is that more than 40?"}]
    }
    made = {}
    for name, build in (("rltr_planner", _ours), ("verl tool_agent", _stock)):
        server = Server(_encode(tokenizer, TURN), _encode(tokenizer, "<answer>"), args.turns)
        loop = build(config, server, tokenizer, file)
        made[name] = ((lambda loop=loop: loop.run({"temperature": 1.0}, **row)), server)
    return made


def _encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def _overrides(args: argparse.Namespace, file: Path) -> list[str]:
    room = (1000 + args.observation) * (args.turns + 1)
    return [
        f"rltr.tools=[{file}]",
        "~rltr.tool_settings.search",
        f"rltr.rollout.max_turns={args.turns + 1}",
        f"data.max_response_length={room}",
        "actor_rollout_ref.rollout.multi_turn.format=hermes",
        "actor_rollout_ref.rollout.multi_turn.max_parallel_calls=4",
        "actor_rollout_ref.rollout.multi_turn.max_tool_response_length=100000",
    ]


def _ours(config: Any, server: Server, tokenizer: Any, file: Path) -> PlannerLoop:
    return PlannerLoop(DictConfigWrap(config), server, tokenizer, None, None, DictConfigWrap(config.data))


def _stock(config: Any, server: Server, tokenizer: Any, file: Path) -> ToolAgentLoop:
    made = load_tools([str(file)], {})["look_up"]
    text = file.read_text("utf-8").split('"""')[1]

    async def look_up(query: str) -> str:
        return text

    tool = FunctionTool("look_up", look_up, OpenAIFunctionToolSchema.model_validate(made.schema), is_async=True)
    parts = (DictConfigWrap(config), server, tokenizer, None, None, DictConfigWrap(config.data))
    return ToolAgentLoop(*parts, hf_model_type="qwen3", tools=ToolListWrap([tool]))


def report(spent: dict[str, list[list[float]]], args: argparse.Namespace) -> None:
    """Print the table; write the JSON if asked."""
    medians = {name: [statistics.median(values) for values in turns] for name, turns in spent.items()}
    table = Table(title=f"CPU ms a turn, {args.turns} turns, {args.rounds} rounds")
    for column in ("turn", *medians, "ratio"):
        table.add_column(column, justify="right")
    for turn in sorted({1, 2, 5, 10, 20, 30, 40, args.turns}):
        if turn <= args.turns:
            ours, stock = (values[turn - 1] for values in medians.values())
            table.add_row(str(turn), f"{ours:.2f}", f"{stock:.2f}", f"{stock / ours:.1f}x")
    console = Console(width=120)
    console.print(table)
    for name, values in medians.items():
        console.print(f"{name}: worst turn {max(values):.2f} ms, last tenth over first tenth {growth(values):.2f}")
    met = max(medians["rltr_planner"]) <= TARGET_MS
    console.print(f"target of {TARGET_MS:g} ms a turn at every turn: {'met' if met else 'MISSED'}")
    if args.json:
        args.json.write_text(json.dumps(medians, indent=2))


def growth(values: list[float]) -> float:
    """What the last tenth of the turns costs over what the first tenth does."""
    share = max(1, len(values) // 10)
    return statistics.median(values[-share:]) / statistics.median(values[:share])


if __name__ == "__main__":
    main()
