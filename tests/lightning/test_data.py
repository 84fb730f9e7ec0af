import dataclasses
import logging
import random
import sys
from collections import OrderedDict, defaultdict, namedtuple
from datetime import datetime
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)
from transformers import BatchEncoding
from transformers.modeling_outputs import SequenceClassifierOutput

from lightning_smp.batch import batch_digest
from lightning_smp.deploy.same_batch import check_same_batch
from lightning_smp.errors import CommunicationError, ConfigError, UnsupportedError
from lightning_smp.lightning.data import broadcast_batch, prepare_dataloader
from tests.support.launch import gloo_group, run_ranks

CPU = torch.device("cpu")
Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    name: str


class Noise(Dataset):
    """Draws from all generators, as an augmentation does."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor([torch.rand(()), random.random(), np.random.rand()])


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


class OwnLoader(DataLoader):
    def __init__(self, required, **kwargs):
        super().__init__(range(10), batch_size=4, **kwargs)


class Pairs:
    """A batch sampler that is none of torch's."""

    def __init__(self):
        self.drop_last = False
        self.sampler = range(5)

    def __len__(self):
        return 2 if self.drop_last else 3

    def __iter__(self):
        return iter([[0, 1], [2, 3], [4]][: len(self)])


class Fixed:
    def __iter__(self):
        return iter([[0, 1], [2]])

    def __len__(self):
        return 2


prepare = partial(prepare_dataloader, training=True, drop_last=True, dp_rank=0, seed_workers=False)


class TestDropLast:
    def test_last_batch_is_dropped_and_announced(self, caplog):
        loader = DataLoader(range(10), batch_size=4)
        with caplog.at_level(logging.INFO, "lightning_smp"):
            new = prepare(loader)
        assert [len(batch) for batch in new] == [4, 4]
        assert len(new) == 2
        assert new.drop_last
        assert [record.getMessage() for record in caplog.records] == [
            "drop_last=True: the training loader drops 2 of 10 samples an epoch on this rank."
        ]
        assert [len(batch) for batch in loader] == [4, 4, 2], "the user's loader is not changed"
        assert new.dataset is loader.dataset
        assert new.sampler is loader.sampler

    @pytest.mark.parametrize(
        "loader",
        [
            DataLoader(range(10), batch_size=1),
            DataLoader(range(10), batch_size=None),
            DataLoader(range(10), batch_size=4, drop_last=True),
            [1, 2, 3],
        ],
    )
    def test_loaders_without_a_short_batch_stay(self, loader, caplog):
        with caplog.at_level(logging.INFO, "lightning_smp"):
            assert prepare(loader) is loader
        assert not caplog.records

    def test_only_training_and_only_if_asked(self):
        loader = DataLoader(range(10), batch_size=4)
        assert prepare(loader, training=False) is loader
        assert prepare(loader, drop_last=False) is loader

    def test_even_epochs_are_not_announced(self, caplog):
        with caplog.at_level(logging.INFO, "lightning_smp"):
            assert len(prepare(DataLoader(range(8), batch_size=4))) == 2
        assert not caplog.records

    def test_the_order_of_samples_is_kept(self):
        loader = DataLoader(range(10), batch_size=4, shuffle=True)
        torch.manual_seed(1)
        expected = [batch.tolist() for batch in loader][:2]
        torch.manual_seed(1)
        assert [batch.tolist() for batch in prepare(loader)] == expected

    def test_subclass_with_own_arguments(self):
        loader = OwnLoader("anything", num_workers=0)
        new = prepare(loader)
        assert type(new) is OwnLoader
        assert len(list(new)) == 2

    def test_custom_batch_samplers(self, caplog):
        with caplog.at_level(logging.INFO, "lightning_smp"):
            new = prepare(DataLoader(range(5), batch_sampler=Pairs()))
            assert [len(batch) for batch in new] == [2, 2]
            sampler = BatchSampler(SequentialSampler(range(5)), 2, False)
            assert len(list(prepare(DataLoader(range(5), batch_sampler=sampler)))) == 2
            assert not sampler.drop_last
            fixed = DataLoader(range(5), batch_sampler=Fixed())
            assert prepare(fixed) is fixed
        messages = [record.getMessage() for record in caplog.records]
        assert "drops 1 of 3 batches" in messages[0]
        assert "drops 1 of 5 samples" in messages[1]
        assert "Fixed" in messages[2]

    def test_iterable_dataset(self):
        new = prepare(DataLoader(Stream(), batch_size=4))
        assert [len(batch) for batch in new] == [4, 4]

    def test_nothing_left_is_an_error(self):
        with pytest.raises(ConfigError, match="all of the 3 training samples"):
            prepare(DataLoader(range(3), batch_size=4))


