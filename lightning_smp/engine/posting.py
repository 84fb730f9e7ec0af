"""When a rank posts its receives: ahead of need, yet never so that ranks wait for each other.

A posted NCCL receive (or send) is a kernel that spins on the device until the other side runs. A
host that waits for its whole device meanwhile (the allocator asks the driver for memory, a library
makes its handle, a kernel is loaded) waits for that kernel too. If the other side's part is still
to be issued by a host that waits in the same way, both wait for ever.

So all actions of a step are put into one order that every rank derives alike, and before its own
action at position p a rank posts exactly the receives of what is sent at positions before p.

Proof: of all ranks that wait, take the one whose action has the lowest position p. All it has
issued belongs to positions up to p. Its receives' sends belong to positions before p, which all
ranks have issued. Its sends' receivers are at positions after p, so they have posted the receives.
What these operations depend on lies before p in turn. So they all end, and the rank waits no more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lightning_smp.engine.messages import MessageKey, Programs, sent
from lightning_smp.program import SegmentNode, TensorSpec
from lightning_smp.schedule import Action

__all__ = ["Receive", "earlier", "one_order", "receives_before"]


class Receive(NamedTuple):
    """A message to this rank: the stage it comes from, its key, what it looks like."""

    sender: int
    key: MessageKey
    spec: TensorSpec


def one_order(rows: Sequence[Sequence[Action]], programs: Programs) -> list[tuple[int, Action]]:
    """Merges the ranks' rows: each action comes after those whose messages it awaits.

    Of those that could come next, backwards come before forwards, then who has come less often. So
    a receive that is posted well ahead of need is one that a forward is posted after, as a rule:
    while it spins it takes some of the device's processors, and a backward is twice as long.
    """
    to_come = Counter(
        (key[0], key[1], node)
        for row in rows for action in row for node, key, _ in sent(action, programs)
    )  # fmt: skip
    taken = [0] * len(rows)
    order: list[tuple[int, Action]] = []
    for _ in range(sum(map(len, rows))):
        heads = [(rank, rows[rank][n]) for rank, n in enumerate(taken) if n < len(rows[rank])]
        ready = [(r, action) for r, action in heads if not to_come[_awaits(action, programs)]]
        assert ready, "the schedule was validated, so it has such an order"
        rank, action = min(ready, key=lambda head: (head[1].kind == "F", taken[head[0]]))
        order.append((rank, action))
        for node, key, _ in sent(action, programs):
            to_come[key[0], key[1], node] -= 1
        taken[rank] += 1
    return order


def _awaits(action: Action, programs: Programs) -> tuple[str, int, SegmentNode] | None:
    """The kind, microbatch and segment of the messages without which an action cannot run."""
    if action.kind == "W":
        return None
    node = programs[action.microbatch].segments[action.segment]
    return "f" if action.kind == "F" else "g", action.microbatch, node


def receives_before(
    order: Iterable[tuple[int, Action]], programs: Programs, receiver: int
) -> list[list[Receive]]:
    """For each action of one rank, the receives to post before it: each sender's in its order.

    Args:
        order: all ranks' actions in one order, each with its rank.
        programs: by microbatch.
        receiver: the rank.
    """
    found: list[list[Receive]] = []
    since: list[Receive] = []
    for rank, action in order:
        if rank == receiver:
            found.append(since)
            since = []
        else:
            messages = sent(action, programs)
            since.extend(
                Receive(rank, key, spec) for node, key, spec in messages if node[0] == receiver
            )
    assert not since, "every message is awaited by an action of its receiver"
    return found


def earlier(receives: Sequence[list[Receive]], ahead: int) -> list[list[Receive]]:
    """The same receives, each posted ``ahead`` actions earlier or a little more.

    For backends whose posted receives hold up nobody: a message that finds its receive posted
    arrives without asking for it first. Those of ``ahead`` actions are posted at once, since one
    that is posted alone, between other work, finds cold caches and takes several times as long.
    """
    if not ahead:
        return list(receives)
    found: list[list[Receive]] = [[] for _ in receives]
    for position, due in enumerate(receives):
        found[max(0, position // ahead - 1) * ahead].extend(due)
    return found
