"""Help for a name that is not known: the closest known ones."""

import difflib


def closest(name, known):
    """' (did you mean ...?)' for the closest of `known` to `name`, or ''. Made to follow the wrong name in an error."""
    by_lower = {str(each).lower(): str(each) for each in reversed(list(known))}
    matches = difflib.get_close_matches(str(name)[:100].lower(), list(by_lower), n=1, cutoff=0.5)
    return f" (did you mean {by_lower[matches[0]]!r}?)" if matches else ""
