"""What a script does, asserted in every rank, for any layout."""

from __future__ import annotations

import argparse
from collections import OrderedDict
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_smp as smp
from tests.script.rig import BATCH, STEPS, Net, assert_weights, batches, fresh, reference

__all__ = ["ANY_LAYOUT"]


class Answer(OrderedDict[str, Any]):
    """A dict subclass, as models return."""


def training_and_evaluation() -> None:
    """Losses, outputs and weights equal one device; hooks, tracing, structure and locals."""
    model, optimizer, plain = fresh()
    seen: list[Any] = []
    traced: list[bool] = []
    args = argparse.Namespace(scale=2.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=1.0)
    model.register_post_partition_hook(lambda m, o: seen.append(("split", m is model, o)))
    model.register_post_step_hook(lambda m, o: seen.append(("stepped", m is model, o)))
    is_split = smp.pp_size() > 1
    assert model.partitioned is not is_split
    if is_split:
        with pytest.raises(smp.SMPError, match="before the model was split"):
            model.local_parameters()

    @smp.step(non_split_inputs=["table"])
    def train(wrapped: Any, inputs: dict[str, Tensor], options: Any, table: Tensor) -> Any:
        traced.append(smp.is_tracing())
        assert options is args
        assert inputs["x"].shape[0] == BATCH // smp.num_microbatches()
        assert table.shape == (3,)
        out = wrapped(**inputs)
        loss = out["loss"]
        loss /= options.scale  # in place, before and after the backward
        wrapped.backward(loss)
        loss *= options.scale
        top = out["logits"].argmax(-1)
        answer = Answer(loss=loss, logits=out["logits"])
        return {"answer": answer, "top": (top, [loss.item()]), "size": len(top)}

    @smp.step
    def evaluate(x: Tensor) -> Any:
        return model(x)  # from the closure

    losses = []
    for x, y in batches(STEPS):
        optimizer.zero_grad()
        result = train(model, {"x": x, "labels": y}, args, torch.ones(3))
        optimizer.step()
        scheduler.step()
        assert type(result["answer"]) is Answer
        loss = result["answer"]["loss"].reduce_mean()
        assert not loss.requires_grad
        losses.append(float(loss))
        assert result["answer"]["logits"].concat().shape == (BATCH, 6)
        assert result["top"][0].concat().shape == (BATCH,)
        numbers = result["top"][1][0]
        assert numbers == [float(part) for part in result["answer"]["loss"].outputs]
        assert result["size"] == [BATCH // smp.num_microbatches()] * smp.num_microbatches()
        assert smp.allgather(numbers, smp.MP_GROUP) == [numbers] * smp.mp_size()
    expected = reference(plain, STEPS, factor=0.5)
    torch.testing.assert_close(losses, expected)
    assert_weights(model, plain)
    assert seen == [("split", True, optimizer), ("stepped", True, optimizer)]
    assert (True in traced) is is_split
    assert model.partitioned

    model.eval()
    x = batches(1)[0][0]
    with torch.no_grad():
        logits = evaluate(x)["logits"].concat()
    torch.testing.assert_close(logits, plain(x)["logits"])
    _check_locals(model)


def _check_locals(model: Any) -> None:
    named = dict(model.named_parameters())
    assert list(model.optimizers()) == list(named.values())
    assert smp.state.optimizer.redefined_params is False
    places = smp.state.optimizer._param_id_to_index()
    assert [places[id(parameter)] for parameter in named.values()] == list(range(len(named)))
    assert type(model)._register_comm_hook is type(model).register_comm_hook
    local = dict(model.local_named_parameters())
    assert all(named[name] is parameter for name, parameter in local.items())
    assert all(name.startswith("module.") for name in named)
    counts = smp.allgather(sorted(local), smp.PP_GROUP)
    assert sorted(name for part in counts for name in part) == sorted(named)  # each on one stage
    assert [p for p in model.local_parameters()] == list(local.values())
    held = [name for name, module in model.local_named_modules() if isinstance(module, nn.Linear)]
    assert sorted(held) == sorted({name.rpartition(".")[0] for name in local} & set(held))
    assert len(held) == sum(name.endswith("weight") and "norm" not in name for name in local)
    assert list(model.local_buffers()) == []
    assert list(model.distributed_modules()) == []
    assert [n for n, _ in model.default_reducer_named_parameters()] == list(named)
    assert smp.state.param_index_to_name_tp_group == [dict(enumerate(named))]
    assert smp.state.param_name_to_index_tp_group == [{name: k for k, name in enumerate(named)}]


def several_backwards() -> None:
    """Several losses, given gradients, sums over microbatches, other losses than the scalar."""
    model, optimizer, plain = fresh(average_grads_across_microbatches=False)
    count = smp.num_microbatches()

    @smp.step
    def train(x: Tensor, y: Tensor) -> None:
        out = model(x, labels=y)
        hidden, logits = out["pair"]
        model.backward(out["loss"] / count)
        model.backward([hidden.pow(2).sum(), logits], [None, torch.full_like(logits, 0.5)])

    for x, y in batches(STEPS):
        optimizer.zero_grad()
        assert train(x, y) is None
        optimizer.step()

    def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out = net(x, labels=y)
        hidden, logits = out["pair"]
        return out["loss"] + hidden.pow(2).sum() + 0.5 * logits.sum()

    reference(plain, STEPS, loss_of=loss_of)
    assert_weights(model, plain)


def accumulation_and_tied_weights() -> None:
    """Two steps an update, with tied weights; clipping by the norm over all stages."""
    torch.manual_seed(2)
    net = Net(tied=True).double()
    model, optimizer, plain = fresh(
        net, backward_passes_per_step=2, overlapping_allreduce=False, bucket_cap_mb=0.001
    )

    @smp.step
    def train(x: Tensor, y: Tensor) -> Any:
        loss = model(x, labels=y)["loss"]
        model.backward(loss)
        return loss

    for number, (x, y) in enumerate(batches(4)):
        train(x, y)
        if number % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    reference(plain, 4, accumulate=2, clip=0.5)
    assert_weights(model, plain)


def gradients_stay(passes: int = 1) -> None:
    """Without zero_grad, reduced gradients stay as they are: the sum of both steps."""
    torch.manual_seed(2)
    model, _, plain = fresh(Net(tied=True).double(), backward_passes_per_step=passes)

    @smp.step
    def train(x: Tensor, y: Tensor) -> None:
        model.backward(model(x, labels=y)["loss"])

    for x, y in batches(2):
        train(x, y)
    for replica in range(smp.dp_size()):
        for x, y in batches(2, replica):
            (plain(x, labels=y)["loss"] / smp.dp_size()).backward()
    expected = dict(plain.named_parameters())
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name.removeprefix("module.")].grad)


