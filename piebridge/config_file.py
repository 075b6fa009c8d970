"""Reading a configuration file: YAML without its traps."""

from pathlib import Path

import yaml

from piebridge.core.errors import UserError


class _UniqueKeyLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice (YAML itself lets the last one win) and, with it, anchors used to blow files up."""

    def compose_node(self, parent, index):
        if self.check_event(yaml.events.AliasEvent):
            raise yaml.constructor.ConstructorError(None, None, "aliases are not used in configurations", self.peek_event().start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if str(key) in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key '{key}' is given twice", key_node.start_mark)
            seen.add(str(key))
        return super().construct_mapping(node, deep)


def read_yaml(path):
    """The mapping in a YAML file of at most 1 MB. Raises UserError that names the file, and the line where there is one."""
    path = Path(str(path))
    try:
        if path.stat().st_size > 1000000:
            raise UserError(f"{path}: larger than 1 MB; a configuration is a short YAML file")
        value = yaml.load(path.read_text(encoding="utf-8-sig"), Loader=_UniqueKeyLoader)
    except FileNotFoundError:
        raise UserError(f"{path}: no such configuration") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    except RecursionError:
        raise UserError(f"{path}: nested too deeply") from None
    except (yaml.YAMLError, ValueError, KeyError, IndexError, AttributeError, TypeError) as error:  # what its tags raise on bad values
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark else str(path)
        raise UserError(f"{place}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds a {type(value).__name__}; a configuration is a list of 'key: value' lines")
    return value
