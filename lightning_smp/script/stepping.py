"""`smp.step`: a function that runs once per microbatch, forward and backward, over the stages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor

from lightning_smp.deploy.running import no_inference_mode
from lightning_smp.engine import StepPlan
from lightning_smp.errors import ConfigError, SMPError, UnsupportedError
from lightning_smp.placed.structure import iter_tensors
from lightning_smp.process_state import state
from lightning_smp.script.backwards import Backwards
from lightning_smp.script.model import DistributedModel
from lightning_smp.script.splitting import Call, Splitter
from lightning_smp.script.step_output import change_tensors, join_results

__all__ = ["StepFunction", "step"]

_SCRIPT_STEP: Final = 4
"""Tells the random streams of these steps from those of Lightning's."""


def step(
    function: Callable[..., Any] | None = None,
    non_split_inputs: Collection[str] | None = None,
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
) -> Any:
    """Makes a function run once per microbatch; a decorator, bare or called.

    In it: the forward of the distributed model, the loss, and ``model.backward(loss)`` for
    training. Not in it: the optimizer's step, clipping, ``scaler.update()``. See `StepFunction`.

    Args:
        function: the function.
        non_split_inputs: names of arguments that every microbatch gets whole.
        input_split_axes: by name of an argument, the axis of its batch; 0 for all others.
        detach_outputs: whether returned tensors are without graph. False works with one stage.

    Raises:
        ConfigError: an argument of that name does not exist.
    """
    if function is None:
        return functools.partial(
            step, non_split_inputs=non_split_inputs, input_split_axes=input_split_axes,
            detach_outputs=detach_outputs,
        )  # fmt: skip
    if not callable(function):
        raise ConfigError(
            f"smp.step was given {function!r} as its function. Use @smp.step, or "
            "@smp.step(non_split_inputs=[...]) with names of arguments."
        )
    splitter = Splitter(function, non_split_inputs or (), input_split_axes or {})
    return StepFunction(function, splitter, detach_outputs=detach_outputs)


