"""The ExternalProcessor service as gRPC calls it."""

from __future__ import annotations

import grpc
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from epp.extproc import wire
from epp.extproc.conversations import Conversations
from epp.extproc.conversations import Limits as Limits
from epp.extproc.conversations import RequestHandler as RequestHandler
from epp.extproc.conversations import ServiceStats as ServiceStats
from epp.extproc.stream import ExtProcStream


class ExtProcService(Conversations):
    """One instance serves every stream of a server."""

    def rpc_handler(self) -> grpc.GenericRpcHandler:
        method = grpc.stream_stream_rpc_method_handler(
            self.process,
            request_deserializer=pb.ProcessingRequest.FromString,
            response_serializer=pb.ProcessingResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(wire.SERVICE_NAME, {"Process": method})

    async def process(self, _: object, context: grpc.aio.ServicerContext) -> None:
        """The RPC (read/write API: a fifth less CPU than an async generator)."""
        await ExtProcStream(self, context).run()
