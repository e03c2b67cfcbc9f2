"""No salt in clear leaves the engine, and nothing else of an event changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_plugin.salt import published_salt
from engine_plugin.vllm.salted_events import KEY_FILE_VARIABLE, SaltKeyError, hide_salts, read_salt_key

KEY = b"0123456789abcdef"
SALT = published_salt(KEY, "tenant-a")


def test_salts_are_hidden_and_the_rest_stays() -> None:
    picture = ("picture", 5)
    assert hide_salts(KEY, [("tenant-a",), None], None) == [(SALT,), None]
    assert hide_salts(KEY, [("lora", picture, "tenant-a")], "lora") == [("lora", picture, SALT)]
    assert hide_salts(KEY, [(picture,), ("lora",)], "lora") == [(picture,), ("lora",)]


def test_a_salt_that_is_called_like_an_adapter_is_hidden() -> None:
    assert hide_salts(KEY, [("lora", "lora")], "lora") == [("lora", published_salt(KEY, "lora"))]
    assert hide_salts(KEY, [("lora",)], None) == [(published_salt(KEY, "lora"),)]


def test_a_key_that_cannot_be_used_stops_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_FILE_VARIABLE, raising=False)
    assert read_salt_key() is None
    monkeypatch.setenv(KEY_FILE_VARIABLE, str(tmp_path / "none"))
    with pytest.raises(SaltKeyError, match="No such file"):
        read_salt_key()
    (tmp_path / "key").write_bytes(b"short\n")
    monkeypatch.setenv(KEY_FILE_VARIABLE, str(tmp_path / "key"))
    with pytest.raises(SaltKeyError, match="5 bytes"):
        read_salt_key()
    (tmp_path / "key").write_bytes(KEY + b"\n")
    assert read_salt_key() == KEY
