"""The report accounts for every layer and every parameter."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_smp.errors import PartitionError
from lightning_smp.partitioning.analysis import count_parameters
from lightning_smp.partitioning.atoms import find_atoms
from lightning_smp.partitioning.plan import plan_partition
from lightning_smp.partitioning.report import compress_names, report
from tests.partitioning import zoo


def table(root: nn.Module, num_stages: int, **kwargs: object) -> str:
    atoms = find_atoms(root)
    analysis = count_parameters(root, atoms, reason="no step was given")
    partition = plan_partition(root, analysis, atoms, num_stages, memory_weight=0.2, **kwargs)  # type: ignore[arg-type]
    return report(partition, root)


def test_report_of_a_mirrored_model() -> None:
    root = zoo.GPT(6)
    root.scale = nn.Parameter(torch.ones(2))
    lines = table(root, 3, tied_parameters="mirrored").splitlines()
    assert lines[0] == "Partition assignments:"
    assert lines[1].split() == ["stage", "parameters", "size", "compute", "units"]
    assert [line.split()[0] for line in lines[2:7]] == ["0", "1", "2", "all", "total"]
    total = sum(p.numel() for p in root.parameters())
    assert f"{total:,}" in lines[6]
    parts = [int(line.split()[1].replace(",", "")) for line in lines[2:6]]
    assert sum(parts) == total + root.head.weight.numel()  # the mirrored copy
    shares = [float(share) for share in re.findall(r"([\d.]+)%", "\n".join(lines))]
    assert sum(shares) == pytest.approx(100, abs=0.3)
    assert "no step was given" in lines[7]
    assert lines[8] == "Tied: wte.weight = head.weight mirrored on stages 0, 2."


def test_empty_stages_are_reported() -> None:
    assert "Stage 2 is empty" in table(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 3)


def test_changed_model_is_refused() -> None:
    root = zoo.mlp()
    atoms = find_atoms(root)
    analysis = count_parameters(root, atoms, reason="")
    partition = plan_partition(root, analysis, atoms, 2, memory_weight=0.2)
    root.append(nn.Linear(2, 2))
    with pytest.raises(PartitionError, match="differ in 9"):
        report(partition, root)


def test_names_are_compressed() -> None:
    universe = ["a.wte", *(f"a.h.{i}.{part}" for i in range(12) for part in "xy"), "b.p", "b.q"]
    chosen = [name for name in universe if not name.startswith(("a.h.0.x", "a.h.11"))]
    assert compress_names(chosen, universe) == ("a.wte", "a.h.0.y", "a.h.1-10", "b")
    assert compress_names(["0", "1", "3"], ["0", "1", "2", "3"]) == ("0-1", "3")
    assert compress_names([]) == ()


@settings(max_examples=50, deadline=None)
@given(st.sets(st.integers(0, 12)))
def test_ranges_expand_to_the_same_names(chosen: set[int]) -> None:
    names = [f"h.{i}" for i in sorted(chosen)]
    found: list[str] = []
    for name in compress_names(names, [*(f"h.{i}" for i in range(14))]):
        low, _, high = name.removeprefix("h.").partition("-")
        found += [f"h.{i}" for i in range(int(low), int(high or low) + 1)]
    assert found == names
