"""Ranks that meet after a run or an error: they go on together, or are all refused."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_smp.errors import CommunicationError
from lightning_smp.groups import Groups
from lightning_smp.kept_groups import KeptGroups
from lightning_smp.reunion import Reunion, Standing
from lightning_smp.topology import Topology
from tests.support.launch import gloo_group, run_ranks

pytestmark = pytest.mark.timeout(90)

WELL = Standing("ended well", failed=False, torn=False)
ERROR = Standing("left train by ValueError: words", failed=True, torn=True)


def _may_come(missing: list[int], waited_s: float) -> None:
    return None


def _meet(rank: int, size: int, case: str) -> tuple[str, bool]:
    """What came of it, and whether there are new groups for messages."""
    with gloo_group():
        kept = KeptGroups()
        groups = Groups.build(
            Topology.from_world(size, pipeline=2), rank, "gloo", timedelta(seconds=20), kept
        )
        before = groups.messages("pp")
        standing: Standing = {"well": WELL, "counts well": WELL}.get(case, ERROR)
        limit_s, why = 30.0, _may_come
        if case == "one failed" and rank == 1:
            standing = WELL
        if case == "obstacle" and rank == 1:
            standing = Standing(ERROR.account, failed=True, torn=True, obstacle="a reason")
        works: list[Any] = []
        if case.startswith("counts") and rank == 0:
            works.append(dist.broadcast(torch.ones(1), 0, group=groups.control, async_op=True))
        if case == "late":
            limit_s = 1.0
            time.sleep(3.0 * rank)
        if case == "lost":
            why: Any = lambda missing, waited_s: f"rank {missing} will not come"  # noqa: E731
            time.sleep(3.0 * rank)
        try:
            Reunion(rank, size, kept).hold(standing, limit_s, why)
            told = "go"
        except CommunicationError as error:
            told = str(error)
        if case.startswith("counts") and rank == 1:
            works.append(dist.broadcast(torch.ones(1), 0, group=groups.control, async_op=True))
        for work in works:
            work.wait()
        renewed = groups.messages("pp") is not before
        store = dist.distributed_c10d._get_default_store()
        store.set(f"done{rank}", "1")
        store.wait([f"done{other}" for other in range(size)], timedelta(seconds=20))
    return told, renewed


def _told(case: str, size: int = 2) -> set[tuple[str, bool]]:
    return set(run_ranks(_meet, size, case))


def test_after_a_good_run_nothing_is_made_anew() -> None:
    assert _told("well") == {("go", False)}


def test_after_the_same_error_groups_for_messages_are_made_anew() -> None:
    assert _told("failed", 4) == {("go", True)}


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("one failed", ["rank 0 left train by ValueError: words", "rank 1 ended well"]),
        ("obstacle", ["rank 1 left train by ValueError: words: a reason"]),
        ("counts", ["rank 1 left train", "after other operations of a group"]),
        ("late", ["rank 0 left train", "rank 1 did not come within the timeout of 1 s"]),
        ("lost", ["rank 0 left train", "rank [1] will not come"]),
    ],
)
def test_all_ranks_are_refused_alike(case: str, words: list[str]) -> None:
    ((told, renewed),) = _told(case)
    assert all(word in told for word in words), told
    assert "start them anew" in told
    assert not renewed


def test_what_is_under_way_between_good_runs_is_as_within_a_run() -> None:
    assert _told("counts well") == {("go", False)}
