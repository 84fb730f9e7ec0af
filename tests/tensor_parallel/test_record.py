"""The record: what each rank holds, and joining it again."""

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_smp.errors import CommunicationError, ConfigError
from lightning_smp.tensor_parallel.context import Draws, TensorParallel
from lightning_smp.tensor_parallel.module import (
    DistributedModule,
    parameter_kinds,
    shardings_of,
)
from lightning_smp.tensor_parallel.record import Sharding, split_sizes


@given(
    length=st.integers(0, 40),
    ranks=st.integers(1, 8),
    unit=st.integers(1, 3),
    dim=st.integers(0, 2),
)
def test_what_was_split_is_joined_again(length: int, ranks: int, unit: int, dim: int) -> None:
    shape = [2, 3, 4]
    shape[dim] = length * unit + 6
    full = torch.randn(shape)
    sharding = Sharding.split(shape, dim, ranks, blocks=[length * unit, 6], unit=[unit, 2])
    shards = [sharding.shard(full, rank) for rank in range(ranks)]
    assert [tuple(s.shape) for s in shards] == [sharding.local_shape(r) for r in range(ranks)]
    assert sum(sharding.local_numel(r) for r in range(ranks)) == sharding.numel == full.numel()
    assert torch.equal(sharding.unshard(shards), full)


def test_the_first_ranks_hold_what_is_left_over() -> None:
    assert split_sizes(50257, 2) == (25129, 25128)
    assert split_sizes(12, 4, unit=3) == (3, 3, 3, 3)
    assert split_sizes(2, 4) == (1, 1, 0, 0)
    with pytest.raises(ConfigError, match="units of 4"):
        split_sizes(10, 2, unit=4)


def test_fused_blocks_are_split_each() -> None:
    sharding = Sharding.split((6, 2), 0, 2, blocks=[2, 2, 2])
    assert sharding.shard(torch.arange(12).view(6, 2), 1)[:, 0].tolist() == [2, 6, 10]


def test_a_record_covers_every_index_once() -> None:
    with pytest.raises(ConfigError, match="exactly once"):
        Sharding(0, (4,), (((0, 2),), ((1, 4),)))
    with pytest.raises(ConfigError, match="exactly once"):
        Sharding(0, (4,), (((0, 2),), ((2, 3),)))
    sharding = Sharding.split((4,), 0, 2)
    with pytest.raises(ConfigError, match=r"record is for \(4,\)"):
        sharding.shard(torch.zeros(5), 0)
    with pytest.raises(ConfigError, match="in order"):
        sharding.unshard([torch.zeros(2)])


class _Split(DistributedModule):
    def __init__(self, tp: TensorParallel) -> None:
        super().__init__(tp=tp)
        self.add_split_parameter("weight", Sharding.split((4, 6), 1, tp.size))
        self.bias = torch.nn.Parameter(torch.zeros(4))


def test_modules_are_copied_with_their_group_and_pickled_without() -> None:
    tp = TensorParallel("group", 1, 2, group=object())  # type: ignore[arg-type]
    module = _Split(tp)
    assert copy.deepcopy(module).tp is tp
    loaded = pickle.loads(pickle.dumps(module))
    assert loaded.tp == tp
    with pytest.raises(CommunicationError, match="no process group"):
        loaded.tp.require_group()
    assert list(parameter_kinds(loaded).values()) == ["split", "plain"]


def test_a_module_takes_its_part_of_a_full_state() -> None:
    module = _Split(TensorParallel("group", 1, 2))
    full = torch.nn.Linear(6, 4)
    module.load_full(full.state_dict())
    assert torch.equal(module.weight, full.weight[:, 3:])
    assert torch.equal(module.bias, full.bias)


def test_shared_tensors_are_split_alike() -> None:
    tp = TensorParallel("group", 0, 2)
    first, second = _Split(tp), _Split(tp)
    second.weight = first.weight
    model = torch.nn.Sequential(first, second)
    assert set(shardings_of(model)) == {"0.weight", "1.weight"}
    second.shardings["weight"] = Sharding.split((8, 3), 0, 2)
    with pytest.raises(ConfigError, match="split it differently"):
        shardings_of(model)


def test_seeds_are_repeated_on_recomputation_only() -> None:
    one, other = Draws(), Draws()
    one.begin(7, 1)
    other.begin(7, 1)
    first, second = one.seed_for(3, 111), one.seed_for(3, 222)
    # Another rank draws other numbers, in the same order of calls.
    assert (other.seed_for(3, 333), other.seed_for(3, 444)) == (first, second)
    assert one.seed_for(3, 111) == first != second != one.seed_for(4, 111)
    one.begin(7, 2)
    assert one.seed_for(3, 111) != first
