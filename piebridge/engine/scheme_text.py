"""A scheme as YAML text, and the schemes that come with the package."""

from fractions import Fraction
from pathlib import Path

import yaml

from piebridge.core.errors import UserError
from piebridge.core.names import closest

FOLDER = Path(__file__).resolve().parent / "schemes"
LARGEST = 1000000  # bytes


class _UniqueKeyLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, of which YAML itself would drop the first, and aliases, which blow files up."""

    def compose_node(self, parent, index):
        if self.check_event(yaml.events.AliasEvent):
            raise yaml.constructor.ConstructorError(None, None, "aliases are not used in schemes", self.peek_event().start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key_node, _ in node.value:
            key = str(self.construct_object(key_node, deep=True))
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key '{key}' is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def presets():
    """Names of the schemes that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def read_mapping(source):
    """(where it is from, the mapping) for a preset's name, a YAML file, or YAML text, which has a colon or lines."""
    if isinstance(source, Path) or not (set(str(source)) & set(":\n") or str(source) in presets()):
        return str(source), _mapping(str(source), _text_of(Path(source)))
    text = str(source)
    if text in presets():
        return f"scheme {text}", _mapping(f"scheme {text}", (FOLDER / f"{text}.yaml").read_text(encoding="utf-8"))
    return "scheme", _mapping("scheme", text)


def _text_of(path):
    try:
        if path.stat().st_size > LARGEST:
            raise UserError(f"{path}: larger than 1 MB; a scheme is a short YAML file")
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        known = presets()
        raise UserError(f"{path}: no such scheme{closest(path, known)}; give a YAML file, or one of: {', '.join(known)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None


def _mapping(where, text):
    try:
        value = yaml.load(text, Loader=_UniqueKeyLoader)
    except RecursionError:
        raise UserError(f"{where}: nested too deeply") from None
    except (yaml.YAMLError, ValueError, TypeError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{where}:{mark.line + 1}" if mark else where
        raise UserError(f"{place}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{where}: holds a {type(value).__name__}; a scheme is a list of 'key: value' lines, such as bias: all")
    return value


def ratio_of(where, value):
    """A Fraction in (0, 1] from 1, 0.5 or "1/8"."""
    try:
        ratio = Fraction(str(value)).limit_denominator(10000)
    except (ValueError, ZeroDivisionError):
        ratio = None
    if isinstance(value, bool) or ratio is None or not 0 < ratio <= 1:
        raise UserError(f"{where}: {value!r:.40} is no ratio; give one above 0 and up to 1, such as 1, 1/2, 1/4 or 1/8")
    return ratio


def amount_of(where, value):
    """A ratio, or the channels' numbers as an ascending tuple."""
    if not isinstance(value, (list, tuple)):
        return ratio_of(where, value)
    if not value or any(isinstance(each, bool) or not isinstance(each, int) or each < 0 for each in value) or len(set(value)) < len(value):
        raise UserError(f"{where}: {str(value):.60} are no channels; give different whole numbers from 0, such as [0, 3, 5]")
    return tuple(sorted(value))


def write_text(fields):
    """YAML of {key: text, tuple of names, or tuple of (name, amount)}; what is empty is left out."""
    lines = []
    for key, value in fields.items():
        if not value:
            continue
        if isinstance(value, str):
            lines.append(f"{key}: {_scalar(value)}")
        elif isinstance(value[0], str):
            lines.append(f"{key}: " + (_scalar(value[0]) if len(value) == 1 else f"[{', '.join(map(_scalar, value))}]"))
        else:
            lines.append(f"{key}:")
            lines += [f"  {_scalar(name)}: {list(amount) if isinstance(amount, tuple) else amount}" for name, amount in value]
    return "\n".join(lines) + "\n"


def _scalar(text):
    """Quoted only where YAML would not read it back as this text, be it a value, in a list or a key."""
    try:
        is_plain = [yaml.safe_load(form.format(text)) for form in ("{}", "[{}]", "{}: 1")] == [text, [text], {text: 1}]
    except (yaml.YAMLError, ValueError, TypeError):
        is_plain = False
    return text if is_plain else yaml.safe_dump(text, default_style='"', width=10000, allow_unicode=True).strip()
