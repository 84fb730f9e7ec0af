import logging
import threading

import lightning.pytorch
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import BinaryAccuracy

from lightning_smp.batch import split_batch
from lightning_smp.lightning.logs import LogBuffer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
SAMPLES = 10
BATCH = 5  # in 2 microbatches: 3 + 2


class Split:
    """Runs a step in microbatches the way the strategy does, without a pipeline."""

    microbatches = 1

    def run(self, step, batch):
        pieces = split_batch(batch, self.microbatches, allow_uneven=True)
        losses = []
        with LogBuffer(self) as buffer:
            for index, piece in enumerate(pieces):
                buffer.begin(index, piece.num_samples)
                losses.append(step(piece.value) * piece.num_samples)
        buffer.resolve(lambda values: [value.detach() for value in values])
        buffer.replay()
        return torch.stack(losses).sum() / sum(piece.num_samples for piece in pieces)


def make_model(base):
    class Model(Split, base.LightningModule):
        def __init__(self, body):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            torch.nn.init.constant_(self.layer.weight, 0.5)
            torch.nn.init.constant_(self.layer.bias, 0.25)
            self.accuracy = BinaryAccuracy()
            self.total = SumMetric()
            self.many = MetricCollection({"mean": MeanMetric(), "sum": SumMetric()})
            self.body = body
            self.history = []

        def training_step(self, batch, batch_idx):
            return self.run(self.inner, batch)

        def validation_step(self, batch, batch_idx):
            self.run(self.inner, batch)

        def inner(self, batch):
            loss = (self.layer(batch) - 1).pow(2).mean()
            self.body(self, batch, loss)
            return loss

        def on_train_batch_end(self, *args):
            self.history.append({k: v.item() for k, v in self.trainer.callback_metrics.items()})

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05)

    return Model


def fit(body, microbatches, base=lightning.pytorch):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    model = make_model(base)(body)
    model.microbatches = microbatches
    data = torch.linspace(-1, 2, SAMPLES).reshape(-1, 1)
    trainer = base.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(model, DataLoader(data, BATCH), DataLoader(data, BATCH))
    assert "log" not in model.__dict__
    return model.history, {k: v.item() for k, v in trainer.callback_metrics.items()}


def log_everything(module, batch, loss):
    module.log("loss", loss, on_step=True, on_epoch=True)
    module.log("positional", loss, True, False, True, True)
    module.log("total", batch.sum(), on_step=True, on_epoch=True, reduce_fx="sum")
    module.log("largest", batch.max(), on_step=True, on_epoch=True, reduce_fx=max)
    module.log("smallest", batch.min(), on_step=True, on_epoch=True, reduce_fx=torch.min)
    module.log("sized", loss, on_step=True, on_epoch=True, batch_size=len(batch))
    module.log("weighted", batch[:1].sum(), on_step=True, on_epoch=True, batch_size=1)
    module.log("number", float(batch.mean()), on_step=True, on_epoch=True)
    module.log("count", len(batch), on_step=True, on_epoch=True, reduce_fx="sum")
    module.log("rate", 0.1, on_step=True, on_epoch=True)
    module.log_dict({"a": loss, "b": loss * 2}, on_step=True, on_epoch=True)
    module.log("changed", loss := loss.detach().clone(), on_step=True, on_epoch=True)
    loss.mul_(0)
    module.accuracy(batch[:, 0].sigmoid(), (batch[:, 0] > 0.5).int())
    module.log("accuracy", module.accuracy, on_step=True, on_epoch=True)
    module.total(batch)
    module.log("metric_sum", module.total, on_step=False, on_epoch=True)
    module.many(batch)
    module.log_dict(module.many, on_step=False, on_epoch=True)


def test_values_are_those_of_the_unsplit_batch():
    skipped = {"weighted"}  # the first sample of each piece is logged: compared below
    plain, plain_end = fit(log_everything, 1)
    split, split_end = fit(log_everything, 2)
    assert len(plain) == 4
    for one, other in zip([*plain, plain_end], [*split, split_end], strict=True):
        assert one.keys() == other.keys()
        for name in one:
            if name.split("_")[0] not in skipped:
                assert other[name] == pytest.approx(one[name], rel=1e-5, abs=1e-6, nan_ok=True), (
                    name
                )
    assert split_end["count_epoch"] == SAMPLES
    assert split_end["rate_epoch"] == plain_end["rate_epoch"]