class StepFunction:
    """What `step` makes of a function.

    Calling it splits the arguments, runs the function for each microbatch in the pipeline, and
    returns what `join_results` makes of the results: equal on all ranks of a model group. It is no
    method: in a class body it is called without ``self``.

    Collective over the pipeline; over the world in the first step and where gradients are reduced.

    Args:
        function: the function.
        splitter: cuts its arguments.
        detach_outputs: whether returned tensors are without graph.
    """

    def __init__(
        self, function: Callable[..., Any], splitter: Splitter, *, detach_outputs: bool
    ) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._splitter = splitter
        self._detach_outputs = detach_outputs
        state.step_functions += 1
        self._number = state.step_functions  # equal on all ranks, which compare their steps

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a step.

        Raises:
            ConfigError: a batch that cannot be cut into equal microbatches.
            SMPError: there is no distributed model, or a step is running already.
            UnsupportedError: ``detach_outputs=False`` with several stages.
        """
        model = self._require_model()
        cfg = state.cfg
        assert cfg is not None
        calls = self._splitter.split(args, kwargs, cfg.microbatches)
        call = state.calls.collective(self._name, state.replica_axis)
        with no_inference_mode(), _step_running(), call:
            deployment = model.deployment
            model.leave_host()
            model.replicas.announce()
            deployment.same_batch.check(list(_tensors_of(args, kwargs)), _batch_advice())
            self._get_ready(model, calls[0])
            results = self._run(model, calls)
        model.after_first_step()
        return results

    def _require_model(self) -> DistributedModel:
        model = state.model
        if model is None:
            raise SMPError(
                f"{self._name} was called, but there is no distributed model. Wrap it first: "
                "model = smp.DistributedModel(model)."
            )
        if state.in_step:
            raise SMPError(
                f"{self._name} was called inside another step. Call the plain function there: "
                f"{self._name}.__wrapped__(...)."
            )
        if not self._detach_outputs and state.groups.pp_size > 1:
            raise UnsupportedError(
                f"smp.step(detach_outputs=False) with pipeline_parallel_degree="
                f"{state.groups.pp_size}: the graphs of the outputs lie on several ranks. Call "
                "model.backward(loss) inside the step, or use one stage."
            )
        return model

    @property
    def _name(self) -> str:
        return getattr(self._function, "__qualname__", repr(self._function))

    def _get_ready(self, model: DistributedModel, first: Call) -> None:
        """In the first step: places the model."""
        if model.deployment.sharing is not None:
            return
        model.deployment.seed_replica()

        def run_traced(copy: Any, call: tuple[Any, Any]) -> None:
            with model.traced_by(copy):
                self._function(*call[0], **call[1])

        optimizer = state.optimizer
        with state.calls.collective("the placing of the model", "world"):
            model.deployment.ensure_ready(
                run_traced, (first.args, first.kwargs),
                optimizers=[] if optimizer is None else [optimizer.optimizer],
            )  # fmt: skip
        model.after_partition()

    def _run(self, model: DistributedModel, calls: list[Call]) -> Any:
        deployment, replicas = model.deployment, model.replicas
        trains = torch.is_grad_enabled()
        if trains:
            model.rebalance_if_due()
            replicas.begin()
        backwards = Backwards(deployment, replicas.seed(len(calls)))
        plan = StepPlan(
            name=f"{self._name}@{self._number}",
            bodies=[functools.partial(self._function, *c.args, **c.kwargs) for c in calls],
            specs=[self._spec(model, call) for call in calls],
            seed=(deployment.seed, deployment.data_rank, _SCRIPT_STEP, model.count_step()),
            on_final=replicas.on_final() if trains else None,
            roots=backwards.roots, keeps_graphs=not self._detach_outputs,
            around_backward=_refuse_plain_backward,
        )  # fmt: skip
        model.backwards.append(backwards.note)
        try:
            with model.unit_times() if trains else nullcontext():
                results = deployment.run(plan)
            if self._detach_outputs:
                results = _realized(results, deployment.fetch)
            if trains:
                replicas.end(had_backward=backwards.noted)
        except BaseException:
            replicas.abort()
            raise
        finally:
            model.backwards.pop()
        return join_results(results)

    def _spec(self, model: DistributedModel, call: Call) -> Any:
        """What a microbatch's shapes depend on."""
        tensors = _tensors_of(call.args, call.kwargs)
        shapes = tuple((tuple(t.shape), t.dtype) for t in tensors)
        return (self._name, self._number, shapes, torch.is_grad_enabled(), model.training)


def _batch_advice() -> str:
    share = "rdp" if state.cfg is not None and state.cfg.prescaled_batch else "dp"
    return (
        f"Let the data depend on smp.{share}_rank() and smp.{share}_size(), never on smp.rank(): "
        f"DistributedSampler(dataset, num_replicas=smp.{share}_size(), rank=smp.{share}_rank()), "
        f"and seeds of shuffling and augmentation made from smp.{share}_rank()."
    )


def _tensors_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    return iter_tensors((args, dict(kwargs)))


def _realized(results: list[Any], fetch: Callable[[list[Tensor]], list[Tensor]]) -> list[Any]:
    """The results with real tensors, without graphs, on every rank. Collective over pp."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    for result in results:
        change_tensors(result, note)
    supply = iter(fetch(found))
    return [change_tensors(result, lambda _: next(supply)) for result in results]


def _refuse_plain_backward(backward: Callable[[], None]) -> None:
    del backward
    raise SMPError(
        "backward() was called on a tensor inside a function decorated with smp.step, where the "
        "order of backwards is the schedule's. Call model.backward(loss) instead."
    )


@contextmanager
def _step_running() -> Iterator[None]:
    state.in_step = True
    try:
        yield
    finally:
        state.in_step = False
