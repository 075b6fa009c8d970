"""Versions of installed packages, looked up without importing them where Python can."""

import importlib

PROJECT_NAMES = {"PIL": "pillow", "yaml": "pyyaml"}
BROKEN = "does not load: "


def package_version(name):
    """Version of the package that `import NAME` would give, or None; not imported where Python can look it up (since 3.8)."""
    try:
        return importlib.import_module("importlib.metadata").version(PROJECT_NAMES.get(name, name))
    except ImportError:  # no such package, or an older Python: the import has the last word
        return imported_version(name)


def imported_version(name):
    """Version of a package that loads; None where it is missing, or why it does not load."""
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        return None if getattr(error, "name", None) == name else BROKEN + one_line(error)
    except Exception as error:  # a broken binary package may raise anything
        return BROKEN + one_line(error)
    return str(getattr(module, "__version__", "installed"))


def one_line(error, most=200):
    """First line of an exception's text, at most `most` characters of it; the exception's type where it has no text."""
    lines = str(error).strip().splitlines()
    return " ".join(lines[0].split())[:most] if lines else type(error).__name__
