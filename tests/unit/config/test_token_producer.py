"""Token back ends in the configuration: what is built, what is refused and with which words."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from epp.config import parse_config
from epp.core.errors import ConfigError
from epp.request.back_end import TokeniserPlan
from epp.request.parse import TextPrompt
from epp.request.render import RenderTokeniser
from epp.request.tokenise import LocalTokeniser
from epp.telemetry.tokeniser_metrics import TokeniserCollector

DIRECTORY = Path(__file__).resolve().parents[3] / "config" / "tokenizer"
BASE = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: precise-prefix-cache-producer}
- type: token-producer
  parameters: %s
- {type: max-score-picker}
schedulingProfiles:
- {name: default, plugins: [{pluginRef: max-score-picker}]}
"""


def plan(parameters: str, directory: Path | None = None) -> TokeniserPlan:
    config = parse_config(BASE % parameters)
    return TokeniserPlan(config.tokens, directory, 2.0, lambda: ["10.0.0.1:8000", "[fd00::1]:8000"])


@pytest.mark.parametrize("parameters", ["{estimate: {}}", "{estimate: {bytesPerToken: 4}}"])
def test_an_estimate_for_precise_routing_is_refused_with_what_to_set(parameters: str) -> None:
    with pytest.raises(ConfigError, match=r"only estimates.*local\.path.*vllm\.url.*--enable-scale-out"):
        parse_config(BASE % parameters)
    without = (BASE % parameters).replace("- {type: precise-prefix-cache-producer}\n", "")
    tokens = parse_config(without).tokens
    assert tokens is not None
    assert not tokens.exact


def test_no_back_end_is_the_references_estimate() -> None:
    assert plan("{}").build() is None


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ("{local: {path: x}, vllm: {}}", "local and vllm: one back end"),
        ("{local: {}}", "local.path: Field required"),
        ("{vllm: {url: 'ftp://a'}}", "vllm.url: "),
        ("{vllm: {url: 'http://user:pw@a'}}", "vllm.url: "),
        ("{vllm: {url: 'http://a/v1'}}", "vllm.url: "),
        ("{vllm: {timeout: 5}}", "vllm.timeout: "),
        ("{vllm: {timeout: 0s}}", "vllm.timeout: .*greater than 0"),
        ("{vllm: {timeout: 5sec}}", "vllm.timeout: .*expected a duration"),
        ("{vllm: {pool: true, url: 'http://a'}}", "url and pool: one of them"),
        ("{vllm: {maxInFlight: 0}}", "vllm.maxInFlight: "),
        ("{tokenizer: x}", "tokenizer: Extra inputs"),
    ],
)
def test_refusals_name_the_parameter(parameters: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_config(BASE % parameters)


@pytest.mark.parametrize(("text", "seconds"), [("500ms", 0.5), ("1m30s", 90.0)])
def test_durations(text: str, seconds: float) -> None:
    tokens = parse_config(BASE % f"{{vllm: {{url: 'http://a', timeout: {text}}}}}").tokens
    assert tokens is not None
    assert tokens.vllm is not None
    assert tokens.vllm.timeout == seconds


async def test_the_local_back_end_is_built_and_says_what_it_does(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        service = plan(f"{{local: {{path: {DIRECTORY}, cacheSizeMiB: 1, workers: 1}}}}").build()
    assert isinstance(service, LocalTokeniser)
    assert "incremental, cut at blanks and marks and special tokens" in caplog.text
    registry = CollectorRegistry()
    registry.register(TokeniserCollector(service))
    assert await service.token_ids(TextPrompt("The harbour")) is not None
    page = generate_latest(registry).decode()
    assert 'kvpull_epp_tokenised_prompts_total{outcome="encoded"} 1.0' in page
    assert 'kvpull_epp_token_cuts{at="blanks"} 1.0' in page
    assert 'kvpull_epp_tokenised_tokens_total{how="encoded"} 2.0' in page
    await service.aclose()


async def test_the_flag_wins_over_the_file(tmp_path: Path) -> None:
    service = plan(f"{{local: {{path: {tmp_path}}}}}", directory=DIRECTORY).build()
    assert isinstance(service, LocalTokeniser)
    await service.aclose()
    with pytest.raises(ConfigError, match=r"tokenizer\.json: no such file"):
        plan(f"{{local: {{path: {tmp_path}}}}}").build()


async def test_the_render_back_end_is_built(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("k3y\n")
    service = plan(f"{{modelName: m, vllm: {{pool: true, timeout: 250ms, apiKeyPath: {key}}}}}").build()
    assert isinstance(service, RenderTokeniser)
    registry = CollectorRegistry()
    registry.register(TokeniserCollector(service))
    assert "kvpull_epp_render_breakers_open 0.0" in generate_latest(registry).decode()
    await service.aclose()


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "one line"), (b"a\nb", "one line"), (b"\xff", "ASCII"), (None, "No such file")],
)
def test_a_broken_key_file_is_a_sentence(tmp_path: Path, content: bytes | None, said: str) -> None:
    if content is not None:
        (tmp_path / "key").write_bytes(content)
    with pytest.raises(ConfigError, match=f"apiKeyPath.*{said}"):
        plan(f"{{vllm: {{apiKeyPath: {tmp_path}/key}}}}").build()


@pytest.mark.parametrize("field", ["caCertPath", "clientCertPath"])
def test_a_broken_certificate_is_a_sentence(tmp_path: Path, field: str) -> None:
    (tmp_path / "pem").write_text("nonsense")
    for path in ("pem", "gone"):
        with pytest.raises(ConfigError, match="certificates cannot be used"):
            plan(f"{{vllm: {{{field}: {tmp_path}/{path}}}}}").build()
