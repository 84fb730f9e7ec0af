"""A hash of how a deferred tensor is made: ranks with equal ones will hold equal values."""

from __future__ import annotations

import hashlib
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_smp.deferred.record import held_of
from lightning_smp.deferred.tape import Buffer, Operand, Ref, needed
from lightning_smp.wire.encode import tensor_bytes

__all__ = ["fingerprint"]


def fingerprint(tensor: Tensor, num_bytes: int = 16) -> bytes:
    """Returns a hash of a deferred tensor's operations, their operands and random states.

    Nothing of the tensor is made. Different hashes say nothing: there are many ways to one value.
    """
    held = held_of(tensor)
    assert held is not None
    ref = held.ref()
    digest = hashlib.blake2b(digest_size=num_bytes)
    places: dict[Buffer, int] = {}

    def note(leaf: Any) -> None:
        if isinstance(leaf, Ref):
            place = places.setdefault(leaf.buffer, len(places))
            said = (place, leaf.buffer.num_bytes, leaf.dtype, leaf.size, leaf.stride, leaf.offset)
            digest.update(repr(said).encode())
        elif isinstance(leaf, Operand):
            value = leaf.value().detach().cpu().contiguous()
            digest.update(repr((value.dtype, value.shape)).encode())
            digest.update(tensor_bytes(value))
        else:
            digest.update(repr(leaf).encode())

    for operation in needed([ref.buffer]):
        digest.update(repr((str(operation.func), operation.default_dtype)).encode())
        if operation.state is not None:
            digest.update(tensor_bytes(operation.state))
        for leaf in tree_leaves((operation.args, operation.kwargs)):
            note(leaf)
        for _, result in operation.results:
            note(result)
    note(ref)
    return digest.digest()
