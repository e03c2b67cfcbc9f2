"""The configured `Tokeniser`: files are read and checked here, once, before the picker is ready."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from epp.core.errors import ConfigError
from epp.plugins.producers import LocalTokenizerParameters, TokenProducerParameters, VllmTokenizerParameters
from epp.request.engine_flags import EngineFlags, refused_defaults
from epp.request.local_tokenizer import LocalTokenizer
from epp.request.render import RenderLimits, RenderTokeniser
from epp.request.tokenise import LocalTokeniser

_log = logging.getLogger(__name__)
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class TokeniserPlan:
    """What to build, flags of the command line included. `directory` wins over the parameters' back end;
    `members` names the pool's serving addresses (`ip:port`) whenever it is asked."""

    parameters: TokenProducerParameters | None
    directory: Path | None
    budget_s: float
    members: Callable[[], Sequence[str]]

    def build(self) -> LocalTokeniser | RenderTokeniser | None:
        """None: nothing here knows the engine's tokens.

        Raises:
            ConfigError: names the file or parameter and what is wrong with it.
        """
        given = self.parameters or TokenProducerParameters()
        if self.directory is not None:
            local = given.local or LocalTokenizerParameters(path="")
            return _local(local.model_copy(update={"path": str(self.directory)}), self.budget_s)
        if given.local is not None:
            return _local(given.local, self.budget_s)
        if given.vllm is not None:
            return _vllm(given.vllm, given.model_name, self.budget_s, self.members)
        return None


def _local(parameters: LocalTokenizerParameters, budget_s: float) -> LocalTokeniser:
    template = parameters.chat_template_path
    tokenizer = LocalTokenizer.load(
        Path(parameters.path),
        chat_template_path=None if template is None else Path(template),
        flags=_flags(parameters),
    )
    service = LocalTokeniser(
        tokenizer,
        workers=parameters.workers,
        budget_s=budget_s,
        cache_bytes=parameters.cache_size_mib * _MIB,
    )
    rules = service.rules
    if rules.any:
        places = {"blanks": rules.at_blanks, "marks": rules.at_marks, "special tokens": bool(rules.tokens)}
        where = " and ".join(place for place, shown in places.items() if shown)
        _log.info("tokenizer %s: incremental, cut at %s", parameters.path, where)
    else:
        _log.warning("tokenizer %s: every text is encoded whole", parameters.path)
    for reason in rules.reasons:
        _log.info("tokenizer %s: %s", parameters.path, reason)
    if not tokenizer.has_chat_template:
        _log.warning("tokenizer %s: no chat template; chats are routed by load", parameters.path)
    return service


def _flags(parameters: LocalTokenizerParameters) -> EngineFlags:
    refused = refused_defaults(parameters.default_chat_template_kwargs)
    if refused is not None:
        raise ConfigError(f"token-producer: defaultChatTemplateKwargs: {refused} is not for a default")
    return EngineFlags(
        default_template_kwargs=parameters.default_chat_template_kwargs,
        content_format=parameters.chat_template_content_format,
        drops_unused_tools=parameters.exclude_tools_when_tool_choice_none,
        disabled_thinking=parameters.anthropic_disabled_thinking_effort,
    )


def _vllm(
    parameters: VllmTokenizerParameters,
    model: str | None,
    budget_s: float,
    addresses: Callable[[], Sequence[str]],
) -> RenderTokeniser:
    tls = _tls(parameters)
    members: Callable[[], Sequence[str]]
    if parameters.pool:
        scheme = (
            "http" if parameters.ca_cert_path is None and not parameters.insecure_skip_verify else "https"
        )

        def members() -> Sequence[str]:
            return [f"{scheme}://{address}" for address in addresses()]

    else:

        def members() -> Sequence[str]:
            return (parameters.url,)

    return RenderTokeniser(
        members,
        limits=RenderLimits(
            budget_s=parameters.timeout or budget_s,
            items_budget_s=parameters.mm_timeout,
            max_in_flight=parameters.max_in_flight,
            max_answer_bytes=parameters.max_answer_bytes,
        ),
        model=model,
        headers=_authorization(parameters.api_key_path),
        tls=tls,
    )


def _authorization(path: str | None) -> dict[str, str]:
    if path is None:
        return {}
    try:
        key = Path(path).read_text(encoding="ascii").strip()
    except OSError as error:
        raise ConfigError(f"token-producer: apiKeyPath {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"token-producer: apiKeyPath {path}: is no ASCII text") from error
    if not key or not key.isprintable():
        raise ConfigError(f"token-producer: apiKeyPath {path}: must hold one line")
    return {"authorization": f"Bearer {key}"}


def _tls(parameters: VllmTokenizerParameters) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=parameters.ca_cert_path)
        if parameters.insecure_skip_verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if parameters.client_cert_path is not None:
            context.load_cert_chain(parameters.client_cert_path, parameters.client_key_path)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or type(error).__name__
        raise ConfigError(f"token-producer: certificates cannot be used: {reason}") from error
    return context
