"""Steps whose calls another rank passes by: what they keep, tag, change and vary on the way.

Each step is one device's ordinary code. What varies, varies with the number of the step or with the
content of the microbatch, so that all ranks see it. Where a rank took a stale placeholder or an
argument of another microbatch for its own, a number that another rank computes would be wrong.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.placed.steps import Chain

__all__ = ["ARGUMENTS", "CHANGES", "MODES", "OBJECTS", "PATHS", "VIEWS", "Double", "Taking"]

Step = Callable[[Any, Tensor, int], Any]


class Double(Chain):
    """Four linear layers in float64, and a place for what the step keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.double()
        self.kept: list[Any] = []
        self.count = 0


class Unit(nn.Module):
    """A layer that all of its arguments have a part in."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor, *others: Any, **named: Any) -> Tensor:
        y = torch.tanh(x @ self.weight)
        for place, other in enumerate((*others, *named.values()), start=2):
            y = _with(y, other) * place
        for name, other in named.items():
            y = y + len(name) * _with(torch.ones_like(y), other)
        return y


def _with(y: Tensor, other: Any) -> Tensor:
    if isinstance(other, Tensor):
        return y + other.sum(-1).sum() * other.dim() + other.shape[-1]
    if isinstance(other, slice):
        return y[other]
    if isinstance(other, (list, tuple)):
        for part in other:
            y = _with(y, part) * 0.9
        return y + len(other)
    if isinstance(other, dict):
        return _with(y, list(other.values()))
    if isinstance(other, (bool, str, type(None))):
        return y + {"add": 1.0, "sub": -1.0, True: 2.0, False: 3.0, None: 4.0}[other]
    if isinstance(other, torch.dtype):
        return y.to(other).to(y.dtype)
    return y * other if isinstance(other, (int, float, np.integer)) else y + other.real


class Taking(Double):
    """Four units that take more than one argument."""

    def __init__(self) -> None:
        super().__init__()
        for name in "abcd":
            self.add_module(name, Unit())
        self.double()


def mark(x: Tensor) -> int:
    """A number from the content of a microbatch: 0 in those that a program is recorded from."""
    return int(x[0, 0].item())


def end(model: Any, h: Tensor) -> Tensor:
    return model.d(torch.tanh(model.c(h))).square().mean()


# Arguments that vary.


def varying(choose: Callable[[int], Any], *, named: bool = False) -> Step:
    """An argument of two units on different ranks, by the step and by the microbatch."""

    def step(model: Any, x: Tensor, number: int) -> Tensor:
        one, other = choose(number // 2), choose(number // 2 + mark(x))
        h = model.c(model.a(x, by=one), by=other) if named else model.c(model.a(x, one), other)
        return (h.sum() + end(model, h.sum(0).expand(2, 4))) / 7

    return step


def of(*items: Any) -> Callable[[int], Any]:
    return lambda k: items[k % len(items)]


ARGUMENTS: dict[str, Step] = {
    "float": varying(lambda k: 0.5 + k),
    "int": varying(lambda k: 1 + k),
    "bool": varying(of(True, True, False)),
    "bool and int": varying(of(True, 1, 1, True)),
    "float and int": varying(of(2.0, 2, 2.0)),
    "complex": varying(of(1 + 1j, 2 + 0j)),
    "None": varying(of(None, None, "add")),
    "str": varying(of("add", "sub", "sub")),
    "slice": varying(of(slice(0, 2), slice(0, 2), slice(0, 1))),
    "dtype": varying(of(torch.float32, torch.float64)),
    "tuple": varying(of((1, 2.0), (1, 3.0), (2, 3.0))),
    "list": varying(of([1, 2.0], [1, 3.0, 4.0])),
    "dict": varying(of({"p": 1, "q": 2.0}, {"q": 2, "p": 3.0})),
    "named float": varying(lambda k: 0.5 + k, named=True),
    "named int": varying(lambda k: 1 + k, named=True),
    "named str": varying(of("add", "sub", "sub"), named=True),
    "numpy size": varying(of(slice(0, np.int64(2)), slice(0, np.int64(1)))),
    "numpy int": varying(lambda k: np.int32(1 + k), named=True),
    "named slice": varying(of(slice(0, 2), slice(0, 1)), named=True),
}


# The way through the units.


def twice(model: Any, x: Tensor, number: int) -> Tensor:
    """Two calls of one unit, whose operands change places."""
    one, other = model.a(x), model.b(x)
    if number % 2:
        one, other = other, one
    return end(model, model.c(one) + model.c(other, 3.0) + model.c(other, one))


def twice_by_content(model: Any, x: Tensor, number: int) -> Tensor:
    one, other = model.a(x), model.b(x)
    if mark(x):
        one, other = other, one
    return end(model, model.c(one) + model.c(other, 3.0) + model.c(other, one))


def order_of_names(model: Any, x: Tensor, number: int) -> Tensor:
    one, other = model.a(x), model.b(x)
    named = [
        {"first": one, "second": other},
        {"second": other, "first": one},
        {"first": other, "second": one},
    ][(number + mark(x)) % 3]
    return end(model, model.c(x, **named)) + model.a(x, **named).mean()


def nested(model: Any, x: Tensor, number: int) -> Tensor:
    one, other = model.a(x), model.b(x)
    pair = [one, other] if number % 2 else [other, one]
    h = model.c(x, tuple(pair)) + model.c(x, pair) + model.c(x, {"p": pair[0], "q": pair[1]})
    return end(model, h + torch.cat(pair).sum() + torch.stack(pair)[0])


def skipped(model: Any, x: Tensor, number: int) -> Tensor:
    h = model.a(x)
    if number % 2:
        h = model.b(h)
    if number != 2:
        h = model.c(h)
    return model.d(h).square().mean()


def skipped_by_content(model: Any, x: Tensor, number: int) -> Tensor:
    h = model.a(x)
    if mark(x):
        h = model.b(h)
    return model.d(model.c(h) if number % 2 else h).square().mean()


def within_modes(model: Any, x: Tensor, number: int) -> Tensor:
    """A microbatch goes another way inside of `with` blocks, which are not those of the others."""
    h = model.a(x)
    if mark(x) == 1:
        with torch.no_grad():
            h = h + model.b(x)
    elif mark(x) == 2:
        with torch.autocast("cpu", torch.bfloat16):
            h = model.b(h).to(h.dtype)
    else:
        h = model.b(h)
    return end(model, h)


_MOOD: ContextVar[float] = ContextVar("mood", default=1.0)


def within_context(model: Any, x: Tensor, number: int) -> Tensor:
    """The same of a context variable."""
    mood = _MOOD.get()
    h = model.a(x)
    if mark(x):
        token = _MOOD.set(5.0)
        h = model.c(h)
        _MOOD.reset(token)
    return end(model, h) * mood


def without_elements(model: Any, x: Tensor, number: int) -> Tensor:
    """An expert without tokens gets gradients, which are zero, and so does what fed it."""
    h = torch.tanh(model.a(x[x[:, 0] < 0]))
    g = model.c(x[x[:, 0] >= 0])
    return model.d(torch.cat([h, g]) + model.b(g[:0]).sum()).square().mean()


def caught(model: Any, x: Tensor, number: int) -> Tensor:
    """The step's own exception, in the middle of a microbatch; its frames hold placeholders."""
    h = model.a(x)
    try:
        g = torch.tanh(h) * 2
        if number == 1 or mark(x):
            raise ValueError(number)
        h = model.b(g)
    except ValueError as error:
        model.kept.append(error)
        h = model.b(h) * 3
    return end(model, h)


