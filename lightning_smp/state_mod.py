"""`smp.state_mod`: the module that clients import `state` from."""

from lightning_smp.process_state import state

__all__ = ["state"]