def test_the_callers_batch_size_weights_the_mean():
    def body(module, batch, loss):
        module.log("value", batch[0, 0], batch_size=1, on_step=True)

    data = torch.linspace(-1, 2, SAMPLES)
    history, _ = fit(body, 2)
    assert history[0]["value"] == pytest.approx(float(data[0] + data[3]) / 2)


def test_names_logged_in_some_microbatches():
    def body(module, batch, loss):
        if len(batch) == 2:
            module.log("some", batch.mean(), on_step=True)
        module.log("all", loss, on_step=True)

    data = torch.linspace(-1, 2, SAMPLES)
    history, _ = fit(body, 2)
    assert history[0]["some"] == pytest.approx(float(data[3:5].mean()))


def test_a_name_logged_twice_in_one_step():
    def body(module, batch, loss):
        module.log("value", loss, on_step=True, on_epoch=True)
        module.log("value", loss + 1, on_step=True, on_epoch=True)

    plain, plain_end = fit(body, 1)
    split, split_end = fit(body, 2)
    assert split[0] == pytest.approx(plain[0])
    assert split_end == pytest.approx(plain_end)


def _twice_with_different_arguments(module, batch, loss):
    module.log("value", loss, prog_bar=True)
    module.log("value", loss, prog_bar=False)


def _in_different_ways(module, batch, loss):
    module.log("value", loss, prog_bar=len(batch) == 2)


@pytest.mark.parametrize(
    ("body", "error", "text"),
    [
        (_twice_with_different_arguments, MisconfigurationException, "different arguments"),
        (_in_different_ways, MisconfigurationException, "different arguments"),
        (lambda m, b, x: m.log("v", x, reduce_fx=torch.median), MisconfigurationException, "Only"),
        (lambda m, b, x: m.log("v", b), ValueError, "single element"),
        (lambda m, b, x: m.log("v", "text"), ValueError, "cannot be logged"),
        (lambda m, b, x: m.log("v", x, unknown=1), TypeError, "unknown"),
        (
            lambda m, b, x: m.log("v", x, on_step=False, on_epoch=False),
            MisconfigurationException,
            "",
        ),
    ],
)
def test_errors_are_lightnings_own(body, error, text):
    with pytest.raises(error, match=text):
        fit(body, 2)


def test_pytorch_lightning_works_too():
    base = pytest.importorskip("pytorch_lightning")
    _, expected = fit(log_everything, 2)
    assert fit(log_everything, 2, base)[1] == pytest.approx(expected, nan_ok=True)


class FakeModule:
    def __init__(self):
        self.calls = []

    def log(self, name, value, reduce_fx="mean", batch_size=None, **kwargs):
        self.calls.append((name, value, {"batch_size": batch_size, **kwargs}))


def replay(module, *pieces, resolve=True):
    """`pieces`: (microbatch, samples, [(args, kwargs)])."""
    with LogBuffer(module) as buffer:
        for index, samples, calls in pieces:
            buffer.begin(index, samples)
            for args, kwargs in calls:
                module.log(*args, **kwargs)
    if resolve:
        buffer.resolve(list)
    buffer.replay()
    return module.calls


def test_one_microbatch_passes_values_through():
    value = torch.nn.Parameter(torch.tensor([[1.5]], dtype=torch.bfloat16))
    (call,) = replay(FakeModule(), (0, 3, [(("x", value), {"sync_dist": True})]))
    assert call == ("x", value, {"batch_size": None, "sync_dist": True})
    assert call[1] is value


