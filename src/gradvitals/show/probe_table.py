"""A table for the terminal that leaves out its lesser columns where the window is narrow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

SHORTEST = 16
"""Characters that a name has at least, before a column is left out; longer ones are folded."""

GAP, EDGES = 3, 2
"""Characters between two columns, and at both sides of the table."""


@dataclass
class Fitted:
    """Rows under named columns; the first column holds names, those in `lesser` are left out first, the last of all."""

    title: str
    columns: Sequence[str]
    left: Sequence[str] = ()
    """Columns set to the left, beside the first."""
    lesser: Sequence[str] = ()
    rows: list[list[str | Text]] = field(default_factory=list)

    def add(self, *cells: str | Text) -> None:
        """One more row."""
        self.rows.append(list(cells))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table, as wide as there is room for."""
        widths = [
            max([cell_len(name), *(cell_len(str(row[at])) for row in self.rows)])
            for at, name in enumerate(self.columns)
        ]
        kept, lesser = list(range(len(self.columns))), list(self.lesser)
        name = min(widths[0], SHORTEST)
        room = options.max_width - EDGES - name
        while lesser and sum(widths[at] + GAP for at in kept[1:]) > room:
            kept.remove(list(self.columns).index(lesser.pop()))
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for at in kept:
            to_the_left = at == 0 or self.columns[at] in self.left
            table.add_column(
                Text(self.columns[at]),
                justify="left" if to_the_left else "right",
                no_wrap=at > 0,
                overflow="fold" if at == 0 else "ellipsis",
                min_width=name if at == 0 else None,
            )
        for row in self.rows:
            table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in (row[at] for at in kept)))
        yield Text(self.title, style="bold")
        yield table
