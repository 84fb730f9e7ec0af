"""What a rank does in a step is worked out once, and kept as long as its programs."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import torch

from lightning_smp.engine import PipelineEngine
from lightning_smp.placed.runtime import Runtime
from lightning_smp.program import Program
from tests.engine.test_posting import chain


def _engine() -> PipelineEngine:
    channels: Any = SimpleNamespace(ahead=0)
    control: Any = SimpleNamespace()
    runtime = Runtime(0, 2, torch.device("cpu"))
    return PipelineEngine(
        runtime, channels, control, pipeline="interleaved", active_microbatches=None
    )


def _pair(program: Program) -> dict[int, Program]:
    return {0: program, 1: program}


def test_the_same_programs_have_one_course() -> None:
    engine, program = _engine(), chain(2, 1)
    engine.remember("shape", program)
    course = engine.course_of(_pair(program), train=True)
    assert engine.course_of(_pair(program), train=True) is course
    assert engine.course_of({1: program, 2: program}, train=True) is not course
    assert engine.course_of(_pair(program), train=False) is not course
    assert len(course.receives) == len(course.row) == 4


def test_a_course_ends_with_its_programs() -> None:
    engine, program, other = _engine(), chain(2, 1), chain(2, 1)
    engine.remember("shape", program)
    engine.remember("other", other)
    course = engine.course_of({0: program, 1: other}, train=True)
    rest = engine.course_of(_pair(other), train=True)
    engine.remember("shape", chain(2, 1))
    assert engine.course_of(_pair(other), train=True) is rest
    assert engine.course_of({0: program, 1: other}, train=True) is not course
    engine.drop("other")
    assert engine.course_of(_pair(other), train=True) is not rest


def test_a_program_that_a_course_is_found_by_is_alive() -> None:
    """Else another program could come to have its id, and find a course that is not its own."""
    engine = _engine()
    programs = [chain(2, 1) for _ in range(2)]
    for program in programs:
        engine.course_of(_pair(program), train=True)
    ids = {id(program) for program in programs}
    del programs, program
    gc.collect()
    assert ids.isdisjoint({id(chain(2, 1)) for _ in range(50)})
