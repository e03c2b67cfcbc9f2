"""Log set-up: one line a record on stderr. No prompt, token, salt or secret is ever logged."""

from __future__ import annotations

import logging
import sys


def setup_logging(level: str) -> None:
    """Configure the root logger once, for a process.

    Raises:
        ValueError: unknown level name.
    """
    logging.basicConfig(
        level=level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        force=True,
    )
    logging.getLogger("watchfiles").setLevel(logging.WARNING)  # it tells of every file in the directory
