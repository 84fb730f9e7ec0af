"""Units' tokens live from step to step, as long as no flag has changed."""

from __future__ import annotations

import torch
from torch import nn

from lightning_smp.placed.runtime import Runtime
from lightning_smp.placed.units import UnitEntry


def _runtime(num_units: int) -> Runtime:
    runtime = Runtime(0, 2, torch.device("cpu"))
    for index in range(num_units):
        module = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
        runtime.units.append(UnitEntry(runtime, index, f"unit{index}", module, index, 1.0))
    return runtime


def test_tokens_are_kept_while_no_flag_changes() -> None:
    runtime = _runtime(2)
    unit = runtime.units[0]
    token = unit.token_in(runtime.tokens.of_step())
    known = runtime.tokens.of_step()
    assert known[0][1] is token
    assert unit.token_in(known) is token


def test_any_flag_that_changes_between_steps_makes_all_tokens_new() -> None:
    runtime = _runtime(2)
    unit = runtime.units[1]
    seen = [unit.token_in(runtime.tokens.of_step())]
    unit.module[0].weight.requires_grad_(False)
    seen.append(unit.token_in(runtime.tokens.of_step()))
    unit.module[1].eval()
    seen.append(unit.token_in(runtime.tokens.of_step()))
    assert len(set(seen)) == 3
    unit.module[0].weight.requires_grad_(True)
    unit.module[1].train()
    assert unit.token_in(runtime.tokens.of_step()) is seen[0]


def test_flag_that_a_step_changes_and_others_change_back() -> None:
    runtime = _runtime(1)
    unit = runtime.units[0]
    known = runtime.tokens.of_step()
    before = unit.token_in(known)
    unit.module[0].weight.requires_grad_(False)
    runtime.tokens.forget()  # as the outer mode does, which sees the call
    assert unit.token_in(known) is not before
    unit.module[0].weight.requires_grad_(True)  # after the step, where nobody sees it
    assert unit.token_in(runtime.tokens.of_step()) is before


def test_units_that_come_later_count() -> None:
    runtime = _runtime(1)
    runtime.tokens.of_step()
    module = nn.Linear(2, 2)
    late = UnitEntry(runtime, 1, "late", module, 0, 1.0)
    runtime.units.append(late)
    before = late.token_in(runtime.tokens.of_step())
    module.weight.requires_grad_(False)
    assert late.token_in(runtime.tokens.of_step()) is not before
