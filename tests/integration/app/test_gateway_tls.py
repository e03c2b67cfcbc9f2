"""S-G09, live: a real Envoy and a picker, each speaking TLS or not.

Where both speak the same the request reaches the engine that the picker named. Where they do not it ends at
once with 500, and what is wrong can be read where docs/troubleshooting.md says it can.
"""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from epp.flag_values import boolean
from tests.integration.app import test_rolling_update as rollout
from tests.integration.app.test_picker_process import picker_process, until, write_thresholds
from tests.integration.extproc.upstream import ANSWER

MISMATCH = "WRONG_VERSION_NUMBER"


@pytest.mark.parametrize("picker", ["true", "false"])
@pytest.mark.parametrize("gateway", ["true", "false"])
async def test_both_speak_the_same_or_it_can_be_read(
    gateway: str, picker: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thresholds").mkdir()
    write_thresholds(tmp_path / "thresholds" / "pull.yaml", "{enabled: false}")
    inputs = ("--endpoints-file", str(tmp_path / "endpoints.json"), f"--secure-serving={picker}")
    async with (
        rollout.upstream() as engine,
        picker_process(tmp_path, rollout.rows(engine), inputs=inputs) as running,
        rollout.gateway(tmp_path, [running.ports["grpc_port"]], tls=boolean(gateway)) as url,
        aiohttp.ClientSession() as session,
    ):

        async def status() -> int:
            """0: Envoy has just been started and does not listen yet."""
            body = {"model": "m", "prompt": [1] * 40}
            try:
                async with session.post(f"{url}/v1/completions", json=body) as answer:
                    assert answer.status != 200 or await answer.read() == ANSWER
                    return answer.status
            except aiohttp.ClientConnectorError:
                return 0

        if gateway == picker:

            async def served() -> bool:
                return await status() == 200

            await until(served)
        else:
            seen = ""

            async def told() -> bool:
                nonlocal seen
                assert await status() in (0, 500)
                seen += "".join(capfd.readouterr())
                return MISMATCH in seen

            await until(told)
            assert not any(engine.bodies)  # scrapes have none
        spoken = "TLS" if boolean(picker) else "plain text"
    assert gateway != picker or f"in {spoken}: the gateway has to speak that, too" in capfd.readouterr().err
