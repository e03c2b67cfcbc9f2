"""Results of simulations that have ended, in a file, so that a long run can go on where it was cut off.

A result is found by all that its experiment, model and policy say, its seed and variant. It does not know
the code that made it: begin a new file after a change of the simulator or of the picker.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from simulator.calibration import DATA
from simulator.runner import Job, Result

_BESIDE = {"published", "ratios", "title", "source", "protocol", "seeds", "variants", "arms"}


def key_of(job: Job) -> str:
    """What decides a job's figures, as a digest."""
    spec = job.spec.model_dump(mode="json", exclude=_BESIDE, exclude_defaults=True)
    arm = job.spec.arms[job.arm]
    texts = [
        (DATA / "models" / f"{job.spec.model}.json").read_text(),
        (DATA / "policies" / f"{arm.policy}.yaml").read_text(),
    ]
    changes = job.spec.variants[job.variant] if job.variant else {}
    whole = json.dumps(
        [spec, arm.model_dump(exclude_defaults=True), changes, job.seed, texts], sort_keys=True
    )
    return hashlib.sha256(whole.encode()).hexdigest()


class KeptResults:
    """Appended line by line; a line that was cut off is left out."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._figures: dict[str, dict[str, dict[str, float]]] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            self._figures[row["key"]] = row["figures"]

    def missing(self, jobs: Sequence[Job]) -> list[Job]:
        """Those without a result, in their order."""
        return [job for job in jobs if key_of(job) not in self._figures]

    def add(self, result: Result) -> None:
        key = key_of(result.job)
        self._figures[key] = result.figures
        job = result.job
        row = {"key": key, "job": [job.experiment, job.arm, job.seed, job.variant], "figures": result.figures}
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def results(self, jobs: Sequence[Job]) -> list[Result]:
        """Of the jobs that have one, in their order."""
        found = [(job, self._figures.get(key_of(job))) for job in jobs]
        return [Result(job, figures) for job, figures in found if figures is not None]
