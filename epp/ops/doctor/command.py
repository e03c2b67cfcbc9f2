"""`kvpull doctor`: gather, examine, report."""

from __future__ import annotations

import argparse
import asyncio
import ssl
import sys
from dataclasses import replace
from pathlib import Path

import aiohttp

from epp.core.errors import ConfigError
from epp.ops.asking import base_url, picker_urls, read_token, tls_context
from epp.ops.doctor.calls import Caller
from epp.ops.doctor.examine import examine, has_fault
from epp.ops.doctor.facts import Facts
from epp.ops.doctor.gather import Asking, gather_engines, gather_pickers, gather_settled, gather_shm
from epp.ops.doctor.probe import Prober
from epp.ops.doctor.report import as_json, lines
from sidecar.routing_auth import load_routing_key


def doctor(arguments: argparse.Namespace) -> int:
    """0: no fault; 1: faults; 3: no picker could be asked. Raises ConfigError."""
    asking = Asking(
        urls=picker_urls(arguments.url),
        token=read_token(arguments.token_file),
        sidecar_metrics_port=arguments.sidecar_metrics_port,
        model=arguments.model,
        sidecar_metrics_scheme=arguments.sidecar_metrics_scheme,
    )
    tls = tls_context(arguments)
    gateway = None if arguments.gateway is None else base_url(arguments.gateway, "--gateway")
    key = _routing_key(arguments.routing_key_file)
    facts = asyncio.run(_gather(arguments, asking, gateway, key, tls))
    checks = examine(facts)
    print(as_json(checks) if arguments.json else "\n".join(lines(checks)))
    if all(picker.fault is not None for picker in facts.pickers):
        print("kvpull: no picker could be asked", file=sys.stderr)
        return 3
    return int(has_fault(checks))


async def _gather(
    arguments: argparse.Namespace,
    asking: Asking,
    gateway: str | None,
    key: bytes | None,
    tls: ssl.SSLContext,
) -> Facts:
    connector = aiohttp.TCPConnector(limit=0, force_close=True, ssl=tls)
    async with aiohttp.ClientSession(connector=connector, trust_env=False) as session:
        caller = Caller(session, timeout_s=arguments.timeout)
        shm = gather_shm()
        pickers = await gather_pickers(caller, asking)
        facts = Facts(pickers, shm=shm, probed=not arguments.passive)
        engines = await gather_engines(caller, asking, facts.endpoints)
        pickers = await gather_settled(caller, asking, pickers, engines, arguments.settle)
        facts = Facts(pickers, shm=shm, probed=facts.probed)
        if arguments.passive or not engines:
            return Facts(pickers, engines, shm=shm, probed=facts.probed)
        answering = [picker.url for picker in pickers if picker.fault is None]
        asked = replace(asking, urls=answering)
        prober = Prober(
            caller, asked, facts.endpoints, engines, key, arguments.request_timeout, arguments.settle
        )
        return Facts(
            pickers,
            engines,
            tokens=await prober.tokens(),
            repeat=None if gateway is None else await prober.repeat(gateway),
            pulls=await prober.pulls(),
            shm=shm,
        )


def _routing_key(path: Path | None) -> bytes | None:
    try:
        return None if path is None else load_routing_key(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--routing-key-file {path}: {error}") from error
