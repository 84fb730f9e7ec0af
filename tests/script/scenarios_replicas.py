"""Scenarios of replicas: hooks, uneven data, buffers, plain loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_smp as smp
from lightning_smp.weights.comm_hook import HookBucket
from tests.script.rig import STEPS, assert_weights, batches, fresh, reference

__all__ = ["ONE_STAGE_REPLICAS", "REPLICAS"]


def buffers_follow_the_first_replica() -> None:
    """Replicas get the first one's buffers before a training step."""
    net = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)).double()
    model, _, _ = fresh(net)

    @smp.step
    def train(x: Tensor) -> None:
        model.backward(model(x).sum())

    for x, _ in batches(3):
        train(x)
    mean = model.state_dict()["1.running_mean"]
    means = smp.allgather(mean, smp.DP_GROUP)
    # They differ by the last step only, whose batches differ.
    steps = [torch.stack([m - means[0] for m in means])]
    assert not torch.equal(means[0], means[1])
    train(batches(1, 0)[0][0])  # the same batch on all replicas
    means = smp.allgather(model.state_dict()["1.running_mean"], smp.DP_GROUP)
    assert all(torch.equal(m, means[0]) for m in means)
    del steps


def uneven_data() -> None:
    """`join`: replicas with fewer batches shadow the others and end with their weights."""
    model, optimizer, plain = fresh()
    data = batches(2 + smp.rdp_rank())

    @smp.step
    def train(x: Tensor, y: Tensor) -> None:
        model.backward(model(x, labels=y)["loss"])

    with model.join():
        for x, y in data:
            optimizer.zero_grad()
            train(x, y)
            optimizer.step()
    outer = torch.optim.Adam(plain.parameters(), lr=0.01)
    for step in range(3):
        outer.zero_grad()
        for replica in range(smp.dp_size()):
            if step < 2 + replica:
                x, y = batches(2 + replica, replica)[step]
                (plain(x, labels=y)["loss"] / smp.dp_size()).backward()
        outer.step()
    assert_weights(model, plain)

    def run_to_the_first_end() -> None:
        with model.join(throw_on_early_termination=True):
            for x, y in data:
                train(x, y)

    with pytest.raises(RuntimeError, match="no more batches"):
        run_to_the_first_end()


def join_mismatch() -> None:
    """Ranks of one replica with different numbers of batches are told so, on every rank."""
    model, _, _ = fresh()

    @smp.step
    def train(x: Tensor, y: Tensor) -> None:
        model.backward(model(x, labels=y)["loss"])

    train(*batches(1)[0])
    joining = _entered(model)
    ends_early = joining.shadow if smp.rank() else joining.announce_reduction
    with pytest.raises(smp.CommunicationError, match="different numbers of batches"):
        ends_early()
    model.replicas.joining = None
    x, y = batches(1)[0]

    def run() -> None:
        with model.join():
            for _ in range(1 + smp.mp_rank()):
                train(x, y)

    with pytest.raises(smp.CommunicationError, match="different numbers of batches"):
        run()
    train(x, y)


def join_without_a_first_step() -> None:
    """A replica without any batch cannot place the model: an error on every rank."""
    model, _, _ = fresh()

    @smp.step
    def train(x: Tensor, y: Tensor) -> None:
        model.backward(model(x, labels=y)["loss"])

    def run() -> None:
        with model.join():
            for x, y in batches(smp.rdp_rank()):
                train(x, y)

    with pytest.raises(smp.CommunicationError, match="no batch at all"):
        run()
    with model.join():  # nobody has one
        pass


def _entered(model: Any) -> Any:
    context = model.join()
    context.__enter__()
    joining = model.replicas.joining
    assert joining is not None
    model._test_context = context  # keeps it entered
    return joining


def comm_hook() -> None:
    """A hook reduces the buckets, and divides by replicas and microbatches itself."""
    model, optimizer, plain = fresh()
    seen: list[int] = []

    def hook(given: str, bucket: Any) -> Any:
        assert given == "state"
        assert isinstance(bucket, HookBucket)
        assert sum(g.numel() for g in bucket.gradients()) == bucket.buffer().numel()
        assert [g.shape for g in bucket.gradients()] == [p.shape for p in bucket.parameters()]
        seen.append(bucket.index())
        tensor = bucket.buffer().div(smp.dp_size() * smp.num_microbatches())
        work = torch.distributed.all_reduce(tensor, group=smp.get_dp_process_group(), async_op=True)
        return work.get_future()

    model.register_comm_hook("state", hook)
    with pytest.raises(smp.SMPError, match="twice"):
        model.register_comm_hook("state", hook)

    @smp.step
    def train(x: Tensor, y: Tensor) -> None:
        model.backward(model(x, labels=y)["loss"])

    for x, y in batches(STEPS):
        optimizer.zero_grad()
        train(x, y)
        optimizer.step()
    assert seen[:1] == [0]
    reference(plain, STEPS)
    assert_weights(model, plain)


def plain_loops() -> None:
    """With one stage `loss.backward()` works without a step, and reduces over replicas."""
    model, optimizer, plain = fresh(backward_passes_per_step=2, broadcast_buffers=False)
    for number, (x, y) in enumerate(batches(4)):
        out = model(x, labels=y)
        loss = out["loss"]
        loss += 0.0
        if number == 0:
            model.backward(loss)
        else:
            loss.backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    reference(plain, 4, accumulate=2)
    assert_weights(model, plain)
    with torch.no_grad():
        torch.testing.assert_close(
            F.softmax(model(x)["logits"], -1), F.softmax(plain(x)["logits"], -1)
        )


def uneven_plain_loops() -> None:
    """`join` around plain loops."""
    model, optimizer, _ = fresh()
    with model.join(divide_by_initial_world_size=False):
        for x, y in batches(1 + smp.dp_rank()):
            optimizer.zero_grad()
            model(x, labels=y)["loss"].backward()
            optimizer.step()
    weights = smp.allgather(model.state_dict()["inp.weight"], smp.DP_GROUP)
    assert all(torch.equal(weight, weights[0]) for weight in weights)


REPLICAS = [comm_hook, uneven_data, buffers_follow_the_first_replica]
ONE_STAGE_REPLICAS = [plain_loops, uneven_plain_loops]
