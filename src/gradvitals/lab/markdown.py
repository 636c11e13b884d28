"""Tables that read well in a terminal and in a page."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def markdown_table(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """A Markdown table with its columns padded to one width.

    Args:
        rows: The head first.
        left: Places of the columns that are aligned left; the others are numbers.
    """
    widths = [max(2, *map(len, column)) for column in zip(*rows, strict=True)]  # room for a hyphen and a colon
    aligned = [
        [
            cell.ljust(width) if place in left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]
    rule = ["-" * width if place in left else "-" * (width - 1) + ":" for place, width in enumerate(widths)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (aligned[0], rule, *aligned[1:]))
