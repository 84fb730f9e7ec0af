"""Entry points of lightning_smp: what other packages call by name after `pip install`.

`arm` runs inside every `import torch`. So this module is outside the package and imports nothing:
switched off it costs one look at the environment, and a broken installation of lightning_smp can
never break torch.
"""

import os

__all__ = ["arm", "no_callbacks"]


def arm() -> None:
    """Makes `Trainer(strategy="smp")` work without an import of lightning_smp.

    Called by torch (entry point group `torch.backends`). Does nothing if the environment variable
    LIGHTNING_SMP_AUTOLOAD is "0"; never raises.
    """
    if os.environ.get("LIGHTNING_SMP_AUTOLOAD", "1") == "0":
        return
    try:
        from lightning_smp import autoload

        autoload.arm()
    except Exception as error:  # torch turns any exception here into a failure of `import torch`
        import logging

        logging.getLogger(__name__).warning(
            'strategy="smp" is not available without `import lightning_smp`: %r', error
        )


def no_callbacks() -> list[object]:
    """Registers as `arm` does and adds no callback.

    Called by a Trainer (entry point groups `*.callbacks_factory`) after it resolved its own
    strategy: so this helps only the process's later Trainers where torch's autoload is off.
    """
    arm()
    return []
