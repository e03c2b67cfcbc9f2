"""Protobuf in and out: values kept, bad bytes survived, framing never touched."""

from __future__ import annotations

import json

import pytest
from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.extproc import events as ev
from epp.extproc import mutations, wire
from epp.extproc.session import GatewayProtocolError


def read(message: pb.ProcessingRequest) -> ev.Event:
    again = pb.ProcessingRequest.FromString(message.SerializeToString())
    return mutations.read(again, lambda: "made")


def request(*headers: tuple[str, bytes | str]) -> pb.ProcessingRequest:
    message = pb.ProcessingRequest()
    message.request_headers.end_of_stream = True
    for name, value in headers:
        header = message.request_headers.headers.headers.add()
        header.key = name
        if isinstance(value, bytes):
            header.raw_value = value
        else:
            header.value = value
    return message


def head_of(message: pb.ProcessingRequest) -> ev.RequestHead:
    event = read(message)
    assert isinstance(event, ev.RequestHeaders)
    return event.head


def written(action: ev.Action) -> pb.ProcessingResponse:
    response = mutations.write(action)
    assert response is not None
    return response


def sets(mutation: pb.HeaderMutation) -> dict[str, bytes]:
    return {option.header.key: option.header.raw_value for option in mutation.set_headers}


def test_s_a14_every_value_is_kept_in_either_form_and_any_case() -> None:
    head = head_of(
        request(
            (":method", b"POST"),
            (":path", b"/v1/chat/completions"),
            ("X-Tenant", "one"),
            ("x-tenant", b"two"),
            ("x-TENANT", b"\xff\xfe bad"),
            ("x-utf8", "grün".encode()),
        )
    )
    assert head.headers.all("x-Tenant") == ("one", "two", "�� bad")
    assert head.headers.first("X-UTF8") == "grün"
    assert "x-tenant" in head.headers
    assert (head.method, head.path, head.request_id) == ("POST", "/v1/chat/completions", "made")


def test_raw_value_wins_over_value() -> None:
    message = request(("x-a", b"raw"))
    message.request_headers.headers.headers[0].value = "text"
    assert head_of(message).headers.first("x-a") == "raw"


@settings(deadline=None)
@given(st.lists(st.tuples(st.text(max_size=5), st.binary(max_size=8) | st.text(max_size=8))))
def test_no_header_bytes_raise(headers: list[tuple[str, bytes | str]]) -> None:
    assert len(head_of(request(*headers)).headers.fields) == len(headers)


def test_the_request_id_is_the_clients_where_given() -> None:
    assert head_of(request(("x-request-id", b"r-7"))).request_id == "r-7"
    assert head_of(request(("x-request-id", b""))).request_id == "made"


def _subset_value(message: pb.ProcessingRequest) -> base_pb2.Metadata:
    fields = message.metadata_context.filter_metadata[wire.SUBSET_NAMESPACE].fields
    return fields[wire.SUBSET_KEY]


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        ("10.0.0.1:8000", {"10.0.0.1:8000"}),
        (" 10.0.0.1 , 10.0.0.2:8000,", {"10.0.0.1", "10.0.0.2:8000"}),
        (["10.0.0.1", "10.0.0.2:80"], {"10.0.0.1", "10.0.0.2:80"}),
        (["10.0.0.1,10.0.0.3"], {"10.0.0.1", "10.0.0.3"}),
        ([], set()),
        ("", set()),
        (7, set()),
        ([7, True], set()),
        (None, None),
    ],
)
@pytest.mark.parametrize("where", ["headers", "body"])
def test_subset_in_every_form_fails_closed(hint: object, expected: set[str] | None, where: str) -> None:
    message = request()
    if where == "body":
        message.request_body.end_of_stream = True
    value = _subset_value(message)
    if hint is None:
        value.null_value = 0
    elif isinstance(hint, str):
        value.string_value = hint
    elif isinstance(hint, list):
        value.list_value.SetInParent()
        value.list_value.extend(hint)
    else:
        value.number_value = 7
    event = read(message)
    found = event.subset if isinstance(event, ev.RequestBody) else head_of(message).subset
    assert found == (None if expected is None else frozenset(expected))


def test_no_hint_is_no_subset() -> None:
    message = request()
    assert head_of(message).subset is None
    message.metadata_context.filter_metadata[wire.SUBSET_NAMESPACE].fields["other"].string_value = "x"
    assert head_of(message).subset is None


def test_modes_and_their_absence() -> None:
    message = request()
    assert read(message).modes is None  # type: ignore[union-attr]
    message.protocol_config.request_body_mode = 2
    message.protocol_config.response_body_mode = 1
    event = read(message)
    assert isinstance(event, ev.RequestHeaders)
    assert event.modes == ev.BodyModes(ev.BodyMode.BUFFERED, ev.BodyMode.STREAMED)
    message.protocol_config.request_body_mode = 77
    with pytest.raises(GatewayProtocolError, match="77"):
        read(message)


@pytest.mark.parametrize("source", ["attribute", "metadata", "both", "none"])
def test_who_served(source: str) -> None:
    message = pb.ProcessingRequest()
    message.response_headers.SetInParent()
    if source in ("attribute", "both"):
        fields = message.attributes[wire.ATTRIBUTES_NAMESPACE].fields
        fields[wire.UPSTREAM_ADDRESS].string_value = "10.0.0.1:80"
    if source in ("metadata", "both"):
        fields = message.metadata_context.filter_metadata[wire.METADATA_NAMESPACE].fields
        fields[wire.DESTINATION_SERVED].string_value = "10.0.0.2:80"
    event = read(message)
    assert isinstance(event, ev.ResponseHeaders)
    expected = {"attribute": "10.0.0.1:80", "metadata": "10.0.0.2:80", "both": "10.0.0.1:80"}
    assert event.served_by == expected.get(source)


