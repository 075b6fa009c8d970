"""One order of channels for all levels, in which what a level keeps comes first: each level is then a prefix of one tensor.

Levels are nested sets: the channels of the last level come first, then those that only the level before it adds, and so on
(ElastiLM, arXiv 2409.09071, reorders neurons so). Where channels lie has no effect on what a network computes, but for the order in
which sums are rounded.
"""

import dataclasses

from piebridge.core.errors import UserError


def nested_order(structure, levels):
    """{group: all of its indices, those that the most levels keep first}, of the groups that some level cuts.

    levels: of `nested_levels`, in order. UserError where a level keeps what the one before it does not.
    """
    order = {}
    for name, group in structure.groups.items():
        indices, missing = [], set(range(group.size))
        for level in reversed(levels):
            kept = level.kept.get(name, range(group.size))
            if not set(indices) <= set(kept):
                raise UserError(f"level {level.number} lacks indices of group {name!r} that a cheaper level keeps; levels must be nested")
            indices += [index for index in kept if index in missing]
            missing.difference_update(kept)
        indices += sorted(missing)
        if indices != list(range(group.size)):
            order[name] = tuple(indices)
    return order


def in_nested_order(structure, levels):
    """The same levels, but for level 0 with each group's indices as a prefix of its nested order. Level 0 stays the original."""
    order = nested_order(structure, levels)

    def rearranged(level):
        counts = {name: len(level.kept.get(name, indices)) for name, indices in order.items()}
        kept = dict(level.kept, **{name: indices[:counts[name]] for name, indices in order.items()})
        return dataclasses.replace(level, kept=kept) if level.number else level

    return [rearranged(level) for level in levels]
