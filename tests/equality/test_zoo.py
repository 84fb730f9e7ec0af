"""The zoo itself, without smp: every case trains, repeats exactly, and keeps what it claims."""

from __future__ import annotations

import math

import pytest

from tests.equality.case import Case
from tests.equality.harness import (
    Layout,
    compare,
    fits,
    reference_kind,
    train_in_pieces,
    train_reference,
)
from tests.equality.zoo import CASES

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
PIECES = Layout(pp=1, dp=2, microbatches=2)


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def case(request: pytest.FixtureRequest) -> Case:
    """Every case of the zoo."""
    return request.param


def test_case_trains_and_repeats(case: Case) -> None:
    before = case.make_module().state_dict()
    result = train_reference(case)
    compare(case, result, [train_reference(case)])
    moved = [name for name, value in result.weights.items() if not value.equal(before[name])]
    assert moved, "no weight changed"
    assert result.gradients, "no gradient arrived"
    assert all(value.isfinite().all() for value in result.weights.values())
    if case.compares_losses:
        assert len(result.losses) == case.steps
        assert all(map(math.isfinite, result.losses))


def test_loss_is_mean_of_parts_as_claimed(case: Case) -> None:
    layout = Layout(dp=min(PIECES.dp, case.max_dp), microbatches=min(2, max(case.microbatches)))
    if case.noise != "none":
        pytest.skip("draws other noise in pieces")
    if case.needs_same_split:
        assert reference_kind(case, layout) == "split"
        pieces, whole = train_in_pieces(case, layout), train_reference(case)
        with pytest.raises(AssertionError, match="differs from one device"):
            compare(case, whole, [pieces])
    elif fits(case, layout):
        compare(case, train_reference(case, layout), [train_in_pieces(case, layout)])