def chosen(model: Any, x: Tensor, number: int) -> Tensor:
    """The number of elements that a plain mask chooses decides the shape."""
    h = model.b(model.a(x))
    part = h[x > (number % 3 - 1) * 0.4]
    rows = h[x[:, 0] > 0]
    return end(model, h) + part.square().sum() / 9 + model.c(rows).sum()


PATHS: dict[str, Step] = {
    step.__name__: step
    for step in (twice, twice_by_content, order_of_names, nested, skipped, skipped_by_content,
                 caught, chosen, within_context, without_elements)
}  # fmt: skip


# Grad mode and autocast.


def no_grad(model: Any, x: Tensor, number: int) -> Tensor:
    with torch.set_grad_enabled(number % 2 == 0):
        h = torch.tanh(model.a(x))
    with torch.set_grad_enabled(not mark(x)):
        g = model.c(h)
    return end(model, model.b(h) + g)


def no_grad_in_part(model: Any, x: Tensor, number: int) -> Tensor:
    """Placeholders of one call with and without a gradient."""
    if number % 2:
        with torch.no_grad():
            h = model.b(model.a(x)) * 2
    else:
        h = model.b(model.a(x)) * 2
    return end(model, h) * (2.0 if h.requires_grad else 3.0)


def autocast(model: Any, x: Tensor, number: int) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=number % 2 == 1):
        h = model.b(torch.tanh(model.a(x)))
    with torch.autocast("cpu", torch.bfloat16, enabled=bool(mark(x))):
        g = model.c(h.float())
    return model.d(g.float()).square().mean()