def test_every_kind_is_read_and_an_empty_message_is_the_gateways_fault() -> None:
    message = pb.ProcessingRequest()
    with pytest.raises(GatewayProtocolError):
        read(message)
    message.request_body.body = b"a"
    assert read(message) == ev.RequestBody(b"a", False)
    message.response_body.body = b"b"
    message.response_body.end_of_stream = True
    assert read(message) == ev.ResponseBody(b"b", True)
    message.request_trailers.SetInParent()
    assert read(message) == ev.RequestTrailers()
    message.response_trailers.SetInParent()
    assert read(message) == ev.ResponseTrailers()


def test_the_destination_is_in_the_header_and_in_the_metadata() -> None:
    edit = ev.HeaderEdit({"X-A": "1"}, ["x-kv-cache-source-host-port", "X-a", "x-b", "x-b"])
    response = written(ev.SendRequestHeaders("10.0.0.1:8000", edit))
    common = response.request_headers.response
    assert common.clear_route_cache
    assert sets(common.header_mutation) == {"x-a": b"1", wire.DESTINATION: b"10.0.0.1:8000"}
    assert list(common.header_mutation.remove_headers) == ["x-kv-cache-source-host-port", "x-b"]
    assert {option.append_action for option in common.header_mutation.set_headers} == {
        base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    }
    metadata = response.dynamic_metadata[wire.METADATA_NAMESPACE]
    assert dict(metadata) == {wire.DESTINATION: "10.0.0.1:8000"}


FRAMING = ["Transfer-Encoding", "content-length", "Connection", "TE", "upgrade", "host", ":path"]


def test_s_a09_framing_headers_are_never_mutated_in_either_direction() -> None:
    edit = ev.HeaderEdit(dict.fromkeys(FRAMING, "x"), FRAMING)
    common = written(ev.SendRequestHeaders("d:1", edit)).request_headers.response
    assert list(sets(common.header_mutation)) == [wire.DESTINATION]
    assert not common.header_mutation.remove_headers
    answered = written(ev.SendResponseHeaders(edit)).response_headers.response.header_mutation
    assert not answered.set_headers
    assert not answered.remove_headers


def test_s_a10_buffered_answers_carry_the_new_length_only_with_a_new_body() -> None:
    kept = written(ev.SendBufferedRequest("d:1", ev.HeaderEdit(), None)).request_body.response
    assert "content-length" not in sets(kept.header_mutation)
    assert not kept.HasField("body_mutation")
    changed = written(ev.SendBufferedRequest("d:1", ev.HeaderEdit(), b"12345")).request_body.response
    assert sets(changed.header_mutation)["content-length"] == b"5"
    assert changed.body_mutation.body == b"12345"
    assert changed.clear_route_cache


@pytest.mark.parametrize("direction", list(ev.Direction))
def test_bodies_and_trailers_go_to_their_direction(direction: ev.Direction) -> None:
    side = direction.value
    piece = written(ev.SendBodyPiece(direction, b"abc", True))
    assert piece.WhichOneof("response") == f"{side}_body"
    streamed = getattr(piece, f"{side}_body").response.body_mutation.streamed_response
    assert (streamed.body, streamed.end_of_stream) == (b"abc", True)
    assert written(ev.SendTrailers(direction)).WhichOneof("response") == f"{side}_trailers"
    kept = written(ev.KeepBody(direction))
    assert kept.WhichOneof("response") == f"{side}_body"
    assert not getattr(kept, f"{side}_body").response.HasField("body_mutation")


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, 400, "invalid_request_error"),
        (413, 413, "invalid_request_error"),
        (429, 429, "rate_limit_error"),
        (503, 503, "service_unavailable_error"),
        (500, 500, "server_error"),
        (200, 500, "server_error"),  # a refusal is never a success
        (999, 500, "server_error"),  # unknown to the gateway: would end the stream
    ],
)
def test_a_refusal_is_json_with_its_reason_as_a_header(status: int, code: int, kind: str) -> None:
    immediate = written(ev.SendImmediate(ev.Refusal(status, "why", "sen\udcfftence"))).immediate_response
    assert immediate.status.code == code
    assert json.loads(immediate.body) == {"error": {"message": "sen?tence", "type": kind, "code": "why"}}
    assert sets(immediate.headers) == {"content-type": b"application/json", wire.DROPPED_REASON: b"why"}


def test_notes_are_not_for_the_gateway() -> None:
    assert mutations.write(ev.FirstToken()) is None


@pytest.mark.parametrize("given", ["x" * 129, "a\nforged line", "tab\there", "", "\u00e9"])
def test_a_long_or_odd_request_id_is_replaced(given: str) -> None:
    """It goes into logs, headers and the decision ring: 58 KB ids were seen to cost 240 MB."""
    message = pb.ProcessingRequest()
    message.request_headers.headers.headers.add(key="x-request-id", raw_value=given.encode())
    event = mutations.read(message, lambda: "ours")
    assert isinstance(event, ev.RequestHeaders)
    assert event.head.request_id == "ours"
