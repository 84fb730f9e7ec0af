"""Atoms of a zoo of module trees."""

from __future__ import annotations

import warnings

import lightning
import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from lightning_smp.partitioning.atoms import find_atoms, outer_parameters
from tests.partitioning import zoo


class Root(nn.Module):
    """Stands for the LightningModule that holds the network."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net


def names(net: nn.Module) -> list[str]:
    root = Root(net)
    atoms = find_atoms(root)
    check_cover(root)
    assert all(atom.name.startswith("net.") for atom in atoms)
    return [atom.name.removeprefix("net.") for atom in atoms]


def check_cover(root: nn.Module) -> None:
    """Each parameter is in an atom or an outer one, never in both, and indices count up."""
    atoms = find_atoms(root)
    inside = {id(p) for atom in atoms for p in atom.module.parameters()}
    outside = {id(p) for p in outer_parameters(root, atoms).values()}
    assert inside | outside == {id(p) for p in root.parameters()}
    assert not inside & outside
    assert [atom.index for atom in atoms] == list(range(len(atoms)))
    assert all(root.get_submodule(atom.name) is atom.module for atom in atoms)
    assert len({id(atom.module) for atom in atoms}) == len(atoms)


def test_sequential_is_divided_into_its_elements() -> None:
    assert names(zoo.mlp(depth=2)) == ["0", "1", "2", "3", "4"]
    assert len(names(zoo.cnn())) == 9


@pytest.mark.parametrize("tied", [True, False])
def test_plain_gpt(tied: bool) -> None:
    blocks = [f"blocks.{i}" for i in range(4)]
    assert names(zoo.GPT(4, tied=tied)) == ["wte", "wpe", *blocks, "ln_f", "head"]


def test_unet_divides_only_its_large_elements() -> None:
    found = names(zoo.UNet())
    assert {"inc", "down_1", "up_1", "out"} <= set(found)
    assert "down_2.net.0" in found


def test_transformer_containers_are_opened() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, nn.LayerNorm(8))
        both = nn.Transformer(8, 2, 1, 1, 16)
    assert names(encoder) == ["layers.0", "layers.1", "norm"]
    assert names(both) == [
        "encoder.layers.0",
        "encoder.norm",
        "decoder.layers.0",
        "decoder.norm",
    ]


def test_moe_blocks_are_whole_unless_large() -> None:
    many = nn.ModuleList(zoo.MoEBlock(8, 4) for _ in range(6))
    few = nn.ModuleList(zoo.MoEBlock(8, 4) for _ in range(2))
    assert names(many) == [str(i) for i in range(6)]
    assert "1.experts.3" in names(few)


def test_swin_nested_lists() -> None:
    found = names(zoo.Swin())
    assert found[:3] == ["patch_embed", "layers.0", "layers.1"]
    assert [f"layers.2.blocks.{i}" for i in range(4)] == found[4:8]


def test_builtins_are_whole() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2)
            self.lstm = nn.LSTM(8, 8, 2)
            self.norm = parametrizations.weight_norm(nn.Linear(8, 8))
            self.loss = nn.CrossEntropyLoss(weight=torch.ones(2))
            self.scales = nn.ParameterList([nn.Parameter(torch.ones(2))])
            self.skip = nn.Sequential()

    assert names(Net()) == ["attention", "lstm", "norm"]


def test_parametrized_subtree_is_whole() -> None:
    class Scaled(zoo.GPT):
        def __init__(self) -> None:
            super().__init__(2)
            self.scale = nn.Parameter(torch.ones(3))

    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    net = Scaled()
    nn.utils.parametrize.register_parametrization(net, "scale", Twice())
    assert [atom.name for atom in find_atoms(Root(net))] == ["net"]


def test_compiled_module_is_whole() -> None:
    root = Root(zoo.GPT(2))
    root.net.compile()
    assert [atom.name for atom in find_atoms(root)] == ["net"]


def test_bulk_in_direct_parameters_is_whole() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Parameter(torch.zeros(64, 8))
            self.norm = nn.LayerNorm(8)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = Table()
            self.head = nn.Linear(8, 8)
            self.bias = nn.Parameter(torch.zeros(8))

    root = Root(Net())
    atoms = find_atoms(root)
    assert [atom.name for atom in atoms] == ["net.table", "net.head"]
    assert list(outer_parameters(root, atoms)) == ["net.bias"]


def test_small_subtree_is_whole() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.big = nn.Linear(100, 100)
            self.small = zoo.Expert(2)

    assert names(Net()) == ["big", "small"]


def test_one_instance_on_two_paths_is_one_atom() -> None:
    shared = nn.Linear(4, 4)
    assert names(nn.ModuleList([shared, nn.ReLU(), shared])) == ["0", "1"]


def test_module_shared_by_two_blocks_stays_inside_both() -> None:
    blocks = nn.ModuleList(zoo.Expert(4) for _ in range(6))
    for block in blocks:
        block.up = blocks[0].up
    assert names(blocks) == [str(i) for i in range(6)]


def test_metrics_are_a_boundary() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)
            self.accuracy = torchmetrics.MetricCollection(
                [torchmetrics.classification.BinaryAccuracy()]
            )

    assert names(Net()) == ["layer"]
    assert names(nn.ModuleList([Net() for _ in range(8)])) == [f"{i}.layer" for i in range(8)]


def test_gan_of_nested_lightning_modules() -> None:
    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.body = zoo.mlp(depth=1)

    class Gan(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.generator = Net()
            self.critic = Net()

    gan = Gan()
    check_cover(gan)
    assert [atom.name for atom in find_atoms(gan)] == [
        *(f"generator.body.{i}" for i in range(3)),
        *(f"critic.body.{i}" for i in range(3)),
    ]


def hugging_face(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    small = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 16}
    if kind == "gpt2":
        config = transformers.GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=16)
        return transformers.GPT2LMHeadModel(config)
    if kind == "llama":
        config = transformers.LlamaConfig(num_hidden_layers=2, num_key_value_heads=2, **small)
        return transformers.LlamaForCausalLM(config)
    if kind == "bert":
        config = transformers.BertConfig(num_hidden_layers=2, **small)
        return transformers.BertForMaskedLM(config)
    config = transformers.T5Config(
        num_layers=2, d_model=8, d_kv=4, d_ff=16, num_heads=2, vocab_size=16,
        pad_token_id=0, decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        ("gpt2", ["transformer.h.0", "transformer.h.1"]),
        ("llama", ["model.layers.0", "model.layers.1"]),
        ("bert", ["bert.encoder.layer.0", "bert.encoder.layer.1"]),
        ("t5", ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"]),
    ],
)
def test_hugging_face_layers_are_whole(kind: str, layers: list[str]) -> None:
    found = names(hugging_face(kind))
    assert set(layers) <= set(found)
    assert not any(name.startswith(f"{layer}.") for name in found for layer in layers)
