"""Parts of state dicts: tags, and merging those of all stages."""

from __future__ import annotations

from collections import OrderedDict

from lightning_smp.script.partial import PARTIAL_KEY, layout_of, merge, tagged, untagged


def part(**entries: object) -> dict[str, object]:
    return {**entries, PARTIAL_KEY: True}


def test_tags_are_on_every_part_and_come_off() -> None:
    obj = {"model": part(a=1), "list": [part(b=2), (3, part())], "epoch": 4, "no": {"x": 5}}
    marked = tagged(obj, (2, 1, 3))
    assert layout_of(marked) == (2, 1, 3)
    assert marked != obj
    assert untagged(marked) == obj
    assert layout_of(obj) is None
    assert layout_of([1, {PARTIAL_KEY: False}]) is None


def test_types_are_kept() -> None:
    obj = OrderedDict(model=OrderedDict(part(a=1)), pair=(1, 2))
    marked = untagged(tagged(obj, (1, 1, 1)))
    assert marked == obj
    assert type(marked) is type(marked["model"]) is OrderedDict
    assert type(marked["pair"]) is tuple


def test_models_are_merged() -> None:
    first, second = part(a=1, shared=0), part(b=2, shared=0)
    assert merge([first, second]) == {"a": 1, "b": 2, "shared": 0, PARTIAL_KEY: False}
    tags = [tagged(p, (2, 1, 1)) for p in (first, second)]
    assert merge(tags) == merge([first, second])


def test_optimizers_are_merged_by_place() -> None:
    groups = [{"params": [0, 1, 2, 10], "lr": 0.1}]
    parts = [
        part(state={10: "d", 1: "b"}, param_groups=groups),
        part(state={2: "c", 0: "a"}, param_groups=groups),
    ]
    whole = merge(parts)
    assert list(whole["state"].items()) == [(0, "a"), (1, "b"), (2, "c"), (10, "d")]
    assert whole["param_groups"] == groups
    assert parts[0]["state"] == {10: "d", 1: "b"}


def test_objects_around_parts_are_the_first_ones() -> None:
    objs = [
        {"model": part(a=1), "epoch": 1, "x": [part()]},
        {"model": part(b=2), "epoch": 2, "x": [part(c=3)]},
    ]
    whole = {PARTIAL_KEY: False}
    assert merge(objs) == {
        "model": {"a": 1, "b": 2, **whole}, "epoch": 1, "x": [{"c": 3, **whole}],
    }  # fmt: skip
