"""Virtual stages, split backwards and orders from files equal one device."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.equality.harness import (
    Layout,
    Outcome,
    Result,
    compare,
    run_layout,
    train_reference,
    train_smp,
)
from tests.equality.zoo import CASES
from tests.support.launch import RankFailure, run_ranks

pytestmark = [
    pytest.mark.timeout(600),  # the first test of a layout waits for all of its cases
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

LAYOUTS = [
    Layout(2, 1, 4, "interleaved", 2),
    Layout(2, 1, 4, "zero_bubble"),
    Layout(2, 1, 4, "zero_bubble", 2),
]
NAMES = ["mlp", "gpt_tied_parameter", "hf_gpt2_checkpoint", "hf_llama", "accumulate_clip_schedule"]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[Layout, dict[str, Outcome]]:
    return {
        layout: run_layout(NAMES, layout, tmp_path_factory.mktemp(str(layout)))
        for layout in LAYOUTS
    }


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_equals_one_device(
    name: str, layout: Layout, outcomes: dict[Layout, dict[str, Outcome]]
) -> None:
    case = CASES[name]
    outcome = outcomes[layout][name]
    if isinstance(outcome, str):
        pytest.fail(outcome)
    compare(case, train_reference(case, layout), outcome)


TABLE = """schedule odd
rank 0: F0.0 F1.0 .    F2.0 B0.0 F3.0 B1.0 B2.0 B3.0
rank 1: .    F0.1 I0.1 F1.1 I1.1 W0.1 B2   F3.1 W1.1 B3.1
"""


def _train_by_table(rank: int, world_size: int, path: str, **config: Any) -> dict[str, Any]:
    given = {"schedule_file": path, **config}
    case = replace(CASES["mlp"], strategy={"config": given})
    return asdict(train_smp(case, Layout(2, 1, 4, "file")))


def test_order_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "order.txt"
    path.write_text(TABLE.replace("B2   F3.1", "F2.1 B2.1 F3.1"))
    results = [Result(**r) for r in run_ranks(_train_by_table, 2, str(path))]
    compare(CASES["mlp"], train_reference(CASES["mlp"]), results)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("B2   F3.1", "'B2' is not an action"),
        ("F2.1 F3.1", "leaves out B2.1 of rank 1"),
    ],
)
def test_broken_file_is_refused_with_its_grid(tmp_path: Path, broken: str, message: str) -> None:
    path = tmp_path / "order.txt"
    path.write_text(TABLE.replace("B2   F3.1", broken))
    with pytest.raises(RankFailure, match=message) as failure:
        run_ranks(_train_by_table, 2, str(path))
    assert "^^" in str(failure.value)
