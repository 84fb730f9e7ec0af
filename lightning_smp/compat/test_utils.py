"""`smdistributed.modelparallel.test.torch.utils`: one published script imports it as it trains."""

from __future__ import annotations

from typing import Any, NoReturn

from lightning_smp.errors import UnsupportedError

__all__ = ["dump_model", "verify"]


def dump_model(*args: Any, **kwargs: Any) -> NoReturn:
    """Is there to be imported; what it did was never documented."""
    raise UnsupportedError(
        "dump_model belonged to the tests of the old library and was never documented. Use "
        "smp.save(model.local_state_dict(), path, partial=True)."
    )


def verify(*args: Any, **kwargs: Any) -> NoReturn:
    """Is there to be imported; what it did was never documented."""
    raise UnsupportedError(
        "verify belonged to the tests of the old library and was never documented. Compare what "
        "model.state_dict() gives in both runs."
    )
