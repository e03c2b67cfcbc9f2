"""grpc.health.v1 as gateways and the kubelet ask it, on its own port and beside ext_proc.

`liveness` says the process runs. Every other known name says whether a request should be sent here:
the injected predicate, and not draining. A name nobody knows is NOT_FOUND, never "serving". Watch is not
offered (UNIMPLEMENTED): the callers poll.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import grpc
from grpc_health.v1 import health_pb2

from epp.extproc import wire

_SERVICE: Final = "grpc.health.v1.Health"
_SERVING: Final = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING: Final = health_pb2.HealthCheckResponse.NOT_SERVING


class Health:
    """`ready` is asked at every check and must be cheap."""

    def __init__(self, ready: Callable[[], bool]) -> None:
        self._ready = ready
        self._draining = False

    def drain(self) -> None:
        """From now on not serving, for good; liveness stays."""
        self._draining = True

    @property
    def draining(self) -> bool:
        return self._draining

    def serving(self, service: str) -> bool:
        """Raises KeyError for a name that is not ours."""
        if service not in wire.HEALTH_SERVICES:
            raise KeyError(service)
        if service == wire.HEALTH_LIVENESS:
            return True
        return not self._draining and self._ready()

    async def check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        try:
            serving = self.serving(request.service)
        except KeyError:
            known = ", ".join(repr(name) for name in wire.HEALTH_SERVICES)
            await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service; known: {known}")
            raise  # abort never returns
        return health_pb2.HealthCheckResponse(status=_SERVING if serving else _NOT_SERVING)

    def rpc_handler(self) -> grpc.GenericRpcHandler:
        method = grpc.unary_unary_rpc_method_handler(
            self.check,
            request_deserializer=health_pb2.HealthCheckRequest.FromString,
            response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(_SERVICE, {"Check": method})
