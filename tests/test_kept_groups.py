"""Process groups that are made once and used again, on two gloo ranks and on one."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lightning_smp.groups import Groups
from lightning_smp.kept_groups import KeptGroups
from lightning_smp.topology import Topology
from tests.support.launch import gloo_group, run_ranks

pytestmark = pytest.mark.timeout(90)

TIMEOUT = timedelta(seconds=30)


def _uses_again(rank: int, size: int) -> None:
    with gloo_group():
        kept = KeptGroups()
        both = kept.get("a", (0, 1), "gloo", TIMEOUT)
        assert kept.get("a", (0, 1), "gloo", TIMEOUT) is both
        own = kept.get("a", (0,), "gloo", TIMEOUT)
        assert (own is not None) == (rank == 0)
        others = [
            kept.get("b", (0, 1), "gloo", TIMEOUT),
            kept.get("a", (0, 1), "gloo", TIMEOUT / 2),
        ]
        assert both not in others
        assert len(kept.kinds()) == 4


def _builds_once(rank: int, size: int) -> None:
    with gloo_group():
        kept = KeptGroups()

        def build(**degrees: int) -> Groups:
            return Groups.build(Topology.from_world(2, **degrees), rank, "gloo", TIMEOUT, kept)

        first, other, again = build(pipeline=2), build(), build(pipeline=2)
        assert first == again
        assert [g for _, g in kept.mine()] == [g for _, g in kept.mine()]
        assert other.pp is not first.pp
        messages = first.messages("pp")
        assert again.messages("pp") is messages
        assert messages is not first.pp
        kept.renew_messages()
        renewed = first.messages("pp")
        assert renewed is not messages
        assert build(pipeline=2) == first  # nothing else is new
        with pytest.raises(KeyError):
            dist.get_process_group_ranks(messages)
        work = [
            renewed.send([torch.ones(1)], 1 - rank, 0),
            renewed.recv([torch.ones(1)], 1 - rank, 0),
        ]
        for each in work:
            each.wait()


@pytest.mark.parametrize("program", [_uses_again, _builds_once])
def test_groups_of_two_ranks(program: object) -> None:
    run_ranks(program, 2)  # type: ignore[arg-type]


def test_another_default_group_begins_anew() -> None:
    kept = KeptGroups()
    assert not kept.is_current
    made = []
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            made.append(Groups.build(Topology(1, 1, 1), 0, "gloo", TIMEOUT, kept))
            assert kept.is_current
            assert made[-1].is_alive
        finally:
            dist.destroy_process_group()
    assert not kept.is_current
    assert not made[1].is_alive
    assert made[0].mp is not made[1].mp
