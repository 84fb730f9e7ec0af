"""Brings values from all stages of a pipeline to the one rank that writes, stage by stage.

A stage first tells what it has (keys, shapes, dtypes, and the values that are no tensors), then
sends the tensors as raw bytes. Nobody but the writer holds more than its own part and one piece.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_smp.errors import CommunicationError
from lightning_smp.groups import Groups
from lightning_smp.wire import recv_object, send_object

__all__ = ["PipelineLinks", "collect"]

_Key = TypeVar("_Key", bound=Hashable)

_PIECE_BYTES: Final = 256 * 2**20  # what is staged at once where the group needs another device


@dataclass(frozen=True, kw_only=True)
class PipelineLinks:
    """How this rank reaches the writer.

    Attributes:
        group: holds the ranks of this pipeline; None if it has one stage.
        ranks: global rank of each stage of this pipeline.
        pp_rank: this rank's stage.
        device: where messages of `group` must lie: the CPU for gloo, this rank's GPU for NCCL.
        writer: global rank of the writer; other pipelines have nothing to do.
        tensor_group: holds the ranks of this tensor group; None if it is one rank.
        tensor_ranks: their global ranks.
        tp_rank_of: position in its tensor group of each rank of this replica.
    """

    group: dist.ProcessGroup | None
    ranks: tuple[int, ...]
    pp_rank: int
    device: torch.device
    writer: int = 0
    tensor_group: dist.ProcessGroup | None = None
    tensor_ranks: tuple[int, ...] = ()
    tp_rank_of: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def over(cls, groups: Groups, device: torch.device) -> PipelineLinks:
        """Return the links over the pipeline of `groups`; gloo stages on the CPU."""
        is_gloo = dist.get_backend(groups.pp) == "gloo"

        def between(axis: Literal["pp", "tp"]) -> dist.ProcessGroup | None:
            if len(groups.topology.group(axis, groups.rank)) == 1:
                return None
            return groups.messages(axis) if is_gloo else getattr(groups, axis)

        return cls(
            group=between("pp"),
            ranks=groups.topology.group("pp", groups.rank),
            pp_rank=groups.pp_rank,
            device=torch.device("cpu") if is_gloo else device,
            tensor_group=between("tp"),
            tensor_ranks=groups.topology.group("tp", groups.rank),
            tp_rank_of={
                rank: groups.topology.tp_rank(rank)
                for rank in groups.topology.group("mp", groups.rank)
            },
        )

    def over_tensor_group(self) -> PipelineLinks | None:
        """Return links to the member of this tensor group that is in the writer's pipeline.

        None where there is no group, or the writer is in another replica.
        """
        place = self.tp_rank_of.get(self.writer)
        if self.tensor_group is None or place is None:
            return None
        rank = self.tensor_ranks.index(self.ranks[self.pp_rank])
        leader = self.tensor_ranks[place]
        return PipelineLinks(
            group=self.tensor_group, ranks=self.tensor_ranks, pp_rank=rank, device=self.device,
            writer=leader,
        )  # fmt: skip

    @property
    def writer_stage(self) -> int | None:
        """The stage of the writer; None in pipelines that it does not belong to."""
        return self.ranks.index(self.writer) if self.writer in self.ranks else None

    def source_of(self, stages: tuple[int, ...]) -> int:
        """Return the stage that the writer takes a value from: itself, or the lowest it is on."""
        assert self.writer_stage is not None
        return self.writer_stage if self.writer_stage in stages else stages[0]


def collect(entries: Mapping[_Key, object], links: PipelineLinks) -> dict[_Key, object]:
    """Return on the writer the entries of all other stages, on the CPU; nothing elsewhere.

    Collective over the writer's pipeline: each of its ranks must call; other pipelines may.

    Args:
        entries: what this stage contributes (ignored on the writer). Keys are str, int or tuples
            of them. Dense tensors travel as they are, other values by `lightning_smp.wire`. A
            tensor given under several keys travels once and is one tensor on the writer too.
        links: how to reach the writer.

    Raises:
        TypeError: on the sender, a value that cannot travel.
        CommunicationError: on the writer, if a sender had such a value.
    """
    if links.writer_stage is None or links.group is None:
        return {}
    if links.pp_rank != links.writer_stage:
        _send(entries, links)
        return {}
    received: dict[_Key, object] = {}
    for stage, rank in enumerate(links.ranks):
        if stage != links.writer_stage:
            received.update(cast("dict[_Key, object]", _receive(rank, links)))
    return received


def _send(entries: Mapping[_Key, object], links: PipelineLinks) -> None:
    tensors: list[Tensor] = []
    place_of: dict[tuple[Any, ...], int] = {}
    places: list[tuple[_Key, int]] = []
    others: list[tuple[_Key, object]] = []
    for key, value in entries.items():
        if not _travels_raw(value):
            others.append((key, value))
            continue
        assert isinstance(value, Tensor)
        place = place_of.setdefault(_identity(value), len(tensors))
        if place == len(tensors):
            tensors.append(value)
        places.append((key, place))
    shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
    send_object((places, others, shapes), links.writer, links.group, links.device)
    for tensor in tensors:
        for piece in _pieces(_as_bytes(tensor)):
            dist.send(piece.to(links.device), links.writer, links.group)


def _receive(rank: int, links: PipelineLinks) -> dict[Hashable, object]:
    manifest = recv_object(rank, links.group, links.device)
    if not (isinstance(manifest, tuple) and len(manifest) == 3):
        raise CommunicationError(
            f"Expected the list of what rank {rank} contributes, met {type(manifest).__name__}. "
            f"Do all ranks save at the same time?"
        )
    places, others, shapes = manifest
    tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]
    for tensor in tensors:
        for piece in _pieces(_as_bytes(tensor)):
            if links.device.type == "cpu":
                dist.recv(piece, rank, links.group)
            else:
                staged = torch.empty_like(piece, device=links.device)
                dist.recv(staged, rank, links.group)
                piece.copy_(staged)
    return dict(others) | {key: tensors[place] for key, place in places}


def _travels_raw(value: object) -> bool:
    return (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and not value.is_quantized
        and not value.is_meta
    )


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    """Return what two views of the same numbers have in common."""
    return (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device)


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a tensor in C order as uint8 [bytes]: backends lack some dtypes."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return dense.reshape(-1).view(torch.uint8)


def _pieces(data: Tensor) -> Iterator[Tensor]:
    return (piece for piece in data.split(_PIECE_BYTES) if piece.numel())
