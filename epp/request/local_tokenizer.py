"""A model's own tokenizer and chat template, from a directory in the Hugging Face layout.

Files read: `tokenizer.json`, `tokenizer_config.json` (begin and end token; optional),
`chat_template.jinja` (or the `chat_template` of the config; optional) and `config.json` (model type;
optional). Everything here blocks and is meant for a thread: `encode_batch_fast` releases the GIL,
`encode` would hold it for the whole prompt. It must not log or cache prompts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import jinja2
from tokenizers import Tokenizer

from epp.core.errors import ConfigError
from epp.request.chat import Unrenderable
from epp.request.chat_template import ChatTemplate
from epp.request.cut_rules import CutRules, cut_rules
from epp.request.engine_flags import DEFAULT_FLAGS, EngineFlags, probed_effort
from epp.request.inline_system import with_system_in_front
from epp.request.items import ItemPlaces
from epp.request.prompts import ChatPrompt
from epp.request.tokenizer_class import renders_in_code, unread_reason


class LocalTokenizer:
    """Text to token ids and back, exactly as an engine with the same directory does it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        chat_template: ChatTemplate | None = None,
        tool_template: ChatTemplate | None = None,
        special_tokens: Mapping[str, str] | None = None,
        item_places: ItemPlaces | None = None,
        flags: EngineFlags = DEFAULT_FLAGS,
    ) -> None:
        """`tool_template` renders chats with tools, where a model has one for them; `special_tokens` by
        the names under which templates know them (`bos_token`, ...)."""
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._tool_template = tool_template or chat_template
        self._special_tokens = dict(special_tokens or {})
        self.item_places: Final = item_places or ItemPlaces({})
        self._flags = flags
        # probed when first asked for
        self._disabled_effort: str | None = None
        self._system_in_front: bool | None = None
        bos_token, eos_token = map(self._special_tokens.get, ("bos_token", "eos_token"))
        self._cut_rules: CutRules | None = None
        self.bos_token: Final = bos_token
        self.eos_token: Final = eos_token
        self.bos_id: Final = None if bos_token is None else tokenizer.token_to_id(bos_token)
        self.eos_id: Final = None if eos_token is None else tokenizer.token_to_id(eos_token)
        self.vocab_size: Final = tokenizer.get_vocab_size(with_added_tokens=True)

    @classmethod
    def load(
        cls,
        directory: Path,
        *,
        chat_template_path: Path | None = None,
        flags: EngineFlags = DEFAULT_FLAGS,
    ) -> LocalTokenizer:
        """`chat_template_path` replaces the directory's own template, as the engine's --chat-template does;
        `flags` are others of the engine's.

        Raises:
            ConfigError: names the file and what is wrong with it.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{path}: no such file; a tokenizer directory needs a tokenizer.json")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the binding raises nothing narrower
            raise ConfigError(f"{path}: not a tokenizer: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        config = _read_config(directory / "tokenizer_config.json")
        unread = unread_reason(tokenizer, config)
        if unread is not None:
            raise ConfigError(
                f"{path}: {unread}, so its tokens would not be the engine's; save the tokenizer with the "
                "engine's transformers (AutoTokenizer.from_pretrained(...).save_pretrained(...)) and use that"
            )
        model_config = _read_config(directory / "config.json")
        in_code = renders_in_code(model_config)
        templates = {} if in_code else _read_templates(directory, config, chat_template_path, flags)
        return cls(
            tokenizer,
            chat_template=templates.get("default"),
            tool_template=templates.get("tool_use"),
            special_tokens=dict(_special_tokens(config)),
            item_places=ItemPlaces(model_config, tokenizer.token_to_id),
            flags=flags,
        )

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`. Special tokens written in the text itself are recognised."""
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Token ids of each text. A text with lone surrogates has none: `UnicodeEncodeError`."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def cut_rules(self) -> CutRules:
        """Where texts may be cut without a change of their tokens. The first call takes a while."""
        if self._cut_rules is None:
            self._cut_rules = cut_rules(self._tokenizer)
        return self._cut_rules

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def render_chat(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        *,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> str:
        """`prompt_text` of a chat in the terms of transformers."""
        prompt = ChatPrompt(
            list(messages),
            None if tools is None else list(tools),
            add_generation_prompt,
            continue_final_message,
            template_kwargs,
        )
        return self.prompt_text(prompt)

    def prompt_text(self, prompt: ChatPrompt) -> str:
        """Prompt text of a chat; encode it *without* special tokens unless the client wants them: the
        template writes its own.

        Raises:
            Unrenderable: no template, or the engine would refuse this chat.
        """
        if prompt.inline_system and self._puts_system_in_front():
            prompt = replace(prompt, messages=with_system_in_front(prompt.messages))
        tools = self._flags.tools(prompt)
        template = self._chat_template if tools is None else self._tool_template
        if template is None:
            raise Unrenderable("no_chat_template")
        given = self._flags.template_kwargs(prompt, self._effort_of_disabled_thinking)
        return template.render(prompt, self._special_tokens | given, tools)

    def _puts_system_in_front(self) -> bool:
        """Any of the model's templates decides for all, as the engine has it."""
        if self._system_in_front is None:
            templates = filter(None, {self._chat_template, self._tool_template})
            self._system_in_front = any(template.refuses_inline_system() for template in templates)
        return self._system_in_front

    def _effort_of_disabled_thinking(self) -> str:
        if self._disabled_effort is None:
            flag = self._flags.disabled_thinking
            self._disabled_effort = probed_effort(self.prompt_text) if flag == "auto" else flag
        return self._disabled_effort


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(_read_text(path))
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: must hold a JSON object")
    return config


def _read_templates(
    directory: Path, config: dict[str, Any], given: Path | None, flags: EngineFlags
) -> dict[str, ChatTemplate]:
    """Templates by name; the engine asks for "tool_use" where a chat has tools, else for "default"."""
    path = given or directory / "chat_template.jinja"
    sources: Any = config.get("chat_template")
    if given is not None or path.is_file():
        sources = _read_text(path)
    if isinstance(sources, list):
        sources = {named.get("name"): named.get("template") for named in sources if isinstance(named, dict)}
    elif isinstance(sources, str):
        sources = {"default": sources}
    more = directory / "additional_chat_templates" / "tool_use.jinja"
    if given is None and path.is_file() and more.is_file():
        sources = {**sources, "tool_use": _read_text(more)}
    try:
        return {
            name: ChatTemplate(source, content_format_flag=flags.content_format)
            for name, source in (sources or {}).items()
        }
    except (jinja2.TemplateError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: not a chat template: {error}") from error


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text") from error


def _special_tokens(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """A special token is written as text or as `{"content": text, ...}`."""
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            yield name, text
