"""Draws which package imports which, from the code, as an SVG that follows the reader's light or dark theme."""

import ast
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from graphlib import TopologicalSorter
from html import escape
from pathlib import Path

import multilin

SOURCE = Path(multilin.__file__).parent
Graph = dict[str, set[str]]

# Where a package stands from left (0) to right (2); how high follows from what it imports.
COLUMNS = {
    "ops": 0, "layers": 0, "architectures": 0, "model": 0, "inference": 0, "publish": 0, "serving": 0,
    "errors": 1, "settings": 1, "machine": 1, "analysis": 1, "export": 1, "cli": 1,
    "files": 2, "data": 2, "scoring": 2, "training": 2,
}  # fmt: skip
WIDTH, HEIGHT, STEP_X, STEP_Y, MARGIN = 250, 74, 290, 106, 14
STYLE = """\
.card {{ fill: {card}; stroke: {edge} }} .box {{ fill: {box}; stroke: {line} }}
.name {{ font: 600 14px sans-serif; fill: {ink} }} .text {{ font: 11.5px sans-serif; fill: {muted} }}
.line {{ fill: none; stroke: {line}; stroke-width: 1.4 }} .tip {{ fill: {line} }}"""
LIGHT = {
    "card": "#ffffff", "edge": "#d9dee7", "box": "#f3f6fc", "line": "#7b8698", "ink": "#1f2733", "muted": "#5b6678",
}  # fmt: skip
DARK = {
    "card": "#1b212b", "edge": "#343d4c", "box": "#242c39", "line": "#8e9ab0", "ink": "#e6eaf1", "muted": "#a3aec0",
}  # fmt: skip


def import_graph() -> Graph:
    """Every module of the package and the modules of the package that it imports, also inside of functions.

    Imports for type checkers alone do not count.
    """
    parts = {path: path.relative_to(SOURCE.parent).with_suffix("").parts for path in SOURCE.rglob("*.py")}
    known = {".".join(names).removesuffix(".__init__"): path for path, names in parts.items()}
    return {name: set(_imports(path, known)) - {name} for name, path in known.items()}


def package_graph() -> Graph:
    """The same for packages and the modules that lie beside them."""
    graph: Graph = defaultdict(set)
    for name, imported in import_graph().items():
        package = name.split(".")[1:2]
        if package and package != ["__main__"]:
            below = {other.split(".")[1] for other in imported if "." in other}
            graph[package[0]] |= below - set(package)
    return dict(graph)


def draw_packages() -> str:
    """The SVG: above what it imports stands each package; an arrow that follows from two others is left out."""
    graph = package_graph()
    rows = _rows(graph)
    places = {
        name: (MARGIN + COLUMNS[name] * STEP_X, MARGIN + (max(rows.values()) - row) * STEP_Y)
        for name, row in rows.items()
    }
    width = 2 * MARGIN + 2 * STEP_X + WIDTH
    height = 2 * MARGIN + max(rows.values()) * STEP_Y + HEIGHT
    lines = [_arrow(places[a], places[b]) for a in rows for b in sorted(_reduced(graph)[a])]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" aria-labelledby="title">',
            '<title id="title">The packages of multilin, each above the packages it imports</title>',
            f"<style>\n{STYLE.format(**LIGHT)}\n@media (prefers-color-scheme: dark) {{\n{STYLE.format(**DARK)}\n}}\n"
            "</style>",
            f'<rect class="card" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="10"/>',
            *lines,
            *(line for name, place in places.items() for line in _box(name, *place)),
            "</svg>\n",
        ]
    )


def _imports(path: Path, known: dict[str, Path]) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in known:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from (name if name in known else node.module for name in inner)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)


def _rows(graph: Graph) -> dict[str, int]:
    """How many imports the longest chain below each package has."""
    rows: dict[str, int] = {}
    for name in TopologicalSorter(graph).static_order():
        rows[name] = max((rows[below] + 1 for below in graph.get(name, ())), default=0)
    return rows


def _reduced(graph: Graph) -> Graph:
    """The graph without the edges that follow from others."""
    below: Graph = {}
    for name in TopologicalSorter(graph).static_order():
        below[name] = set().union(*({other} | below[other] for other in graph.get(name, ())))
    return {
        name: {one for one in graph.get(name, ()) if not any(one in below[other] for other in graph[name])}
        for name in below
    }


def _box(name: str, x: int, y: int) -> Iterator[str]:
    yield f'<rect class="box" x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="7"/>'
    yield f'<text class="name" x="{x + 12}" y="{y + 20}">{name}</text>'
    for index, line in enumerate(textwrap.wrap(_purpose(name), 43)[:3]):
        yield f'<text class="text" x="{x + 12}" y="{y + 37 + 14 * index}">{escape(line)}</text>'


def _purpose(name: str) -> str:
    """The first sentence of its docstring."""
    path = SOURCE / name / "__init__.py" if (SOURCE / name).is_dir() else SOURCE / f"{name}.py"
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.split("\n\n")[0].split())


def _arrow(start: tuple[int, int], end: tuple[int, int]) -> str:
    """From the lower edge of a box to the upper edge of another; a long one goes down beside the other's column."""
    (x, y), (to_x, to_y) = start, end
    slant = (to_x > x) - (to_x < x)
    x, y, to_x = x + WIDTH // 2 + slant * WIDTH // 4, y + HEIGHT, to_x + WIDTH // 2 - slant * WIDTH // 4
    if slant and to_y - y > STEP_Y:
        side, bend = to_x - slant * (WIDTH // 4 + (STEP_X - WIDTH) // 2), STEP_Y - HEIGHT
        path = f"M{x} {y}C{x} {y + bend} {side} {y} {side} {y + bend}V{to_y - bend}"
        path += f"C{side} {to_y} {to_x} {to_y - bend} {to_x} {to_y - 6}"
    else:
        middle = (y + to_y) // 2
        path = f"M{x} {y}C{x} {middle} {to_x} {middle} {to_x} {to_y - 6}"
    return f'<path class="line" d="{path}"/><path class="tip" d="M{to_x - 4} {to_y - 8}h8l-4 8z"/>'
