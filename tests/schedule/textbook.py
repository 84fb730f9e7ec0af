"""The textbook orders of chains and virtual stages, written down without the scheduler's help."""

from lightning_smp.errors import ScheduleError
from lightning_smp.schedule import Action, Schedule, simulate


def one_f_one_b(stages, microbatches, chunks=1):
    """1F1B, and interleaved 1F1B where there are several chunks (Narayanan et al. 2021)."""
    rows = []
    for rank in range(stages):
        forwards = _interleaved(stages, microbatches, range(chunks))
        backwards = _interleaved(stages, microbatches, reversed(range(chunks)))
        f = [Action("F", m, chunk * stages + rank) for m, chunk in forwards]
        b = [Action("B", m, chunk * stages + rank) for m, chunk in backwards]
        ahead = stages - rank - 1
        warm_up = ahead if chunks == 1 else 2 * ahead + (chunks - 1) * stages
        rows.append(_alternate(f, b, min(warm_up, len(f))))
    return Schedule(tuple(map(tuple, rows)), name="textbook 1F1B")


def zb_h1(stages, microbatches, chunks=1):
    """ZB-H1 (Qi et al. 2023): rank r does each weight gradient r input gradients later."""
    rows = []
    for rank, row in enumerate(one_f_one_b(stages, microbatches, chunks).ranks):
        new, late = [], []
        for action in row:
            if action.kind == "F":
                new.append(action)
                continue
            new.append(action._replace(kind="I"))
            late.append(action._replace(kind="W"))
            if len(late) > rank:
                new.append(late.pop(0))
        rows.append(tuple(new + late))
    return Schedule(tuple(rows), name="textbook ZB-H1")


def gpipe(stages, microbatches, chunks=1):
    """All forwards, chunk by chunk, then all backwards."""
    rows = []
    for rank in range(stages):
        own = [c * stages + rank for c in range(chunks)]
        row = [Action("F", m, s) for s in own for m in range(microbatches)]
        row += [Action("B", m, s) for s in reversed(own) for m in range(microbatches)]
        rows.append(tuple(row))
    return Schedule(tuple(rows), name="textbook GPipe")


def played(graphs, schedule):
    """The timeline, or None where the order does not work for this number of microbatches."""
    try:
        return simulate(graphs, schedule)
    except ScheduleError:
        return None


def _interleaved(stages, microbatches, chunks):
    chunks = list(chunks)
    return [
        (m, chunk)
        for first in range(0, microbatches, stages)
        for chunk in chunks
        for m in range(first, min(first + stages, microbatches))
    ]


def _alternate(forwards, backwards, warm_up):
    row = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        row += [forward, backward]
    return row + backwards[len(forwards) - warm_up :]
