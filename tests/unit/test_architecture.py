"""The package keeps its shape: which part imports which, who prints, and what an import costs."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent.parent / "piebridge"
CORE = sorted((PACKAGE / "core").glob("**/*.py"))
REST = [path for path in sorted(PACKAGE.glob("**/*.py")) if path not in CORE]
MAY_PRINT = ("cli.py", "console.py")
# what a board has not, or what takes a second to import: only inside the function that needs it
LATE = ("matplotlib", "timm", "openvino", "onnx", "onnxruntime", "gdown", "pandas", "torchvision", "torch.optim")


def trees(paths):
    return [(path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text(encoding="utf-8"))) for path in paths]


def imported(nodes, package):
    """Dotted names that import statements among `nodes` ask for; `package` is what a relative import starts from."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[:len(package.split(".")) + 1 - node.level] if node.level else []
            module = ".".join(base + ([node.module] if node.module else []))
            yield from (f"{module}.{alias.name}" for alias in node.names)


def at_module_level(tree):
    """Every node that runs when the module is imported."""
    waiting = list(tree.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            waiting.extend(ast.iter_child_nodes(node))


def test_all_files_are_looked_at():
    assert len(CORE) > 40 and len(REST) > 10


def test_imports_are_found_wherever_they_hide():
    tree = ast.parse("import a.b as c\nfrom ..cli import main\nfrom . import x\ntry:\n  import y\nfinally: pass\ndef f():\n  import z\n")
    assert sorted(imported(ast.walk(tree), "piebridge.core")) == ["a.b", "piebridge.cli.main", "piebridge.core.x", "y", "z"]
    assert sorted(imported(at_module_level(tree), "piebridge.core")) == ["a.b", "piebridge.cli.main", "piebridge.core.x", "y"]


def test_core_imports_nothing_of_the_rest():
    for name, tree in trees(CORE):
        for target in imported(ast.walk(tree), ".".join(["piebridge"] + name.split("/")[:-1])):
            assert target.split(".")[0] != "piebridge" or target.startswith("piebridge.core."), f"{name} imports {target}"


def test_reports_import_core_and_nothing_else_of_the_package():
    for name, tree in trees(path for path in REST if path.parent.name == "report"):
        for target in imported(ast.walk(tree), "piebridge.report"):
            if target.split(".")[0] == "piebridge":
                assert target.split(".")[1] in ("core", "report"), f"{name} imports {target}"


def test_core_imports_what_is_heavy_or_optional_where_it_is_needed():
    for name, tree in trees(CORE):
        for target in imported(at_module_level(tree), ""):
            assert not any((target + ".").startswith(late + ".") for late in LATE), f"{name} imports {target}"


def test_only_the_command_line_prints():
    for name, tree in trees(CORE + REST):
        calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
        prints = [each for each in calls if isinstance(each, ast.Name) and each.id == "print"]
        assert not prints or name in MAY_PRINT, f"{name}:{prints[0].lineno} prints"


def test_nothing_unpickles_but_the_reader_of_state_dicts():
    for name, tree in trees(CORE + REST):
        pickles = [target for target in imported(ast.walk(tree), "") if target.split(".")[0] in ("pickle", "dill", "joblib", "marshal")]
        assert not pickles or name == "core/state_dicts.py", f"{name} imports {pickles[0]}"


def test_modules_say_what_they_are():
    for name, tree in trees(CORE + REST):
        assert ast.get_docstring(tree) or not tree.body, f"{name} has no docstring"
