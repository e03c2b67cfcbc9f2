"""`python -m deploy.local demo|up`: the fleet from the command line.

Checks first what the rest needs to be imported at all, in words that any Python 3 understands.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

MIN_PYTHON = (3, 11)
CANNOT_START = 2


def python_problem(version: tuple[int, ...]) -> str | None:
    """A sentence if this Python is too old."""
    if tuple(version[:2]) >= MIN_PYTHON:
        return None
    found, needed = (".".join(str(n) for n in v) for v in (version[:2], MIN_PYTHON))
    return (
        f"Python {found} is too old: kvpull needs {needed} or newer"
        " (on Debian 12: apt install python3 python3-venv)."
    )


def main(argv: Sequence[str]) -> int:
    """Exit status; see `deploy.local.cli`."""
    problem = python_problem(tuple(sys.version_info[:2]))
    if problem is None:
        from deploy.local.preflight import module_problem

        problem = module_problem()
    if problem is not None:
        sys.stderr.write(f"{problem}\n")
        return CANNOT_START
    from deploy.local.cli import run

    return run(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
