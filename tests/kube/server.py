"""The HTTP side: paths to verbs, verbs to the store. Runs in the test's own event loop."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import yaml
from aiohttp import web

from tests.kube import patches, protobuf
from tests.kube.discovery import AGGREGATED, Discovery
from tests.kube.faults import Faults
from tests.kube.notice import Notice
from tests.kube.rbac import Access, Authority
from tests.kube.selectors import matches
from tests.kube.status import ApiFault, bad_request, expired, not_found
from tests.kube.store import Store
from tests.kube.watching import WatchStream, truthy

CRD_FILE = Path(__file__).parent / "crds.yaml"
NEVER = "2099-01-01T00:00:00Z"
_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


@dataclass(frozen=True)
class Seen:
    """One request that came in."""

    verb: str
    plural: str
    query: dict[str, str]
    user: str


@dataclass(frozen=True)
class Target:
    """What a path names."""

    key: tuple[str, str, str]
    namespace: str
    name: str
    sub: str


class KubeServer:
    """The double. `store` is its content, `faults` its failures, `watches` the open watches."""

    def __init__(self, *, log_size: int = 1000, bookmark_every_s: float | None = None) -> None:
        self.store = Store(log_size=log_size)
        for crd in yaml.safe_load_all(CRD_FILE.read_text()):
            self.store.create(("apiextensions.k8s.io", "v1", "customresourcedefinitions"), "", crd)
        self.store.forget()  # as after a start: nobody can watch from before it
        self.authority = Authority(self.store)
        self.faults = Faults()
        self.notice = Notice()
        self.requests: list[Seen] = []
        self.watches: list[WatchStream] = []
        self.url = ""
        self._bookmark_every_s = bookmark_every_s
        self._discovery = Discovery(self.store)

    def watch_of(self, plural: str) -> WatchStream:
        """The newest open watch of a plural."""
        return [watch for watch in self.watches if watch.table.kind.plural == plural][-1]

    async def until_watched(self, plural: str, times: int = 1) -> WatchStream:
        """Until so many watches of a plural have been asked for and one is open."""
        await self.notice.until(
            lambda: (
                self.count("watch", plural) >= times
                and any(watch.table.kind.plural == plural for watch in self.watches)
            )
        )
        return self.watch_of(plural)

    def count(self, verb: str, plural: str) -> int:
        return sum(1 for seen in self.requests if (seen.verb, seen.plural) == (verb, plural))

    def write_kubeconfig(
        self, path: Path, *, token: str = "", namespace: str = "default", authority: Path | None = None
    ) -> Path:
        """For clients of this server. `authority`: the file that its certificate is checked with."""
        user = {"token": token} if token else {}
        trust = {"certificate-authority": str(authority)} if authority else {}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": self.url} | trust}],
            "users": [{"name": "u", "user": user}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": namespace}}],
            "current-context": "x",
        }
        path.write_text(json.dumps(config))
        return path

    # --- requests -----------------------------------------------------------------------------
    async def handle(self, request: web.Request) -> web.StreamResponse:
        try:
            return await self._answer(request)
        except ConnectionResetError:
            if request.transport is not None:
                request.transport.write(b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"items":[')
                request.transport.close()
            return web.Response()  # into the void
        except ApiFault as fault:
            headers = {"Retry-After": str(fault.retry_after)} if fault.retry_after else {}
            return _json(fault.body(), status=fault.code, headers=headers)
        finally:
            self.notice.tell()  # whatever it was, it is done

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        parts = [part for part in request.path.split("/") if part]
        if parts and parts[0] in ("healthz", "livez", "readyz"):
            return web.Response(text="ok")
        target = _target(parts)
        if target is None:
            aggregated = AGGREGATED in request.headers.get("Accept", "")
            document = self._discovery.document(parts, aggregated=aggregated)
            content = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
            return _json(document, headers={"Content-Type": content} if aggregated else {})
        query = dict(request.query)
        verb = _verb(request.method, target, query)
        user = self.authority.user(request.headers.get("Authorization", ""))
        self.requests.append(Seen(verb, target.key[2], query, user))
        self.notice.tell()
        await self.faults.meet(verb, target.key[2])
        self._authorise(user, verb, target, query)
        if verb == "watch":
            return await self._watch(request, target, query)
        if verb == "list":
            return self._list(target, query)
        if target.sub == "token":
            return self._issue(target)
        body = await _body(request)
        return self._write(verb, target, request, body) if verb != "get" else self._get(target)

    def _authorise(self, user: str, verb: str, target: Target, query: dict[str, str]) -> None:
        name = target.name
        if verb in ("list", "watch") and query.get("fieldSelector", "").startswith("metadata.name="):
            name = query["fieldSelector"].removeprefix("metadata.name=")
        group, _, plural = target.key
        plural = f"{plural}/{target.sub}" if target.sub else plural
        self.authority.check(user, Access(verb, group, plural, target.namespace, name))

    def _get(self, target: Target) -> web.Response:
        return _json(self.store.get(target.key, target.namespace, target.name))

    def _list(self, target: Target, query: dict[str, str]) -> web.Response:
        table = self.store.table(target.key)
        labels, fields = query.get("labelSelector", ""), query.get("fieldSelector", "")
        revision, after = str(self.store.revision), ("", "")
        if token := query.get("continue"):
            revision, *where = json.loads(token)
            after = (where[0], where[1])
            if int(revision) < table.floor:
                raise expired(
                    "The provided continue parameter is too old to display a consistent list result."
                )
        found = [
            (where, obj)
            for where, obj in sorted(table.objects.items())
            if where > after and target.namespace in ("", where[0]) and matches(obj, labels, fields)
        ]
        meta: dict[str, Any] = {"resourceVersion": revision}
        limit = int(query.get("limit") or 0)
        if limit and len(found) > limit:
            meta["remainingItemCount"] = len(found) - limit
            found = found[:limit]
            meta["continue"] = json.dumps([revision, *found[-1][0]])
        kind = table.kind
        listed = {"kind": f"{kind.kind}List", "apiVersion": kind.api_version, "metadata": meta}
        return _json(listed | {"items": [obj for _, obj in found]})

    async def _watch(self, request: web.Request, target: Target, query: dict[str, str]) -> web.StreamResponse:
        table = self.store.table(target.key)
        watch = WatchStream(
            self.store, table, target.namespace, query, bookmark_every_s=self._bookmark_every_s
        )
        self.watches.append(watch)
        self.notice.tell()
        try:
            return await watch.run(request)
        finally:
            self.watches.remove(watch)
            self.notice.tell()

    def _write(self, verb: str, target: Target, request: web.Request, body: Any) -> web.Response:
        key, namespace, name = target.key, target.namespace, target.name
        dry = "All" in request.query.getall("dryRun", [])
        if verb == "create":
            return _json(self.store.create(key, namespace, body, dry=dry), status=201)
        if verb == "delete":
            options = body or {}
            grace = options.get("gracePeriodSeconds", request.query.get("gracePeriodSeconds"))
            uid = (options.get("preconditions") or {}).get("uid", "")
            gone = self.store.delete(key, namespace, name, now=str(grace) == "0", uid=uid, dry=dry)
            return _json(gone)
        status_only = target.sub == "status"
        if verb == "update":
            return _json(self.store.update(key, namespace, name, body, status_only=status_only, dry=dry))
        if "apply" in request.content_type:
            return self._apply(target, request, body, dry=dry)
        old = self.store.get(key, namespace, name)
        if "json-patch" in request.content_type:
            new = patches.json_patch(old, body)
        else:
            new = patches.merge(old, body, strategic="strategic" in request.content_type)
        return _json(self.store.update(key, namespace, name, new, status_only=status_only, dry=dry))

    def _issue(self, target: Target) -> web.Response:
        """A token of a ServiceAccount; for how long and for whom it is asked is not looked at."""
        self.store.get(target.key, target.namespace, target.name)
        token = self.authority.issue(target.namespace, target.name)
        status = {"token": token, "expirationTimestamp": NEVER}
        kind = {"kind": "TokenRequest", "apiVersion": "authentication.k8s.io/v1"}
        return _json(kind | {"metadata": {}, "spec": {"audiences": []}, "status": status}, status=201)

    def _apply(self, target: Target, request: web.Request, body: Any, *, dry: bool) -> web.Response:
        table = self.store.table(target.key)
        manager, force = request.query.get("fieldManager", "unknown"), truthy(request.query.get("force"))
        where = (target.namespace if table.kind.namespaced else "", target.name)
        body.setdefault("metadata", {})["name"] = target.name
        if where not in table.objects:
            owned = patches.own(table.kind, body, body, manager)
            return _json(self.store.create(target.key, target.namespace, owned, dry=dry), status=201)
        new = patches.apply(table.kind, table.objects[where], body, manager, force=force)
        return _json(self.store.update(target.key, target.namespace, target.name, new, dry=dry))


def _target(parts: list[str]) -> Target | None:
    """None: not the path of objects."""
    if len(parts) < 3 or parts[0] not in ("api", "apis") or (parts[0] == "apis" and len(parts) < 4):
        return None
    group, version, rest = ("", parts[1], parts[2:]) if parts[0] == "api" else (parts[1], parts[2], parts[3:])
    namespace = ""
    if rest[0] == "namespaces" and len(rest) > 2:
        namespace, rest = rest[1], rest[2:]
    plural, name, sub, *more = [*rest, "", ""][: max(3, len(rest))]
    if more or sub not in ("", "status", "token"):
        raise not_found()
    return Target((group, version, plural), namespace, name, sub)


def _verb(method: str, target: Target, query: dict[str, str]) -> str:
    if method == "GET":
        if truthy(query.get("watch")):
            return "watch"
        return "get" if target.name else "list"
    return _VERBS[method]


async def _body(request: web.Request) -> Any:
    raw = await request.read()
    if not raw:
        return None
    if raw.startswith(protobuf.MAGIC):
        return protobuf.decode(raw)
    if "cbor" in request.content_type:
        raise ApiFault(
            415, "UnsupportedMediaType", "accepted media types include: application/json, application/yaml"
        )
    try:
        return yaml.safe_load(raw) if "yaml" in request.content_type else orjson.loads(raw)
    except (ValueError, yaml.YAMLError) as error:
        raise bad_request(f"the body cannot be read: {error}") from error


def _json(body: dict[str, Any], *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    headers = {"Content-Type": "application/json"} | (headers or {})
    return web.Response(body=orjson.dumps(body), status=status, headers=headers)


@asynccontextmanager
async def kube_server(
    *, log_size: int = 1000, bookmark_every_s: float | None = None, tls: ssl.SSLContext | None = None
) -> AsyncIterator[KubeServer]:
    """A running double on a free port of loopback."""
    server = KubeServer(log_size=log_size, bookmark_every_s=bookmark_every_s)
    app = web.Application(client_max_size=64 << 20)
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    server.url = f"{'https' if tls else 'http'}://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        server.faults.stop_all()
        for watch in server.watches:
            watch.end()
        await runner.cleanup()
