"""What an atom does in one microbatch, before any device is known, and what it costs on one. Pure.

Note [Samples]
All of it grows linearly with the number of samples: some once a microbatch (casts and gradients of
weights), some with each sample. So two analyses, of different numbers of samples, tell of any other
number, kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from lightning_smp.partitioning.device import DeviceModel, Kernel

__all__ = ["AtomCost", "Work", "scaled"]


@dataclass(frozen=True)
class AtomCost:
    """What one step on one microbatch costs in one atom.

    Attributes:
        calls: Number of calls by outer code.
        flops: Floating-point operations of the forwards.
        moved_bytes: Memory traffic of the forwards.
        forward_s: Estimated time of the forwards, in seconds.
        backward_s: Estimated time of the backwards, in seconds; 0 where no gradient flows.
        output_bytes: Size of the results of the last call.
        saved_bytes: Activations kept for the backward.
        temporary_bytes: What else exists at the fullest moment of its forward or backward.
        parameters: Number of parameter elements.
        parameter_bytes: Their size.
        state_bytes: Parameters and buffers, with gradients and two optimizer states for trainable
            ones.
    """

    calls: int = 0
    flops: float = 0
    moved_bytes: float = 0
    forward_s: float = 0.0
    backward_s: float = 0.0
    output_bytes: float = 0
    saved_bytes: float = 0
    temporary_bytes: float = 0
    parameters: int = 0
    parameter_bytes: int = 0
    state_bytes: int = 0

    @property
    def compute_s(self) -> float:
        """Forward plus backward, in seconds."""
        return self.forward_s + self.backward_s

    def __add__(self, other: AtomCost) -> AtomCost:
        return AtomCost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(AtomCost)))


@dataclass(frozen=True)
class Work:
    """What one atom does with one microbatch.

    Attributes:
        forward: Kernels of its forwards.
        backward: Kernels of its backwards.
        calls: Number of calls by outer code.
        output_bytes: Size of the results of the last call.
        saved_bytes: Activations kept for the backward.
        temporary_bytes: What else exists at the fullest moment of its forward or backward.
    """

    forward: tuple[Kernel, ...] = ()
    backward: tuple[Kernel, ...] = ()
    calls: int = 0
    output_bytes: float = 0.0
    saved_bytes: float = 0.0
    temporary_bytes: float = 0.0

    def cost(self, device: DeviceModel, divided: int = 1) -> AtomCost:
        """Return what it costs, without parameters.

        Args:
            device: the device.
            divided: number of tensor-parallel ranks that share the kernels' work.
        """
        return AtomCost(
            calls=self.calls,
            flops=sum(kernel.flops for kernel in self.forward),
            moved_bytes=sum(kernel.moved for kernel in self.forward),
            forward_s=device.unit_seconds(self.forward, divided),
            backward_s=device.unit_seconds(self.backward, divided),
            output_bytes=self.output_bytes,
            saved_bytes=self.saved_bytes,
            temporary_bytes=self.temporary_bytes,
        )

    def toward(self, other: Work, share: float) -> Work | None:
        """Return the work ``share`` of the way to ``other``; None if their kernels differ."""
        forward = _toward(self.forward, other.forward, share)
        backward = _toward(self.backward, other.backward, share)
        if forward is None or backward is None:
            return None

        def between(one: float, two: float) -> float:
            return max(0.0, one + share * (two - one))

        return Work(
            forward, backward, self.calls,
            output_bytes=between(self.output_bytes, other.output_bytes),
            saved_bytes=between(self.saved_bytes, other.saved_bytes),
            temporary_bytes=between(self.temporary_bytes, other.temporary_bytes),
        )  # fmt: skip


_NOTHING = Kernel("stream")


def scaled(work: Work, factor: float) -> Work:
    """Return work that is proportional to the number of samples, for ``factor`` times as many."""
    return Work(
        tuple(_NOTHING.toward(kernel, factor) for kernel in work.forward),
        tuple(_NOTHING.toward(kernel, factor) for kernel in work.backward),
        work.calls,
        output_bytes=factor * work.output_bytes,
        saved_bytes=factor * work.saved_bytes,
        temporary_bytes=factor * work.temporary_bytes,
    )


def _toward(
    ones: Sequence[Kernel], others: Sequence[Kernel], share: float
) -> tuple[Kernel, ...] | None:
    if [kernel.kind for kernel in ones] != [kernel.kind for kernel in others]:
        return None
    return tuple(one.toward(other, share) for one, other in zip(ones, others, strict=True))
