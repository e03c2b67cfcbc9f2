"""The command line refuses what it cannot mean, with a sentence and status 2."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from epp import cli, flag_values, key_files
from epp.core.errors import ConfigError
from epp.request.trusted_salt import TrustedSalt
from epp.settings import server_settings, trusted_salt


@pytest.mark.parametrize(("text", "value"), [("false", False), ("FALSE", False), ("true", True)])
def test_false_means_false(text: str, value: bool) -> None:
    """S-G07."""
    assert flag_values.boolean(text) is value


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (cli.duration_flag_s, "-1s"),
        (flag_values.boolean, "0"),
        (flag_values.port, "99999"),
        (flag_values.port, "-1"),
        (flag_values.port, "x"),
        (flag_values.body_bytes, "0"),
        (flag_values.body_bytes, "-1"),
        (flag_values.body_bytes, "3000000000"),
        (flag_values.body_bytes, "9" * 5000),
        (flag_values.file_bytes, "4095"),
        (flag_values.file_bytes, "9" * 5000),
        (flag_values.index_bytes, "1048575"),
        (flag_values.index_bytes, "9" * 5000),
        (flag_values.file_count, "0"),
        (flag_values.file_count, "9" * 5000),
    ],
)
def test_refused_values(parse, text: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(argparse.ArgumentTypeError, match="expected"):
        parse(text)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([], "cannot be read"),
        (["--log-level", "loud"], "--log-level"),
    ],
)
def test_a_start_that_cannot_be_is_a_sentence(
    more: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["epp", "--config-file", str(tmp_path / "absent.yaml"), *more]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("text", "value"),
    [("epp:9004", ("epp", 9004)), ("10.0.0.1:1", ("10.0.0.1", 1)), ("[fd00::1]:9004", ("fd00::1", 9004))],
)
def test_addresses(text: str, value: tuple[str, int]) -> None:
    assert flag_values.host_port(text) == value


@pytest.mark.parametrize(
    "text", ["", "epp", ":1", "epp:", "epp:0", "epp:70000", "fd00::1:9004", "a b:1", "u@h:1"]
)
def test_refused_addresses(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected"):
        flag_values.host_port(text)


@pytest.mark.parametrize("text", ["0", "1", "-1", "x", "9" * 40])
def test_refused_snapshot_limits(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected"):
        flag_values.snapshot_bytes(text)


@pytest.mark.parametrize(
    ("read", "flag", "content", "said"),
    [
        (key_files.salt_key, "--salt-key-file", b"short", "at least 16"),
        (key_files.routing_key, "--routing-key-file", b"short", "at least 16"),
        (key_files.peer_keys, "--peer-key-file", b"short", "line 1 has 5 bytes, and 16"),
        (key_files.index_seed, "--index-seed-file", b"not hex", "not hex digits"),
        (key_files.index_seed, "--index-seed-file", b"00ff", "2 bytes, 16 are needed"),
        (key_files.debug_token, "--debug-token-file", b"\n", "is empty"),
    ],
)
def test_unusable_key_files_are_named_and_not_shown(read, flag, content, said, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "key"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=said) as refused:
        read(path)
    assert str(refused.value).startswith(f"{flag} {path}")
    path.unlink()
    with pytest.raises(ConfigError, match="No such file"):
        read(path)
    assert not read(None)


@pytest.mark.parametrize("parameters", ["", "- {type: token-producer}"])
def test_precise_routing_without_exact_tokens_does_not_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], parameters: str
) -> None:
    """No token-producer, or one that would only estimate: a sentence that says what to set."""
    config = tmp_path / "config.yaml"
    config.write_text(
        "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n"
        f"- {{type: precise-prefix-cache-producer}}\n{parameters}\n- {{type: max-score-picker}}\n"
        "schedulingProfiles:\n- {name: default, plugins: [{pluginRef: max-score-picker}]}\n"
    )
    endpoints = tmp_path / "endpoints.yaml"
    endpoints.write_text("endpoints: []\n")
    assert cli.main(["epp", "--config-file", str(config), "--endpoints-file", str(endpoints)]) == 2
    said = capsys.readouterr().err
    assert "nothing knows the engines' tokens" in said
    for what in ("parameters.local.path", "parameters.vllm.url", "--tokenizer"):
        assert what in said


def test_orders_without_the_engines_key_do_not_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = Path(__file__).parents[3]
    endpoints = tmp_path / "endpoints.yaml"
    endpoints.write_text("endpoints: []\n")
    config, tokenizer = root / "config" / "epp" / "next-turn.yaml", root / "config" / "tokenizer"
    inputs = ("--config-file", str(config), "--endpoints-file", str(endpoints), "--tokenizer", str(tokenizer))
    assert cli.main(["epp", *inputs]) == 2
    assert (
        "kvpull-next-turn-prefetcher orders engines to pull: give --peer-key-file" in capsys.readouterr().err
    )


def test_one_configuration_and_not_two(capsys: pytest.CaptureFixture[str]) -> None:
    for given in ([], ["--config-file", "a", "--config-text", "b"]):
        with pytest.raises(SystemExit) as ended:
            cli.parser().parse_args(["epp", *given])
        assert ended.value.code == 2
    assert "not allowed with argument" in capsys.readouterr().err
    assert cli.parser().parse_args(["epp", "--config-text", "b"]).config_file is None


@pytest.mark.parametrize(
    ("given", "heeds"),
    [
        ([], True),
        (["--disable-endpoint-subset-filter"], False),
        (["--disable-endpoint-subset-filter=false"], True),
    ],
)
def test_the_subset_is_heeded_unless_told_otherwise(given: list[str], heeds: bool) -> None:
    arguments = cli.parser().parse_args(["epp", "--config-text", "x", *given])
    assert server_settings(arguments).limits.heeds_subset is heeds


def test_cache_salts_are_the_clients_unless_a_header_is_named(tmp_path: Path) -> None:
    key = tmp_path / "salt-key"
    key.write_bytes(b"k" * 32 + b"\n")
    arguments = cli.parser().parse_args(["epp", "--config-text", "x"])
    assert trusted_salt(arguments) is None
    assert not server_settings(arguments).limits.needs_bodies
    named = ["--cache-salt-header", "X-Tenant-ID"]
    arguments = cli.parser().parse_args(["epp", "--config-text", "x", *named, "--salt-key-file", str(key)])
    assert trusted_salt(arguments) == TrustedSalt("x-tenant-id", b"k" * 32)
    assert server_settings(arguments).limits.needs_bodies


@pytest.mark.parametrize(
    "name", ["", "a b", "x-tenant:", "ä", "x-request-id", "Content-Type", "x-prefiller-host-port", "a" * 129]
)
def test_a_header_that_is_none_or_somebody_elses_is_refused(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.parser().parse_args(["epp", "--config-text", "x", "--cache-salt-header", name])
    assert "--cache-salt-header" in capsys.readouterr().err
