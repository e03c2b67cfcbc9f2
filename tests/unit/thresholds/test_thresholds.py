"""PullThresholds: merge rule, refusals, link swap, last good kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from epp.core.errors import ConfigError
from epp.core.thresholds import NO_THRESHOLDS, PullThresholds
from epp.thresholds.directory_source import DirectoryThresholds
from epp.thresholds.document import merge, parse_thresholds


def doc(**default: object) -> str:
    lines = "".join(f"\n    {name}: {value}" for name, value in default.items())
    return f"apiVersion: kvpull/v1alpha1\nkind: PullThresholds\nspec:\n  default: {lines or '{}'}\n"


def test_parse() -> None:
    assert parse_thresholds(doc(enabled="false", minCachedTokenDelta=2048), "t") == PullThresholds(
        False, 2048
    )
    assert parse_thresholds(doc(), "t") == NO_THRESHOLDS


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (doc(minCachedTokenDelta=-1), r"t: spec.default.minCachedTokenDelta"),
        (doc(minCachedTokenDelta="lots"), r"t: spec.default.minCachedTokenDelta"),
        (doc(minCachedTokenDelta=10**30), r"t: spec.default.minCachedTokenDelta"),
        (doc(enabled="maybe"), r"t: spec.default.enabled"),
        (doc(minCachedTokens=1), r"t: spec.default.minCachedTokens"),
        (doc().replace("v1alpha1", "v9"), "expected kvpull/v1alpha1"),
        ("spec: {", "not YAML"),
        ("", "document"),
    ],
)
def test_refusals_name_the_path(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_thresholds(text, "t")


def test_a_later_document_wins_field_by_field() -> None:
    merged = merge([PullThresholds(True, 2048), PullThresholds(min_cached_token_delta=4096), NO_THRESHOLDS])
    assert merged == PullThresholds(True, 4096)


async def test_link_swap_is_seen_and_bad_content_keeps_the_last_good(tmp_path: Path) -> None:
    """S-G05: a ConfigMap volume is replaced by swapping the ..data link."""
    seen: list[PullThresholds] = []
    for name, text in (("v1", doc(minCachedTokenDelta=100)), ("v2", doc(minCachedTokenDelta=200))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thresholds.yaml").write_text(text)
    (tmp_path / "..data").symlink_to("v1")
    mount = tmp_path / "mount"
    mount.mkdir()
    (mount / "thresholds.yaml").symlink_to("../..data/thresholds.yaml")

    source = DirectoryThresholds(mount, seen.append)
    await source.refresh()
    await source.refresh()
    assert [t.min_cached_token_delta for t in seen] == [100]

    (tmp_path / "..next").symlink_to("v2")
    os.replace(tmp_path / "..next", tmp_path / "..data")
    await source.refresh()
    assert [t.min_cached_token_delta for t in seen] == [100, 200]
    assert (source.state.generation, source.state.rejected) == (2, None)

    (tmp_path / "v2" / "thresholds.yaml").write_text(doc(minCachedTokenDelta=300)[:-10])
    await source.refresh()
    assert source.state.thresholds.min_cached_token_delta == 200
    assert source.state.generation == 2
    assert source.state.rejected is not None

    (tmp_path / "v2" / "thresholds.yaml").write_text(doc(minCachedTokenDelta=300))
    await source.refresh()
    assert (source.state.generation, source.state.rejected) == (3, None)
    assert [t.min_cached_token_delta for t in seen] == [100, 200, 300]


async def test_a_missing_directory_is_said_and_recovered_from(tmp_path: Path) -> None:
    seen: list[PullThresholds] = []
    source = DirectoryThresholds(tmp_path / "absent", seen.append)
    await source.refresh()
    assert source.state.rejected is not None
    (tmp_path / "absent").mkdir()
    (tmp_path / "absent" / "a.yaml").write_text(doc(enabled="true"))
    await source.refresh()
    assert seen == [PullThresholds(True)]
    assert source.state.rejected is None
