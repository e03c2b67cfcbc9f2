"""From a call to token ids and back to text: tokenizer, chat template, length limits.

Tokenising blocks and runs in a thread. Nothing here logs or keeps a prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from deploy.local.engine.errors import ApiError
from deploy.local.engine.schema import ChatCall, CompletionCall, Prompt
from deploy.local.engine.stepper import LONGEST_NATURAL_ANSWER_TOKENS
from epp.request.chat import Unrenderable
from epp.request.local_tokenizer import LocalTokenizer


class PromptReader:
    """One model's tokenizer with its context length."""

    def __init__(self, tokenizer: LocalTokenizer, *, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self.max_model_len = max_model_len

    async def completion(self, call: CompletionCall) -> list[tuple[int, ...]]:
        """Token ids of every prompt. Raises ApiError."""
        return await asyncio.to_thread(self._completion, call)

    async def chat(self, call: ChatCall) -> tuple[int, ...]:
        """Token ids of the rendered chat. Raises ApiError."""
        return await asyncio.to_thread(self._chat, call)

    def _completion(self, call: CompletionCall) -> list[tuple[int, ...]]:
        return [self._ids(prompt, call.add_special_tokens) for prompt in call.prompts]

    def _ids(self, prompt: Prompt, add_special_tokens: bool) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(self._encode(prompt, add_special_tokens))
        size = self._tokenizer.vocab_size
        if not all(0 <= token < size for token in prompt):
            raise ApiError("Token id is out of vocabulary", param="prompt")
        return prompt

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            return self._tokenizer.encode(text, add_special_tokens)
        except UnicodeEncodeError as error:
            raise ApiError("the prompt is not valid Unicode text") from error

    def _chat(self, call: ChatCall) -> tuple[int, ...]:
        try:
            text = self._tokenizer.render_chat(
                call.messages,
                call.tools,
                call.add_generation_prompt,
                continue_final_message=call.continue_final_message,
                **call.template,
            )
        except Unrenderable as error:
            raise ApiError(f"the chat cannot be rendered: {error.reason}", param="messages") from error
        except TypeError as error:
            raise ApiError("chat_template_kwargs clash with other parameters") from error
        return tuple(self._encode(text, call.add_special_tokens))

    def answer_tokens(self, prompt_tokens: int, asked: int | None) -> int:
        """Longest answer to make room for. Raises ApiError where the prompt, or what was asked, does
        not fit."""
        room = self.max_model_len - prompt_tokens
        if prompt_tokens < 1:
            raise ApiError("The decoder prompt cannot be empty", param="prompt")
        if room < 1 or (asked is not None and asked > room):
            completion = f" and asked for {asked} in the completion" if asked is not None else ""
            raise ApiError(
                f"This model's maximum context length is {self.max_model_len} tokens. However, your "
                f"request has {prompt_tokens} input tokens{completion}. Please reduce the length of "
                "the input or of the completion.",
                param="input_tokens",
            )
        return min(room, LONGEST_NATURAL_ANSWER_TOKENS) if asked is None else asked

    def tokenize(self, text: str, add_special_tokens: bool) -> list[int]:
        """Blocking."""
        return self._encode(text, add_special_tokens)

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self._tokenizer)


class Detokenizer:
    """Text of a growing answer, piece by piece: a piece is held back while it ends in the middle of
    a character."""

    def __init__(self, tokenizer: LocalTokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._prefix = 0  # decoding starts here, so that blanks between tokens come out right
        self._read = 0  # tokens whose text has been given out

    def add(self, ids: Sequence[int]) -> str:
        """New text."""
        self._ids.extend(ids)
        before = self._tokenizer.decode(self._ids[self._prefix : self._read])
        now = self._tokenizer.decode(self._ids[self._prefix :])
        if now.endswith("\ufffd"):
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        return now[len(before) :]
