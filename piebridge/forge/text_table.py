"""Rows as text in aligned columns, or as a Markdown table."""


def text_table(rows, sides):
    """Lines of two spaces between columns. rows: equally long sequences of text, the header first; sides: "left right ..." """
    sides = sides.split()
    widths = [max(len(row[column]) for row in rows) for column in range(len(sides))]
    return "\n".join("  ".join(cell.rjust(width) if side == "right" else cell.ljust(width)
                               for cell, width, side in zip(row, widths, sides)).rstrip() for row in rows)


def markdown_table(rows, sides):
    """The same rows as Markdown; what would end a cell is escaped."""
    rule = ["---:" if side == "right" else "---" for side in sides.split()]
    header, *body = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, rule] + body)
