"""What `up` tells a person: a request that works, and where to look."""

from __future__ import annotations

import json
import sys

from deploy.local.client import CHAT
from deploy.local.fleet import Fleet


def welcome(fleet: Fleet) -> str:
    """Text for a terminal; the curl line can be pasted as it is."""
    body = json.dumps(
        {
            "model": fleet.spec.model,
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 16,
        }
    )
    control = fleet.spec.addresses.control
    token = fleet.debug_token_file
    engines = "\n".join(
        f"    {engine.pod}  http://{engine.address.serving}  (engine: {engine.url}/metrics)"
        for engine in fleet.engines()
    )
    sidecar_metrics_port = fleet.engines()[0].address.sidecar_metrics_port
    headers = "-H 'content-type: application/json' -H 'x-request-id: hello-1'"
    return f"""
The fleet is up. A request (its id lets you look at the decision afterwards):

    curl -s {fleet.gateway_url}{CHAT} {headers} -d '{body}'

Why it went where it went, and what the picker knows of every engine:

    curl -s -H "authorization: Bearer $(cat {token})" http://127.0.0.1:{control.metrics_port}/debug/kvpull/decisions/hello-1
    curl -s -H "authorization: Bearer $(cat {token})" http://127.0.0.1:{control.metrics_port}/debug/kvpull/endpoints

Is it able to pull? (docs/troubleshooting.md)

    {sys.executable} -m epp.cli doctor --url http://127.0.0.1:{control.metrics_port} --token-file {token} \\
        --gateway {fleet.gateway_url} --sidecar-metrics-port {sidecar_metrics_port} \\
        --routing-key-file {fleet.routing_key_file}

Picker metrics:  http://127.0.0.1:{control.metrics_port}/metrics
Engines:
{engines}
Logs:            {fleet.spec.log_dir}

Ctrl-C stops everything.
"""
