"""Which waits never end: told from what ranks say of their calls, without processes."""

from __future__ import annotations

import json
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import pytest

from lightning_smp.calls import Calls, Sheet, Torn, endless_wait, is_loss
from lightning_smp.errors import CommunicationError
from lightning_smp.topology import Axis, Topology

_GRID = Topology(pipeline=2, tensor=1, reduced_data=2)  # pipelines {0, 1} and {2, 3}


@dataclass
class Run:
    """Ranks that make calls; one that stays in a call makes no other."""

    topology: Topology = _GRID
    ended: dict[int, Sheet] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.calls = [Calls() for _ in range(self.topology.size)]
        self.stack = ExitStack()

    def make(self, text: str, axis: Axis, *ranks: int) -> None:
        for rank in ranks:
            with self.calls[rank].collective(text, axis):
                pass

    def stay(self, text: str, axis: Axis, *ranks: int) -> None:
        for rank in ranks:
            self.stack.enter_context(self.calls[rank].collective(text, axis))

    def message(self, rank: int, peer: int, *, sends: bool) -> None:
        self.stack.enter_context(self.calls[rank].message("message", peer, sends=sends))

    def end(self, rank: int) -> None:
        self.ended[rank] = self.calls[rank].sheet

    def wait_of(self, start: int, unknown: tuple[int, ...] = ()) -> list[int] | None:
        sheets = {
            rank: Sheet.from_plain(json.loads(json.dumps(calls.sheet.to_plain())))
            for rank, calls in enumerate(self.calls)
            if rank not in self.ended and rank not in unknown
        }
        return endless_wait(sheets, self.ended, self.topology, start)


def test_ranks_in_one_call_go_on() -> None:
    run = Run()
    run.stay("step", "pp", 0, 1)
    run.stay("step", "pp", 2)
    assert [run.wait_of(rank) for rank in range(4)] == [None] * 4  # rank 3 may still come


def test_two_calls_of_one_number_never_end() -> None:
    run = Run()
    run.make("step", "pp", 0, 1)
    run.stay("barrier", "world", 0)
    run.stay("step", "pp", 1)
    assert run.wait_of(0) == [0, 1, 0]
    assert run.wait_of(1) == [1, 0, 1]
    assert run.wait_of(0, unknown=(1,)) is None  # it may be on its way to the barrier


def test_an_earlier_call_of_the_other_may_end() -> None:
    """Rank 1 is through with the step that rank 0 is still in, and waits in the next call."""
    run = Run()
    run.stay("step", "pp", 0)
    run.make("step", "pp", 1)
    run.stay("barrier", "world", 1)
    assert run.wait_of(0) is None
    assert run.wait_of(1) is None


def test_replicas_that_evaluate_alone_keep_nobody_for_ever() -> None:
    run = Run()
    run.stay("barrier", "world", 2, 3)
    run.make("evaluation", "pp", 0, 1)
    run.stay("evaluation", "pp", 0, 1)
    assert [run.wait_of(rank) for rank in range(4)] == [None] * 4


def test_calls_inside_others_are_waited_for_by_their_own_group() -> None:
    run = Run()
    run.stay("step", "pp", 0, 1, 2, 3)
    run.stay("reduction", "dp", 0, 1, 3)  # rank 2 still computes
    assert [run.wait_of(rank) for rank in range(4)] == [None] * 4
    run.stay("barrier", "world", 2)  # and comes to something else
    assert run.wait_of(0) == [0, 2, 0]
    assert run.wait_of(1) is None  # its own reduction is complete
    assert run.wait_of(2) == [2, 0, 2]


def test_who_waits_for_the_end_of_a_chain_waits_too() -> None:
    run = Run()
    run.stay("step", "pp", 0, 1)
    run.stay("reduction", "dp", 1)
    run.make("step", "pp", 2, 3)
    run.end(3)
    assert run.wait_of(1) == [1, 3]
    assert run.wait_of(0) is None  # rank 1 has come to the step; the reduction is not rank 0's
    run.stay("barrier", "world", 0)
    assert run.wait_of(0) == [0, 1, 3]


def test_an_ended_rank_is_waited_for_where_it_had_something_to_do() -> None:
    run = Run()
    run.make("step", "pp", 0, 1)
    run.end(1)
    assert run.wait_of(0) is None  # nothing is asked of it
    run.stay("step", "pp", 0)
    assert run.wait_of(0) == [0, 1]


def test_a_rank_that_ended_in_the_call_has_not_made_it() -> None:
    run = Run()
    run.stay("step", "pp", 0)
    with pytest.raises(SystemExit), run.calls[1].collective("step", "pp"):
        raise SystemExit(3)
    assert str(run.calls[1].sheet.failed[0]) == "step"
    run.end(1)
    assert run.wait_of(0) == [0, 1]


def test_messages() -> None:
    run = Run()
    run.message(0, 1, sends=False)
    assert run.wait_of(0) is None  # rank 1 computes
    run.message(1, 0, sends=True)
    assert run.wait_of(0) is run.wait_of(1) is None
    run.message(2, 3, sends=False)
    run.message(3, 2, sends=False)
    assert run.wait_of(2) == [2, 3, 2]
    run = Run()
    run.message(0, 1, sends=False)
    run.stay("barrier", "world", 1, 2, 3)
    assert run.wait_of(3) == [3, 0, 1, 0]
    run.end(1)
    assert run.wait_of(0) == [0, 1]


def test_lost_connections_are_explained_where_that_is_known() -> None:
    calls = Calls()
    assert str(calls.sheet) == "no call of the library"
    with calls.collective("step", "pp"):
        pass
    with calls.collective("step", "pp"), calls.collective("reduction", "dp"):
        assert str(calls.sheet) == "reduction in step (call 2)"
    assert str(calls.sheet) == "no call of the library, after step (call 2)"
    lost = RuntimeError("[gloo/pair.cc] Connection closed by peer")
    assert is_loss(lost)
    with pytest.raises(RuntimeError, match="closed by peer"), calls.collective("step", "pp"):
        raise lost
    calls.explain = lambda call: f"why {call} was lost"
    why = pytest.raises(CommunicationError, match=r"why step \(call 4\) was lost")
    with why, calls.collective("step", "pp"):
        raise lost
    with pytest.raises(ValueError, match="own"), calls.collective("step", "pp"):
        raise ValueError("own")


def _fail(calls: Calls, *, in_step: bool) -> None:
    error = ValueError("words")
    with suppress(ValueError), calls.collective("step", "pp"):
        if in_step:
            calls.tear(error)
        raise error


def test_a_step_that_an_error_has_left_is_mended_before_the_next_call() -> None:
    calls, untouched = Calls(), Calls()
    met: list[str] = []

    def mend(torn: Torn) -> None:
        met.append(str(torn))
        calls.mended()

    calls.mend = mend
    _fail(calls, in_step=True)
    for found in (calls, untouched):
        with found.collective("barrier", "world"):
            pass
    assert met == ["left step by ValueError: words"]
    assert calls.torn is None
    assert calls.where().counts == untouched.where().counts


def test_an_error_that_left_another_call_is_known_but_not_mended() -> None:
    calls = Calls()
    calls.mend = lambda torn: pytest.fail(str(torn))
    _fail(calls, in_step=False)
    with calls.message("message", 1, sends=True):
        pass
    assert calls.torn is not None
    assert not calls.torn.in_step
    calls.mend = None
    _fail(calls, in_step=True)
    assert calls.torn.in_step
    calls.restart()
    assert calls.torn is None
