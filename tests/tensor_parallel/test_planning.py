"""What rules mean for a model: decisions and reasons, without processes."""

from __future__ import annotations

import importlib
import pkgutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import lightning_smp as smp
from lightning_smp.errors import ConfigError, UnsupportedError
from lightning_smp.tensor_parallel.context import TensorParallel
from lightning_smp.tensor_parallel.huggingface import rules_of
from lightning_smp.tensor_parallel.patterns import pattern_rule, read_patterns
from lightning_smp.tensor_parallel.plan import Plan, Rule, Style, describe, make_plan
from lightning_smp.tensor_parallel.pretrained import pretrained_rule
from lightning_smp.tensor_parallel.replace import Kept, distribute
from lightning_smp.tensor_parallel.sharded import Place
from tests.tensor_parallel.pretrained import CASES, Own

# Styles of installed plans that are refused by name.
_REFUSED = {"all_reduce", "moe_identity_expert"}


def _plan(model: nn.Module, tp_size: int) -> Plan:
    known = rules_of(model)
    assert known is not None
    partners = known.family.partners
    return make_plan(model, known.rules, tp_size, heads=known.heads, partners=partners)


def test_llama_by_its_own_plan() -> None:
    plan = _plan(CASES["llama"].make(), 4)
    assert len(plan.splits) == 2 * 7 + 2
    assert plan.splits["model.embed_tokens"].rule.style is Style.EMBEDDING
    assert plan.splits["lm_head"].rule.style is Style.VOCAB
    assert plan.splits["lm_head"].shardings["weight"].sizes == (9, 8, 8, 8)
    block = plan.blocks["model.layers.0.self_attn"]
    assert (block.place, block.ends_inside, block.whole) == (Place.GATHERED, True, ())
    assert plan.splits["model.layers.1.mlp.down_proj"].shardings["weight"].sizes == (6, 6, 5, 5)
    assert not plan.whole


def test_attention_stays_whole_where_ranks_do_not_divide_the_heads() -> None:
    for name, expected in (("gpt2", 6), ("bert", 6), ("t5", 12)):
        plan = _plan(CASES[name].make(), 3)
        assert len(plan.splits) == expected, name  # feed-forward halves and vocabulary
        reasons = set(plan.whole.values())
        assert reasons == {"3 ranks do not divide 4 attention heads"}, name
        assert not any(block.is_attention for block in plan.blocks.values())
    bert = _plan(CASES["bert"].make(), 3)
    assert "bert.encoder.layer.0.attention.output.dense" in bert.whole


def test_parameters_that_a_region_does_not_split_see_all_samples() -> None:
    import transformers as t

    config = t.Olmo2Config(
        hidden_size=16, intermediate_size=22, num_hidden_layers=1, num_attention_heads=4,
        vocab_size=33,
    )  # fmt: skip
    plan = _plan(t.Olmo2ForCausalLM(config), 2)
    block = plan.blocks["model.layers.0.self_attn"]
    assert block.place is Place.REGION
    assert block.whole == ("q_norm.weight", "k_norm.weight")
    assert plan.splits["model.layers.0.self_attn.q_proj"].rule.style is Style.COLUMN_JOINED


def test_shared_weights_stay_tied_or_whole() -> None:
    rules = read_patterns({"*.emb": "embedding", "*.head": "vocab"})
    model = nn.Sequential(Own())
    assert set(make_plan(model, rules, 2).splits) == {"0.emb", "0.head"}
    alone = make_plan(model, rules[:1], 2)
    assert not alone.splits
    assert "weight is shared with a module that is not split" in alone.whole["0.emb"]


