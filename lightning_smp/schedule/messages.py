"""Lists the messages that a schedule sends, channel by channel, and checks that they match up.

A channel is an ordered pair of ranks. Its order is the order in which the sender produces; the
receiver posts its receives in the same order, whatever order it consumes in.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_smp.errors import ScheduleError
from lightning_smp.schedule.actions import Action, Schedule
from lightning_smp.schedule.graph import SegmentGraph

__all__ = ["Channel", "Message", "list_channels"]


class Message(NamedTuple):
    """What one action sends to another over one edge: values (F) or gradients (B or I)."""

    producer: Action
    consumer: Action
    edge: int

    def __str__(self) -> str:
        """Return ``producer->consumer``."""
        return f"{self.producer}->{self.consumer}"


@dataclass(frozen=True, slots=True)
class Channel:
    """All messages from one rank to another.

    Attributes:
        messages: In the order of sending: by producer, then by edge.
        depth: Receives that must be outstanding at once so that, posted in the order of sending,
            none keeps a needed one waiting. 1 where the receiver consumes in the sender's order.
    """

    messages: tuple[Message, ...]
    depth: int


def list_channels(
    graphs: Sequence[SegmentGraph], schedule: Schedule
) -> dict[tuple[int, int], Channel]:
    """List the messages between each ordered pair of ranks that has any.

    Args:
        graphs: One graph per microbatch.
        schedule: A schedule that ``validate`` accepts.

    Returns:
        ``{(sender, receiver): channel}``, in ascending order of the pairs.

    Raises:
        ScheduleError: If a message is produced twice, or never consumed by its receiver.
    """
    steps = [{action: step for step, action in enumerate(actions)} for actions in schedule.ranks]
    sent: dict[tuple[int, int], list[Message]] = {}
    seen: set[Message] = set()
    for sender, actions in enumerate(schedule.ranks):
        for action in actions:
            for message in _sent_by(graphs[action.microbatch], action):
                consumer = message.consumer
                receiver = graphs[consumer.microbatch].segments[consumer.segment].rank
                if consumer.kind == "B" and consumer not in steps[receiver]:
                    split = consumer._replace(kind="I")
                    if split in steps[receiver]:
                        message = message._replace(consumer=split)
                        consumer = split
                if message in seen or consumer not in steps[receiver]:
                    raise ScheduleError(_mismatch(schedule, message, sender, receiver, seen))
                seen.add(message)
                sent.setdefault((sender, receiver), []).append(message)
    return {
        pair: Channel(tuple(messages), _depth(messages, steps[pair[1]]))
        for pair, messages in sorted(sent.items())
    }


def _sent_by(graph: SegmentGraph, action: Action) -> Iterator[Message]:
    for index, edge in enumerate(graph.edges):
        if not graph.is_message(edge):
            continue
        if action.kind == "F" and edge.source == action.segment:
            yield Message(action, action._replace(segment=edge.target), index)
        elif action.kind in "BI" and edge.target == action.segment and edge.has_gradient:
            yield Message(action, action._replace(kind="B", segment=edge.source), index)


def _mismatch(
    schedule: Schedule, message: Message, sender: int, receiver: int, seen: set[Message]
) -> str:
    problem = (
        "is sent a second time; list its producer once"
        if message in seen
        else f"is never consumed; add {message.consumer} to the row of rank {receiver}"
    )
    return (
        f"In the schedule {schedule.name!r}, the message {message} (edge {message.edge}) from rank "
        f"{sender} to rank {receiver} {problem}."
    )


def _depth(messages: Sequence[Message], steps: dict[Action, int]) -> int:
    """Consume in the receiver's order; count what must have been posted by then and is left."""
    order = sorted(range(len(messages)), key=lambda i: (steps[messages[i].consumer], i))
    posted = depth = 0
    for consumed, position in enumerate(order):
        posted = max(posted, position + 1)
        depth = max(depth, posted - consumed)
    return depth
