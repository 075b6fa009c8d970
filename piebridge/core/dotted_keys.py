"""Nested settings as dotted keys."""


def dotted(entries, sections=None):
    """(dotted key, value) of nested or dotted entries: {"a": {"b": 1}, "c": 2} gives ("a.b", 1) and ("c", 2).

    sections: the keys whose mappings are taken apart; None for all. A section that holds no mapping stays what it is.
    """
    for key, value in entries.items():
        if isinstance(value, dict) and (sections is None or key in sections):
            for name, content in value.items():
                yield f"{key}.{name}", content
        else:
            yield str(key), value
