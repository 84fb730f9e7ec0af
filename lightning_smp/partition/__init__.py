"""The partition: which module subtree lives on which stage."""

from lightning_smp.partition.analysis import Analysis, analyze, count_parameters
from lightning_smp.partition.atoms import Atom, find_atoms, outer_parameters
from lightning_smp.partition.costs import AtomCost, DeviceModel
from lightning_smp.partition.fakes import fake_batch, new_fake_mode
from lightning_smp.partition.plan import Partition, plan_partition
from lightning_smp.partition.report import report
from lightning_smp.partition.sharing import SharedParameter
from lightning_smp.partition.split import Item, Split, solve, split

__all__ = [
    "Analysis",
    "Atom",
    "AtomCost",
    "DeviceModel",
    "Item",
    "Partition",
    "SharedParameter",
    "Split",
    "analyze",
    "count_parameters",
    "fake_batch",
    "find_atoms",
    "new_fake_mode",
    "outer_parameters",
    "plan_partition",
    "report",
    "solve",
    "split",
]
