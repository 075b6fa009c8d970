"""README keeps its word: every command is in a test that runs it, every file has its line, every link leads somewhere."""

import ast
import importlib
import re
import shlex
from pathlib import Path

import pytest

from piebridge.cli import main, parse
from piebridge.config import build_config, read_yaml
from piebridge.core.methods import METHODS
from piebridge.run_paths import list_configs

ROOT = Path(__file__).resolve().parent.parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL) for line in block.splitlines() if line.strip()]

# run here, as they stand
QUICK = (
    "piebridge configs ls",
    "piebridge configs show efficientnet_lite0/Clipart10/ours epochs=20 optimizer.lr=0.003",
    "piebridge configs keys",
    "piebridge doctor",
    "piebridge data",
)
FORGE = "tests/recipe/test_forge.py::test_the_commands_of_the_readme"
PLAN = "tests/recipe/test_plan.py::test_a_plan_and_a_run_by_it"
ENGINE = "tests/recipe/test_engine.py"
END_TO_END = "tests/recipe/test_scripts_end_to_end.py"
# {command: the test that runs it, on less data or with the output elsewhere}
ELSEWHERE = {
    "bash scripts/quickstart.sh": END_TO_END + "::test_quickstart",
    ". .venv/bin/activate": "tests/unit/test_scripts.py::test_setup_is_done_at_once_where_nothing_has_changed",
    "piebridge train efficientnet_lite0/Clipart10/ours data=photos output=res/photos": END_TO_END + "::test_own_images",
    "piebridge predict res/photos new_photos > predictions.csv": END_TO_END + "::test_own_images",
    "piebridge plan efficientnet_lite0/Clipart10/ours data=photos": PLAN,
    "piebridge train efficientnet_lite0/Clipart10/ours data=photos output=res/photos_auto strategy=auto": PLAN,
    "bash scripts/downloading.sh Openclipart": "tests/unit/test_scripts.py::test_downloading_leaves_what_is_there_alone",
    "bash scripts/measure.sh": END_TO_END + "::test_the_measuring_script",
    "piebridge table res/measured_here --markdown": END_TO_END + "::test_the_measuring_script",
    "piebridge plot res/measured_here": END_TO_END + "::test_the_measuring_script",
    "bash scripts/run_e2e.sh 0": END_TO_END + "::test_the_whole_comparison",
    "bash scripts/run_ours.sh": END_TO_END + "::test_the_whole_comparison",
    "bash scripts/run_baselines.sh": END_TO_END + "::test_the_whole_comparison",
    "bash scripts/run_standalone_datasets/run_openclipart.sh 0": END_TO_END + "::test_a_standalone_data_set",
    "bash scripts/run_standalone_datasets/run_caltech101.sh 0":
        "tests/unit/test_scripts.py::test_a_data_set_that_is_not_here_says_how_to_get_it",
    "piebridge compare res/train_log res/expected/jetson_tx2": END_TO_END + "::test_a_standalone_data_set",
    "piebridge table --document doc/results.md": "tests/unit/test_results_document.py::test_one_command_makes_them",
    "piebridge forge efficientnet_lite0 --images photos --out proxynetworks/lite0": FORGE,
    "piebridge forge --profile proxynetworks/lite0": FORGE,
    "piebridge train efficientnet_lite0/Clipart10/ours data=photos output=res/photos_lite0 proxies.set=proxynetworks/lite0": FORGE,
    "piebridge engine show efficientnet_lite0 scheme=last_block": ENGINE + "::test_show_says_what_is_trained_and_every_byte",
    "piebridge engine search efficientnet_lite0 data=Clipart10 --memory 16MiB --out lite0.yaml": ENGINE + "::test_search_compile_and_bench",
    "piebridge engine compile efficientnet_lite0 scheme=lite0.yaml classes=10 --out step.safetensors":
        ENGINE + "::test_search_compile_and_bench",
    "piebridge engine bench efficientnet_lite0 scheme=lite0.yaml classes=10": ENGINE + "::test_search_compile_and_bench",
    "bash scripts/test.sh": "tests/unit/test_scripts.py::test_ci_runs_the_tests_and_nothing_else",
}


def test_each_command_is_run_somewhere():
    assert sorted(set(COMMANDS)) == sorted(QUICK + tuple(ELSEWHERE))


