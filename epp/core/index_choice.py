"""Which implementation of the prefix index this process runs: the compiled one where it was built.

Both give the same answers; only speed and memory differ. The choice is a fact that the shell logs at
start-up and shows in /metrics, so that nobody runs the slower one without knowing.
It must not log, and must not build anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from epp.core.engine_blocks import IndexLimits
from epp.core.prefix_index import PrefixIndex, PythonPrefixIndex

COMPILED, PURE = "compiled", "pure"


class IndexMaker(Protocol):
    """`scheme` names the way in which its indexes make keys: those of two schemes never meet."""

    scheme: str

    def __call__(self, index_seed: bytes, limits: IndexLimits | None = None) -> PrefixIndex: ...


class IndexChoice(NamedTuple):
    """`implementation` is stable (a metric label); `reason` says in words why it is not the compiled one."""

    implementation: str
    make: IndexMaker
    reason: str = ""

    @property
    def scheme(self) -> str:
        return self.make.scheme


def available_indexes() -> Mapping[str, IndexMaker]:
    """Every implementation that can run here, by name."""
    chosen = choose_index()
    return {PURE: PythonPrefixIndex, chosen.implementation: chosen.make}


def choose_index() -> IndexChoice:
    """The best implementation that can run here."""
    try:
        from epp.core._compiled_index import CompiledPrefixIndex
    except ImportError as error:
        return IndexChoice(PURE, PythonPrefixIndex, f"the compiled index cannot be loaded: {error}")
    return IndexChoice(COMPILED, CompiledPrefixIndex)
