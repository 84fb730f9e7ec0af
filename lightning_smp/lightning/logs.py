"""Hold back `self.log` while a batch runs as microbatches, and log once for the batch afterwards.

Without this, a value logged in each of M microbatches would reach Lightning M times: `on_step`
would show the last microbatch's value, and `sync_dist` would communicate inside the schedule.

Values are neither read nor computed with when they are recorded: a placed tensor (real on one
rank only) stays as it is until `resolve`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Number
from threading import get_ident
from types import TracebackType
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from typing_extensions import Self

from lightning_smp.batch_merge import weighted_mean

__all__ = ["LogBuffer"]

Fetch: TypeAlias = Callable[[list[Tensor]], list[Tensor]]
_Reduction: TypeAlias = Literal["mean", "sum", "max", "min"]


class _Missing:
    """Stands for an instance attribute that was not there."""


@dataclass(slots=True)
class _Call:
    """One call of `log` in one microbatch.

    Attributes:
        num_samples: the microbatch's number of samples.
        name: the key.
        value: what was logged: tensor (maybe placed), number, metric, or something invalid.
        kwargs: the other arguments by name, without `batch_size`.
        batch_size: the caller's own `batch_size`, if any.
        step_value: for a metric, its value for this microbatch, if it computed one.
    """

    num_samples: int
    name: str
    value: Any
    kwargs: dict[str, Any]
    batch_size: Any
    step_value: Any = None

    @property
    def weight(self) -> int:
        return self.num_samples if self.batch_size is None else int(self.batch_size)


@dataclass(slots=True)
class _Record:
    """The calls of one microbatch, and where they are in its order."""

    num_samples: int
    calls: list[_Call] = field(default_factory=list)


class LogBuffer:
    """Records what a module logs in each microbatch and logs the combined values once.

    Use::

        with LogBuffer(module) as buffer:
            for index, piece in enumerate(pieces):
                buffer.begin(index, piece.num_samples)
                module.training_step(piece.value)
        buffer.resolve(fetch)  # placed tensors become real ones, on every rank
        buffer.replay()

    Combined over the microbatches in which a name was logged: `mean` (the default) is weighted by
    the call's own `batch_size`, or else by samples; `sum`, `max`, `min` are what they say. A
    metric object is logged once; its value `on_step` is the mean weighted by samples of its values
    for the microbatches. A single value goes through unchanged. Calls that differ in their
    arguments stay separate calls, so that Lightning refuses them as it always does.

    The module's `log` is shadowed on the instance; `log_dict` goes through it. Works with any
    class that has Lightning's `log`; nothing here depends on which Lightning package it is from.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._log: Callable[..., None] = module.log
        self._records: dict[int, _Record] = {}
        self._current: dict[int, _Record] = {}  # by thread, for the microbatch that it runs
        self._shadowed: Any = _Missing

    def __enter__(self) -> Self:
        attributes = self._module.__dict__
        self._shadowed = attributes.get("log", _Missing)
        attributes["log"] = self._record
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._shadowed is _Missing:
            self._module.__dict__.pop("log", None)
        else:
            self._module.__dict__["log"] = self._shadowed
        self._current.clear()

    def begin(self, index: int, num_samples: int) -> None:
        """Says that the following calls of this thread belong to microbatch `index`.

        Threads do not disturb each other: a microbatch that is suspended in its own thread goes on
        with its own record.
        """
        record = self._records.get(index)
        if record is None:
            record = self._records[index] = _Record(num_samples)
        self._current[get_ident()] = record

    def values(self) -> list[Tensor]:
        """Returns the recorded tensors, in an order that is the same on every rank.

        The order is by microbatch, not by time: ranks may run microbatches in different orders.
        """
        return [value for call in self._calls() for value in _tensors(call)]

    def resolve(self, fetch: Fetch) -> None:
        """Replaces the recorded tensors by real ones.

        Args:
            fetch: given `values()`, returns real detached tensors in the same order. If it
                communicates, every rank must call `resolve`.
        """
        real = iter(fetch(self.values()))
        for call in self._calls():
            if isinstance(call.value, Tensor):
                call.value = next(real)
            if isinstance(call.batch_size, Tensor):
                call.batch_size = next(real)
            if isinstance(call.step_value, Tensor):
                call.step_value = next(real)
        assert next(real, None) is None, "fetch returns one tensor per value"

    def replay(self) -> None:
        """Logs each recorded name once, in the order of its first call, on every rank.

        Raises:
            What Lightning's own `log` raises.
        """
        for calls in self._groups():
            kwargs = dict(calls[0].kwargs)
            if any(call.batch_size is not None for call in calls):
                kwargs["batch_size"] = sum(call.weight for call in calls)
            self._log(calls[0].name, _combined(calls), **kwargs)

    def _record(self, *args: Any, **kwargs: Any) -> None:
        record = self._current.get(get_ident())
        if record is None:
            self._log(*args, **kwargs)  # not inside a microbatch
            return
        arguments = self._by_name(args, kwargs)
        name, value = arguments.pop("name"), arguments.pop("value")
        call = _Call(
            num_samples=record.num_samples,
            name=name,
            value=_snapshot(value),
            kwargs=arguments,
            batch_size=arguments.pop("batch_size", None),
        )
        if _is_metric(value):
            call.step_value = _snapshot(value._forward_cache)
        record.calls.append(call)

    def _by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments of one call of `log` by name."""
        named = {**dict(zip(("name", "value"), args, strict=False)), **kwargs}
        if len(named) == len(args) + len(kwargs) and {"name", "value"} <= named.keys():
            return named
        arguments = inspect.signature(self._log).bind(*args, **kwargs).arguments
        extra = arguments.pop("kwargs", {})  # an overriding `log(self, name, value, **kwargs)`
        return {**arguments, **extra}

    def _calls(self) -> list[_Call]:
        return [call for record in self._used_records() for call in record.calls]

    def _used_records(self) -> list[_Record]:
        """The records of microbatches that logged something, in the order of microbatches."""
        if not any([record.calls for record in self._records.values()]):
            return []
        return [record for _, record in sorted(self._records.items())]

    def _groups(self) -> list[list[_Call]]:
        """Returns the calls that become one, in the order of their first call.

        The second call of a name inside one microbatch joins the second calls of the others: so a
        step that logs a name twice is replayed as two calls.
        """
        groups: dict[tuple[str, int], list[list[_Call]]] = {}
        order: list[list[_Call]] = []
        for record in self._used_records():
            seen: dict[str, int] = {}
            for call in record.calls:
                seen[call.name] = seen.get(call.name, -1) + 1
                alike = groups.setdefault((call.name, seen[call.name]), [])
                group = next((g for g in alike if g[0].kwargs == call.kwargs), None)
                if group is None:
                    group = []
                    alike.append(group)
                    order.append(group)
                group.append(call)
        return order


def _snapshot(value: Any) -> Any:
    """Returns `value` such that later in-place changes by the step do not reach the log.

    Only plain tensors are copied. A placed one must not meet a torch operation here.
    """
    if type(value) is not Tensor:
        return value
    with torch._C.DisableTorchFunction(), torch.no_grad():
        return value.detach().clone()


def _is_metric(value: Any) -> bool:
    """Whether `value` is a torchmetrics `Metric` (told by its parts, without the import)."""
    return hasattr(value, "_forward_cache") and hasattr(value, "compute")


def _tensors(call: _Call) -> list[Tensor]:
    candidates = (call.value, call.batch_size, call.step_value)
    return [value for value in candidates if isinstance(value, Tensor)]


def _combined(calls: Sequence[_Call]) -> Any:
    last = calls[-1]
    if len(calls) == 1:
        return last.value
    if _is_metric(last.value):
        return _combined_metric(calls)
    reduction = _reduction(last.kwargs.get("reduce_fx", "mean"))
    values = [call.value for call in calls]
    if reduction is None or not all(_is_scalar(value) for value in values):
        return next((value for value in values if not _is_scalar(value)), values[0])  # log refuses
    weights = [call.weight for call in calls]
    tensor = next((value for value in values if isinstance(value, Tensor)), None)
    if tensor is None:
        return _combined_numbers(values, weights, reduction)
    return _combined_tensors([_like(value, tensor) for value in values], weights, reduction)


def _combined_metric(calls: Sequence[_Call]) -> Any:
    """Returns the metric, its step value set to that of the batch instead of the last microbatch's.

    Exact for metrics that are means over samples; the value over the epoch is exact for all.
    """
    metric = calls[-1].value
    values = [call.step_value for call in calls]
    if all(isinstance(value, Tensor) and value.shape == values[0].shape for value in values):
        metric._forward_cache = weighted_mean(values, [call.num_samples for call in calls])
    return metric


def _reduction(reduce_fx: Any) -> _Reduction | None:
    """Returns the name of a reduction that Lightning knows; None for those it refuses."""
    known: dict[Any, _Reduction] = {
        "mean": "mean",
        "avg": "mean",
        "sum": "sum",
        "max": "max",
        "min": "min",
        torch.mean: "mean",
        torch.sum: "sum",
        torch.max: "max",
        torch.min: "min",
        sum: "sum",
        max: "max",
        min: "min",
    }
    return known.get(reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx)


def _is_scalar(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, Number)


def _like(value: Any, tensor: Tensor) -> Tensor:
    """Returns a number, or a tensor with one element, as a tensor without dimensions."""
    if isinstance(value, Tensor):
        return value.detach().reshape(())
    return torch.as_tensor(value, dtype=tensor.dtype, device=tensor.device)


def _combined_numbers(values: list[Any], weights: list[int], reduction: _Reduction) -> Any:
    if reduction == "sum":
        return sum(values)
    if reduction == "max":
        return max(values)
    if reduction == "min":
        return min(values)
    if all(value == values[0] for value in values):
        return values[0]
    if not sum(weights):
        return sum(values) / len(values)
    return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)


def _combined_tensors(values: list[Tensor], weights: list[int], reduction: _Reduction) -> Tensor:
    if reduction == "mean":
        return weighted_mean(values, weights)
    stacked = torch.stack(values)
    if reduction == "sum":
        return stacked.sum(dtype=None if stacked.dtype is torch.bool else stacked.dtype)
    return stacked.amax() if reduction == "max" else stacked.amin()
