"""The partition: which module subtree lives on which stage."""

from lightning_smp.partitioning.analysis import Analysis, analyze, count_parameters
from lightning_smp.partitioning.atoms import Atom, find_atoms, outer_parameters
from lightning_smp.partitioning.costs import AtomCost, Work
from lightning_smp.partitioning.device import DeviceModel
from lightning_smp.partitioning.fakes import fake_batch, new_fake_mode
from lightning_smp.partitioning.measured import MeasuredUnits, repartition
from lightning_smp.partitioning.plan import Partition, plan_partition
from lightning_smp.partitioning.report import report
from lightning_smp.partitioning.sharing import SharedParameter
from lightning_smp.partitioning.split import Item, Split, solve, split

__all__ = [
    "Analysis",
    "Atom",
    "AtomCost",
    "DeviceModel",
    "Item",
    "MeasuredUnits",
    "Partition",
    "SharedParameter",
    "Split",
    "Work",
    "analyze",
    "count_parameters",
    "fake_batch",
    "find_atoms",
    "new_fake_mode",
    "outer_parameters",
    "plan_partition",
    "repartition",
    "report",
    "solve",
    "split",
]
