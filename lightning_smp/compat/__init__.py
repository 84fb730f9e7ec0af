"""Makes `smdistributed.modelparallel` importable in this process, as another name of this library.

Nothing is installed under that name: `install` adds a finder, `remove` takes it away.
"""

from lightning_smp.compat.finder import VERSION, install, remove

__all__ = ["VERSION", "install", "remove"]
