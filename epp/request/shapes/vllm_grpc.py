"""vLLM's gRPC API: one message of `vllm.grpc.engine.VllmEngine/Generate` or `/Embed` in a request body.

Only the fields that decide about the prompt are declared; field numbers are those of `vllm_engine.proto` as
smg-grpc-proto 0.4.28 publishes it. A body that is no such message is no error of ours: the engine answers it.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from epp.request.body import MAX_PARSED_BYTES, MAX_SEPARATORS
from epp.request.prompts import NoPrompt, ParsedRequest, Prompt, Reason, RequestKind, TextPrompt, TokenPrompt

GRPC_PATHS: Final = ("/vllm.grpc.engine.VllmEngine/Generate", "/vllm.grpc.engine.VllmEngine/Embed")
FRAME_BYTES: Final = 5  # one byte of flags, four of length (gRPC over HTTP/2)

_Field = descriptor_pb2.FieldDescriptorProto
_TEXT, _NUMBER, _INT, _FLAG, _MESSAGE = (
    _Field.TYPE_BYTES,  # decoded here, where it can fail
    _Field.TYPE_UINT32,
    _Field.TYPE_INT32,
    _Field.TYPE_BOOL,
    _Field.TYPE_MESSAGE,
)
_ONE_OF: Final = {"GenerateRequest": ("tokenized", "text")}  # the last one sent counts
# message -> (field, number, type, message or `repeated`)
_MESSAGES: Final[Mapping[str, tuple[tuple[str, int, Any, str], ...]]] = {
    "Opaque": (),
    "TokenizedInput": (("input_ids", 2, _NUMBER, "repeated"),),
    "SamplingParams": (("truncate_prompt_tokens", 27, _INT, ""),),
    "GenerateRequest": (
        ("tokenized", 2, _MESSAGE, "TokenizedInput"),
        ("text", 3, _TEXT, ""),
        ("sampling_params", 4, _MESSAGE, "SamplingParams"),
        ("stream", 5, _FLAG, ""),
        ("mm_inputs", 7, _MESSAGE, "Opaque"),
        ("media_refs", 10, _MESSAGE, "Opaque"),
        ("extra_mm_inputs", 11, _MESSAGE, "Opaque"),
    ),
}


def parse_grpc(body: bytes) -> ParsedRequest:
    """The prompt of a framed `GenerateRequest` (an `EmbedRequest` is one without text). The model is the
    engine's own: a message names none."""
    try:
        request = _read(_unframed(body))
        prompt = _prompt(request)
    except NoPrompt as reason:
        return ParsedRequest(RequestKind.TOKENS_IN, no_prompt=reason.reason, size_bytes=len(body))
    return ParsedRequest(
        RequestKind.TOKENS_IN, prompt=prompt, prompts=1, stream=request.stream, size_bytes=len(body)
    )


def _unframed(body: bytes) -> bytes:
    if len(body) > MAX_PARSED_BYTES:
        raise NoPrompt(Reason.BODY_SIZE)
    if len(body) < FRAME_BYTES or int.from_bytes(body[1:FRAME_BYTES]) != len(body) - FRAME_BYTES:
        raise NoPrompt(Reason.PROMPT_SHAPE)  # cut short, or more than the one message of such a call
    if body[0]:
        raise NoPrompt(Reason.UNKNOWN_ENCODING)  # compressed
    return body[FRAME_BYTES:]


def _read(message: bytes) -> Any:
    try:
        return _GENERATE.FromString(message)
    except DecodeError:
        raise NoPrompt(Reason.PROMPT_SHAPE) from None


def _prompt(request: Any) -> Prompt:
    if request.HasField("mm_inputs") or request.HasField("media_refs") or request.extra_mm_inputs:
        raise NoPrompt(Reason.MULTIMODAL)
    if request.sampling_params.HasField("truncate_prompt_tokens"):
        raise NoPrompt(Reason.TRUNCATED_PROMPT)
    if request.HasField("text"):
        return TextPrompt(_text(request))
    token_ids = request.tokenized.input_ids
    if not token_ids:
        raise NoPrompt(Reason.PROMPT_SHAPE)
    if len(token_ids) > MAX_SEPARATORS:  # copied under the GIL, as a list in JSON is
        raise NoPrompt(Reason.BODY_DENSITY)
    return TokenPrompt(array("I", token_ids[:]))  # a list first: half the time


def _text(request: Any) -> str:
    try:
        return str(request.text, "utf-8")
    except UnicodeDecodeError:
        raise NoPrompt(Reason.PROMPT_SHAPE) from None


def _generate_request() -> Any:
    """The message class, declared here: there is no generated module to import."""
    file = descriptor_pb2.FileDescriptorProto(
        name="kvpull/vllm_engine.proto", package="kvpull.vllm", syntax="proto2"
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        choice = _ONE_OF.get(name, ())
        if choice:
            message.oneof_decl.add(name="input")
        for field, number, kind, detail in fields:
            many = detail == "repeated" or field.startswith("extra_")
            row = message.field.add(name=field, number=number, type=kind)
            row.label = _Field.LABEL_REPEATED if many else _Field.LABEL_OPTIONAL
            if field in choice:
                row.oneof_index = 0
            if kind == _MESSAGE:
                row.type_name = f".kvpull.vllm.{detail}"
            elif many:
                row.options.packed = True
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("kvpull.vllm.GenerateRequest"))


_GENERATE: Final = _generate_request()
