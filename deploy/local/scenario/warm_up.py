"""What a transfer must not be priced with: memory touched for the first time, and new sessions.

A real engine pins its memory at start; the emulated ones get each page when it is first written, and
two peers open a session at their first contact. Both happen here, on the engines' own ports, before
any row that measures a pull; everything that it caches is dropped again.
"""

from __future__ import annotations

import asyncio

from deploy.local.client import CHAT, kv_source_body
from deploy.local.errors import FleetError
from deploy.local.scenario.observe import account_of
from deploy.local.scenario.texts import chat, question
from deploy.local.scenario.world import DOCUMENT_TOKENS, OWNER, World


async def touch_memory(world: World) -> None:
    """Let each of the other engines compute a document as long as the scenario's."""
    text = world.texts.document("warm up", DOCUMENT_TOKENS + 4 * world.block_size)
    body = chat([question(text, "What is this?")], max_tokens=1)
    await asyncio.gather(
        *(
            world.fleet.engine_client(pod).stream(CHAT, body, request_id=f"touch-{pod}")
            for pod in world.others
        )
    )
    await world.forget(world.others)


async def open_sessions(world: World) -> None:
    """Let each of the other engines pull the small document, which the owner holds, once."""
    await asyncio.gather(*(_pull_once(world, pod) for pod in world.others))
    await world.forget(world.others)


async def _pull_once(world: World, pod: str) -> None:
    owner = world.fleet.engine_spec(OWNER).address
    request_id = f"session-{pod}"
    body = {
        **world.body("What is it?", small=True),
        **kv_source_body(request_id, owner.host, owner.p2p_port),
    }
    await world.fleet.engine_client(pod).stream(CHAT, body, request_id=request_id)
    account = await account_of(world.fleet, pod, request_id)
    if account.pulled_tokens == 0:
        raise FleetError(f"{pod} could not pull from {OWNER}: {account.pull_reason} {account.pull_detail}")
