"""Requests to one API server, with the credentials that this process has.

The only module that knows the kubernetes package: its `kubernetes.aio` reads KUBECONFIG or the
in-cluster files and keeps the token fresh (it is read again every minute). On top of that a refused
token or a refused certificate makes us read everything again, so a rotation between two readings costs
one failed request. No models of that package are used; bodies are bytes and plain mappings.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import aiohttp
import msgspec

from sidecar.pool_watch.errors import AccessError, KubeError, Unauthorised, Unreachable, failure
from sidecar.pool_watch.objects import Failure
from sidecar.pool_watch.resources import Call

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
CONNECT_TIMEOUT_S: Final = 10.0
REQUEST_TIMEOUT_S: Final = 60.0
_MAX_FAILURE_BYTES: Final = 64 << 10
_read_failure = msgspec.json.Decoder(Failure).decode


@dataclass(frozen=True, slots=True)
class Environment:
    """Where this process finds its API server."""

    variables: Mapping[str, str]
    service_account: Path = SERVICE_ACCOUNT

    @classmethod
    def of_process(cls) -> Environment:
        return cls(os.environ)

    @property
    def kubeconfig(self) -> str | None:
        """KUBECONFIG wins over the in-cluster files: whoever sets it means it."""
        return self.variables.get("KUBECONFIG") or None

    @property
    def namespace(self) -> str:
        """The pod's own namespace; `default` where nothing says it."""
        if named := self.variables.get("NAMESPACE"):
            return named
        try:
            return (self.service_account / "namespace").read_text("utf-8").strip() or "default"
        except (OSError, UnicodeDecodeError):
            return "default"


class KubeAccess:
    """One API server. `open` before the first request, `close` after the last."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._client: _Client | None = None
        self._renewing = asyncio.Lock()

    @property
    def namespace(self) -> str:
        return self._environment.namespace

    async def open(self) -> None:
        """Read the configuration.

        Raises:
            AccessError: there is none, or it cannot be used.
        """
        self._client = _Client(await _load(self._environment))

    async def close(self) -> None:
        if self._client is not None:
            await self._client.retire()

    @asynccontextmanager
    async def request(
        self, call: Call, *, total_s: float | None = REQUEST_TIMEOUT_S, read_s: float | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer's head; the body is read inside the context, whose faults are translated too.

        `total_s` bounds the whole exchange, `read_s` the silence between two reads.

        Raises:
            KubeError: an answer of 400 or more, none at all, or a broken one.
        """
        client = self._client
        if client is None:
            raise AccessError("the API server's configuration is not read yet")
        timeout = aiohttp.ClientTimeout(total=total_s, sock_connect=CONNECT_TIMEOUT_S, sock_read=read_s)
        client.users += 1
        try:
            async with client.send(call, timeout) as response:
                if response.status >= 400:
                    raise await _failure(call, response)
                yield response
        except Unauthorised:
            await self._renew(client)
            raise
        except (aiohttp.ClientSSLError, aiohttp.ServerFingerprintMismatch) as error:
            await self._renew(client)
            raise Unreachable(f"{call.verb} {call.resource.qualified}: {_short(error)}") from error
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise Unreachable(f"{call.verb} {call.resource.qualified}: {_short(error)}") from error
        finally:
            client.users -= 1
            await client.close_if_unused()

    async def read(self, call: Call) -> bytes:
        """The whole answer. Raises KubeError."""
        async with self.request(call) as response:
            return await response.read()

    async def _renew(self, refused: _Client) -> None:
        """Read the configuration again, once however many requests were refused with it."""
        async with self._renewing:
            if self._client is not refused:
                return
            try:
                configuration = await _load(self._environment)
            except KubeError:
                return  # the next refusal tries again
            self._client = _Client(configuration)
            await refused.retire()


class _Client:
    """The package's client of one reading of the configuration; closed when nobody uses it any more."""

    def __init__(self, configuration: Any) -> None:
        from kubernetes.aio.client.rest import RESTClientObject

        self._configuration = configuration
        self._rest = RESTClientObject(configuration)
        self._retired = False
        self.users = 0

    @asynccontextmanager
    async def send(self, call: Call, timeout: aiohttp.ClientTimeout) -> AsyncIterator[aiohttp.ClientResponse]:
        url = f"{self._configuration.host}{call.path}"
        if call.query:
            url += "?" + urlencode(call.query)
        headers = {"Accept": "application/json", "User-Agent": "kvpull"}
        headers |= await self._credentials()
        answer = await self._rest.request(
            call.method, url, headers=headers, body=call.body, _request_timeout=timeout
        )
        response: aiohttp.ClientResponse = answer.response
        try:
            yield response
        finally:
            response.close()

    async def _credentials(self) -> dict[str, str]:
        """Raises AccessError: the token file is empty in the middle of its rotation."""
        from kubernetes.aio.config import ConfigException

        try:
            settings = (await self._configuration.auth_settings()).get("BearerToken")
        except ConfigException as error:
            raise AccessError(f"the token cannot be read: {_short(error)}") from error
        return {"Authorization": settings["value"]} if settings else {}

    async def retire(self) -> None:
        self._retired = True
        await self.close_if_unused()

    async def close_if_unused(self) -> None:
        if self._retired and self.users == 0:
            await self._rest.close()


async def _load(environment: Environment) -> Any:
    """Raises AccessError."""
    from kubernetes.aio import config  # 2 s and 20 MB, only where there is a cluster
    from kubernetes.aio.client import Configuration

    configuration = Configuration()
    configuration.connection_pool_maxsize = 64
    try:
        if environment.kubeconfig is not None:
            await config.load_kube_config(environment.kubeconfig, client_configuration=configuration)
        elif "KUBERNETES_SERVICE_HOST" in environment.variables:
            _load_in_cluster(environment, configuration)
        else:
            raise AccessError(
                "no API server: this is not a pod with a ServiceAccount token, and KUBECONFIG is not set"
            )
    except (config.ConfigException, OSError, ValueError, TypeError) as error:
        raise AccessError(f"the API server's configuration cannot be used: {_short(error)}") from error
    return configuration


def _load_in_cluster(environment: Environment, configuration: Any) -> None:
    from kubernetes.aio.config.incluster_config import InClusterConfigLoader

    loader: Callable[..., Any] = InClusterConfigLoader
    folder = environment.service_account
    loader(
        token_filename=str(folder / "token"),
        cert_filename=str(folder / "ca.crt"),
        environ=environment.variables,
    ).load_and_set(configuration)


async def _failure(call: Call, response: aiohttp.ClientResponse) -> KubeError:
    raw = await response.content.read(_MAX_FAILURE_BYTES)
    try:
        message = _read_failure(raw).message or ""
    except msgspec.DecodeError:
        message = response.reason or ""
    asked = response.headers.get("Retry-After", "")
    return failure(
        response.status,
        message,
        verb=call.verb,
        resource=call.resource.qualified,
        namespace=call.namespace,
        version=call.resource.version,
        retry_after_s=float(asked) if asked.isascii() and asked.isdigit() else 0.0,
    )


def _short(error: BaseException) -> str:
    """Type and text; the text of a connection error names host and port, nothing else."""
    return f"{type(error).__name__}: {str(error)[:200]}" if str(error) else type(error).__name__
