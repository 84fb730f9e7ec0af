"""The native parts: what is built, how it is loaded, and what takes its place where it is not.

Importing this package registers the backends "smp" and "smp_gloo" with torch.distributed.
"""

import torch.distributed

from lightning_smp.native.loading import Loaded, load_backend, load_kernels

__all__ = ["Loaded", "load_backend", "load_kernels"]

if torch.distributed.is_available():
    from lightning_smp.native.backend import register

    register()
