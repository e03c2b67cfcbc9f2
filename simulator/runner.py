"""Many simulations on many cores: jobs in a fixed order, results in the same order, a bar while they run."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from simulator.experiment import Experiment, Figures, run_job


@dataclass(frozen=True, slots=True)
class Job:
    """One simulation."""

    experiment: str  # its name, for whoever collects
    spec: Experiment
    arm: str
    seed: int
    variant: str = ""

    def __call__(self) -> Figures:
        return run_job(self.spec, self.arm, self.seed, self.variant)


@dataclass(frozen=True, slots=True)
class Result:
    job: Job
    figures: Figures


VARIANT_SEEDS = 3


def jobs_of(
    name: str, spec: Experiment, *, seeds: int | None = None, arms: Sequence[str] = (), variants: bool = False
) -> list[Job]:
    """All arms and seeds of an experiment, seed by seed; with `variants` also those: the arms that the ratios
    compare (all, where there are none), under the first `VARIANT_SEEDS` seeds."""
    chosen = list(arms) or list(spec.arms)
    count = seeds or spec.seeds
    jobs = [Job(name, spec, arm, seed) for seed in range(1, count + 1) for arm in chosen]
    if variants:
        compared = {arm for ratio in spec.ratios for arm in (ratio.of, ratio.over)}
        varied = [arm for arm in chosen if arm in compared or not compared]
        jobs += [
            Job(name, spec, arm, seed, variant)
            for seed in range(1, min(count, VARIANT_SEEDS) + 1)
            for variant in spec.variants
            for arm in varied
        ]
    return jobs


def run_jobs(
    jobs: Sequence[Job], processes: int, progress: Callable[[Result], None] = lambda _: None
) -> list[Result]:
    """Results in the order of `jobs`, whatever the number of processes; `progress` hears of each as well."""
    results = []
    if processes <= 1 or len(jobs) <= 1:
        for job in jobs:
            results.append(Result(job, job()))
            progress(results[-1])
        return results
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes, len(jobs)), mp_context=context) as pool:
        futures = [pool.submit(job) for job in jobs]
        for job, future in zip(jobs, futures, strict=True):
            results.append(Result(job, future.result()))
            progress(results[-1])
    return results


def default_processes() -> int:
    return max(1, os.cpu_count() or 1)


@contextmanager
def progress_bar(title: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on a terminal where `rich` is installed, else nothing."""
    bar = _rich_progress()
    if bar is None:
        yield lambda: None
        return
    with bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)


def _rich_progress() -> Any:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        return None
    console = Console(stderr=True)
    if not console.is_terminal:
        return None
    columns: Iterable[Any] = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console)