MODES: dict[str, Step] = {
    step.__name__: step for step in (no_grad, no_grad_in_part, autocast, within_modes)
}


# What the step does to a plain tensor that several calls get.


def changing(change: Callable[[Tensor], Any], *, named: bool = False) -> Step:
    """A plain tensor goes to units of both ranks, changed in between in some of the steps."""

    def step(model: Any, x: Tensor, number: int) -> Tensor:
        mask = torch.arange(12.0, dtype=x.dtype).view(3, 4) / 10
        given = {"mask": mask} if named else {}
        args = () if named else (mask,)
        h = model.c(model.a(x, *args, **given), *args, **given) / 9
        if (number + mark(x)) % 2:
            change(mask)
        h = model.c(model.a(h, *args, **given), *args, **given) / 9
        return (h.sum() + end(model, h)) / 7

    return step


def _assign_requires_grad(mask: Tensor) -> None:
    mask.requires_grad = True


def _assign_data(mask: Tensor) -> None:
    mask.data = torch.ones(2, 2, dtype=mask.dtype)


def _write_out(mask: Tensor) -> None:
    torch.ones(2, 5, dtype=mask.dtype, out=mask.resize_(0))


CHANGES: dict[str, Step] = {
    "resize_": changing(lambda m: m.resize_(2, 3)),
    "resize_, named": changing(lambda m: m.resize_(2, 3), named=True),
    "transpose_": changing(lambda m: m.transpose_(0, 1)),
    "t_": changing(lambda m: m.t_()),
    "unsqueeze_": changing(lambda m: m.unsqueeze_(0)),
    "squeeze_": changing(lambda m: m.resize_(1, 4).squeeze_(0)),
    "swapdims_, named": changing(lambda m: m.swapdims_(0, 1), named=True),
    "requires_grad_": changing(lambda m: m.requires_grad_()),
    "requires_grad = True": changing(_assign_requires_grad),
    "data = ...": changing(_assign_data),
    "out=": changing(_write_out),
    "numbers": changing(lambda m: m.mul_(3)),
    "operator": changing(lambda m: m.__imul__(3)),
    "item": changing(lambda m: m.__setitem__(0, 5.0)),
}


# Views of a placeholder, and writes through them.


def through(view: Callable[[Tensor], Any], *, sent: bool = False, cut: bool = False) -> Step:
    """A write through a view, seen by what both ranks compute from the base.

    Args:
        view: the view of what units of rank 0 made.
        sent: whether a call on rank 1 has got the base before.
        cut: whether the base has no gradient (torch forbids the write through one of many views).
    """

    def step(model: Any, x: Tensor, number: int) -> Tensor:
        h = torch.tanh(model.b(model.a(x))) * 1
        base = h.detach() * 2 if cut else h
        first = model.c(x) + base if sent else h * 2
        part = view(base)
        part.mul_(2.0 + number)
        if number % 2:
            part.add_(1)
        return end(model, base + first * 2) + part.sum() + model.d(base).mean() + h.mean()

    return step


def detached(model: Any, x: Tensor, number: int) -> Tensor:
    """A detached placeholder shares its numbers, not its gradient."""
    h = model.b(model.a(x)) * 2
    still = h.detach()
    if number % 2 or mark(x):
        still.mul_(3)
    return end(model, h + still) * (5.0 if still.requires_grad else 1.0)


def detached_in_place(model: Any, x: Tensor, number: int) -> Tensor:
    h = model.b(model.a(x)) * 2
    if number % 2 or mark(x):
        h = h.detach_()
    return end(model, h) * (5.0 if h.requires_grad else 1.0)


def asks_for_gradients(model: Any, x: Tensor, number: int) -> Tensor:
    with torch.no_grad():
        h = model.b(model.a(x)) * 2
    if number % 2 or mark(x):
        h.requires_grad_()
    return end(model, h) * (5.0 if h.requires_grad else 1.0)


def in_place(model: Any, x: Tensor, number: int) -> Tensor:
    """Written where it was made, and where it was sent, in some microbatches."""
    h = model.b(model.a(x)) * 1
    if mark(x):
        h.add_(1.0)
    g = model.c(h) * 1
    if number % 2:
        g += h
    if number == 2:
        g.mul_(0.5)
    return end(model, g + h)


