"""What moves between stages arrives as it was; what cannot move is refused by name."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_smp.errors import UnsupportedError
from lightning_smp.program import TensorSpec
from lightning_smp.weights.migration import Migration
from lightning_smp.weights.ownership import Ownership, release
from lightning_smp.weights.packing import pack, shapes, unpack
from lightning_smp.wire import dumps, loads

_CPU = torch.device("cpu")


def test_plain_data_comes_back_as_it_was() -> None:
    big, strided = torch.randn(5, 7), torch.randn(6, 8).t()
    value = {
        "step": torch.tensor(3.0), 2: [big, (strided, None)], "empty": torch.empty(0, 3),
        "kept": OrderedDict(mask=torch.ones(3, 9, dtype=torch.bool), lr=0.1),
    }  # fmt: skip
    tensors: list[Tensor] = []
    template = loads(dumps(pack(value, tensors, "state")))
    assert [tuple(t.shape) for t in tensors] == [shape.shape for shape in shapes(template)]
    assert [t.stride() for t in tensors] == [shape.stride for shape in shapes(template)]
    found = unpack(template, tensors)
    assert type(found["kept"]) is OrderedDict
    assert torch.equal(found["step"], value["step"])
    assert found[2][1][0].stride() == strided.stride()
    assert found["empty"].shape == (0, 3)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": [object()]}, r"state\['a'\] is a builtins.object"),
        (torch.eye(3).to_sparse(), "layout torch.sparse_coo"),
        ([deque()], "is a collections.deque"),
    ],
)
def test_refused_by_name(value: Any, text: str) -> None:
    with pytest.raises(UnsupportedError, match=text):
        pack(value, [], "state")


class _Line:
    """Both directions between two stages, in one process."""

    def __init__(self) -> None:
        self.sent: deque[Tensor] = deque()

    def send(self, tensor: Tensor, stage: int, *, copy: bool) -> None:
        self.sent.append(tensor.clone(memory_format=torch.contiguous_format))

    def receive(self, stage: int, spec: TensorSpec) -> Tensor:
        tensor = self.sent.popleft()
        assert tuple(tensor.shape) == spec.shape
        assert tensor.dtype == spec.dtype
        return tensor

    def finish(self) -> None:
        """Nothing waits here."""


class _Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 6).t())
        self.register_buffer("table", torch.randn(40))
        self.register_buffer("again", self.table)
        self.seen: Any = None
        self.alias = [self.weight]

    def get_extra_state(self) -> Any:
        return {"extra": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state["extra"]


def _stage(rank: int) -> tuple[nn.Module, torch.optim.Optimizer, Ownership, Ownership]:
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": _Unit(), "b": _Unit()})
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    names = ("a", "b")

    def owned(homes: tuple[int, int]) -> Ownership:
        given = dict(zip(names, homes, strict=True))
        return Ownership(
            model, {f"{n}.weight": (s,) for n, s in given.items()}, pp_rank=rank, pp_size=2,
            buffers={f"{n}.{b}": (s,) for n, s in given.items() for b in ("table", "again")},
            units=given,
        )  # fmt: skip

    return model, optimizer, owned((0, 0)), owned((0, 1))


def _migrations() -> Iterator[Any]:
    for rank in (0, 1):
        model, optimizer, old, new = _stage(rank)
        if rank == 0:
            for _, p in model.named_parameters():
                p.grad = torch.randn_like(p)
            optimizer.step()
            model["b"].seen = (3, torch.arange(50))
        else:
            release(model, old)
        yield model, optimizer, Migration(model, old, new, {"b": (0, 1)}, [optimizer])


def test_all_that_a_unit_holds_moves() -> None:
    (source, adam, out), (target, other, into) = _migrations()
    weight, table = source["b"].weight, source["b"].table
    data, gradient = weight.detach().clone(), weight.grad
    state = {name: value.clone() for name, value in adam.state[weight].items()}
    new_weight = target["b"].weight
    assert out.mark == into.mark
    offers = loads(dumps([out.offer(), into.offer()]))
    line = _Line()
    out.run(offers, line, _CPU)
    into.run(offers, line, _CPU)
    assert target["b"].weight is new_weight
    assert target["b"].alias[0] is new_weight
    assert torch.equal(new_weight, data)
    assert new_weight.stride() == data.stride()
    assert torch.equal(new_weight.grad, gradient)
    assert set(other.state) == {new_weight}
    for name, value in state.items():
        assert torch.equal(other.state[new_weight][name], value)
    assert torch.equal(target["b"].table, table)
    assert target["b"].again is target["b"].table
    assert target["b"].seen[0] == 3
    assert torch.equal(target["b"].extra[1], torch.arange(50))
    assert source["b"].weight is weight  # a placeholder now
    assert weight.grad is None
    assert weight.untyped_storage().nbytes() == weight.element_size()
    assert set(adam.state) == {source["a"].weight}
    assert out.moved_bytes == into.moved_bytes > 4 * data.nbytes
