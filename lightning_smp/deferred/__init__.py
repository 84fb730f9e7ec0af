"""Deferred construction: tensors that remember how they are made instead of holding memory."""

from lightning_smp.deferred.fingerprint import fingerprint
from lightning_smp.deferred.mode import deferring
from lightning_smp.deferred.parts import Part, take_part
from lightning_smp.deferred.realize import (
    attribute_tensors,
    is_deferred,
    realize,
    realize_module,
    value_of,
)
from lightning_smp.deferred.tape import default_dtype
from lightning_smp.deferred.tensor import DeferredTensor, become

__all__ = [
    "DeferredTensor",
    "Part",
    "attribute_tensors",
    "become",
    "default_dtype",
    "deferring",
    "fingerprint",
    "is_deferred",
    "realize",
    "realize_module",
    "take_part",
    "value_of",
]
