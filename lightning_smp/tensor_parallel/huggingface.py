"""Rules for Hugging Face models: from the model's own plan, or known here by model type.

Reads the attributes that models carry (their plan, configuration and embeddings); transformers is
never imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from torch import nn

from lightning_smp.errors import UnsupportedError
from lightning_smp.tensor_parallel.families import FAMILIES, Family
from lightning_smp.tensor_parallel.plan import Rule, Style, is_linear

__all__ = ["ModelRules", "is_pretrained", "rules_of"]

_STYLES: Final = {
    "colwise": Style.COLUMN,
    "colwise_gather_output": Style.COLUMN_JOINED,
    "colwise_rep": Style.COLUMN_JOINED,
    "rowwise": Style.ROW,
    "rowwise_split_input": Style.ROW_WHOLE_INPUT,
    "rowwise_rep": Style.ROW_WHOLE_INPUT,
    "embedding_rowwise": Style.EMBEDDING,
    "embedding_colwise": Style.EMBEDDING_COLUMNS,
    "replicated_with_grad_allreduce": Style.SUMMED,
    "mla_kv_a_proj": Style.LATENT,
    "moe_tp_experts": Style.EXPERTS,
    "local_params": Style.LOCAL,
}
_NOTHING: Final = {"replicate"}
# Of a stacked weight [experts, outputs, inputs]: dimension and fused blocks.
_STACKED: Final = {
    "colwise": (-2, 1),
    "rowwise": (-1, 1),
    "packed_colwise": (-2, 2),
    "packed_rowwise": (-1, 2),
}

_BY_HEAD: Final = {"colwise": (0, 1)}  # a module's own parameters under "local_params"


@dataclass(frozen=True)
class ModelRules:
    """What is known of a model.

    Attributes:
        rules: how its modules are split; names are relative to the model.
        heads: numbers of attention heads, all of which the group's size must divide.
        family: what differs from the usual in its blocks.
        source: where the rules come from, for the report.
    """

    rules: tuple[Rule, ...]
    heads: tuple[int, ...]
    family: Family = field(default_factory=Family)
    source: str = ""


def is_pretrained(module: nn.Module) -> bool:
    """Whether a module is a model of Hugging Face's transformers."""
    return any(
        base.__name__ == "PreTrainedModel" and base.__module__.split(".")[0] == "transformers"
        for base in type(module).__mro__
    )


def rules_of(model: nn.Module) -> ModelRules | None:
    """Returns the rules for a Hugging Face model, or None if nothing is known of it.

    Raises:
        UnsupportedError: its plan has a style that is not supported.
    """
    config: Any = model.config
    family = FAMILIES.get(config.model_type)
    if family is not None:
        rules = tuple(Rule(f"*{end}", style, blocks) for end, style, blocks in family.rules)
        source = f"the rules for {config.model_type}"
    else:
        plan = dict(getattr(model, "_tp_plan", None) or {})
        if not plan:
            return None
        rules = tuple(_translated(model, plan))
        family, source = Family(), f"the tp_plan of {type(model).__name__}"
    vocabulary = tuple(_vocabulary_rules(model))
    return ModelRules((*vocabulary, *rules), _heads(config), family, source)


def _heads(config: Any) -> tuple[int, ...]:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    names = ("num_attention_heads", "num_key_value_heads", "num_heads")
    found = [getattr(text, name, None) for name in names]
    return tuple(dict.fromkeys(n for n in found if isinstance(n, int)))


def _vocabulary_rules(model: nn.Module) -> Iterator[Rule]:
    """Rules for the embedding of the input, whatever shares its weight, and the head."""
    names = {id(m): n for n, m in model.named_modules(remove_duplicate=False)}
    embedding, head = _part(model, "get_input_embeddings"), _part(model, "get_output_embeddings")
    weights = {id(m.weight) for m in (embedding, head) if m is not None and hasattr(m, "weight")}
    for module in model.modules():
        weight = module._parameters.get("weight")
        if id(module) not in names or weight is None or id(weight) not in weights:
            continue
        if isinstance(module, nn.Embedding):
            yield Rule(names[id(module)], Style.EMBEDDING)
        elif is_linear(module):
            yield Rule(names[id(module)], Style.VOCAB)


def _part(model: nn.Module, getter: str) -> Any:
    try:
        return getattr(model, getter)()
    except (AttributeError, NotImplementedError):  # models without that part raise either
        return None


def _translated(model: nn.Module, plan: dict[str, str]) -> Iterator[Rule]:
    held: dict[str, list[tuple[str, int, int]]] = {}  # parameters by the pattern of their module
    of_modules = {}
    for pattern, style in plan.items():
        owner, _, local = pattern.rpartition(".")
        known = _STACKED if plan.get(owner) == "moe_tp_experts" else _BY_HEAD
        if known is _BY_HEAD and not _is_parameter(model, pattern, plan.get(owner)):
            of_modules[pattern] = style
        elif style not in known:
            raise _refusal(model, pattern, style)
        else:
            held.setdefault(owner, []).append((local, *known[style]))
    for pattern, style in of_modules.items():
        if style in _NOTHING:
            continue
        if style not in _STYLES:
            raise _refusal(model, pattern, style)
        direct = _rope_size(model, pattern) if style == "mla_kv_a_proj" else 0
        dims = tuple(held.get(pattern, ()))
        yield Rule(pattern.replace("*", "#"), _STYLES[style], dims=dims, direct=direct)


def _is_parameter(model: nn.Module, pattern: str, style_of_owner: str | None) -> bool:
    """Whether a pattern names parameters of a module that uses its part of them directly."""
    if style_of_owner != "local_params":
        return False
    rule = Rule(pattern.replace("*", "#"), Style.LOCAL)
    return any(rule.matches(name) for name, _ in model.named_parameters())


def _rope_size(model: nn.Module, pattern: str) -> int:
    size = getattr(model.config, "qk_rope_head_dim", None)
    if not isinstance(size, int):
        raise _refusal(model, pattern, "mla_kv_a_proj without config.qk_rope_head_dim")
    return size


def _refusal(model: nn.Module, pattern: str, style: str) -> UnsupportedError:
    return UnsupportedError(
        f"The tp_plan of {type(model).__name__} splits {pattern!r} in the style {style!r}, which "
        f"is not supported. Supported are {sorted(_STYLES)}. Give name patterns of your own by "
        "tensor_parallel_modules={...}, or use tensor_parallel_degree=1."
    )