def states() -> None:
    """State dicts of the whole and of parts, of model and optimizer, saved and loaded again."""
    model, optimizer, plain = fresh()

    @smp.step
    def train(x: Tensor, y: Tensor) -> Any:
        loss = model(x, labels=y)["loss"]
        model.backward(loss)
        return loss

    def run(steps: list[tuple[Tensor, Tensor]]) -> list[float]:
        losses = []
        for x, y in steps:
            optimizer.zero_grad()
            losses.append(float(train(x, y).reduce_mean()))
            optimizer.step()
        return losses

    data = batches(4)
    assert set(model.local_state_dict()) == {*plain.state_dict(), "_smp_is_partial"}  # still whole
    run(data[:2])
    part, part_of_state = model.local_state_dict(), optimizer.local_state_dict()
    assert part.pop("_smp_is_partial") is True
    assert part_of_state["_smp_is_partial"] is True
    local = {name.removeprefix("module.") for name, _ in model.local_named_parameters()}
    assert set(part) == local
    assert len(part_of_state["state"]) == len(local)
    part = {name: tensor.clone() for name, tensor in part.items()} | {"_smp_is_partial": True}
    part_of_state = {**part_of_state, "state": _copied(part_of_state["state"])}
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state_of_all = optimizer.state_dict()
    state_of_all = {**state_of_all, "state": _copied(state_of_all["state"])}
    assert len(state_of_all["state"]) == len(list(model.parameters()))
    gathered = model.state_dict(gather_to_rank0=True)
    assert (len(gathered) > 0) is (smp.rank() == 0)
    expected = run(data[2:])

    for weights, moments, options in (
        (whole, state_of_all, {}),
        ({f"module.{name}": value for name, value in whole.items()}, part_of_state, {}),
        (part, part_of_state, {"same_partition_load": True}),
        (part, state_of_all, {}),
    ):
        with torch.no_grad():
            for parameter in model.local_parameters():
                parameter.zero_()
        model.load_state_dict(weights, **options)
        optimizer.load_state_dict(deepcopy(moments))
        assert run(data[2:]) == expected
    _whole_again(model, optimizer, run, data)


def _copied(states: dict[int, Any]) -> dict[int, Any]:
    return {k: {n: v.clone() for n, v in s.items()} for k, s in states.items()}


def _whole_again(model: Any, optimizer: Any, run: Any, data: Any) -> None:
    """`cpu()` brings all weights to every rank; a later step goes on."""
    before = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    assert model.cpu() is model
    plain = model.get_module().state_dict()
    for name, expected in before.items():
        assert torch.equal(plain[name], expected), name
    assert len(run(data[:1])) == 1


def loads_before_the_first_step() -> None:
    """What is loaded before the split is there after it."""
    model, optimizer, plain = fresh()
    torch.manual_seed(7)
    other = Net().double().to(smp.state.device)
    outer = torch.optim.Adam(other.parameters(), lr=0.01)
    other(*batches(1, 0)[0])["loss"].backward()
    outer.step()
    model.load_state_dict(other.state_dict())
    optimizer.load_state_dict(deepcopy(outer.state_dict()))
    if smp.pp_size() > 1:
        assert len(optimizer.optimizer.state) == 0  # it waits

    @smp.step
    def train(x: Tensor, y: Tensor) -> None:
        model.backward(model(x, labels=y)["loss"])

    train(*batches(1)[0])
    optimizer.step()
    outer.zero_grad()
    for replica in range(smp.dp_size()):
        (other(*batches(1, replica)[0])["loss"] / smp.dp_size()).backward()
    outer.step()
    assert_weights(model, other)
    del plain


