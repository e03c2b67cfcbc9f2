"""Certificates (of one authority: making keys takes a moment) and engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.kvevents.conftest import new_engine as new_engine
from tests.integration.siblings.certificates import Authority


@pytest.fixture(scope="session")
def authority() -> Authority:
    return Authority()


@pytest.fixture
def certificates(authority: Authority, tmp_path: Path) -> Path:
    """A directory with what a replica needs."""
    return authority.issue(tmp_path / "tls")
