"""The gateway's end of an ext_proc stream, from real gRPC: what to send, and a channel over TLS."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

import grpc
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

_OWN_POOL = [("grpc.use_local_subchannel_pool", 1)]  # a new channel is a new handshake
METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"


async def channel_to(port: int, *, secure: bool = True) -> grpc.aio.Channel:
    """Trusts whatever certificate the server shows now."""
    if not secure:
        return grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=_OWN_POOL)
    pem = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port))
    options = [("grpc.ssl_target_name_override", "localhost"), *_OWN_POOL]
    return grpc.aio.secure_channel(
        f"127.0.0.1:{port}", grpc.ssl_channel_credentials(pem.encode()), options=options
    )


def open_stream(channel: grpc.aio.Channel) -> Any:
    return channel.stream_stream(
        METHOD,
        request_serializer=pb.ProcessingRequest.SerializeToString,
        response_deserializer=pb.ProcessingResponse.FromString,
    )()


def headers(*fields: tuple[str, str], end: bool = False, method: str = "POST") -> pb.ProcessingRequest:
    message = pb.ProcessingRequest()
    message.request_headers.end_of_stream = end
    for name, value in ((":method", method), (":path", "/v1/completions"), *fields):
        header = message.request_headers.headers.headers.add()
        header.key, header.raw_value = name, value.encode()
    return message


def body(data: bytes, end: bool = False) -> pb.ProcessingRequest:
    message = pb.ProcessingRequest()
    message.request_body.body, message.request_body.end_of_stream = data, end
    return message


def response_headers(status: str = "200") -> pb.ProcessingRequest:
    message = pb.ProcessingRequest()
    for name, value in ((":status", status), ("content-type", "text/event-stream")):
        header = message.response_headers.headers.headers.add()
        header.key, header.raw_value = name, value.encode()
    return message


def response_body(data: bytes, end: bool = False) -> pb.ProcessingRequest:
    message = pb.ProcessingRequest()
    message.response_body.body, message.response_body.end_of_stream = data, end
    return message
