"""A network's structure as a table: its frozen blocks, what of each may be cut, and what each costs."""

from piebridge.forge.text_table import text_table

HEADER = ("block", "kind", "input", "output", "may be cut", "MACs", "share", "parameters", "tap")
SIDES = "left left left left left right right right left"


def render(structure):
    """Text: two lines on the network, an aligned line per block, and a line on what lies outside the blocks."""
    description, blocks = structure.description, structure.blocks
    table = text_table([HEADER] + [_row(structure, block) for block in blocks], SIDES)
    outside = structure.macs - sum(block.macs for block in blocks)
    rest = structure.parameters - sum(block.parameters for block in blocks)
    height, width = structure.input_size[1:]
    head = [f"{description['name']}: {len(blocks)} frozen blocks; {millions(structure.macs)} MACs for an image of {height} x "
            f"{width} pixels, {millions(structure.parameters)} parameters",
            f"head {description['head']}, which reads {description['tap']}", ""]
    tail = ["", f"outside the blocks: {millions(outside)} MACs ({_share(outside, structure)}), {millions(rest)} parameters"]
    return "\n".join(head + [table] + tail)


def _row(structure, block):
    cut = ", ".join(_group_text(structure.groups[name]) for name in block.groups)
    return (block.name, block.kind, shape_text(block.input_shape), shape_text(block.output_shape), cut or "nothing",
            millions(block.macs), _share(block.macs, structure), millions(block.parameters), block.tap)


def _group_text(group):
    unit = {"heads": "heads of", "groups": "groups of"}.get(group.kind)
    return f"{group.size} {unit} {group.width}" if unit else str(group.size)


def shape_text(shape):
    """"256 x 56x56" of [C,H,W], "768 x 197 tokens" of [T,D], "4096" of [D]; another shape as it is."""
    if len(shape) == 3:
        return f"{shape[0]} x {shape[1]}x{shape[2]}"
    if len(shape) == 2:
        return f"{shape[1]} x {shape[0]} tokens"
    return "x".join(str(size) for size in shape)


def millions(count):
    """"402.1 M", "0.012 M"."""
    return f"{count / 1e6:.{1 if count >= 1e6 else 3}f} M"


def _share(macs, structure):
    return f"{100 * macs / structure.macs:.1f} %"