VIEWS: dict[str, Step] = {
    "column": through(lambda h: h[:, 0]),
    "row": through(lambda h: h[0]),
    "view": through(lambda h: h.view(-1)),
    "reshape": through(lambda h: h.reshape(4, 2)),
    "transpose": through(lambda h: h.t()),
    "unbind": through(lambda h: h.unbind(0)[1], cut=True),
    "iteration": through(lambda h: list(h)[1], cut=True),
    "chunk": through(lambda h: h.chunk(2, 1)[0], cut=True),
    "split": through(lambda h: h.split(1)[0], cut=True),
    "narrow": through(lambda h: h.narrow(1, 1, 2)),
    "view of a view": through(lambda h: h.view(-1)[2:5]),
    "sent before": through(lambda h: h[:, 1:], sent=True),
    "view of a view, sent before": through(lambda h: h.t()[0].view(-1)[:1], sent=True),
    "detached": detached,
    "detach_": detached_in_place,
    "requires_grad_": asks_for_gradients,
    "in place": in_place,
}


# Objects that live longer than their microbatch, or carry something.


def tagged(model: Any, x: Tensor, number: int) -> Tensor:
    """What the step writes on a tensor is not there on the tensor of another microbatch."""
    h = model.a(x)
    g = torch.tanh(h)
    scale = getattr(h, "tag", 1.0) + getattr(g, "tag", 1.0)
    if number % 2 or mark(x):
        h.tag = 10.0
        g.tag = 7.0
    scale += 2 * getattr(h, "tag", 1.0)
    return end(model, model.c(g) * scale) + model.b(g).mean() * scale


def kept_for_nothing(model: Any, x: Tensor, number: int) -> Tensor:
    """Kept over microbatches and steps, and asked only what its spec answers."""
    start = model.a(x)  # never sent, so that its placeholder serves again
    h = torch.tanh(start)
    g = model.c(h)
    fresh = not any(start is old or h is old or g is old for old in model.kept)
    model.kept += [start, h, g, h.detach(), g[:1]]
    return end(model, g) * (1.0 if fresh else 5.0) + model.kept[0].shape[1]


def kept_now_and_then(model: Any, x: Tensor, number: int) -> Tensor:
    start = model.a(x)
    h = torch.tanh(start)
    fresh = not any(start is old for old in model.kept)
    if number % 2:
        model.kept.append(start)
    if len(model.kept) > 3:
        model.kept.clear()
    return end(model, h * 2) * (1.0 if fresh else 5.0)


def weakly_known(model: Any, x: Tensor, number: int) -> Tensor:
    """A cache with weak keys knows no tensor of another microbatch."""
    known = model.__dict__.setdefault("known", {})
    h = model.a(x)  # never moves, so that its placeholder is used again
    found = known.get(id(h))
    scale = found[1] if found is not None and found[0]() is h else 1.0
    known[id(h)] = (weakref.ref(h), 3.0 + number)
    return end(model, model.c(torch.tanh(h)) * scale)


def returned(model: Any, x: Tensor, number: int) -> dict[str, Tensor]:
    """What a step returns is still that of its microbatch when the step is over."""
    start = model.a(x)
    h = torch.tanh(start)
    g = model.c(h)
    return {"loss": end(model, g), "start": start, "part": h[:, 1], "g": g.detach()}


def suspended(model: Any, x: Tensor, number: int) -> Tensor:
    """A generator that is never finished holds a placeholder in its frame."""

    def parts() -> Iterator[Tensor]:
        g = torch.tanh(model.a(x))
        yield g * 2
        yield g * 3

    source = parts()
    model.kept.append(source)
    return end(model, model.c(next(source)))


def containers(model: Any, x: Tensor, number: int) -> Tensor:
    """What a call gave is changed by the step; the next microbatch gets another one."""
    parts = list(model.a(x).unbind(0))
    size = len(parts)
    parts.append(parts[0] * 2)
    named = {"p": parts.pop(), "q": parts[0]}
    named["r"] = model.b(named.pop("q").expand(2, 4))
    return end(model, model.c(named["r"]) * size + named["p"])


OBJECTS: dict[str, Step] = {
    step.__name__: step
    for step in (tagged, kept_for_nothing, kept_now_and_then, weakly_known, returned, suspended,
                 containers)
}  # fmt: skip
