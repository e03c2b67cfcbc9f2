"""ProcessingRequest -> plain events, plain actions -> ProcessingResponse.

The only place that knows the gateway's protobuf. `read` never raises on odd bytes: header values are
decoded with replacement, every value is kept. `write` never touches framing or hop-by-hop headers,
whatever a caller asks for: the gateway owns them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import orjson
from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.type.v3 import http_status_pb2
from google.protobuf import struct_pb2

from epp.extproc import events as ev
from epp.extproc import wire
from epp.extproc.session import GatewayProtocolError

_OVERWRITE: Final = base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
_OVERWRITE_PRESENT: Final = base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS

# RFC 9110 7.6.1 (hop by hop) and what frames or addresses a message
UNTOUCHABLE: Final = frozenset(
    {
        "connection",
        "content-length",
        "host",
        "keep-alive",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_ERROR_TYPES: Final = {429: "rate_limit_error", 503: "service_unavailable_error"}
_HTTP_STATUSES: Final = frozenset(http_status_pb2.StatusCode.values())


_REQUEST_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")  # it goes into logs, headers and the ring


def read(message: pb.ProcessingRequest, new_request_id: Callable[[], str]) -> ev.Event:
    """One message as an event. `new_request_id` names a request that came without an id.

    Raises:
        GatewayProtocolError: the message carries none of the six kinds.
    """
    kind = message.WhichOneof("request")
    if kind == "request_headers":
        return _read_request_headers(message, new_request_id)
    if kind == "request_body":
        body = message.request_body
        return ev.RequestBody(body.body, body.end_of_stream, _subset(message))
    if kind == "response_headers":
        headers = message.response_headers
        return ev.ResponseHeaders(
            _headers(headers.headers), headers.end_of_stream, _served_by(message), _modes(message)
        )
    if kind == "response_body":
        return ev.ResponseBody(message.response_body.body, message.response_body.end_of_stream)
    if kind == "request_trailers":
        return ev.RequestTrailers(_subset(message))
    if kind == "response_trailers":
        return ev.ResponseTrailers()
    raise GatewayProtocolError("a message that is neither headers, body nor trailers")


def write(action: ev.Action) -> pb.ProcessingResponse | None:
    """One action as an answer to the gateway; None where the gateway is not concerned."""
    response = pb.ProcessingResponse()
    match action:
        case ev.SendBodyPiece(direction, body, end_of_stream):
            common = _body_response(response, direction)
            common.body_mutation.streamed_response.body = body
            common.body_mutation.streamed_response.end_of_stream = end_of_stream
        case ev.SendRequestHeaders(destination, edit):
            _route(response, response.request_headers.response, destination, edit)
        case ev.SendBufferedRequest(destination, edit, new_body):
            _write_buffered(response, destination, edit, new_body)
        case ev.SendResponseHeaders(edit):
            response.response_headers.SetInParent()
            if edit.set or edit.remove:
                _edit(response.response_headers.response.header_mutation, edit)
        case ev.ContinueRequestHeaders():
            response.request_headers.response.SetInParent()
        case ev.KeepBody(direction):
            _body_response(response, direction).SetInParent()
        case ev.ReplaceBody(body, whole):
            _replace(_body_response(response, ev.Direction.RESPONSE), body, whole=whole)
        case ev.SendTrailers(ev.Direction.REQUEST):
            response.request_trailers.SetInParent()
        case ev.SendTrailers():
            response.response_trailers.SetInParent()
        case ev.SendImmediate(refusal):
            _write_immediate(response.immediate_response, refusal)
        case _:
            return None
    return response


# ---- reading -------------------------------------------------------------------------------------


def _usable_id(value: str | None) -> str | None:
    """A client's request id, unless it is long or odd: then the request gets one of ours."""
    return value if value is not None and _REQUEST_ID.fullmatch(value) else None


def _read_request_headers(
    message: pb.ProcessingRequest, new_request_id: Callable[[], str]
) -> ev.RequestHeaders:
    headers = _headers(message.request_headers.headers)
    head = ev.RequestHead(
        headers=headers,
        method=headers.first(":method") or "",
        path=headers.first(":path") or "",
        request_id=_usable_id(headers.first(wire.REQUEST_ID)) or new_request_id(),
        subset=_subset(message),
    )
    return ev.RequestHeaders(head, message.request_headers.end_of_stream, _modes(message))


def _headers(header_map: base_pb2.HeaderMap) -> ev.Headers:
    return ev.Headers(tuple((header.key.lower(), _value(header)) for header in header_map.headers))


def _value(header: base_pb2.HeaderValue) -> str:
    raw: bytes = header.raw_value  # Envoy 1.40 sends raw_value only, others value only
    return raw.decode("utf-8", "replace") if raw else str(header.value)


def _modes(message: pb.ProcessingRequest) -> ev.BodyModes | None:
    if not message.HasField("protocol_config"):
        return None
    config = message.protocol_config
    try:
        return ev.BodyModes(ev.BodyMode(config.request_body_mode), ev.BodyMode(config.response_body_mode))
    except ValueError as error:
        raise GatewayProtocolError(f"unknown body mode in protocol_config: {error}") from error


