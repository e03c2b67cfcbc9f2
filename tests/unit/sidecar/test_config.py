"""Flags: the reference's names and defaults, and one sentence for what cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from sidecar.config import SidecarConfig, parse_config
from sidecar.flags import ConfigError
from sidecar.plan import Connector

_BASE = ("--pod-ip", "10.0.0.1", "--endpoints-file", "pool.yaml")


def _parse(*argv: str, env: dict[str, str] | None = None) -> SidecarConfig:
    return parse_config([*_BASE, *argv], env or {})


def test_defaults_are_the_references_except_for_the_allow_list() -> None:
    config = _parse()
    assert (config.port, config.model_server_port, config.p2p_base_port) == (8000, 8200, 7777)
    assert (config.connector, config.enable_p2p_pull, config.pull_enabled) == (Connector.NIXLV2, False, False)
    assert (config.ranks, config.prefill_max_retries, config.prefill_retry_backoff_s) == (1, 0, 0.2)
    assert config.enforce_allow_list
    assert config.prefill_failure_local
    assert config.metrics_port == 0


def test_environment_variables_of_the_reference() -> None:
    env = {"POD_IP": "::ffff:10.0.0.7", "P2P_CONNECTOR_PORT": "7800"}
    config = parse_config(["--endpoints-file", "f"], env)
    assert (config.pod_ip, config.p2p_base_port) == ("10.0.0.7", 7800)
    assert parse_config(["--endpoints-file", "f", "--p2p-connector-port", "7900"], env).p2p_base_port == 7900


@pytest.mark.parametrize(
    ("given", "on"),
    [
        (("--enable-p2p-pull",), True),
        (("--enable-p2p-pull=true",), True),
        (("--enable-p2p-pull=false",), False),
    ],
)
def test_go_style_booleans(given: tuple[str, ...], on: bool) -> None:
    assert _parse(*given).enable_p2p_pull is on


@pytest.mark.parametrize(("text", "seconds"), [("1m30s", 90.0), ("5", 5.0)])
def test_durations(text: str, seconds: float) -> None:
    assert _parse("--prefill-timeout", text).prefill_timeout_s == pytest.approx(seconds)


def test_yaml_has_the_same_names_and_the_command_line_wins(tmp_path: Path) -> None:
    text = "port: 9000\nenable-p2p-pull: true\nprefill-retry-backoff: 1s\nenable-tls: [prefiller, decoder]\n"
    file = tmp_path / "sidecar.yaml"
    file.write_text(text)
    for given in (
        ("--configuration", text),
        ("--configuration-file", str(file)),
        (f"--configuration={text}",),
    ):
        config = _parse(*given, "--port", "9001")
        assert (config.port, config.enable_p2p_pull, config.prefill_retry_backoff_s) == (9001, True, 1.0)
        assert config.tls_legs == {"prefiller", "decoder"}
    env = {"P2P_CONNECTOR_PORT": "7800", "ENABLE_PREFILLER_SAMPLING": "true"}
    config = _parse("--configuration", "p2p-connector-port: 7900", env=env)
    assert (config.p2p_base_port, config.sample_prefiller) == (7900, True)


@pytest.mark.parametrize(
    "flag",
    [
        "--ec-connector=",
        "--decode-chunk-size=0",
        "--tracing=false",
        "--max-idle-conns-per-host=1024",
        "--pool-group=inference.networking.k8s.io",
        "--inference-pool=",
    ],
)
def test_the_references_defaults_of_what_we_do_not_do_are_accepted(flag: str) -> None:
    assert _parse(flag) == _parse()


def test_tls_is_on_as_in_the_reference() -> None:
    config = _parse()
    assert (config.secure, config.cert_path, config.tls_legs) == (True, None, frozenset())
    config = _parse("--secure-proxy=false", "--enable-tls", "prefiller", "--enable-tls=decoder")
    assert (config.secure, config.tls_legs) == (False, {"prefiller", "decoder"})


def test_the_failure_policy_follows_what_the_engine_can_do() -> None:
    assert _parse("--kv-connector", "offloading").prefill_failure_local
    assert not _parse("--kv-connector", "sglang").prefill_failure_local
    assert _parse("--kv-connector", "sglang", "--prefill-failure-policy", "local").prefill_failure_local
    config = _parse("--kv-connector", "sglang", env={"SGLANG_BOOTSTRAP_PORT": "9001"})
    assert (config.bootstrap_port, config.pull_enabled) == (9001, False)


def test_a_listen_address_is_the_own_address_too() -> None:
    config = parse_config(["--endpoints-file", "f", "--listen-host", "127.0.1.1"], {})
    assert config.pod_ip == "127.0.1.1"


def test_the_ranks_this_process_serves() -> None:
    assert _parse("--data-parallel-size", "3").served_ranks == (0, 1, 2)
    assert _parse("--data-parallel-size", "3", "--rank", "2").served_ranks == (2,)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (
            ("--kv-connector", "shared-storage"),
            "'shared-storage' is not supported, use one of offloading, nixlv2, sglang, mooncake",
        ),
        (("--kv-connector", "offloading", "--enable-p2p-pull"), "--enable-p2p-pull is for"),
        (("--inference-pool", "ns/pool"), "--endpoints-file and --inference-pool exclude each other"),
        (("--secure-proxy=false", "--cert-path", "d"), "--cert-path needs --secure-proxy"),
        (("--metrics-cert-dir", "d"), "--metrics-cert-dir needs --metrics-port"),
        (("--app-protocol", "kubernetes.io/h2c"), "speaks HTTP/1.1 only"),
        (("--enable-tls", "prefiller,encoder"), "'encoder': encoder disaggregation is not supported"),
        (("--tls-insecure-skip-verify=all",), "'all': unknown, use prefiller or decoder"),
        (("--ec-connector", "ec-nixl"), "--ec-connector: encoder disaggregation"),
        (("--max-idle-conns-per-host", "0"), "--max-idle-conns-per-host"),
        (("--moriio-write-mode",), "--moriio-*: MoRI-IO is not supported"),
        (("--zap-log-level", "loud"), "'loud' is none of debug"),
        (("--configuration", "port: 1", "--configuration-file", "f"), "exclude each other"),
        (("--configuration", "prot: 1"), "--configuration: unknown field 'prot'"),
        (("--configuration", "[port]"), "must be a mapping"),
        (("--configuration", "port: {a: 1}"), "port must be a text"),
        (("--configuration", "port: 1\nport: 2"), "--configuration: key 'port' twice"),
        (("--configuration", "moriio-hosts: x"), "--moriio-*: MoRI-IO"),
        (("--configuration", "configuration-file: x"), "cannot stand inside"),
        (("--configuration-file", "absent.yaml"), "--configuration-file: "),
        (("--decode-chunk-size=8",), "--decode-chunk-size: chunked decode"),
        (("--no-such-flag",), "--no-such-flag"),
        (("--port", "0"), "argument --port: '0' is not a whole number in 1..65535"),
        (("--port", "65535", "--data-parallel-size", "2"), "--port: 65535 leaves no room for 2 ranks"),
        (("--data-parallel-size", "65"), "--data-parallel-size: 65 ranks"),
        (("--data-parallel-size", "2", "--rank", "2"), "--rank: 2 is not one of 2 ranks"),
        (("--model-server-port", "8000"), "--model-server-port: the engine's ports overlap"),
        (
            ("--model-server-port", "8001", "--data-parallel-size", "2"),
            "--model-server-port: the engine's ports",
        ),
        (("--model-server-host", "engine"), "--model-server-host: 'engine' is not an IP address"),
        (("--prefill-timeout", "0s"), "'0s' is not a duration"),
        (("--prefill-timeout", "soon"), "'soon': expected a duration"),
        (("--enable-ssrf-protection=maybe",), "'maybe' is neither true nor false"),
        (("--prefill-failure-policy", "retry"), "--prefill-failure-policy"),
        (("--routing-key-file", "absent-key"), "absent-key"),
    ],
)
def test_refused_with_a_sentence(argv: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        _parse(*argv)
    assert sentence in str(refusal.value)


def test_protection_without_members_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="give --inference-pool, --endpoints-file, or --enable-ssrf-protection=false"
    ):
        parse_config([], {})
    assert parse_config(["--enable-ssrf-protection=false"], {}).pod_ip is None


def test_pulls_need_the_own_address() -> None:
    with pytest.raises(ConfigError, match="--pod-ip"):
        parse_config(["--endpoints-file", "f", "--enable-p2p-pull"], {})


def test_the_key_is_read_and_never_shown(tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_bytes(b"0123456789abcdefSECRET\n")
    config = _parse("--routing-key-file", str(key_file))
    assert config.routing_key == b"0123456789abcdefSECRET"
    assert "SECRET" not in repr(config)


def test_a_short_key_is_refused(tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_bytes(b"short\n")
    with pytest.raises(ConfigError, match="5 bytes"):
        _parse("--routing-key-file", str(key_file))


def test_an_inference_pool_is_the_allow_list_of_a_cluster() -> None:
    config = parse_config(["--pod-ip", "10.0.0.1"], {"INFERENCE_POOL": "llm/llama"})
    assert (config.inference_pool, config.pool_group) == ("llm/llama", "inference.networking.k8s.io")
    with pytest.raises(ConfigError, match="expected namespace/name"):
        parse_config(["--inference-pool", "a/b/c", "--pod-ip", "10.0.0.1"], {})
