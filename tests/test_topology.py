"""The grid of ranks against the published tables and the identities between axes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_smp.errors import ConfigError
from lightning_smp.topology import AXES, PLACEMENTS, Axis, Topology, nearest_divisors

# 8 ranks, pp = 2, tp = 2: per placement, one digit per global rank.
TABLES = {
    "DPT": ("00110011", "01010101", "00001111", "01230123", "01012323"),
    "DTP": ("01010101", "00110011", "00001111", "01230123", "00112233"),
    "PDT": ("00001111", "01010101", "00110011", "01012323", "01230123"),
    "PTD": ("00001111", "00110011", "01010101", "00112233", "01230123"),
    "TDP": ("01010101", "00001111", "00110011", "01012323", "00112233"),
    "TPD": ("00110011", "00001111", "01010101", "00112233", "01012323"),
}
GROUPS = {
    "DPT": ("01 23 45 67", "02 13 46 57", "04 15 26 37", "0123 4567", "0145 2367"),
    "DTP": ("02 13 46 57", "01 23 45 67", "04 15 26 37", "0123 4567", "0246 1357"),
    "PDT": ("01 23 45 67", "04 15 26 37", "02 13 46 57", "0145 2367", "0123 4567"),
    "PTD": ("02 13 46 57", "04 15 26 37", "01 23 45 67", "0246 1357", "0123 4567"),
    "TDP": ("04 15 26 37", "01 23 45 67", "02 13 46 57", "0145 2367", "0246 1357"),
    "TPD": ("04 15 26 37", "02 13 46 57", "01 23 45 67", "0246 1357", "0145 2367"),
}
WORDS = {"cluster": "DPT", "spread": "TPD"}


def _digits(text: str) -> list[int]:
    return [int(digit) for digit in text]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_ranks_match_the_published_tables(placement: str) -> None:
    topology = Topology.from_world(8, pipeline=2, tensor=2, placement=placement)
    pp, tp, rdp, mp, dp = map(_digits, TABLES[WORDS.get(placement, placement)])
    ranks = range(8)
    assert [topology.pp_rank(rank) for rank in ranks] == pp
    assert [topology.tp_rank(rank) for rank in ranks] == tp
    assert [topology.rdp_rank(rank) for rank in ranks] == rdp
    assert [topology.mp_rank(rank) for rank in ranks] == mp
    assert [topology.dp_rank(rank) for rank in ranks] == dp


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("column", "axis"), list(enumerate(("tp", "pp", "rdp", "mp", "dp"))))
def test_groups_match_the_published_tables(placement: str, column: int, axis: Axis) -> None:
    topology = Topology.from_world(8, pipeline=2, tensor=2, placement=placement)
    expected = GROUPS[WORDS.get(placement, placement)][column].split()
    assert topology.groups(axis) == tuple(tuple(_digits(group)) for group in expected)


@pytest.mark.parametrize(
    ("placement", "mp", "dp"),
    [
        ("spread", ((0, 4), (1, 5), (2, 6), (3, 7)), ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("cluster", ((0, 1), (2, 3), (4, 5), (6, 7)), ((0, 2, 4, 6), (1, 3, 5, 7))),
    ],
)
def test_published_example_without_tensor_parallelism(
    placement: str, mp: tuple[tuple[int, ...], ...], dp: tuple[tuple[int, ...], ...]
) -> None:
    topology = Topology.from_world(8, pipeline=2, placement=placement)
    assert topology.groups("mp") == mp
    assert topology.groups("dp") == dp
    if placement == "spread":
        assert topology.dp_rank(6) == 2


def test_published_sharding_example() -> None:
    topology = Topology.from_world(32, tensor=4)
    assert topology.groups("tp")[:2] == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert topology.group("rdp", 0) == (0, 4, 8, 12, 16, 20, 24, 28)


TOPOLOGIES = st.builds(
    Topology, st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.sampled_from(PLACEMENTS)
)


@settings(deadline=None, max_examples=50)
@given(TOPOLOGIES)
def test_identities_of_sizes(topology: Topology) -> None:
    size = topology.size
    assert topology.mp_size * topology.rdp_size == size
    assert topology.pp_size * topology.dp_size == size
    assert topology.pp_size * topology.tp_size * topology.rdp_size == size
    assert (topology.mp_size * topology.dp_size == size) == (topology.tp_size == 1)
    again = Topology.from_world(
        size,
        pipeline=topology.pp_size,
        tensor=topology.tp_size,
        placement=topology.placement,
    )
    assert again == topology


@settings(deadline=None, max_examples=50)
@given(TOPOLOGIES)
def test_groups_of_an_axis_partition_the_ranks(topology: Topology) -> None:
    for axis in AXES:
        groups = topology.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(topology.size))
        size = topology.size if axis == "world" else getattr(topology, f"{axis}_size")
        assert {len(group) for group in groups} == {size}
        for group in groups:
            assert list(group) == sorted(group)
            assert all(topology.group(axis, rank) == group for rank in group)


@settings(deadline=None, max_examples=50)
@given(TOPOLOGIES)
def test_ranks_are_positions_in_their_sorted_groups(topology: Topology) -> None:
    for axis in ("pp", "tp", "rdp", "dp", "mp"):
        for rank in range(topology.size):
            position = topology.group(axis, rank).index(rank)
            assert getattr(topology, f"{axis}_rank")(rank) == position


@settings(deadline=None, max_examples=50)
@given(TOPOLOGIES)
def test_groups_are_defined_by_what_their_members_share(topology: Topology) -> None:
    pp, tp, rdp = topology.pp_rank, topology.tp_rank, topology.rdp_rank
    shared = {
        "pp": lambda rank: (tp(rank), rdp(rank)),
        "tp": lambda rank: (pp(rank), rdp(rank)),
        "rdp": lambda rank: (pp(rank), tp(rank)),
        "dp": pp,
        "mp": rdp,
    }
    for axis, key in shared.items():
        for rank in range(topology.size):
            same = tuple(r for r in range(topology.size) if key(r) == key(rank))
            assert topology.group(axis, rank) == same  # type: ignore[arg-type]


@settings(deadline=None, max_examples=50)
@given(TOPOLOGIES)
def test_axes_that_coincide(topology: Topology) -> None:
    if topology.tp_size == 1:
        assert topology.groups("pp") == topology.groups("mp")
        assert topology.groups("rdp") == topology.groups("dp")
    if topology.pp_size == 1:
        assert topology.groups("tp") == topology.groups("mp")


@settings(deadline=None, max_examples=50)
@given(TOPOLOGIES)
def test_the_right_most_letter_varies_fastest(topology: Topology) -> None:
    letters = WORDS.get(topology.placement, topology.placement)
    ranks = {"D": topology.rdp_rank, "P": topology.pp_rank, "T": topology.tp_rank}
    coordinates = [tuple(ranks[x](rank) for x in letters) for rank in range(topology.size)]
    assert coordinates == sorted(coordinates)


def test_degrees_that_do_not_divide_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"3 x tensor degree 1 = 3 .* size 8.* 2 or 4"):
        Topology.from_world(8, pipeline=3)
    with pytest.raises(ConfigError, match=r"= 16 does not divide .* 8\. Use .* product is 8, or"):
        Topology.from_world(8, pipeline=4, tensor=4)


@pytest.mark.parametrize("degree", [0, -1, 2.0, "2", None, True])
def test_degrees_that_are_no_positive_int_are_refused(degree: object) -> None:
    with pytest.raises(ConfigError, match=r"pipeline degree .* must be an int >= 1"):
        Topology.from_world(8, pipeline=degree)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"world size .* must be an int >= 1"):
        Topology.from_world(degree)  # type: ignore[arg-type]


@pytest.mark.parametrize("placement", ["", "DP", "DDP", "dpt", "near"])
def test_unknown_placement_is_refused(placement: str) -> None:
    with pytest.raises(ConfigError, match="one of cluster, spread, DPT"):
        Topology(1, 1, 1, placement)


@pytest.mark.parametrize("rank", [-1, 8])
def test_rank_outside_the_grid_is_refused(rank: int) -> None:
    topology = Topology.from_world(8, pipeline=2)
    with pytest.raises(IndexError, match="outside the grid of 8"):
        topology.pp_rank(rank)
    with pytest.raises(IndexError, match="outside the grid of 8"):
        topology.group("dp", rank)


def test_huge_degrees_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="does not divide"):
        Topology.from_world(8, pipeline=10**9)


@pytest.mark.parametrize(
    ("degree", "size", "expected"),
    [(3, 8, (2, 4)), (4, 8, (4, 8)), (9, 8, (8,)), (5, 7, (1, 7)), (1, 1, (1,))],
)
def test_nearest_divisors(degree: int, size: int, expected: tuple[int, ...]) -> None:
    assert nearest_divisors(degree, size) == expected