@pytest.mark.parametrize("command", ELSEWHERE)
def test_the_test_of_a_command_runs_it(command):
    """It exists, is never skipped, starts a process, and names the command's script or verb and its settings."""
    file, name = ELSEWHERE[command].split("::")
    module = (ROOT / file).read_text(encoding="utf-8")
    (function,) = [node for node in ast.parse(module).body if isinstance(node, ast.FunctionDef) and node.name == name]
    assert "skip" not in "".join(ast.dump(each) for each in function.decorator_list)
    source = ast.get_source_segment(module, function)
    assert name == "test_ci_runs_the_tests_and_nothing_else" or "run(" in source or "run_bash(" in source
    for word in _telling_words(command):
        parametrised = re.fullmatch(r"run_(\w+)\.sh", word)
        assert word in source or (parametrised and "run_{name}.sh" in source and f'"{parametrised.group(1)}"' in module), word


def _telling_words(command):
    """Of a command's words, those that a test of it has to have: the script or the verb, options and settings."""
    words = shlex.split(command.split(">")[0])
    if words[0] == ".":
        return ["setup.sh", ".venv"]
    scripts = [word.rpartition("/")[2] for word in words if word.endswith(".sh")]
    verb = [f'"{words[1]}"'] if words[0] == "piebridge" else []
    settings = [word for word in words if word.startswith("--") or word.startswith("res/") or "=" in word]
    return scripts + verb + [word.partition("=")[0] if word.startswith("SEEDS=") else word for word in settings]


@pytest.mark.parametrize("command", QUICK)
def test_quick_commands_run(command, capsys):
    assert main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("command", [command for command in ELSEWHERE if command.startswith("piebridge ")])
def test_the_others_parse_and_name_a_shipped_run(command):
    arguments = parse(shlex.split(command.split(">")[0])[1:])
    if arguments.verb == "train":
        assert arguments.run in list_configs()


def test_the_python_example_uses_what_the_package_offers():
    import piebridge

    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    compile(example, "README.md", "exec")
    for name in re.findall(r"piebridge\.(\w+)\(", example):
        assert name in piebridge.__all__ and callable(getattr(piebridge, name))


def test_the_table_is_that_of_the_records():
    """What README shows is what its command prints: whoever changes either has to change both."""
    from piebridge.report.results import collect
    from piebridge.report.table import build_rows, render_markdown

    runs = collect(ROOT / "res" / "measured" / "x86_2_cores")
    table = README.split("<!-- results", 1)[1].split("-->\n", 1)[1].split("\n<!-- end of results", 1)[0]
    assert table.strip() == render_markdown(build_rows(runs), runs).strip()


def test_every_method_has_its_row():
    rows = re.findall(r"^\| (`.*?`) \|", README, re.MULTILINE)
    assert sorted(name for row in rows for name in re.findall(r"`(\w+)`", row)) == sorted(METHODS)


def test_links_and_paths_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
    for path in re.findall(r"`((?:scripts|res/train_log|datasets|doc)(?:/[\w/.]*)?)`", README):
        assert (ROOT / path).exists(), path


def test_the_tree_has_a_line_for_each_file():
    block = README.split("<!-- tree")[1].split("<!-- end of tree -->")[0]
    listed = re.findall(r"^(\S+\.(?:py|sh))  +\S", block, re.MULTILINE)
    assert len(set(listed)) == len(listed)
    present = [path.relative_to(ROOT).as_posix() for folder in ("piebridge", "scripts") for path in (ROOT / folder).glob("**/*")
               if path.suffix in (".py", ".sh") and path.stat().st_size]
    missing = sorted(set(present) - set(listed))
    assert not missing, "not in README's tree: " + ", ".join(f"{path} ({_summary(path)})" for path in missing)
    assert sorted(listed) == sorted(present)


def _summary(path):
    """First sentence of a module, to be shortened into its line."""
    if not path.endswith(".py"):
        return "see its header"
    module = importlib.import_module(path[:-len(".py")].replace("/", "."))
    return (module.__doc__ or "no docstring").splitlines()[0]


def test_every_shipped_configuration_loads_and_says_what_it_is():
    configs = list_configs()
    assert len(configs) == 87
    networks = {"resnet": "resnet50", "mobilenet": "mobilenet_v3_large", "vit": "vit_b_16"}
    for name, path in configs.items():
        network, dataset, method = name.split("/")
        config = build_config(read_yaml(path), {}, str(path))
        # a variant says after the name what differs: Openclipart_adapters, PET_fast_short
        assert method.startswith(config.method) and dataset.partition("_")[0] == config.data
        assert networks.get(network, network) == config.network
        header = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
        assert header[0].startswith(f"# {method} with ") and f" on {config.data}: " in header[0]
        assert f"# command:  piebridge train {name}" in header
        assert all(any(line.startswith(f"# {word}:") for line in header) for word in ("data", "cost", "expected"))


def test_the_package_and_the_documents_agree_on_the_version():
    import piebridge

    assert f"## {piebridge.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"version: {piebridge.__version__}" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
