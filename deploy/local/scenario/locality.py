"""Rows 1, 2 and 6, and a check: nothing moves. A cold prefix, a local hit, a restore from the own CPU
tier, equal holders."""

from __future__ import annotations

from deploy.local.envoy import LAB_SUBSET_HEADER
from deploy.local.scenario.observe import ask, expect_answered, expect_no_transfer, make_row
from deploy.local.scenario.row import Check, Findings, Row
from deploy.local.scenario.texts import assistant, chat, question, user
from deploy.local.scenario.world import ANSWER_TOKENS, DOCUMENT_TOKENS, OWNER, World


async def cold_prefix(world: World) -> Row:
    """Row 1. The lab listener's hint makes `OWNER` the one that computes."""
    findings = Findings()
    first = question(world.document, "Who wrote the numbers down?")
    headers = {LAB_SUBSET_HEADER: world.fleet.engine_spec(OWNER).address.serving}
    body = chat([first], max_tokens=ANSWER_TOKENS)
    seen = await ask(world.fleet, body, "row-01", client=world.fleet.lab, headers=headers)
    findings.equal("reason", seen.decision.reason, "no_holder")
    findings.equal("cached tokens", seen.computed.cached_tokens, 0)
    expect_no_transfer(findings, seen)
    expect_answered(findings, seen)
    findings.true(seen.answer.prompt_tokens > DOCUMENT_TOKENS, "the prompt is shorter than the document")
    world.first_answer = seen.answer.text
    world.conversation = [first, assistant(seen.answer.text)]
    await world.until_known(OWNER, seen.answer.prompt_tokens)
    return world.finish(make_row(1, "cold prefix", seen, "nobody holds it: computed, no transfer", findings))


async def owner_idle(world: World) -> Row:
    """Row 2: the next turn of the same conversation."""
    findings = Findings()
    messages = [*world.conversation, user("And who read them out?")]
    seen = await ask(world.fleet, chat(messages, max_tokens=ANSWER_TOKENS), "row-02")
    findings.equal("destination", seen.decision.destination, OWNER)
    findings.equal("reason", seen.decision.reason, "local_best")
    held = DOCUMENT_TOKENS // world.block_size * world.block_size
    findings.true(
        seen.computed.device_hit_tokens >= held,
        f"device hits are {seen.computed.device_hit_tokens} tokens, expected at least {held}",
    )
    expect_no_transfer(findings, seen)
    expect_answered(findings, seen)
    world.conversation = [*messages, assistant(seen.answer.text)]
    await world.until_known(OWNER, seen.answer.prompt_tokens)
    return world.finish(make_row(2, "owner idle", seen, "local hit, no transfer", findings))


async def evicted_device_tier(world: World) -> Row:
    """Row 6. The load of rows 3 to 5 has pushed the document out of the owner's device tier; its CPU
    tier has kept it, and nobody else holds it."""
    findings = Findings()
    await world.forget(world.others)
    seen = await ask(world.fleet, world.body("Which ship came last?"), "row-06")
    held = DOCUMENT_TOKENS // world.block_size * world.block_size
    findings.equal("destination", seen.decision.destination, OWNER)
    findings.equal("reason", seen.decision.reason, "local_best")
    findings.true(
        seen.computed.restored_tokens > held // 2,
        f"{seen.computed.restored_tokens} tokens were restored from the own CPU tier, less than half",
    )
    findings.equal("cached tokens", seen.computed.cached_tokens, held)
    expect_no_transfer(findings, seen)
    expect_answered(findings, seen)
    expected = f"{seen.computed.restored_tokens} tokens restored from the owner's own CPU tier, not pulled"
    return world.finish(make_row(6, "device tier evicted", seen, expected, findings))


async def equal_holders(world: World) -> Check:
    """Extra check, after rows 3 and 4: every endpoint holds the document, so whichever is chosen stays
    local."""
    findings = Findings()
    seen = await ask(world.fleet, world.body("Who lit the lamps?"), "equal-holders")
    held = DOCUMENT_TOKENS // world.block_size * world.block_size
    servable = {row["pod"]: row["servable_tokens"] for row in seen.decision.candidates}
    equal = sorted(pod for pod, tokens in servable.items() if abs(tokens - held) <= world.block_size)
    findings.true(len(equal) >= 2, f"no two endpoints hold the document: {servable}")
    findings.true(seen.decision.destination in equal, f"{seen.decision.destination} does not hold it")
    findings.one_of("reason", seen.decision.reason, ("local_best", "below_delta"))
    findings.equal("cached tokens", seen.computed.cached_tokens, held)
    expect_no_transfer(findings, seen)
    expect_answered(findings, seen)
    check = Check(
        title="equal holders",
        expected="the destination ties with the best holder: stays local, no transfer",
        seen=f"{', '.join(equal)} hold it; {seen.decision.destination} <- - ({seen.decision.reason})",
        problems=findings.as_tuple,
    )
    world.report.check(check)
    return check
