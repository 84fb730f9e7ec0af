"""Decides which modules of a model are split over a tensor group, and how; pure, nothing is done.

Rules name modules (or parameters, for experts) and say how they are split. The result lists what is
split and in which place, the blocks around split layers, and what stays whole for which reason.

A *block* is a module whose inputs every rank brings together before its layers run. Rules of a
model's own plan form blocks by themselves: the parent of a column-wise layer is one. Rules that
users write do so only by the style ``block``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from torch import nn

from lightning_smp.tensor_parallel.record import Sharding
from lightning_smp.tensor_parallel.replace import InPlace
from lightning_smp.tensor_parallel.sharded import Place

__all__ = [
    "Block",
    "Plan",
    "Rule",
    "Split",
    "Style",
    "describe",
    "input_dim",
    "is_linear",
    "make_plan",
]


class Style(Enum):
    """How a module is split."""

    COLUMN = "column"  # some of the outputs
    COLUMN_JOINED = "column_joined"  # some of the outputs, which are joined after it
    ROW = "row"  # some of the inputs
    ROW_WHOLE_INPUT = "row_whole_input"  # some of the inputs, which come whole
    EMBEDDING = "embedding"  # some of the rows
    EMBEDDING_COLUMNS = "embedding_columns"  # some of the columns, which are joined after it
    HEAD_BIAS = "head_bias"  # an embedding with a column for each attention head
    VOCAB = "vocab"  # some of the classes, with a parallel cross entropy
    SUMMED = "summed"  # whole, applied to slices
    LATENT = "latent"  # whole; its last outputs go to slices directly
    EXPERTS = "experts"  # parameters of its own, some of the inner channels of each expert
    LOCAL = "local"  # parameters of a block's own, one for each attention head
    BLOCK = "block"  # brings the inputs together


@dataclass(frozen=True)
class Rule:
    """Says how the modules with matching names are split.

    Attributes:
        pattern: of the dotted name; ``*`` stands for anything, ``#`` for a number.
        style: how.
        blocks: fused blocks along the outputs, each of which is split by itself.
        dims: of experts and of a block's own parameters: the dimension of each that is split, and
            its fused blocks.
        by_user: whether a user wrote it, so that what it cannot do is an error.
        direct: outputs of a latent projection that go to slices directly.
    """

    pattern: str
    style: Style
    blocks: int = 1
    dims: tuple[tuple[str, int, int], ...] = ()
    by_user: bool = False
    direct: int = 0

    def matches(self, name: str) -> bool:
        """Whether the pattern fits a dotted name as a whole."""
        wild = {"*": ".*", "#": r"\d+"}
        expression = "".join(wild.get(c) or re.escape(c) for c in self.pattern)
        return re.fullmatch(expression, name) is not None


@dataclass
class Split:
    """A module that is split.

    Attributes:
        name: dotted name, the first of several.
        module: the module.
        rule: the rule that says so.
        shardings: of its parameters, by local name.
        place: where it stands.
        block: name of the block that it belongs to, "" for none.
    """

    name: str
    module: nn.Module = field(repr=False)
    rule: Rule
    shardings: dict[str, Sharding]
    place: Place = Place.ALONE
    block: str = ""


@dataclass
class Block:
    """A module whose inputs are brought together.

    Attributes:
        name: dotted name.
        module: the module.
        place: of the layers inside.
        ends_inside: whether a row-wise layer inside gives everybody's own samples back.
        whole: local names of parameters inside that are not split.
        is_attention: whether attention is computed inside.
        by_user: whether a user's rule names it.
        own: how parameters of its own are split, by local name.
    """

    name: str
    module: nn.Module = field(repr=False)
    place: Place
    ends_inside: bool
    whole: tuple[str, ...] = ()
    is_attention: bool = False
    by_user: bool = False
    own: dict[str, Sharding] = field(default_factory=dict)


@dataclass
class Plan:
    """What is split, what stays whole, and why.

    Attributes:
        splits: by name.
        blocks: by name.
        whole: name to reason, of modules that a rule names.
        own: by name of a module, how parameters of its own are split if it becomes a block.
        modules: all modules by name.
    """

    splits: dict[str, Split] = field(default_factory=dict)
    blocks: dict[str, Block] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)
    own: dict[str, dict[str, Sharding]] = field(default_factory=dict)
    modules: dict[str, nn.Module] = field(default_factory=dict, repr=False)


_SIMPLE: Final = {Style.COLUMN, Style.ROW, Style.SUMMED, Style.HEAD_BIAS}
_COLUMNS: Final = {Style.COLUMN, Style.COLUMN_JOINED}
_ROWS: Final = {Style.ROW, Style.ROW_WHOLE_INPUT}
_LINEAR: Final = {*_COLUMNS, *_ROWS, Style.VOCAB}
_EMBEDDINGS: Final = {Style.EMBEDDING, Style.EMBEDDING_COLUMNS, Style.HEAD_BIAS}


def make_plan(
    model: nn.Module,
    rules: Sequence[Rule],
    tp_size: int,
    *,
    heads: Sequence[int] = (),
    partners: Sequence[tuple[str, str]] = (),
    root: nn.Module | None = None,
    may_split: Callable[[nn.Module], bool] | None = None,
) -> Plan:
    """Returns what rules mean for a model.

    Args:
        model: the module whose names the patterns are of.
        rules: the first that matches a module counts.
        tp_size: ranks of the tensor group.
        heads: numbers of attention heads in the model; if the group's size does not divide all of
            them, blocks of attention stay whole.
        partners: (end of a block's name, what stands there in the name of its row-wise layer), for
            blocks that have none inside.
        root: what the model is a part of; its modules may share weights with the model's.
        may_split: says which modules may be split; by default all.
    """
    planner = _Planner(model, rules, tp_size, heads, partners)
    planner.holders = _holders(model if root is None else root)
    planner.may_split = may_split
    return planner.run()


class _Planner:
    """One walk over a module tree."""

    def __init__(
        self,
        model: nn.Module,
        rules: Sequence[Rule],
        tp_size: int,
        heads: Sequence[int],
        partners: Sequence[tuple[str, str]],
    ) -> None:
        self.model = model
        self.rules = rules
        self.tp_size = tp_size
        self.heads = heads
        self.partners = partners
        self.plan = Plan(modules=dict(model.named_modules()))
        self.holders: dict[int, set[tuple[int, str]]] = {}
        self.may_split: Callable[[nn.Module], bool] | None = None

    def run(self) -> Plan:
        for name, module in self.model.named_modules():
            rule = next((r for r in self.rules if name and r.matches(name)), None)
            if rule is None:
                continue
            if self.may_split is not None and not self.may_split(module):
                self.plan.whole[name] = "it is not marked, or marked as not to be split"
            else:
                self._decide(name, module, rule)
        self._form_blocks()
        while self._drop_shared():
            pass
        self._place()
        return self.plan

    def _decide(self, name: str, module: nn.Module, rule: Rule) -> None:
        if rule.style is Style.BLOCK:
            self.plan.blocks[name] = Block(name, module, Place.GATHERED, False, by_user=True)
            return
        if rule.style is Style.LOCAL:
            self.plan.own[name] = _shardings(module, rule, self.tp_size)
            return
        problem = _misfit(module, rule)
        shardings: dict[str, Sharding] = {}
        if not problem:
            shardings = _shardings(module, rule, self.tp_size)
            short = [n for n, s in shardings.items() if min(s.sizes) == 0]
            if short:
                shape = shardings[short[0]].shape
                problem = f"{short[0]} of shape {shape} is too small for {self.tp_size} ranks"
        if problem:
            self.plan.whole[name] = problem
        else:
            self.plan.splits[name] = Split(name, module, rule, shardings)

    # ---- blocks ---------------------------------------------------------------------------------

    def _form_blocks(self) -> None:
        """Gives the layers of a model's own plan their blocks, or drops them together."""
        groups: dict[str, list[Split]] = {}
        for split in self.plan.splits.values():
            if not split.rule.by_user and split.rule.style not in (
                Style.VOCAB, Style.EMBEDDING, Style.EMBEDDING_COLUMNS, Style.EXPERTS,
            ):  # fmt: skip
                groups.setdefault(self._parent(split), []).append(split)
        for name, members in groups.items():
            styles = {m.rule.style for m in members}
            if not styles & _COLUMNS or (styles == {Style.COLUMN_JOINED} and len(members) == 1):
                continue
            problem = self._block_problem(name, members)
            if not problem and not styles & _ROWS:
                row = self._partner(name)
                if row not in self.plan.splits:
                    problem = self.plan.whole.get(
                        row, "no row-wise layer next to it ends its slices"
                    )
            self._add_block(name, members, styles)
            if problem:
                self._drop_block(name, problem)

    def _parent(self, split: Split) -> str:
        return split.name.rpartition(".")[0]

    def _block_problem(self, name: str, members: list[Split]) -> str:
        module = self.model.get_submodule(name)
        lost = [n for n in self.plan.whole if n.rpartition(".")[0] == name]
        if lost:
            return f"{lost[0]} next to it stays whole"
        if not name:
            return "it stands directly in the model, so that there is no block to gather for"
        if any(other.startswith(name + ".") or name.startswith(other + ".")
               for other in self.plan.blocks):  # fmt: skip
            return "its block is inside another block"
        odd_own = [n for n, s in self.plan.own.get(name, {}).items() if len(set(s.sizes)) > 1]
        if odd_own:
            return f"{self.tp_size} ranks do not divide its {odd_own[0]}"
        if not _is_attention(module):
            return ""
        odd = [count for count in self.heads if count % self.tp_size]
        if odd:
            return f"{self.tp_size} ranks do not divide {odd[0]} attention heads"
        size = getattr(module, "head_dim", None)
        if isinstance(size, int):
            for member in members:
                sharding = member.shardings.get("weight")
                if sharding is None or member.rule.style is not Style.COLUMN:
                    continue
                heads = sharding.shape[sharding.dim] // size
                if heads % self.tp_size:
                    return f"{self.tp_size} ranks do not divide the {heads} heads of {member.name}"
        return ""

    def _add_block(self, name: str, members: list[Split], styles: set[Style]) -> None:
        module = self.model.get_submodule(name)
        split = {f"{m.name}.{n}" for m in members for n in m.shardings}
        split |= {f"{m.name}.{n}" for m in members if m.rule.style is Style.SUMMED
                  for n, _ in m.module.named_parameters()}  # fmt: skip
        own = self.plan.own.get(name, {})
        split |= {f"{name}.{n}" for n in own}
        whole = tuple(n for n, _ in module.named_parameters() if f"{name}.{n}" not in split)
        # A row-wise layer that gives own samples back adds its bias to these.
        biases = {f"{m.name}.bias" for m in members if m.rule.style in _ROWS}
        is_simple = styles <= _SIMPLE and all(f"{name}.{n}" in biases for n in whole)
        place = Place.GATHERED if is_simple else Place.REGION
        whole = () if is_simple else whole
        self.plan.blocks[name] = Block(
            name, module, place, bool(styles & _ROWS), whole, _is_attention(module), own=own
        )

    def _drop(self, name: str, reason: str) -> None:
        self.plan.splits.pop(name, None)
        self.plan.whole[name] = reason

    # ---- shared weights -------------------------------------------------------------------------

    def _drop_shared(self) -> bool:
        """Drops modules that share a parameter with one that is not split alike."""
        wanted: dict[int, tuple[Sharding, str]] = {}
        names: dict[int, int] = {}
        for split in self.plan.splits.values():
            for local, sharding in split.shardings.items():
                key = id(_tensor(split.module, local))
                names[key] = names.get(key, 0) + 1
                wanted.setdefault(key, (sharding, split.name))
        for split in list(self.plan.splits.values()):
            for local, sharding in split.shardings.items():
                tensor = _tensor(split.module, local)
                other = wanted[id(tensor)]
                alone = len(self._users(split, tensor)) - names[id(tensor)]
                if other[0] == sharding and alone <= 0:
                    continue
                reason = f"{local} is shared with a module that is not split in the same way"
                self._drop_with_block(split, reason)
                return True
        return False

    def _users(self, split: Split, tensor: nn.Parameter) -> set[tuple[int, str]]:
        """Who holds a parameter. A parent that keeps its head's bias as its own does not use it."""
        holders = self.holders[id(tensor)]
        if split.rule.style is not Style.VOCAB:
            return holders
        parent = self.model.get_submodule(self._parent(split))
        return {h for h in holders if h != (id(parent), "bias")}

    def _drop_with_block(self, split: Split, reason: str) -> None:
        blocks = [self._parent(split), *self.plan.blocks]
        for name in blocks:
            block = self.plan.blocks.get(name)
            if block is not None and not block.by_user and split.name in self._members(name):
                self._drop_block(name, reason)
                return
        self._drop(split.name, reason)

    def _members(self, block: str) -> list[str]:
        """The layers that are split together with a block, or not at all."""
        inside = [
            s.name
            for s in self.plan.splits.values()
            if self._parent(s) == block and s.rule.style is not Style.EXPERTS
        ]
        return inside if self.plan.blocks[block].ends_inside else [*inside, self._partner(block)]

    def _partner(self, block: str) -> str:
        for end, row in self.partners:
            if block.endswith(end):
                return block.removesuffix(end) + row
        return ""

    def _drop_block(self, name: str, reason: str) -> None:
        for member in self._members(name):
            if member in self.plan.splits:
                self._drop(member, reason)
        del self.plan.blocks[name]

    def _place(self) -> None:
        for name, block in self.plan.blocks.items():
            if block.by_user:
                inside = [s for s in self.plan.splits.values() if s.name.startswith(name + ".")]
                self._add_block(name, inside, {s.rule.style for s in inside})
        for split in self.plan.splits.values():
            for name, block in self.plan.blocks.items():
                if split.name.startswith(name + "."):
                    split.place, split.block = block.place, name


def _tensor(module: nn.Module, local: str) -> nn.Parameter:
    path, _, name = local.rpartition(".")
    found = getattr(module.get_submodule(path), name)
    assert isinstance(found, nn.Parameter)
    return found


def _holders(model: nn.Module) -> dict[int, set[tuple[int, str]]]:
    """The (module, name) pairs that hold each parameter."""
    holders: dict[int, set[tuple[int, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            holders.setdefault(id(parameter), set()).add((id(module), name))
    return holders


def _is_attention(module: nn.Module) -> bool:
    return "attention" in type(module).__name__.lower() or hasattr(module, "head_dim")


def _is_conv1d(module: nn.Module) -> bool:
    """Whether it is Hugging Face's Conv1D, a linear layer with a transposed weight."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def is_linear(module: nn.Module) -> bool:
    """Whether a module computes what `nn.Linear` does, with a weight of its own."""
    is_plain = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    return is_plain or _is_conv1d(module)


def input_dim(module: nn.Module) -> int:
    """The dimension of a linear layer's weight that runs over its inputs."""
    return 0 if _is_conv1d(module) else 1


def _misfit(module: nn.Module, rule: Rule) -> str:
    kind = type(module).__name__
    if "forward" in vars(module):
        return f"the forward of this {kind} was replaced"
    if rule.style in _LINEAR:
        return "" if is_linear(module) else f"a {kind} is no linear layer"
    if rule.style in _EMBEDDINGS:
        if not isinstance(module, nn.Embedding):
            return f"a {kind} is no embedding"
        if module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
            return "max_norm, sparse and scale_grad_by_freq look at whole embeddings"
    if rule.style is Style.EXPERTS:
        covered = {name for name, _, _ in rule.dims}
        others = [n for n, _ in module.named_parameters() if n not in covered]
        if others:
            return f"nothing says how its parameter {others[0]} is split"
    return ""


def _shardings(module: nn.Module, rule: Rule, tp_size: int) -> dict[str, Sharding]:
    if rule.style in (Style.EXPERTS, Style.LOCAL):
        return {
            name: _sharding(_tensor(module, name).shape, dim, tp_size, blocks)
            for name, dim, blocks in rule.dims
            if getattr(module, name) is not None
        }
    if rule.style in (Style.SUMMED, Style.LATENT):
        return {}
    weight = _tensor(module, "weight")
    inputs = input_dim(module) if rule.style in _LINEAR else 0
    if rule.style in _ROWS:
        return {"weight": _sharding(weight.shape, inputs, tp_size, rule.blocks)}
    if rule.style in (Style.EMBEDDING_COLUMNS, Style.HEAD_BIAS):
        return {"weight": _sharding(weight.shape, 1, tp_size, 1)}
    outputs = 1 - inputs if rule.style in _LINEAR else 0
    found = {"weight": _sharding(weight.shape, outputs, tp_size, rule.blocks)}
    bias = getattr(module, "bias", None)
    if rule.style in _LINEAR and bias is not None:
        found["bias"] = _sharding(bias.shape, 0, tp_size, rule.blocks)
    return found


def _sharding(shape: Iterable[int], dim: int, tp_size: int, blocks: int) -> Sharding:
    shape = tuple(shape)
    return Sharding.split(shape, dim, tp_size, blocks=[shape[dim] // blocks] * blocks)


def describe(plan: Plan, prefix: str, source: str) -> InPlace:
    """Returns what a plan does, for the report; to be called before it is carried out.

    Args:
        plan: the plan.
        prefix: dotted name of its model in the whole.
        source: where its rules come from.
    """

    def entry(name: str, module: nn.Module, text: str) -> tuple[str, str, str]:
        return (f"{prefix}.{name}" if prefix and name else prefix or name, _kind(module), text)

    done = [
        entry(s.name, s.module, f"{s.rule.style.value}, by {source}") for s in plan.splits.values()
    ]
    done += [
        entry(b.name, b.module, f"{', '.join(b.own)} by heads, by {source}")
        for b in plan.blocks.values()
        if b.own
    ]
    modules = plan.modules
    kept = [entry(name, modules[name], reason) for name, reason in plan.whole.items()]
    return InPlace(tuple(done), tuple(kept))


def _kind(module: nn.Module) -> str:
    return type(module).__name__
