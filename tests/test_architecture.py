"""The house rules that a machine can check. A cap is raised only here, with the reason."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from posttrain_cli.cli.options import flag_settings
from posttrain_cli.schema import settings

SOURCE = Path(__file__).parent.parent / "src" / "posttrain_cli"
FILES = sorted(SOURCE.rglob("*.py"))
MAX_LINES, MAX_FUNCTION, MAX_PARAMETERS = 400, 60, 8

# Layers from the ground up; a module imports its own layer and those below. Whatever lies
# directly in the package belongs to the base, the config or `__main__`.
BASE = {"errors", "files", "diagnostics", "extras", "devices", "environment"}
CONFIG = {"config", "schema", "yamlfile", "values", "paths", "sources", "defaults", "settings"}
LAYERS = [BASE, CONFIG, {"data"}, {"engine", "rollout", "runs", "rewards"}, {"cli"}, {"__main__"}]
HEAVY = {"torch", "transformers", "peft", "datasets", "polars", "vllm", "pyarrow", "pandas", "ray"}
# Loaded at module level by these only, which the shell imports inside its functions.
MAY_LOAD_HEAVY = ("engine", "rollout")
# Worker processes, whose streams are log files that their parent follows.
WORKERS = {"engine/worker.py", "engine/train.py", "engine/metrics.py"}


def relative(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def room(path: Path) -> str:
    """The package a file lies in, or its own name when it lies at the top."""
    parts = path.relative_to(SOURCE).parts
    return parts[0].removesuffix(".py") if len(parts) == 1 else parts[0]


def level(name: str) -> int:
    found = [index for index, names in enumerate(LAYERS) if name in names]
    assert found, f"`{name}` belongs to no layer: add it to LAYERS"
    return found[0]


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(node: ast.AST) -> list[str]:
    """Every module that `node` imports, as dotted names."""
    found: list[str] = []
    for part in ast.walk(node):
        if isinstance(part, ast.Import):
            found += [alias.name for alias in part.names]
        elif isinstance(part, ast.ImportFrom):
            assert part.level == 0, "relative imports are not used"
            base = part.module or ""
            found += [f"{base}.{alias.name}" for alias in part.names]
    return found


def top_level_imports(module: ast.Module) -> list[str]:
    """Imports that run when the module is loaded: not in functions, not for type checkers."""
    found: list[str] = []
    pending: list[ast.stmt] = list(module.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            found += imports(node)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ClassDef):
            pending += [
                child for child in ast.walk(node) if child is not node and _is_import(child)
            ]
    return found


def _is_import(node: ast.AST) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


def functions(module: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(module) if isinstance(node, kinds)]


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_imports_point_down(path: Path) -> None:
    here = level(room(path)) if path.name != "__init__.py" or path.parent != SOURCE else 0
    for name in imports(tree(path)):
        if name.startswith("posttrain_cli."):
            target = name.split(".")[1]
            if target == "__version__":
                continue
            assert level(target) <= here, f"{relative(path)} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_nothing_heavy_at_module_level(path: Path) -> None:
    if room(path) in MAY_LOAD_HEAVY:
        return
    loaded = {name.split(".")[0] for name in top_level_imports(tree(path))}
    assert not loaded & HEAVY


def test_data_never_imports_torch() -> None:
    for path in FILES:
        if room(path) in {"data", "runs", *BASE, *CONFIG} and relative(path) != "environment.py":
            loaded = {name.split(".")[0] for name in imports(tree(path))}
            assert not loaded & {"torch", "transformers", "peft"}, relative(path)


def test_only_the_shell_prints_and_exits() -> None:
    for path in FILES:
        name = relative(path)
        if room(path) in ("cli", "__main__") or name in WORKERS:
            continue
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call):
                call = ast.unparse(node.func)
                assert call not in ("print", "input", "sys.exit", "exit", "quit"), (
                    f"{name}:{node.lineno} calls {call}"
                )


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_files_and_functions_stay_small(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES
    for function in functions(tree(path)):
        length = (function.end_lineno or 0) - function.lineno + 1
        assert length <= MAX_FUNCTION or is_command(function), f"{function.name}: {length} lines"
        arguments = function.args
        count = len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs)
        count -= bool(arguments.args) and arguments.args[0].arg in ("self", "cls")
        assert count <= MAX_PARAMETERS or is_command(function), (
            f"{function.name}: {count} parameters"
        )


def is_command(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether Typer calls it: its docstring has an `Examples:` section, as every command's."""
    return "\n    Examples:\n" in (ast.get_docstring(function, clean=False) or "")


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_no_pickle_no_unsafe_yaml_no_code_from_models(path: Path) -> None:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call):
            call = ast.unparse(node.func)
            assert call not in ("yaml.load", "torch.load", "eval", "exec", "pickle.load"), call
            for keyword in node.keywords:
                if keyword.arg == "trust_remote_code":
                    assert ast.unparse(keyword.value) == "False"


def test_the_number_of_options_has_a_budget() -> None:
    """More options need a reason: raise the number here, in the commit that gives it."""
    assert len(settings()) <= 85
    assert len(flag_settings("sft")) <= 46
    assert len(flag_settings(None)) <= 44


def test_all_tests_mirror_a_source_folder() -> None:
    folders = {path.name for path in Path(__file__).parent.iterdir() if path.is_dir()}
    known = {path.name for path in SOURCE.iterdir() if path.is_dir()}
    assert folders - known <= {"__pycache__", "e2e", "scripts"}