class TestWorkers:
    def batches(self, dp_rank, seed_workers=True, **kwargs):
        loader = DataLoader(Noise(), batch_size=2, num_workers=2, **kwargs)
        loader = prepare(loader, dp_rank=dp_rank, drop_last=False, seed_workers=seed_workers)
        torch.manual_seed(3)
        return torch.cat(list(loader))

    def test_seeds_follow_the_dp_rank(self):
        one = self.batches(0)
        assert torch.equal(one, self.batches(0)), "equal on all ranks of a replica"
        assert not (one == self.batches(1)).any()

    def test_a_single_process_draws_what_lightning_gives_it(self):
        from lightning.fabric.utilities.seed import pl_worker_init_function

        plain = partial(pl_worker_init_function, rank=0)
        assert torch.equal(self.batches(0), self.batches(0, worker_init_fn=plain))

    def test_other_loaders_are_left_alone(self):
        own = DataLoader(Noise(), num_workers=1, worker_init_fn=print)
        assert prepare(own, seed_workers=True) is own
        main = DataLoader(Noise())
        assert prepare(main, seed_workers=True) is main
        assert torch.equal(self.batches(0, seed_workers=False), self.batches(1, seed_workers=False))

    def test_the_package_in_use_is_taken(self, monkeypatch):
        pytest.importorskip("pytorch_lightning")
        monkeypatch.delitem(sys.modules, "lightning.pytorch", raising=False)
        loader = prepare(DataLoader(Noise(), num_workers=1), seed_workers=True, dp_rank=3)
        assert loader.worker_init_fn.func.__module__ == "lightning_fabric.utilities.seed"
        assert loader.worker_init_fn.keywords == {"rank": 3}


def test_random_sampler_is_kept():
    sampler = RandomSampler(range(10), generator=torch.Generator())
    assert prepare(DataLoader(range(10), batch_size=4, sampler=sampler)).sampler is sampler


def _check(rank, world_size, kind):
    values = {"equal": [1, 1, 1], "one": [1, 2, 1], "all": [1, 2, 3]}[kind]
    with gloo_group():
        try:
            check_same_batch(batch_digest(values[rank]), dist.group.WORLD, range(world_size), 7)
        except CommunicationError as error:
            return str(error)
    return None


def test_equal_batches_pass():
    assert run_ranks(_check, 2, "equal") == [None, None]


def test_different_batches_are_an_error_on_every_rank():
    messages = run_ranks(_check, 3, "one")
    assert len(set(messages)) == 1
    assert "Step 7" in messages[0]
    assert "one on ranks 0, 2 and a different one on rank 1." in messages[0]
    for fix in ('batch_source="leader"', "use_distributed_sampler", "seed_everything"):
        assert fix in messages[0]
    three = run_ranks(_check, 3, "all")[0]
    assert "one on rank 0 and a different one on rank 1; a different one on rank 2." in three


