"""Rules that a linter does not check, over every Python file of the repository."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_MAX_LINES = 500
_MAX_FUNCTION_LINES = 60
_FORBIDDEN_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
_FORBIDDEN_CALLS = {"eval", "exec", "compile", "print"}
# They move pickled objects between processes.
_FORBIDDEN_ATTRIBUTES = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
}
_PURE = ("lightning_smp/schedule", "lightning_smp/config", "lightning_smp/topology.py")


def _files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (_ROOT / folder).rglob("*.py"))


_LIBRARY = [*_files("lightning_smp"), _ROOT / "lightning_smp_autoload.py"]
_ALL = [*_LIBRARY, *_files("tests", "examples", "scripts", "benchmarks")]


def _name(path: Path) -> str:
    return path.relative_to(_ROOT).as_posix()


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@pytest.mark.parametrize("path", _ALL, ids=_name)
def test_file_is_short_and_ascii(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= _MAX_LINES
    assert text.isascii(), "non-ASCII characters"


@pytest.mark.parametrize("path", _LIBRARY, ids=_name)
def test_module_declares_what_is_public(path: Path) -> None:
    tree = _tree(path)
    names = [
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    ]
    is_bare_package = path.name == "__init__.py" and len(tree.body) == 1  # a docstring only
    assert "__all__" in names or is_bare_package


@pytest.mark.parametrize("path", _LIBRARY, ids=_name)
def test_no_forbidden_construct(path: Path) -> None:
    prints = _name(path).startswith("lightning_smp/commands/")  # what commands are there for
    found = [
        f"line {node.lineno}: {what}"
        for node, what in _forbidden(_tree(path))
        if not (prints and what == "print()")
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", _LIBRARY, ids=_name)
def test_functions_are_short(path: Path) -> None:
    long = [
        f"{node.name}: {_body_lines(node)} lines"
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and _body_lines(node) > _MAX_FUNCTION_LINES
    ]
    assert not long, "\n".join(long)


@pytest.mark.parametrize("path", [p for p in _LIBRARY if _name(p).startswith(_PURE)], ids=_name)
def test_planning_does_not_communicate(path: Path) -> None:
    assert not [name for name in _imports(_tree(path)) if name.startswith("torch.distributed")]


def test_ruff_is_content() -> None:
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format=concise", "."]
    result = subprocess.run(
        command, cwd=_ROOT, check=False, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stdout + result.stderr


def _body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function after its signature and docstring."""
    has_docstring = ast.get_docstring(node) is not None
    body = node.body[1:] if has_docstring else node.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _forbidden(tree: ast.Module) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield node, "global"
        elif isinstance(node, ast.Import):
            bad = {alias.name.partition(".")[0] for alias in node.names} & _FORBIDDEN_MODULES
            yield from ((node, f"import {name}") for name in sorted(bad))
        elif isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names} - {"UnpicklingError"}  # to catch it
            if names and (node.module or "").partition(".")[0] in _FORBIDDEN_MODULES:
                yield node, f"from {node.module} import"
        elif isinstance(node, ast.Attribute) and node.attr in _FORBIDDEN_ATTRIBUTES:
            yield node, node.attr
        elif isinstance(node, ast.Call):
            yield from ((node, what) for what in _forbidden_call(node))


def _forbidden_call(node: ast.Call) -> Iterator[str]:
    keywords = {keyword.arg: keyword.value for keyword in node.keywords}
    if isinstance(node.func, ast.Name) and node.func.id in _FORBIDDEN_CALLS:
        yield f"{node.func.id}()"
    shell = keywords.get("shell")
    if shell is not None and not (isinstance(shell, ast.Constant) and shell.value is False):
        yield "shell="
    if ast.unparse(node.func) in {"os.system", "os.popen"}:
        yield ast.unparse(node.func)
    if ast.unparse(node.func) == "torch.load" and "weights_only" not in keywords:
        yield "torch.load without weights_only"
