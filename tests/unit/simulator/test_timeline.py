"""Virtual time: in order, never backwards, never the real clock."""

from __future__ import annotations

import ast
from pathlib import Path

import simulator
from simulator.timeline import Timeline


def test_things_are_done_in_order_of_time_and_then_of_making() -> None:
    timeline, done = Timeline(), []
    timeline.at(2.0, done.append, "late")
    timeline.at(1.0, done.append, "first")
    timeline.at(1.0, done.append, "second")
    timeline.at(1.0, lambda: timeline.at(0.5, done.append, "past is now"))
    timeline.run()
    assert done == ["first", "second", "past is now", "late"]
    assert timeline.now_s == 2.0


def test_no_module_of_the_simulator_or_the_engine_model_reads_a_clock() -> None:
    root = Path(simulator.__file__).parent
    for file in [*root.glob("*.py"), *(root.parent / "epp/engine_model").glob("*.py")]:
        tree = ast.parse(file.read_text())
        names = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
        names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not names & {"time", "datetime", "asyncio"}, file