def _batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 3, generator=generator)
    return {
        "floats": [x, x.double(), x.bfloat16(), x.half(), x.to(torch.complex64)],
        "others": (x > 0, x.long(), x.to(torch.uint8), x.to(torch.float8_e4m3fn)),
        "odd": [torch.tensor(3.0), torch.empty(0, 2), x.t(), x.conj(), x[:, ::2]],
        "image": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "leaf": torch.ones(2, requires_grad=True),
        "pair": Pair(x, "text"),
        "sample": Sample(x, "name"),
        "encoding": BatchEncoding({"input_ids": x.long()}),
        "output": SequenceClassifierOutput(logits=x),
        "ordered": OrderedDict(b=x, a=1),
        "default": defaultdict(list, {3: x}),
        "packed": pack_sequence([x, x[:2]]),
        "set": {1, 2},
        "array": np.arange(3),
        "names": ["a", None, 1, 2.5, True, b"z", datetime(2020, 1, 1)],
        5: torch.Size([1, 2]),
    }


def _same(one, other):
    if isinstance(one, torch.Tensor):
        assert one.dtype is other.dtype
        assert one.requires_grad == other.requires_grad
        assert one.shape == other.shape
        fmt = torch.channels_last
        assert one.ndim != 4 or one.is_contiguous(memory_format=fmt)
        assert batch_digest(one) == batch_digest(other)


def _broadcast(rank, world_size, template):
    with gloo_group():
        groups = dist.group.WORLD, dist.new_group(backend="gloo")
        own = _batch() if rank == 1 or template else None
        if template and rank == 0:
            own = _batch(seed=5)
        got = broadcast_batch(own, 1, *groups, CPU)
    expected = _batch()
    expected["image"] = got["image"]
    assert batch_digest(got) == batch_digest(expected)
    for key, value in expected.items():
        assert type(got[key]) is type(value), key
        for one, other in zip(_tensors(got[key]), _tensors(value), strict=True):
            _same(one, other)
    assert got["output"].logits is got["output"]["logits"]
    assert got["encoding"].input_ids.dtype is torch.int64
    assert torch.equal(got["sample"].x, expected["sample"].x)
    assert (got is own) == (rank == 1)
    return batch_digest(got)


def _tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [x for x in value if isinstance(x, torch.Tensor)] if isinstance(value, list) else []


@pytest.mark.parametrize("template", [False, True])
def test_batch_is_broadcast_with_types(template):
    one, other = run_ranks(_broadcast, 2, template)
    assert one == other


def _broadcast_local_class(rank, world_size):
    Local = namedtuple("Local", "x")

    @dataclasses.dataclass
    class Data:
        x: object

    value = [Local(torch.ones(2)), Data(torch.ones(1))]
    with gloo_group():
        with_template = broadcast_batch(value, 0, None, None, CPU)
        without = broadcast_batch(value if rank == 0 else None, 0, None, None, CPU)
    names = [[type(item).__name__ for item in found] for found in (with_template, without)]
    return names, batch_digest(without[0][0])


def test_unknown_classes_become_plain_containers():
    leader, follower = run_ranks(_broadcast_local_class, 2)
    assert leader[0] == [["Local", "Data"], ["Local", "Data"]]
    assert follower[0] == [["Local", "Data"], ["tuple", "dict"]]
    assert leader[1] == follower[1]


def _broadcast_refused(rank, world_size):
    errors = []
    with gloo_group():
        for value in (SimpleNamespace(x=1), torch.eye(2).to_sparse(), {object(): 1}):
            with pytest.raises(UnsupportedError) as caught:
                broadcast_batch({"v": [value]}, 0, None, None, CPU)
            errors.append(str(caught.value))
        assert broadcast_batch(rank, 0, None, None, CPU) == 0
    return errors


def test_what_cannot_be_sent_is_refused_on_every_rank():
    one, other = run_ranks(_broadcast_refused, 2)
    assert one == other
    assert one[0].startswith("batch['v'][0] is a types.SimpleNamespace")
    assert one[1].startswith("batch['v'][0] is a tensor that cannot be broadcast (torch.sparse_coo")
    assert "(the key)" in one[2]
