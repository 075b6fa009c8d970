"""What `piebridge configs` prints: the shipped runs, one run's resolved configuration, and every key."""

import yaml

from piebridge.config import describe_keys, load_config
from piebridge.run_paths import find_config, list_configs


def describe_runs():
    """One line a run: its name, and the first line of its configuration's header."""
    found = list_configs()
    if not found:
        return ["no configuration below res/train_log, here or in the project's checkout"]
    width = max(len(name) for name in found)
    return [f"{name:<{width}}  {_first_comment(path)}".rstrip() for name, path in found.items()]


def describe_settings():
    """One line a key: key, default, what it does."""
    rows = [(key, _short(default), text) for key, default, text in describe_keys()]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return [f"{key:<{widths[0]}}  {default:<{widths[1]}}  {text}" for key, default, text in rows]


def show(run, overrides=()):
    """The run's configuration as YAML, with defaults, method and `key=value` overrides applied."""
    path = find_config(run)
    return f"# {path}\n" + yaml.safe_dump(load_config(path, overrides).as_dict(), sort_keys=False, default_flow_style=False)


def _first_comment(path):
    with open(str(path), encoding="utf-8-sig", errors="replace") as stream:
        line = stream.readline().strip()
    return line.lstrip("# ") if line.startswith("#") else ""


def _short(value):
    if isinstance(value, tuple):
        return "[" + ", ".join(str(item) for item in value) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return "-" if value is None else str(value)
