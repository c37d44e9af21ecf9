"""Tables and text on a terminal. rich is imported at the first print, so that help and errors are quick."""

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

LONGEST_HEADING = 12


def make_console() -> "Console":
    """A console that prints to stdout, without colours if stdout is not a terminal."""
    from rich.console import Console

    return Console(highlight=False)


def print_table(
    align: str,
    rows: Iterable[Sequence["str | Text"]],
    *,
    head: Sequence[str] = (),
    title: str = "",
    bold: Collection[int] = (),
) -> None:
    """Print rows in columns.

    Args:
        align: one letter per column: "l" left, "r" right, "w" left and wrapped where the terminal is narrow.
        rows: the cells, printed without interpreting markup.
        head: headings of the columns, if any.
        title: a line above the table.
        bold: indices of the rows in bold.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=bool(head), title=title or None, title_justify="left")
    lines = [[Text(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    for place, (letter, heading) in enumerate(zip(align, head or [""] * len(align), strict=True)):
        if letter == "r" and len(heading) > LONGEST_HEADING:
            heading = "\n".join(heading.rsplit(" ", 1))
        cells = [Text(part) for part in heading.split("\n")] + [line[place] for line in lines]
        table.add_column(
            heading,
            justify="right" if letter == "r" else "left",
            no_wrap=letter != "w",
            min_width=None if letter == "w" else max(cell.cell_len for cell in cells),
        )
    for place, line in enumerate(lines):
        table.add_row(*line, style="bold" if place in bold else None)
    console = make_console()
    # A terminal that is too narrow may break the lines, but nothing is cut.
    needed = console.measure(table, options=console.options.update(width=1000)).minimum
    console.width = max(console.width, needed)
    console.print(table, crop=False)
