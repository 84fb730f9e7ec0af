"""What common GPUs can do, from their data sheets, and what of it a training run attains. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lightning_smp.partitioning.device import DeviceModel

__all__ = ["DEVICES", "Device"]

_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One GPU.

    Attributes:
        flops_16: Peak dense operations per second on 16-bit numbers.
        flops_32: Peak operations per second on 32-bit numbers, without TF32.
        bandwidth: Memory bandwidth in bytes per second.
        memory: Usable memory in bytes.
        link: Bandwidth to a GPU of the same host, one direction, in bytes per second.
        network: Bandwidth to a GPU of another host, one direction, in bytes per second.
        compute_share: Share of the peak that large products attain.
        bandwidth_share: Share of the bandwidths that large transfers attain.
    """

    flops_16: float
    flops_32: float
    bandwidth: float
    memory: float
    link: float
    network: float
    compute_share: float = 0.79
    bandwidth_share: float = 0.8

    def model(self) -> DeviceModel:
        """Return the model of time."""
        return DeviceModel(
            flops_16=self.flops_16,
            flops_32=self.flops_32,
            bytes_per_s=self.bandwidth,
            link_bytes_per_s=self.link * self.bandwidth_share,
            compute_share=self.compute_share,
            bandwidth_share=self.bandwidth_share,
        )

    def transfer_s(self, num_bytes: float, *, in_host: bool) -> float:
        """Return the seconds that a message to another GPU takes."""
        return num_bytes / ((self.link if in_host else self.network) * self.bandwidth_share)

    def all_reduce_s(self, num_bytes: float, num_ranks: int, *, in_host: bool) -> float:
        """Return the seconds of a ring all-reduce: every byte goes around almost twice."""
        rounds = 2.0 * (num_ranks - 1) / num_ranks
        return self.transfer_s(rounds * num_bytes, in_host=in_host)


def _gpu(
    flops_16: float, flops_32: float, bandwidth: float, memory: float, link: float, network: float
) -> Device:
    """Tera operations per second (2), then TB/s, GiB, GB/s, GB/s."""
    return Device(
        flops_16=flops_16 * 1e12, flops_32=flops_32 * 1e12, bandwidth=bandwidth * 1e12,
        memory=memory * _GIB, link=link * 1e9, network=network * 1e9,
    )  # fmt: skip


DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        "b200": _gpu(2250, 80, 8.0, 178, 900, 50),
        "h200": _gpu(989, 67, 4.8, 139.8, 450, 50),
        "h100": _gpu(989, 67, 3.35, 79.1, 450, 50),
        "a100-80gb": _gpu(312, 19.5, 2.04, 79.1, 300, 25),
        "a100-40gb": _gpu(312, 19.5, 1.55, 39.4, 300, 25),
        "v100-32gb": _gpu(125, 15.7, 0.9, 31.7, 150, 12.5),
        "l40s": _gpu(362, 91.6, 0.86, 44.5, 25, 12.5),
        "rtx4090": _gpu(165, 82.6, 1.01, 23.6, 25, 12.5),
        "t4": _gpu(65, 8.1, 0.3, 14.6, 12, 6),
        "mi300x": _gpu(1307, 163, 5.3, 191, 448, 50),
    }
)
"""By name. Dense peaks, without sparsity; network as in common 8-GPU hosts."""
