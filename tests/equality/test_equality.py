"""The smp strategy equals one device: losses, gradients, metrics and all weights.

The covering set gives every case a few layouts, so that all layouts are met by some case. The whole
matrix runs with ``-m matrix``. All selected cases of a layout share one start of its ranks, at the
first test that needs one of them: a single failing test is best repeated alone with ``-k``.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.equality.case import Case
from tests.equality.harness import (
    Layout,
    Outcome,
    averaged,
    compare,
    fits,
    reference_kind,
    run_layout,
    train_reference,
)
from tests.equality.zoo import CASES
from tests.support.devices import needs_devices

pytestmark = [
    pytest.mark.timeout(1800),  # the first test of a layout waits for all of its cases
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

MATRIX = [
    Layout(*degrees) for degrees in product((1, 2, 4), (1, 2), (1, 2, 4), ("simple", "interleaved"))
]
# Every case runs in these two ...
ALWAYS = [Layout(2, 1, 2, "interleaved"), Layout(4, 1, 4, "interleaved")]
# ... and in one of these in turn.
IN_TURN = [
    Layout(2, 2, 2, "simple"),
    Layout(1, 2, 4, "simple"),
    Layout(2, 1, 4, "simple"),
    Layout(2, 2, 1, "interleaved"),
    Layout(1, 1, 4, "interleaved"),
    Layout(4, 1, 2, "simple"),
]


class Run(NamedTuple):
    """One case in one layout."""

    case: str
    layout: Layout

    def reference(self) -> Run | None:
        """Return the run of the strategy itself that this one must equal, if it is one."""
        if reference_kind(CASES[self.case], self.layout) != "smp":
            return None
        return Run(self.case, Layout(1, self.layout.dp, self.layout.microbatches, "simple"))

    def __str__(self) -> str:
        return f"{self.case}-{self.layout}"


def nearest(case: Case, layout: Layout) -> Layout:
    """Return the layout with its numbers lowered to what the case allows."""
    allowed = [count for count in case.microbatches if count <= layout.microbatches]
    pp = max(case.min_pp, min(layout.pp, case.max_pp))
    return Layout(pp, min(layout.dp, case.max_dp), max(allowed), layout.pipeline)


def covering() -> Iterator[Run]:
    """Yield the runs of the covering set."""
    for index, case in enumerate(CASES.values()):
        layouts = [*ALWAYS, IN_TURN[index % len(IN_TURN)]]
        for layout in dict.fromkeys(nearest(case, layout) for layout in layouts):
            yield Run(case.name, layout)


def matrix() -> Iterator[Run]:
    """Yield every case in every layout that it allows."""
    for case, layout in product(CASES.values(), MATRIX):
        if fits(case, layout):
            yield Run(case.name, layout)


class Outcomes:
    """Outcomes of the runs of a session, made layout by layout when first asked for."""

    def __init__(self, runs: list[Run], folder: Path) -> None:
        references = [reference for run in runs if (reference := run.reference())]
        self.runs = list(dict.fromkeys([*runs, *references]))
        self.folder = folder
        self.done: dict[Run, Outcome] = {}

    def __getitem__(self, run: Run) -> Outcome:
        if run not in self.done:
            self._run(run.layout)
        return self.done[run]

    def _run(self, layout: Layout) -> None:
        folder = self.folder / str(layout)
        folder.mkdir()
        names = [run.case for run in self.runs if run.layout == layout]
        for name, outcome in run_layout(names, layout, folder).items():
            self.done[Run(name, layout)] = outcome


@pytest.fixture(scope="session")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Outcomes of all runs that this session selected, and of their references."""
    specs = [getattr(item, "callspec", None) for item in request.session.items]
    found = [spec.params.get("run") for spec in specs if spec is not None]
    runs = [run for run in found if isinstance(run, Run)]
    return Outcomes(runs, tmp_path_factory.mktemp("equality"))


def check(run: Run, outcomes: Outcomes) -> None:
    """Fail unless a run equals its reference."""
    needs_devices(run.layout.world_size)
    case, results = CASES[run.case], outcomes[run]
    if isinstance(results, str):
        if case.may_be_refused and "lightning_smp.errors.UnsupportedError" in results:
            pytest.skip("refused by name")
        pytest.fail(results, pytrace=False)
    if (own := run.reference()) is None:
        compare(case, train_reference(case, run.layout), results)
        return
    expected = outcomes[own]
    if isinstance(expected, str):
        pytest.fail(f"the reference {own} failed:\n{expected}", pytrace=False)
    compare(case, averaged(expected), results)


@pytest.mark.parametrize("run", list(covering()), ids=str)
def test_equals_one_device(run: Run, outcomes: Outcomes) -> None:
    check(run, outcomes)


@pytest.mark.matrix
@pytest.mark.parametrize("run", list(matrix()), ids=str)
def test_equals_one_device_in_every_layout(run: Run, outcomes: Outcomes) -> None:
    check(run, outcomes)