def mixed_precision() -> None:
    """autocast and GradScaler: an overflow in one stage's gradients skips the step everywhere."""
    torch.manual_seed(1)
    model, optimizer, plain = fresh(Net().float())
    scaler = smp.amp.GradScaler(init_scale=4.0, growth_interval=2)
    spoil = [False]

    @smp.step
    def train(x: Tensor, y: Tensor) -> Any:
        with torch.autocast(smp.state.device.type, torch.bfloat16):
            loss = model(x, labels=y)["loss"]
        scaled = scaler.scale(loss)
        model.backward(scaled)
        return loss

    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for number, (x, y) in enumerate(batches(4)):
        spoil[0] = number == 3
        optimizer.zero_grad()
        loss = train(x.float(), y).reduce_mean()
        assert torch.isfinite(loss)
        if spoil[0] and smp.rank() == smp.size() - 1:
            for parameter in model.local_parameters():
                parameter.grad.fill_(float("inf"))
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        scaler.step(optimizer)
        scaler.update()
        after = model.state_dict()
        changed = any(not torch.equal(before[name], after[name]) for name in before)
        assert changed is not spoil[0]
    assert scaler.get_scale() == 4.0  # doubled after two steps, halved after the overflow
    assert set(first) == set(plain.state_dict())


def refusals() -> None:
    """What cannot be done says so, on every rank alike."""
    gc_model, optimizer, _ = fresh()
    model = gc_model
    x, y = batches(1)[0]
    with pytest.raises(smp.SMPError, match="one only"):
        smp.DistributedModel(nn.Linear(2, 2))
    with pytest.raises(smp.ConfigError, match=r"dynamic loss scale are \['consecutive"):
        smp.DistributedOptimizer(optimizer.optimizer, dynamic_loss_args={"scale": 1})
    smp.DistributedOptimizer(
        optimizer.optimizer, static_loss_scale=None, dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 8}, scale_window=10,
    )  # fmt: skip

    @smp.step
    def plain_backward(x: Tensor, y: Tensor) -> None:
        model(x, labels=y)["loss"].backward()

    @smp.step
    def inner(x: Tensor, y: Tensor) -> None:
        plain_backward(x, y)

    @smp.step
    def no_model(x: Tensor) -> None:
        model.backward(torch.ones(2, requires_grad=True).sum() + x.sum())

    @smp.step(detach_outputs=False)
    def attached(x: Tensor) -> Any:
        return model(x)["logits"]

    @smp.step
    def fine(x: Tensor, y: Tensor) -> Any:
        loss = model(x, labels=y)["loss"]
        model.backward(loss)
        return loss

    fine(x, y)
    with pytest.raises(smp.SMPError, match=r"model\.backward\(loss\)"):
        plain_backward(x, y)
    with pytest.raises(smp.SMPError, match="inside another step"):
        inner(x, y)
    with pytest.raises(smp.ConfigError, match="drop_last=True"):
        fine(x[:-1], y[:-1])
    if smp.pp_size() > 1:
        with pytest.raises(smp.SMPError, match="outside of a step"):
            model(x)
        with pytest.raises(smp.SMPError, match="outside of a step"):
            model.backward(x.sum())
        with pytest.raises(smp.UnsupportedError, match="detach_outputs=False"):
            attached(x)
        with pytest.raises(smp.SMPError, match="does not depend on the distributed model"):
            no_model(x)
    else:
        logits = attached(x)
        assert all(part.requires_grad for part in logits.outputs)
    assert torch.isfinite(fine(x, y).reduce_mean())  # none of it has left anything behind


def device_and_dtype() -> None:
    """The library chooses devices; dtypes are the user's, before the split and after it."""
    model, _, _ = fresh()
    assert model.to("meta").cuda() is model
    at_first = smp.state.device if smp.pp_size() == 1 else torch.device("cpu")
    assert next(model.parameters()).device == at_first

    @smp.step
    def forward(x: Tensor) -> Any:
        return model(x)["logits"]

    with torch.no_grad():
        forward(batches(1)[0][0])
        model.to(torch.float32)
        logits = forward(batches(1)[0][0].float()).concat()
    assert logits.dtype is torch.float32


def foreign_parameters() -> None:
    """An optimizer of other parameters than the model's is refused at its first step."""
    model, _, _ = fresh()
    other = smp.DistributedOptimizer(torch.optim.SGD(Net().parameters(), lr=0.1))
    if smp.size() == 1:
        return
    with pytest.raises(smp.SMPError, match=r"SGD\(model\.parameters\(\)") as raised:
        other.step()
    assert "model = smp.DistributedModel(model)" in str(raised.value)
    del model


ANY_LAYOUT = [
    training_and_evaluation,
    several_backwards,
    accumulation_and_tied_weights,
    gradients_stay,
    states,
    loads_before_the_first_step,
    mixed_precision,
    refusals,
    device_and_dtype,
    foreign_parameters,
]
