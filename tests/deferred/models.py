"""Models whose construction does something that deferred construction must repeat."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["HUGGING_FACE", "MODELS", "assert_same", "built_twice"]


class _Views(nn.Module):
    """Two parameters in one memory, and tensors that are neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.randn(6, 4)
        self.low = nn.Parameter(self.base[:3])
        self.high = nn.Parameter(self.base[3:])
        self.tables = [torch.ones(3), {"scale": torch.full((2,), 0.5)}]


class _Arithmetic(nn.Module):
    """Initialises by hand, in place, through views, and with values that Python looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(10, 20), nn.Linear(20, 10)
        self.embedding = nn.Embedding(9, 10, padding_idx=2)
        with torch.no_grad():
            self.a.weight.mul_(0.3).add_(torch.arange(10.0))
            self.a.weight[:, 1] = self.b.weight[1].mean()
            self.b.weight.copy_(self.b.weight.t().contiguous().t())
            self.embedding.weight[3].fill_(0.5)
        self.a.weight.data[3].zero_()
        self.b.bias.data = torch.randn(10) * 0.1
        self.b.weight.data /= self.b.weight.data.norm()
        self.scale = nn.Parameter(torch.ones(1) * self.a.weight.norm().item())
        if torch.rand(1) > 0.5:
            nn.init.ones_(self.a.bias)
        if self.b.weight.detach()[0, 0] > 0:
            nn.init.constant_(self.b.bias, 2.0)
        self.rates = nn.Parameter(torch.tensor(torch.linspace(0, 1, 4).tolist()))
        self.register_buffer("table", _sines(10, 6))
        self.register_buffer("mask", torch.tril(torch.ones(5, 5, dtype=torch.bool)))
        self.noise = nn.Parameter(torch.randn(3, generator=torch.Generator().manual_seed(9)))
        self.python = nn.Parameter(torch.full((2,), random.random() + np.random.rand()))


def _sines(length: int, width: int) -> Tensor:
    table = torch.zeros(length, width)
    position = torch.arange(length)[:, None]
    rate = torch.exp(torch.arange(0, width, 2) * (-math.log(100.0) / width))
    table[:, 0::2] = torch.sin(position * rate)
    table[:, 1::2] = torch.cos(position * rate)
    return table


def _factories() -> nn.Module:
    """Parameters made by every kind of factory, some with draws that cannot be left out."""
    made = [
        torch.Tensor(3, 4).normal_(),
        torch.FloatTensor(3, 4).fill_(1),
        torch.randn(3, 20, dtype=torch.float64),
        torch.normal(0.0, 1.0, (30, 4)),
        torch.normal(torch.zeros(3), 1.0),
        torch.bernoulli(torch.full((5, 5), 0.4)),
        torch.rand(40, 3)[torch.rand(40) > 0.5],
        torch.randint(0, 9, (3,)).float(),
        torch.from_numpy(np.random.rand(3)),
        torch.empty(40, 4).exponential_(),
        torch.cat([torch.randn(3, 3), torch.zeros(1, 3)]),
        torch.linalg.svd(torch.randn(3, 3))[0],
        torch.randn(20, 40).T[::2].normal_(),
        torch.rand_like(torch.empty(17, 3)),
        torch.empty(100, dtype=torch.bfloat16).normal_(),
        nn.functional.dropout(torch.ones(50), 0.3),
    ]
    return nn.ParameterList([nn.Parameter(tensor) for tensor in made])


def _initialisers() -> nn.Module:
    model = nn.ModuleList(nn.Linear(24, 20) for _ in range(9))
    weights = [layer.weight for layer in model]
    nn.init.orthogonal_(weights[0])
    nn.init.orthogonal_(weights[1].data.t())
    nn.init.trunc_normal_(weights[2], std=0.02)
    nn.init.sparse_(weights[3], 0.3)
    nn.init.eye_(weights[4])
    nn.init.xavier_normal_(weights[5])
    nn.init.kaiming_normal_(weights[6], generator=torch.Generator().manual_seed(1))
    nn.init.xavier_uniform_(weights[7], gain=2.0)
    nn.init.dirac_(model[8].register_parameter("kernel", nn.Parameter(torch.empty(3, 3, 3))) or
                   model[8].kernel)  # fmt: skip
    return model


def _tied() -> nn.Module:
    model = nn.ModuleDict({"tokens": nn.Embedding(50, 16), "head": nn.Linear(16, 50, bias=False)})
    model["head"].weight = model["tokens"].weight
    return model


def _copies() -> nn.Module:
    first = nn.Linear(4, 4)
    second = copy.deepcopy(first)
    first.weight.data.zero_()
    return nn.ModuleList([first, second, *nn.TransformerEncoder(_layer(), 2).layers])


def _layer() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 4, batch_first=True)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(300, 200),
    "layers": lambda: nn.Sequential(
        nn.LSTM(10, 20, 2), nn.MultiheadAttention(16, 4), nn.BatchNorm2d(7), nn.Conv2d(3, 8, 3)
    ),
    "views": _Views,
    "arithmetic": _Arithmetic,
    "factories": _factories,
    "initialisers": _initialisers,
    "tied": _tied,
    "copies": _copies,
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(5, 7)),
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(5, 7)),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(5, 5)),
    "half": lambda: nn.Linear(5, 7).half(),
    "double": lambda: nn.Linear(50, 70).double(),
    "channels_last": lambda: nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last),
    "reset": lambda: nn.Sequential(nn.Linear(20, 30)).apply(_reset),
}


def _reset(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.reset_parameters()
        module.weight.data.normal_(0, 0.5)


def _hugging_face(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers as hf

        small = {
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "vocab_size": 99, "pad_token_id": 0,
            "bos_token_id": 1, "eos_token_id": 2,
        }  # fmt: skip
        if name == "gpt2":
            config = hf.GPT2Config(
                n_embd=32, n_layer=2, n_head=4, vocab_size=99, bos_token_id=1, eos_token_id=2
            )
            return hf.GPT2LMHeadModel(config)
        if name == "llama":
            return hf.LlamaForCausalLM(hf.LlamaConfig(**small, num_key_value_heads=2))
        return hf.BertForMaskedLM(hf.BertConfig(**small))

    return make


HUGGING_FACE = {name: _hugging_face(name) for name in ("gpt2", "llama", "bert")}


def built_twice(make: Callable[[], nn.Module], deferred: Any) -> tuple[nn.Module, nn.Module]:
    """Returns the model built eagerly and under `deferred`, from one seed.

    All generators must end in one state.
    """
    make()  # what it imports may draw from Python's generator
    states, models = [], []
    for context in (None, deferred):
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        if context is None:
            models.append(make())
        else:
            with context:
                models.append(make())
        states.append((torch.get_rng_state(), random.getstate(), np.random.get_state()[1]))
    assert torch.equal(states[0][0], states[1][0]), "torch's generator went another way"
    assert states[0][1] == states[1][1]
    assert (states[0][2] == states[1][2]).all()
    return models[0], models[1]


def assert_same(found: Tensor, expected: Tensor, name: str) -> None:
    """Fails unless two tensors are equal to the bit, in one dtype and layout."""
    assert type(found) is type(expected), f"{name}: {type(found)}"
    assert (found.dtype, found.stride()) == (expected.dtype, expected.stride()), name
    assert found.requires_grad == expected.requires_grad, name
    assert torch.equal(found, expected), name
