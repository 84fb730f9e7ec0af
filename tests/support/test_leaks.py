"""The leak check of the conftest finds what it claims to find."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

_LEAKS = {
    "environment variable SMP_LEAK": "os.environ['SMP_LEAK'] = '1'",
    "thread 'leak'": "threading.Thread(target=time.sleep, args=(8,), name='leak', daemon=True)"
    ".start()",
    "process ": "subprocess.Popen(['sleep', '8'])",
}


@pytest.mark.parametrize("leak", list(_LEAKS))
def test_leak_fails_the_test(leak: str, tmp_path: Path) -> None:
    conftest = Path(__file__).parents[1] / "conftest.py"
    (tmp_path / "conftest.py").write_text(conftest.read_text())
    (tmp_path / "test_it.py").write_text(
        textwrap.dedent(f"""
        import os, subprocess, threading, time

        def test_it():
            {_LEAKS[leak]}
        """)
    )
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert f"the test left behind: {leak}" in result.stdout
