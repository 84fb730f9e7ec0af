"""The optional native libraries; all else is in pyproject.toml. See docs/native.md."""

import importlib.util
from pathlib import Path

from setuptools import setup

_ROOT = Path(__file__).parent.resolve()
_SPEC = importlib.util.spec_from_file_location(
    "_smp_recipe", _ROOT / "lightning_smp" / "native" / "recipe.py"
)
assert _SPEC is not None
assert _SPEC.loader is not None
_RECIPE = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_RECIPE)

setup(**_RECIPE.setup_arguments(_ROOT))