def _subset(message: pb.ProcessingRequest) -> frozenset[str] | None:
    """The gateway's endpoint subset: a list, a string or a comma string, of `ip` or `ip:port`.

    A hint in any other form allows nothing rather than everything: traffic must not leave a subset
    because we could not read it.
    """
    fields = _metadata(message, wire.SUBSET_NAMESPACE)
    if fields is None or wire.SUBSET_KEY not in fields:
        return None
    value = fields[wire.SUBSET_KEY]
    kind = value.WhichOneof("kind")
    if kind == "null_value":
        return None
    texts: Iterable[str] = ()
    if kind == "string_value":
        texts = (value.string_value,)
    elif kind == "list_value":
        texts = (item.string_value for item in value.list_value.values)
    parts = (part.strip() for text in texts for part in text.split(","))
    return frozenset(part for part in parts if part)


def _served_by(message: pb.ProcessingRequest) -> str | None:
    """Upstream address: Envoy's attribute, else the metadata of the Endpoint Picker Protocol."""
    attributes = message.attributes
    if wire.ATTRIBUTES_NAMESPACE in attributes:
        fields = attributes[wire.ATTRIBUTES_NAMESPACE].fields
        if wire.UPSTREAM_ADDRESS in fields and fields[wire.UPSTREAM_ADDRESS].string_value:
            return str(fields[wire.UPSTREAM_ADDRESS].string_value)
    metadata = _metadata(message, wire.METADATA_NAMESPACE)
    if metadata is not None and wire.DESTINATION_SERVED in metadata:
        return metadata[wire.DESTINATION_SERVED].string_value or None
    return None


def _metadata(message: pb.ProcessingRequest, namespace: str) -> Mapping[str, struct_pb2.Value] | None:
    # `in` first: reading a missing key of a protobuf map would create it
    namespaces = message.metadata_context.filter_metadata
    return namespaces[namespace].fields if namespace in namespaces else None


# ---- writing -------------------------------------------------------------------------------------


def _body_response(response: pb.ProcessingResponse, direction: ev.Direction) -> pb.CommonResponse:
    body = response.request_body if direction is ev.Direction.REQUEST else response.response_body
    return body.response


def _route(
    response: pb.ProcessingResponse, common: pb.CommonResponse, destination: str, edit: ev.HeaderEdit
) -> None:
    """The decision: the same destination as a header and as metadata, and the route chosen anew."""
    _edit(
        common.header_mutation,
        ev.HeaderEdit({**edit.set, wire.DESTINATION: destination}, edit.remove),
    )
    common.clear_route_cache = True
    metadata = response.dynamic_metadata.fields[wire.METADATA_NAMESPACE].struct_value
    metadata.fields[wire.DESTINATION].string_value = destination


def _write_buffered(
    response: pb.ProcessingResponse, destination: str, edit: ev.HeaderEdit, body: bytes | None
) -> None:
    common = _body_response(response, ev.Direction.REQUEST)
    _route(response, common, destination, edit)
    if body is not None:
        _replace(common, body, whole=True)


def _replace(common: pb.CommonResponse, body: bytes, *, whole: bool) -> None:
    if body:
        common.body_mutation.body = body
    else:
        common.body_mutation.clear_body = True
    if whole:
        # Envoy answers 500 where a present length and the new body differ; a chunked body has none
        _set(common.header_mutation, "content-length", str(len(body)), _OVERWRITE_PRESENT)


def _edit(mutation: pb.HeaderMutation, edit: ev.HeaderEdit) -> None:
    to_set = {name.lower(): value for name, value in edit.set.items()}
    for name, value in to_set.items():
        if _is_ours(name):
            _set(mutation, name, value, _OVERWRITE)
    names = dict.fromkeys(name.lower() for name in edit.remove)
    mutation.remove_headers.extend(name for name in names if name not in to_set and _is_ours(name))


def _is_ours(name: str) -> bool:
    return name not in UNTOUCHABLE and not name.startswith(":")


def _set(mutation: pb.HeaderMutation, name: str, value: str, action: int) -> None:
    option = mutation.set_headers.add()
    option.append_action = action
    option.header.key = name
    option.header.raw_value = value.encode("utf-8", "replace")


def _write_immediate(immediate: pb.ImmediateResponse, refusal: ev.Refusal) -> None:
    status = refusal.status if refusal.status in _HTTP_STATUSES and refusal.status >= 400 else 500
    immediate.status.code = status
    immediate.body = error_body(status, refusal)
    immediate.details = refusal.reason
    _set(immediate.headers, "content-type", "application/json", _OVERWRITE)
    _set(immediate.headers, wire.DROPPED_REASON, refusal.reason, _OVERWRITE)


def error_body(status: int, refusal: ev.Refusal) -> bytes:
    """OpenAI's error object, so that client libraries show the sentence."""
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    message = refusal.message.encode("utf-8", "replace").decode()
    error = {"message": message, "type": kind, "code": refusal.reason}
    return orjson.dumps({"error": error})
