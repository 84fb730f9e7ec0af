"""What a device needs for one kernel: the model of time behind every estimate. Pure.

Note [The model of a device]
A kernel takes what launching it takes, plus the longest of three: its arithmetic at an attainable
share of the peak, its memory traffic at an attainable share of the bandwidth, and, where it cannot
load several elements at a time (operands of different types, broadcast, or in another order), its
elements at a rate that does not depend on their type. Products also fill and drain the
multiprocessors once, which is why small ones are slow. 16-bit products whose rows do not start at
multiples of 16 bytes (a vocabulary of 50257) run on kernels without the fast copies; attention with
heads narrower than 128 leaves the multipliers idle in proportion.

The host issues kernels one after the other; what a unit's kernels take on the device or on the
host, whichever is longer, is its time.

All constants are measured on one NVIDIA H200 (docs/plan.md has the table); other GPUs have the same
shares of their data sheet's peaks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

__all__ = ["CPU", "DeviceModel", "Kernel", "Kind"]

Kind = Literal["product", "unaligned", "attention", "attention_backward", "stream", "rows", "link"]
"""Products, those on unaligned 16-bit rows, attention; element-wise work; work along rows
(normalisation, softmax, sums); messages to the tensor group."""

_SHARES: dict[Kind, float] = {
    "product": 0.79,
    "unaligned": 0.125,
    "attention": 0.58,
    "attention_backward": 0.43,
}
"""Of the peak; products of 8192 x 8192, of 8192 x 1024 x 50257, causal heads of 128."""
_ROWS_SHARE = 0.5
_ATTENTION_WIDTH = 128
_BYTES_PER_ELEMENT = 16.0  # bandwidth over elements a second, where they move one at a time


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch. All numbers grow linearly with the number of samples, from one on.

    Attributes:
        kind: what it is bound by.
        flops: floating-point operations.
        moved: bytes read and written.
        elements: elements that move one at a time; 0 where several do.
        is_16_bit: whether its products are of 16-bit numbers.
        head: width of an attention head.
    """

    kind: Kind
    flops: float = 0.0
    moved: float = 0.0
    elements: float = 0.0
    is_16_bit: bool = False
    head: int = 0

    def toward(self, other: Kernel, share: float) -> Kernel:
        """Return ``other``'s kernel with numbers ``share`` of the way from these to its own."""

        def between(one: float, two: float) -> float:
            return max(0.0, one + share * (two - one))

        return Kernel(
            other.kind, between(self.flops, other.flops), between(self.moved, other.moved),
            between(self.elements, other.elements), other.is_16_bit, other.head,
        )  # fmt: skip


@dataclass(frozen=True)
class DeviceModel:
    """Turns kernels into seconds; see Note [The model of a device]. The defaults are an H200.

    Attributes:
        flops_16: peak operations per second on 16-bit numbers.
        flops_32: peak operations per second on others.
        bytes_per_s: peak memory bandwidth.
        link_bytes_per_s: what a rank sends to its tensor group, in bytes per second.
        compute_share: what large products attain of the peaks.
        bandwidth_share: what large copies attain of the bandwidth.
        launch_s: from one kernel's end to the next one's first byte.
        ramp_s: filling and draining of a product.
        host_s: the host's time to issue a kernel.
    """

    flops_16: float = 989e12
    flops_32: float = 67e12
    bytes_per_s: float = 4.8e12
    link_bytes_per_s: float = 450e9
    compute_share: float = _SHARES["product"]
    bandwidth_share: float = 0.8
    launch_s: float = 2.5e-6
    ramp_s: float = 3e-6
    host_s: float = 20e-6

    def seconds(self, kernel: Kernel, divided: int = 1) -> float:
        """What the device takes for a kernel.

        Args:
            kernel: the kernel.
            divided: number of tensor-parallel ranks that share its work.
        """
        if kernel.kind == "link":
            return kernel.moved / self.link_bytes_per_s
        ramp_s = self.ramp_s if kernel.flops else 0.0
        return self.launch_s + ramp_s + self.busy_seconds(kernel) / divided

    def busy_seconds(self, kernel: Kernel) -> float:
        """What its arithmetic, traffic or elements take, whichever is longest."""
        share = _ROWS_SHARE if kernel.kind == "rows" else self.bandwidth_share
        return max(
            kernel.flops / self._attainable(kernel),
            kernel.moved / (self.bytes_per_s * share),
            kernel.elements * _BYTES_PER_ELEMENT / self.bytes_per_s,
        )

    def unit_seconds(self, kernels: Iterable[Kernel], divided: int = 1) -> float:
        """What the kernels of one unit take, on the device or to be issued."""
        device_s = host_s = 0.0
        for kernel in kernels:
            device_s += self.seconds(kernel, divided)
            host_s += self.host_s
        return max(device_s, host_s)

    def _attainable(self, kernel: Kernel) -> float:
        share = self.compute_share * _SHARES.get(kernel.kind, 1.0) / _SHARES["product"]
        if kernel.head:
            share *= min(1.0, kernel.head / _ATTENTION_WIDTH)
        return share * (self.flops_16 if kernel.is_16_bit else self.flops_32)


CPU = DeviceModel(
    flops_16=100e9, flops_32=100e9, bytes_per_s=20e9, link_bytes_per_s=1e9, launch_s=0.0,
    ramp_s=0.0, host_s=5e-6,
)  # fmt: skip
"""A core of a CPU, which is its own host; by order of magnitude, for the ratios of units."""
