"""The result of a comparison on a terminal."""

from rich.console import Console
from rich.table import Table

from multilin.analysis.compare.record import Comparison, RowRecord
from multilin.analysis.compare.words import UNITS, amount, score_text, verdict


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Show the rows, the best first, and what must be known of them."""
    table = Table(box=None, pad_edge=False)
    table.add_column("row", no_wrap=True)
    for name in (UNITS[comparison.measure], "against the best", "parameters", "training tokens/s", "seconds"):
        table.add_column(name, justify="left" if name == "against the best" else "right")
    ordered = [comparison.row(name) for name in comparison.order]
    ordered += [row for row in comparison.rows if row.score is None]
    for place, row in enumerate(ordered):
        table.add_row(*_cells(comparison, row), style="bold" if place == 0 and row.score else None)
    console.print()
    console.print(table)
    console.print()
    for remark in comparison.remarks:
        console.print(remark, style="dim", soft_wrap=True, markup=False)
    for row in comparison.rows:
        for remark in row.remarks:
            console.print(f"{row.name}: {remark}", style="dim", soft_wrap=True, markup=False)


def _cells(comparison: Comparison, row: RowRecord) -> list[str]:
    parameters = amount(row.parameters)
    if row.score is None:
        return [row.name, "", verdict(comparison, row), parameters, "", ""]
    speed, seconds = f"{row.tokens_per_second:,.0f}", f"{row.seconds:,.1f}"
    return [row.name, score_text(comparison, row), verdict(comparison, row), parameters, speed, seconds]
