"""Which tensors to train within a time budget: the selection of ElasticTrainer, by dynamic programming."""

import numpy as np

PARTS = 10000  # of the budget: times are rounded up to whole ones, so a choice never takes longer than allowed


def select_tensors(importance, own, reach, budget):
    """Indices (sorted list) of the tensors to train, such that their importance is the largest that the time budget allows.

    Training the tensors S takes sum(own[k]) + max(reach[k]) over k in S: each its own gradient, and the error's way from the loss
    down to the deepest of them, which is computed once (Huang et al., MobiSys'23, section 3: t_dw, and the sum of t_dy).

    importance, own, reach: float [tensors]; budget: of the same unit as `own` and `reach`. Where nothing that is worth training
    fits in, the list is empty.
    """
    importance, own, reach = (np.asarray(each, dtype=np.float64) for each in (importance, own, reach))
    wanted = np.flatnonzero(importance > 0)
    if not len(wanted) or own[wanted].sum() + reach[wanted].max() <= budget:
        return wanted.tolist()
    if not budget > 0:
        return []
    # in parts of the budget; what is longer than it is longer by any amount
    own, reach = (np.minimum(np.ceil(each / budget * PARTS - 1e-6), PARTS + 1.0).astype(np.int64) for each in (own, reach))
    order = np.argsort(reach, kind="stable")
    chosen = best_subset(importance[order], own[order], reach[order], PARTS)
    return sorted(int(order[place]) for place in chosen)


def best_subset(values, weights, reach, budget):
    """Places of the subset with the largest sum of values, such that the sum of weights plus the largest reach is within the budget.

    weights, reach, budget: whole numbers, not negative; reach must not fall. A 0/1 knapsack: of all subsets whose last item is k,
    the best has the best knapsack of the items before k in what k and its reach leave of the budget. As the way to the deepest
    tensor is the same for all of them, the paper's recursion over pairs of tensors comes to this, in a factor N less time.
    """
    best = np.zeros(budget + 1)  # [room]: of the items so far
    is_taken = np.zeros((len(values), budget + 1), dtype=bool)
    top, last, room = 0.0, None, 0
    for place, (value, weight) in enumerate(zip(values, weights)):
        left = budget - int(reach[place]) - int(weight)
        if value <= 0 or left < 0:
            continue
        if value + best[left] > top:
            top, last, room = value + best[left], place, left
        with_item = best[:budget + 1 - weight] + value
        is_taken[place, weight:] = with_item > best[weight:]
        best[weight:] = np.maximum(best[weight:], with_item)
    if last is None:
        return []
    chosen = [last]
    for place in reversed(range(last)):
        if is_taken[place, room]:
            chosen.append(place)
            room -= int(weights[place])
    return chosen[::-1]