def test_blocks_of_users_and_their_report() -> None:
    model = nn.Sequential(Own())
    plan = make_plan(model, read_patterns(CASES["own"].modules), 2)
    assert plan.blocks["0.attn"].is_attention
    assert plan.splits["0.attn.qkv"].place is Place.GATHERED
    assert plan.splits["0.attn.qkv"].shardings["weight"].ranges[0] == ((0, 8), (16, 24), (32, 40))
    assert plan.splits["0.fc1"].place is Place.ALONE
    done = describe(plan, "", "tensor_parallel_modules")
    assert ("0.fc1", "Linear", "column, by tensor_parallel_modules") in done.distributed


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ({"*.fc1": "colum"}, "styles are column, row"),
        ({"*.fc1": "row:3"}, "column:N for N fused blocks"),
        ({"0.fc3": "column"}, "matches no module. Did you mean '0.fc"),
        ({"*.fc1": "column", "*.norm": "row"}, "'0.norm' cannot be split, because a LayerNorm"),
    ],
)
def test_patterns_that_cannot_be_meant(patterns: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        pattern_rule(patterns)("", nn.Sequential(Own()), TensorParallel(size=2))
    assert message in str(caught.value)


def test_experts_need_a_rule_for_each_parameter() -> None:
    experts = nn.Module()
    experts.up, experts.bias = nn.Parameter(torch.zeros(2, 4, 3)), nn.Parameter(torch.zeros(3))
    rule = Rule("experts", Style.EXPERTS, dims=(("up", -2, 2),))
    plan = make_plan(nn.ModuleDict({"experts": experts}), [rule], 2)
    assert plan.whole == {"experts": "nothing says how its parameter bias is split"}


def test_a_plan_in_an_unknown_style_is_refused_by_name() -> None:
    model: Any = CASES["llama"].make()
    model._tp_plan = {"model.layers.*.self_attn": "sequence_parallel"}
    with pytest.raises(UnsupportedError, match="'sequence_parallel', which is not supported"):
        rules_of(model)


def test_a_model_without_plan_stays_whole_and_says_so() -> None:
    model: Any = CASES["llama"].make()
    model._tp_plan = None
    answer = pretrained_rule()("net", model, TensorParallel(size=2))
    assert isinstance(answer, Kept)
    assert "LlamaForCausalLM has no tp_plan" in answer.reason


def test_split_weights_are_parts_of_the_originals_or_fresh() -> None:
    whole: Any = CASES["gpt2"].make()
    tp = TensorParallel(size=2, rank=1)
    torch.manual_seed(0)
    for weights in ("slice", "reinit"):
        model: Any = CASES["gpt2"].make()
        model.load_state_dict(whole.state_dict())
        distribute(model, tp, (pretrained_rule(weights),), weights=weights)  # type: ignore[arg-type]
        weight = model.transformer.h[0].mlp.c_fc.weight
        expected = whole.transformer.h[0].mlp.c_fc.weight[:, 11:]
        assert weight.shape == expected.shape
        assert torch.equal(weight, expected) == (weights == "slice")
        assert model.lm_head.weight is model.transformer.wte.weight
        assert model.transformer.h[0].attn.num_heads == 2


def test_marks_say_which_parts_of_a_pretrained_model_are_split() -> None:
    tp = TensorParallel(size=2)
    model: Any = CASES["gpt2"].make()
    assert pretrained_rule(only_marked=True)("", model, tp) is None
    smp.set_tensor_parallelism(model.transformer.h[0])
    _, report = distribute(model, tp, (pretrained_rule(only_marked=True),))
    names = [name for name, _, _ in report.distributed]
    assert len(names) == 4
    assert all(name.startswith("transformer.h.0.") for name in names)
    model = CASES["gpt2"].make()
    smp.set_tensor_parallelism(model.transformer.h[1].attn, False)
    _, report = distribute(model, tp, (pretrained_rule(),))
    assert len(report.distributed) == 8
    assert ("transformer.h.1.attn.c_proj", "Conv1D") in [kept[:2] for kept in report.kept]


def test_weights_shared_with_the_model_around_stay_whole() -> None:
    root: Any = nn.Module()
    root.net = CASES["gpt2"].make()
    root.own_head = nn.Linear(16, 33, bias=False)
    root.own_head.weight = root.net.lm_head.weight
    tp = TensorParallel(size=2)
    _, report = distribute(root, tp, (pretrained_rule(root=root),))
    assert {name for name, _, _ in report.kept} == {"net.transformer.wte", "net.lm_head"}
    assert root.own_head.weight.shape == (33, 16)


def test_every_style_of_installed_plans_is_supported_or_refused() -> None:
    """Collects the plans of all configuration classes; a new style in transformers fails here."""
    from lightning_smp.tensor_parallel.huggingface import _NOTHING, _STACKED, _STYLES

    styles: set[str] = set()
    import transformers.models as models

    for info in pkgutil.iter_modules(models.__path__):
        try:
            module = importlib.import_module(
                f"{models.__name__}.{info.name}.configuration_{info.name}"
            )
        except ImportError:  # a few packages hold several configurations, or none
            continue
        for value in vars(module).values():
            plan = getattr(value, "base_model_tp_plan", None)
            if isinstance(value, type) and isinstance(plan, dict):
                styles |= set(plan.values())
    assert {"colwise", "rowwise", "moe_tp_experts"} <= styles
    assert styles - {*_STYLES, *_STACKED, *_NOTHING} <= _REFUSED


def test_nothing_is_asked_of_transformers() -> None:
    model: Any = nn.Linear(2, 2)
    model.config = SimpleNamespace(model_type="llama")
    assert pretrained_rule()("", model, TensorParallel(size=2)) is None
