"""A memory plan to look at: a table, a picture made of characters, and a PNG."""

from piebridge.core.errors import UserError
from piebridge.core.files import atomic_path

MIB = 2 ** 20


def table(plan, rows=20):
    """The plan in words: totals, then what the backward pass keeps, by layer; the largest `rows` of them, the rest in one line."""
    weights = plan.weights_bytes
    lines = [
        f"{'peak of the step':<28}{_mib(plan.peak_bytes)}  at {plan.peak_node} ({plan.peak_position + 1} of {len(plan.timeline)})",
        f"{'  of it kept for backward':<28}{_mib(plan.kept_bytes)}  in {len(plan.kept)} values",
        f"{'arena':<28}{_mib(plan.arena_bytes)}  at least {plan.arena.bound / MIB:.2f}",
        f"{'weights, trained':<28}{_mib(weights['trained'])}",
        f"{'weights, frozen':<28}{_mib(weights['frozen'] + weights['buffer'])}",
        f"{'state of the update rule':<28}{_mib(plan.state_bytes)}",
        f"{'batch':<28}{_mib(plan.batch_bytes)}",
        f"{'together':<28}{_mib(plan.total_bytes)}",
    ]
    layers = plan.kept_by_layer()
    if layers:
        shown = set(sorted(layers, key=lambda layer: -layers[layer])[:rows])
        width = max(28, max(len(layer) for layer in shown) + 4)
        lines += ["", "kept for backward, by layer"]
        lines += [f"{'  ' + (layer or '(none)'):<{width}}{_mib(size)}" for layer, size in layers.items() if layer in shown]
        if len(layers) > len(shown):
            rest = sum(size for layer, size in layers.items() if layer not in shown)
            lines.append(f"{f'  {len(layers) - len(shown)} more':<{width}}{_mib(rest)}")
    return "\n".join(lines)


def bars(plan, columns=72, rows=10):
    """Bytes over the schedule as columns of characters; each column is the highest of the nodes that it stands for."""
    live = [size for _, size in plan.timeline]
    columns = max(1, min(columns, len(live)))
    edges = [len(live) * column // columns for column in range(columns + 1)]
    heights = [max(live[first:last], default=0) for first, last in zip(edges, edges[1:])]
    top = max(max(heights), 1)
    lines = []
    for row in range(rows, 0, -1):
        label = f"{top * row / rows / MIB:8.2f} " if row in (rows, (rows + 1) // 2) else " " * 9
        lines.append(label + "|" + "".join("#" if height * rows > top * (row - 0.5) else " " for height in heights).rstrip())
    boundary = min(columns - 1, (plan.forward_end + 1) * columns // max(1, len(live)))
    lines.append(f"{'MiB':>8} +" + "".join("^" if column == boundary else "-" for column in range(columns)))
    lines.append(" " * 10 + f"{len(live)} nodes; the backward pass begins at ^")
    return "\n".join(lines)


def write_png(plan, path, title="memory of one step"):
    """The same as a PNG. UserError where matplotlib is missing."""
    figure_class, canvas_class = _matplotlib()
    figure = figure_class(figsize=(8, 4), layout="constrained")
    canvas_class(figure)
    axes = figure.add_subplot()
    live = [size / MIB for _, size in plan.timeline]
    axes.fill_between(range(len(live)), live, step="mid", alpha=0.5, linewidth=0)
    axes.axvline(plan.forward_end + 0.5, color="0.4", linewidth=0.8)
    axes.annotate(f"{plan.peak_bytes / MIB:.1f} MiB at {plan.peak_node}", (plan.peak_position, plan.peak_bytes / MIB),
                  textcoords="offset points", xytext=(0, 4), ha="center", fontsize=8)
    axes.set(xlabel="node of the schedule (line: the forward pass ends)", ylabel="MiB allocated by the step", title=title, ylim=(0, None))
    axes.margins(x=0, y=0.12)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150)


def _mib(size):
    return f"{size / MIB:10.2f} MiB"


def _matplotlib():
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("engine: the picture needs matplotlib: pip install matplotlib; the table and the bars do without") from None
    return Figure, FigureCanvasAgg
