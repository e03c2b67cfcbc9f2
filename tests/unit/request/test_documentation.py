"""docs/requests.md names every reason and every path, and the sidecar handles the paths that are matched."""

from __future__ import annotations

from pathlib import Path

import pytest

from epp.request.parse import MATCHED_PATHS, Reason
from sidecar.kv_params import Api

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "requests.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_is_explained(reason: Reason) -> None:
    assert f"`{reason}`" in PAGE


def test_every_matched_path_is_in_the_table() -> None:
    assert all(f"| `{path}` |" in PAGE for path in MATCHED_PATHS)


def test_s_b05_picker_and_sidecar_know_the_same_paths() -> None:
    """A pull needs both: tokens from the one, parameters in the body from the other."""
    assert set(MATCHED_PATHS) == {api.value for api in Api}
