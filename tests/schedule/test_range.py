"""Every kind over all stages, microbatches and chunks: never worse than the textbook order."""

import pytest

from lightning_smp.schedule import make_schedule, simulate, validate

from .graphs import line
from .textbook import gpipe, one_f_one_b, played, zb_h1

TEXTBOOK = {"simple": gpipe, "interleaved": one_f_one_b, "zero_bubble": zb_h1}
FEW = [1, 2, 3, 5, 8, 9, 16]


def check(pipeline, stages, microbatches, chunks):
    graphs = [line(list(range(stages)) * chunks, weight=1.0)] * microbatches
    schedule = make_schedule(graphs, pipeline)
    validate(graphs, schedule)
    made = simulate(graphs, schedule)
    textbook = played(graphs, TEXTBOOK[pipeline](stages, microbatches, chunks))
    case = (pipeline, stages, microbatches, chunks, schedule.name)
    if textbook is None:
        assert microbatches % stages, case
        return
    assert made.makespan <= textbook.makespan * (1 + 1e-9), case
    assert made.bubble <= textbook.bubble + 1e-9, case
    pairs = list(zip(made.peak_live, textbook.peak_live, strict=True))
    assert all(ours <= theirs for ours, theirs in pairs), (case, pairs)


@pytest.mark.parametrize("pipeline", TEXTBOOK)
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_covering_set(pipeline, stages, chunks):
    for microbatches in FEW:
        check(pipeline, stages, microbatches, chunks)


@pytest.mark.parametrize("pipeline", TEXTBOOK)
@pytest.mark.parametrize(
    ("stages", "microbatches", "chunks"), [(8, 32, 1), (8, 24, 2), (7, 11, 2), (6, 12, 4)]
)
def test_covering_set_of_large_ones(pipeline, stages, microbatches, chunks):
    check(pipeline, stages, microbatches, chunks)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("pipeline", TEXTBOOK)
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
@pytest.mark.parametrize("stages", range(1, 9))
def test_whole_range(pipeline, stages, chunks):
    for microbatches in range(1, 33):
        check(pipeline, stages, microbatches, chunks)
