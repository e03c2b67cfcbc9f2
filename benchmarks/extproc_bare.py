"""The floor that `benchmarks.extproc` compares with: an ext-proc server on grpc.aio that thinks nothing.

Same library, loop, TLS and number of messages as a plain implementation of the protocol has: hold the
headers, answer headers and body, pass every piece of the answer. It never looks into a body. Prints its port.
"""

from __future__ import annotations

import ctypes
import signal
import sys

import grpc
import uvloop
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from epp.extproc import events as ev
from epp.extproc import mutations, tls, wire

_PR_SET_PDEATHSIG = 1
_PIECE = wire.MAX_BODY_CHUNK_BYTES


def _server(destination: str) -> grpc.aio.Server:
    async def process(_: object, context: grpc.aio.ServicerContext) -> None:
        held: list[bytes] = []
        while (message := await context.read()) is not grpc.aio.EOF:
            kind = message.WhichOneof("request")
            if kind == "request_body":
                held.append(message.request_body.body)
                if message.request_body.end_of_stream:
                    await context.write(mutations.write(ev.SendRequestHeaders(destination, ev.HeaderEdit())))
                    await _pieces(context, b"".join(held), ev.Direction.REQUEST, end_of_stream=True)
            elif kind == "response_headers":
                await context.write(mutations.write(ev.SendResponseHeaders(ev.HeaderEdit())))
            elif kind == "response_body":
                body = message.response_body
                await _pieces(context, body.body, ev.Direction.RESPONSE, end_of_stream=body.end_of_stream)

    method = grpc.stream_stream_rpc_method_handler(
        process,
        request_deserializer=pb.ProcessingRequest.FromString,
        response_serializer=pb.ProcessingResponse.SerializeToString,
    )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(wire.SERVICE_NAME, {"Process": method}),)
    )
    return server


async def _pieces(
    context: grpc.aio.ServicerContext, body: bytes, direction: ev.Direction, *, end_of_stream: bool
) -> None:
    for start in range(0, max(len(body), 1), _PIECE):
        last = start + _PIECE >= len(body)
        piece = ev.SendBodyPiece(direction, body[start : start + _PIECE], end_of_stream and last)
        await context.write(mutations.write(piece))


async def _main(destination: str) -> None:
    server = _server(destination)
    port = server.add_secure_port("127.0.0.1:0", tls.credentials(None))
    await server.start()
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    await server.wait_for_termination()


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    uvloop.run(_main(sys.argv[1]))
