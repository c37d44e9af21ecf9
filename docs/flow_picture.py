"""Draws the data flow of a layer as an SVG that needs nothing else and follows the reader's light or dark theme."""

from collections.abc import Iterator
from html import escape

from data_flow import KINDS, Step
from flow_layout import (
    LINE_HEIGHT,
    MARGIN,
    RADIUS,
    Node,
    Picture,
    lay_out,
    path_of,
    port,
    shown,
    state_lines,
    text_width,
)

LIGHT = {
    "card": ("#ffffff", "#d9dee7"), "ink": "#1f2733", "muted": "#5b6678", "line": "#7b8698",
    "time": ("#ffc35c", "#c77700"), "linear": ("#dce8ff", "#6b90de"), "product": ("#d8f1e1", "#4ba673"),
    "map": ("#ebe2ff", "#9678dc"), "norm": ("#eceff4", "#9aa5b6"), "sum": ("#ffffff", "#7b8698"),
    "state": ("#fff4dd", "#c77700"), "on_time": "#3a2500",
}  # fmt: skip
DARK = {
    "card": ("#1b212b", "#343d4c"), "ink": "#e6eaf1", "muted": "#a3aec0", "line": "#8e9ab0",
    "time": ("#b26a00", "#ffbe5c"), "linear": ("#24406f", "#7fa6f2"), "product": ("#1d4a33", "#63c28d"),
    "map": ("#41316b", "#b49bf2"), "norm": ("#333c4b", "#8793a8"), "sum": ("#1b212b", "#8e9ab0"),
    "state": ("#3b2600", "#ffbe5c"), "on_time": "#fff6e6",
}  # fmt: skip


def draw(title: str, steps: list[Step]) -> str:
    """The SVG of these steps."""
    picture = lay_out(steps)
    legend, legend_height = _legend(picture)
    width, height = picture.width, picture.height + legend_height
    body = [f'<rect class="card" x="0.5" y="0.5" width="{width - 1:.0f}" height="{height - 1:.0f}" rx="10"/>']
    body += _lines(picture)
    for value in picture.values:
        if value.is_named:
            x, y = port(picture, value)
            body.append(_text(value.name, x + 6, y + 14, "value", "start"))
    for node in picture.nodes:
        body += _node(node)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
            f'height="{height:.0f}" role="img" aria-labelledby="title description">',
            f'<title id="title">Data flow of one layer: {escape(title)}</title>',
            f'<desc id="description">{escape(describe(steps))}</desc>',
            f"<style>\n{_style(LIGHT)}\n@media (prefers-color-scheme: dark) {{\n{_style(DARK)}\n}}\n</style>",
            *body,
            *legend,
            "</svg>\n",
        ]
    )


def describe(steps: list[Step]) -> str:
    """The picture in words, for those who do not see it."""
    parts = []
    for step in steps:
        what = step.label or {"sum": "sum", "product": "pointwise product"}[step.kind]
        sentence = f"{' and '.join(step.outputs)} from {', '.join(step.inputs)}: {what}"
        if step.kind == "time":
            sentence += ", over the positions read so far"
        parts.append(sentence + (" (with an option)" if step.is_option else ""))
    return "; ".join(parts) + "."


def _lines(picture: Picture) -> Iterator[str]:
    """One path for all lines of a value, so that they do not darken each other where they run together."""
    for value in picture.values:
        paths = [_line_and_tip(path_of(picture, edge)) for edge in picture.edges if edge.value is value]
        if paths:
            yield f'<path class="line" d="{"".join(line for line, _ in paths)}"/>'
            yield f'<path class="tip" d="{"".join(tip for _, tip in paths)}"/>'


