"""Extra check: an engine with another hash seed. Loud on both sides, never zero matches in silence."""

from __future__ import annotations

from deploy.local.client import CHAT, kv_source_body
from deploy.local.scenario.observe import account_of
from deploy.local.scenario.row import Check, Findings
from deploy.local.scenario.texts import chat, question
from deploy.local.scenario.world import OWNER, World
from deploy.local.waiting import until

STRANGER = "engine-x"
_SEED = "another seed"
_FIELD = "seed_fp"
_TIER_TOKENS = 16 * 1024
_PROMPT_TOKENS = 2_048


async def start_stranger(world: World) -> None:
    """Start the engine; the picker does not know it yet."""
    await world.fleet.start_stranger(STRANGER, hash_seed=_SEED, tier_tokens=_TIER_TOKENS)


async def wrong_hash_seed(world: World) -> Check:
    """Tell the stranger directly to pull from `OWNER`, then let the picker see it."""
    findings = Findings()
    peer = world.fleet.engine_spec(OWNER).address
    prompt = question(world.texts.document("for a stranger", _PROMPT_TOKENS), "What is this?")
    body = chat([prompt], max_tokens=1)
    await world.fleet.engine_client(OWNER).stream(CHAT, body, request_id="stranger-own")
    await world.fleet.engine_client(STRANGER).stream(
        CHAT, {**body, **kv_source_body("stranger", peer.host, peer.p2p_port)}, request_id="stranger-pull"
    )
    account = await account_of(world.fleet, STRANGER, "stranger-pull")
    findings.equal("pulled tokens", account.pulled_tokens, 0)
    findings.equal("pull reason", account.pull_reason, "refused_identity")
    findings.true(_FIELD in account.pull_detail, f"the engine names {account.pull_detail!r}, not {_FIELD}")
    for pod in (STRANGER, OWNER):
        refused = (await world.fleet.engine(pod).counters()).refused
        reasons = {reason for (_, reason), count in refused.items() if count > 0}
        findings.true(_FIELD in reasons, f"{pod} counts no refusal by {_FIELD}, only {sorted(reasons)}")
    differing = await _seen_by_picker(world)
    findings.equal("field that the picker shows", differing, _FIELD)
    check = Check(
        title="another hash seed",
        expected=f"refused by name on both sides, shown by the picker ({_FIELD})",
        seen=f"{STRANGER} <- {OWNER}: {account.pull_reason} {account.pull_detail}; picker: {differing}",
        problems=findings.as_tuple,
    )
    world.report.check(check)
    return check


async def _seen_by_picker(world: World) -> str | None:
    """List the stranger, wait until the picker's metrics show both refusals, and return the field in
    which it finds the two different."""
    world.fleet.list_strangers()
    await until(
        f"the picker's metrics show the refusals of {STRANGER} and {OWNER}",
        world.fleet.picker.refusals,
        lambda refusals: all(_FIELD in refusals.get(f"{pod}/0", ()) for pod in (STRANGER, OWNER)),
    )
    rows = await until(
        f"the picker compares {STRANGER} with {OWNER}",
        world.fleet.picker.endpoints,
        lambda rows: STRANGER in rows and bool(rows[STRANGER].incompatible_with),
    )
    return rows[STRANGER].incompatible_with.get(f"{OWNER}/0")