def test_integers_and_dtypes_stay_exact():
    big = 2**53 + 1
    half = torch.tensor(0.1, dtype=torch.bfloat16)
    calls = replay(
        FakeModule(),
        *[
            (
                index,
                3,
                [
                    (("same", big), {}),
                    (("sum", big), {"reduce_fx": "sum"}),
                    (("half", half), {}),
                    (("int", torch.tensor(7)), {}),
                    (("half_sum", half), {"reduce_fx": "sum"}),
                    (("mixed", half if index else 0.5), {"reduce_fx": "max"}),
                ],
            )
            for index in range(3)
        ],
    )
    found = {name: value for name, value, _ in calls}
    assert found["same"] == big
    assert type(found["same"]) is int
    assert found["sum"] == 3 * big
    assert found["half"].dtype is torch.bfloat16
    assert found["half"] == half
    assert found["int"] == 7
    assert found["half_sum"].dtype is torch.bfloat16
    assert found["mixed"] == 0.5


def test_order_is_by_microbatch_whatever_ran_first():
    module = FakeModule()
    call = lambda name, value=1.0: ((name, value), {})  # noqa: E731
    calls = replay(
        module,
        (1, 1, [call("a", 2.0), call("c")]),
        (0, 3, [call("b")]),
        (1, 1, [call("d")]),
        (0, 3, [call("a", 6.0)]),
    )
    assert [name for name, _, _ in calls] == ["b", "a", "c", "d"]
    assert calls[1][1] == 5.0


def test_values_are_fetched_in_one_order_and_untouched_before():
    class Placed(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise AssertionError(f"{func} on a placed tensor")

    placed = [torch.tensor(float(i)).as_subclass(Placed) for i in range(4)]
    module = FakeModule()
    with LogBuffer(module) as buffer:
        for index in (1, 0):
            buffer.begin(index, 2)
            module.log("x", placed[index])
            module.log("y", placed[2 + index], batch_size=torch.tensor(3))
    expected = [placed[0], placed[2], 3, placed[1], placed[3], 3]
    fetched = buffer.values()
    assert [a is b for a, b in zip(fetched, expected, strict=True)].count(False) == 2

    def fetch(values):
        with torch._C.DisableTorchFunctionSubclass():
            return [value.detach().as_subclass(torch.Tensor) for value in values]

    buffer.resolve(fetch)
    buffer.replay()
    assert module.calls[0][1] == 0.5
    assert module.calls[1] == ("y", torch.tensor(2.5), {"batch_size": 6})


def test_log_is_restored_after_an_error():
    module = FakeModule()
    with pytest.raises(KeyError), LogBuffer(module):
        raise KeyError
    assert "log" not in module.__dict__
    own = module.__dict__["log"] = lambda name, value: None
    with LogBuffer(module) as buffer:
        module.log("outside", 1)  # before the first microbatch: at once
    assert module.log is own
    assert buffer.values() == []


def test_nothing_is_lost_with_weights_of_zero():
    calls = replay(
        FakeModule(),
        (0, 1, [(("n", 1), {"batch_size": 0}), (("t", torch.tensor(1.0)), {"batch_size": 0})]),
        (1, 1, [(("n", 2), {"batch_size": 0}), (("t", torch.tensor(2.0)), {"batch_size": 0})]),
    )
    assert [value for _, value, _ in calls] == [1.5, 1.5]


def test_a_suspended_microbatch_keeps_its_record():
    module = FakeModule()
    resume = threading.Event()
    began = threading.Event()

    def first():
        buffer.begin(0, 1)
        began.set()
        assert resume.wait(10)
        module.log("a", 1.0)

    with LogBuffer(module) as buffer:
        thread = threading.Thread(target=first)
        thread.start()
        assert began.wait(10)
        buffer.begin(1, 3)
        module.log("a", 5.0)
        resume.set()
        thread.join(10)
    buffer.replay()
    assert [value for _, value, _ in module.calls] == [4.0]


def test_nothing_is_seen_by_a_function_mode():
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            raise AssertionError(f"{func} was seen")

    module = FakeModule()
    value = torch.tensor(1.0)
    with LogBuffer(module) as buffer:
        buffer.begin(0, 1)
        with Mode():
            module.log("x", value)
            module.log(name="y", value=value, batch_size=4)
        value.add_(1)
    buffer.resolve(list)
    buffer.replay()
    assert module.calls == [("x", 1.0, {"batch_size": None}), ("y", 1.0, {"batch_size": 4})]