def _line_and_tip(points: list[tuple[float, float]]) -> tuple[str, str]:
    (x0, y0), (x1, y1) = points[-2:]
    length = abs(x1 - x0) + abs(y1 - y0)
    dx, dy = (x1 - x0) / length, (y1 - y0) / length
    corners = "L".join(f"{x:.1f} {y:.1f}" for x, y in [*points[:-1], (x1 - 5 * dx, y1 - 5 * dy)])
    tip = f"M{x1:.1f} {y1:.1f}l{-7 * dx - 4 * dy:.1f} {-7 * dy + 4 * dx:.1f}l{8 * dy:.1f} {-8 * dx:.1f}z"
    return f"M{corners}", tip


def _is_option(node: Node) -> bool:
    return node.step is not None and node.step.is_option


def _node(node: Node) -> Iterator[str]:
    option = " option" * _is_option(node)
    if node.is_circle:
        sign = "+" if node.kind == "sum" else "×"
        yield f'<circle class="{node.kind}{option}" cx="{node.centre:.1f}" cy="{node.middle:.1f}" r="{RADIUS}"/>'
        yield _text(sign, node.centre, node.middle + 6, "sign")
        return
    if node.step is None:
        yield _rect("given", node.left, node.top, node.width, node.height, 13)
        yield _text(node.name, node.centre, node.middle + 5, "name")
        return
    yield _rect(node.kind + option, node.left, node.top, node.width, node.height, 6)
    is_time = node.kind == "time"
    yield _text(node.step.label, node.centre, node.top + 21, "label on_time" if is_time else "label")
    lines = state_lines(node.step)
    if lines:
        width = max(text_width(line, 12) for line in lines) + 16
        yield _rect("state", node.centre - width / 2, node.top + 34, width, LINE_HEIGHT * len(lines) + 3, 9)
        for index, line in enumerate(lines):
            yield _text(line, node.centre, node.top + 49 + LINE_HEIGHT * index, "small")


def _legend(picture: Picture) -> tuple[list[str], float]:
    kinds = [kind for kind in KINDS if any(node.kind == kind for node in picture.nodes)]
    entries = [(kind, KINDS[kind]) for kind in kinds if kind != "sum"]
    if any(_is_option(node) for node in picture.nodes):
        entries.append(("sum option", "with an option"))
    x, y, drawn = float(MARGIN), picture.height + 6, []
    drawn.append(f'<path class="rule" d="M{MARGIN} {y - 16:.1f}H{picture.width - MARGIN:.1f}"/>')
    for kind, meaning in entries:
        width = 22 + text_width(meaning, 12) + 10
        if x > MARGIN and x + width > picture.width:
            x, y = float(MARGIN), y + 22
        drawn.append(_rect(kind, x, y - 2, 15, 13, 3))
        drawn.append(_text(meaning, x + 22, y + 9, "small", "start"))
        x += width
    return drawn, y + 12 + MARGIN - picture.height


def _rect(kind: str, left: float, top: float, width: float, height: float, radius: int) -> str:
    return (
        f'<rect class="{kind}" x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius}"/>'
    )


def _text(text: str, x: float, y: float, kind: str, anchor: str = "middle") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(shown(text))}</text>'


def _style(colours: dict) -> str:
    rules = [
        f".{kind} {{ fill: {pair[0]}; stroke: {pair[1]}; stroke-width: {2 if kind == 'time' else 1.3} }}"
        for kind, pair in colours.items()
        if isinstance(pair, tuple)
    ]
    return "\n".join(
        [
            "text { font-family: system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif; "
            f"font-size: 14px; fill: {colours['ink']} }}",
            *rules,
            f".given {{ fill: none; stroke: {colours['line']} }}",
            ".option { stroke-dasharray: 4 3 }",
            f".line {{ fill: none; stroke: {colours['line']}; stroke-width: 1.5 }}",
            f".tip {{ fill: {colours['line']} }}",
            f".rule {{ stroke: {colours['card'][1]} }}",
            f".value {{ font-size: 13px; font-style: italic; fill: {colours['muted']} }}",
            ".sign { font-size: 18px } .small { font-size: 12px }",
            ".name { font-style: italic }",
            f".on_time {{ font-weight: 600; fill: {colours['on_time']} }}",
        ]
    )
