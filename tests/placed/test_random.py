"""Random streams: seeded by what runs, undone afterwards, equal on all ranks."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_smp.placed import random as streams
from lightning_smp.placed.random import (
    SEED_START,
    DrawState,
    Guard,
    digest_draws,
    isolated_draws,
    mix_seed,
    seed_everywhere,
    stir,
    unit_seed,
)

CPU = torch.device("cpu")
numbers = st.lists(st.integers(-(2**70), 2**70), max_size=5)


@pytest.fixture(autouse=True)
def kept_streams() -> Iterator[None]:
    state = DrawState(CPU)
    yield
    state.restore()


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


@given(numbers)
def test_seed_fits_a_generator(parts: list[int]) -> None:
    seed = mix_seed(*parts)
    assert 0 <= seed < 2**63
    assert seed == mix_seed(*parts)
    assert seed != mix_seed(*parts, 0)


def test_seeds_of_neighbours_differ() -> None:
    grid = {mix_seed(*parts) for parts in itertools.product(range(6), repeat=4)}
    assert len(grid) == 6**4
    assert mix_seed(1, 2) != mix_seed(2, 1)


def test_units_and_their_calls_have_seeds_of_their_own() -> None:
    states = [stir(SEED_START, 0, microbatch) for microbatch in range(4)]
    calls = itertools.product(states, range(30), range(30))
    assert len({unit_seed(*call) for call in calls}) == 4 * 30 * 30


def test_restored_streams_repeat() -> None:
    state = DrawState(CPU)
    first = draw()
    assert draw() != first
    state.restore()
    assert draw() == first


def test_seeding_all_streams() -> None:
    seed_everywhere(2**62 + 5, CPU)
    first = draw()
    seed_everywhere(2**62 + 5, CPU)
    assert draw() == first


@pytest.mark.parametrize("stream", [0, 1, 2], ids=["random", "numpy", "torch"])
def test_digest_sees_a_draw_of_each_stream(stream: int) -> None:
    before = digest_draws(CPU)
    assert digest_draws(CPU) == before
    (random.random, np.random.rand, lambda: torch.rand(()))[stream]()
    assert digest_draws(CPU) != before


def test_digest_reads_what_the_generator_says_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest from memory is that of `getstate`, whatever was drawn."""
    changes = [
        lambda: random.seed(11), random.random, lambda: random.gauss(0, 1),
        lambda: random.gauss(0, 1), lambda: random.shuffle(list(range(700))),
        lambda: random.getrandbits(20_001), lambda: random.seed("text"),
    ]  # fmt: skip
    assert streams._offset_of_words() is not None
    read = []
    for change in changes:
        change()
        fast = digest_draws(CPU)
        with monkeypatch.context() as patched:
            patched.setattr(streams, "_offset_of_words", lambda: None)
            assert digest_draws(CPU) == fast
        read.append(fast)
    assert len(set(read)) == len(changes)


def test_digest_sees_the_second_number_of_a_pair() -> None:
    random.seed(3)
    random.gauss(0, 1)
    words, waits = random.getstate()[1], digest_draws(CPU)
    random.gauss(0, 1)  # was drawn together with the first
    assert random.getstate()[1] == words
    assert digest_draws(CPU) != waits


def test_state_travels_as_plain_data() -> None:
    state = DrawState(CPU)
    before = digest_draws(CPU)
    first = draw()
    DrawState.from_plain(state.to_plain(), CPU).restore()
    assert digest_draws(CPU) == before
    assert draw() == first


@pytest.mark.parametrize("guard", Guard)
def test_isolated_draws_leave_no_trace(guard: Guard) -> None:
    before = digest_draws(CPU)
    with isolated_draws(5, CPU, guard):
        first = torch.rand(3)
        if guard is Guard.ALL:
            draw()
    assert digest_draws(CPU) == before
    torch.rand(7)
    with isolated_draws(5, CPU, guard):
        assert torch.rand(3).tolist() == first.tolist()


class Counter:
    """Stands for a CUDA generator: a seed, and how much was drawn."""

    def __init__(self) -> None:
        self.state = (3, 8)

    def initial_seed(self) -> int:
        return self.state[0]

    def get_offset(self) -> int:
        return self.state[1]

    def manual_seed(self, seed: int) -> None:
        self.state = (seed, 0)

    def set_offset(self, offset: int) -> None:
        self.state = (self.state[0], offset)


def test_the_hosts_stream_is_left_alone_where_only_the_device_draws(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Counter()
    monkeypatch.setattr(streams, "_cuda_generator", lambda _: device)
    host = torch.default_generator.get_state()
    for guard, is_guarded in ((Guard.DEVICE, False), (Guard.TORCH, True)):
        with isolated_draws(5, torch.device("cuda"), guard):
            assert device.state == (5, 0)
            assert torch.equal(torch.default_generator.get_state(), host) is not is_guarded
            device.set_offset(64)
        assert device.state == (3, 8)
        assert torch.equal(torch.default_generator.get_state(), host)


def test_isolated_draws_are_undone_after_an_error() -> None:
    before = digest_draws(CPU)
    with contextlib.suppress(KeyError), isolated_draws(5, CPU, Guard.ALL):
        draw()
        raise KeyError
    assert digest_draws(CPU) == before


def test_what_was_drawn_is_known() -> None:
    with isolated_draws(5, CPU, Guard.ALL) as draws:
        assert not draws.used()
        assert draws.needed() is Guard.DEVICE
        torch.rand(1)
        assert draws.used()
        assert draws.needed() is Guard.TORCH
        np.random.rand()
        assert draws.needed() is Guard.ALL
    with isolated_draws(5, CPU, Guard.ALL) as draws:
        random.random()
        assert not draws.used()
        assert draws.needed() is Guard.ALL
