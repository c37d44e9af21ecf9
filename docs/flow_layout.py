"""Where the steps of a layer stand in its picture, in pixels.

x runs down the left side; what a layer adds to it is computed in columns beside, from top to bottom. A value has a
column of its own until its last reader, so that no line crosses a box.
"""

import re
from dataclasses import dataclass, field

from data_flow import Step

GAP, SMALL_GAP, MARGIN, SPINE, LANE, BETWEEN = 36, 22, 20, 46, 40, 14
BOX_HEIGHT, LINE_HEIGHT, RADIUS, PADDING = 32, 19, 11, 12


@dataclass
class Node:
    """A step and the cells it stands in; `left` and the rest are known once all nodes have their cells."""

    step: Step | None
    name: str
    row: int
    first: int
    last: int
    left: float = 0.0
    top: float = 0.0
    width: float = 0.0
    height: float = 0.0

    @property
    def centre(self) -> float:
        """Across."""
        return self.left + self.width / 2

    @property
    def middle(self) -> float:
        """Down."""
        return self.top + self.height / 2

    @property
    def kind(self) -> str:
        """The step's, or that of a value which is given."""
        return self.step.kind if self.step else "given"

    @property
    def is_circle(self) -> bool:
        """Whether a bare sum or product."""
        return self.step is not None and self.step.is_circle


@dataclass
class Value:
    """What a node gives, in the columns where its line runs down."""

    name: str
    node: Node
    first: int
    last: int
    has_box_below: bool = False
    is_named: bool = True  # drawn with its name: not where the next step goes on with a value of that name


@dataclass
class Edge:
    """From a value to a reader of it; `lane` is the column where it runs down, if it has one of its own."""

    value: Value
    reader: Node
    lane: int | None = None


@dataclass
class Picture:
    """Everything that is drawn."""

    nodes: list[Node] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    column_centres: list[float] = field(default_factory=list)
    width: float = 0.0
    height: float = 0.0


def lay_out(steps: list[Step]) -> Picture:
    """Cells for all steps, then their places in pixels."""
    picture = _Placement(steps).picture
    _measure(picture)
    return picture


class _Placement:
    """Gives each step, in order, a row below what it reads and columns that nothing else uses."""

    def __init__(self, steps: list[Step]) -> None:
        self.picture = Picture()
        self.taken: set[tuple[int, int]] = set()
        self.next_column = 1
        self.current = {"x": self._give(Node(None, "x", 0, 0, 0))}
        for step in steps:
            self._place(step)
        self._end()

    def _end(self) -> None:
        row = 1 + max(node.row for node in self.picture.nodes)
        end = Node(None, "x", row, 0, 0)
        self.current["x"].is_named = False
        self.picture.nodes.append(end)
        self.picture.edges.append(Edge(self.current["x"], end))

    def _give(self, node: Node) -> Value:
        self.picture.nodes.append(node)
        value = Value(node.name, node, node.first, node.last, is_named=False)
        self.picture.values.append(value)
        return value

    def _new_columns(self, count: int = 1) -> int:
        first, self.next_column = self.next_column, self.next_column + count
        return first

    def _place(self, step: Step) -> None:
        for name in step.inputs:
            if name not in self.current:
                column = self._new_columns()
                self.current[name] = self._give(Node(None, name, 1, column, column))
                self.taken.add((1, column))
        inputs = [self.current[name] for name in step.inputs]
        edges = [Edge(value, None) for value in inputs]  # type: ignore[arg-type]
        first, last = self._columns(step, edges)
        used = {first, last, *(edge.lane for edge in edges if edge.lane is not None)}
        row = 1 + max(value.node.row for value in inputs)
        cells = range(min(used), max(used) + 1)
        while any((row, column) in self.taken for column in cells):
            row += 1
        self.taken.update((row, column) for column in cells)
        node = Node(step, step.outputs[0], row, first, last)
        self.picture.nodes.append(node)
        for edge in edges:
            edge.reader = node
            self.picture.edges.append(edge)
        several = len(step.outputs) > 1
        for value in inputs:
            value.is_named = value.is_named and value.name not in step.outputs
        for index, name in enumerate(step.outputs):
            columns = (first + index, first + index) if several else (first, last)
            self.current[name] = Value(name, node, *columns)
            self.picture.values.append(self.current[name])
        if first == 0:
            self.next_column = 1

    def _columns(self, step: Step, edges: list[Edge]) -> tuple[int, int]:
        main = edges[0].value
        if step.outputs == ("x",):
            for edge in edges[1:]:
                edge.lane = edge.value.first
            return 0, 0
        if step.is_circle:
            main.has_box_below = True
            for edge in edges[1:]:
                edge.lane = self._new_columns() if edge.value.has_box_below else edge.value.first
            return main.first, main.last
        if len(edges) > 1:
            for edge in edges:
                edge.value.has_box_below = True
            return min(e.value.first for e in edges), max(e.value.last for e in edges)
        if main.first == 0 or main.has_box_below:
            first = self._new_columns(len(step.outputs))
            return first, first + len(step.outputs) - 1
        main.has_box_below = True
        more = len(step.outputs) - 1
        self.next_column = max(self.next_column, main.first + more + 1)
        return main.first, max(main.last, main.first + more)


def _measure(picture: Picture) -> None:
    """Widths of columns from the text in them, heights of rows, then the place of every node."""
    num_columns = 1 + max(node.last for node in picture.nodes)
    num_columns = max(num_columns, 1 + max((e.lane or 0 for e in picture.edges), default=0))
    widths = [float(SPINE)] + [float(LANE)] * (num_columns - 1)
    for value in picture.values:
        if value.is_named and value.first == value.last > 0:
            widths[value.first] = max(widths[value.first], 2 * (text_width(value.name, 13) + 8))
    for node in sorted(picture.nodes, key=lambda n: n.last - n.first):
        node.width, node.height = _size(node)
        if node.last > 0 or not node.is_circle:
            columns = range(node.first, node.last + 1)
            missing = node.width - sum(widths[c] for c in columns) - BETWEEN * (len(columns) - 1)
            for column in columns:
                widths[column] += max(missing, 0.0) / len(columns)
    lefts = [MARGIN + sum(widths[:c]) + BETWEEN * c for c in range(num_columns)]
    picture.column_centres = [left + width / 2 for left, width in zip(lefts, widths, strict=True)]
    picture.width = max(lefts[-1] + widths[-1] + MARGIN, 300.0)
    top = float(MARGIN)
    roomy = {edge.value.node.row for edge in picture.edges if edge.lane is None and _turns(edge)}
    roomy |= {value.node.row for value in picture.values if value.is_named}
    for row in range(1 + max(node.row for node in picture.nodes)):
        in_row = [node for node in picture.nodes if node.row == row]
        height = max((node.height for node in in_row), default=0.0)
        for node in in_row:
            left, right = lefts[node.first], lefts[node.last] + widths[node.last]
            if not node.is_circle and node.step and (len(node.step.inputs) > 1 or len(node.step.outputs) > 1):
                node.width = right - left
            node.left, node.top = (left + right - node.width) / 2, top + (height - node.height) / 2
        top += height + (GAP if row in roomy else SMALL_GAP)
    picture.height = top


def _turns(edge: Edge) -> bool:
    """Whether its line leaves its columns on the way down."""
    return not edge.reader.first <= edge.value.first <= edge.value.last <= edge.reader.last


def _size(node: Node) -> tuple[float, float]:
    if node.is_circle:
        return 2.0 * RADIUS, 2.0 * RADIUS
    if node.step is None:
        return text_width(node.name, 14) + 2 * PADDING, 26.0
    lines = state_lines(node.step)
    bold = 1.08 if node.kind == "time" else 1.0
    needed = max([bold * text_width(node.step.label, 14), *(text_width(line, 12) + 16 for line in lines)])
    return needed + 2 * PADDING, BOX_HEIGHT + (LINE_HEIGHT * len(lines) + 12 if lines else 0)


def path_of(picture: Picture, edge: Edge) -> list[tuple[float, float]]:
    """The corners of an edge's line."""
    reader, (x, y) = edge.reader, port(picture, edge.value)
    if edge.lane is not None:
        end = (reader.left + reader.width if x > reader.centre else reader.left, reader.middle)
        column = picture.column_centres[edge.lane] if edge.lane != edge.value.first else x
        if column == x:
            return [(x, y), (x, reader.middle), end]
        bus = y + GAP * 0.55
        return [(x, y), (x, bus), (column, bus), (column, reader.middle), end]
    is_above = reader.left + RADIUS < x < reader.left + reader.width - RADIUS
    target = x if is_above and not reader.is_circle else reader.centre
    if abs(target - x) < 1:
        return [(x, y), (x, reader.top)]
    bus = y + GAP * 0.55
    return [(x, y), (x, bus), (target, bus), (target, reader.top)]


def port(picture: Picture, value: Value) -> tuple[float, float]:
    """Where a value leaves its node."""
    node = value.node
    several = node.step is not None and len(node.step.outputs) > 1
    x = picture.column_centres[value.first] if several else node.centre
    return x, node.top + node.height


def state_lines(step: Step) -> list[str]:
    """What the box of a step says about its state."""
    cases = [case.strip() for case in step.state.split(";") if case.strip()]
    return [f"state: {case} numbers" if index == 0 else f"or {case}" for index, case in enumerate(cases)]


def shown(text: str) -> str:
    """Minus signs and the indices of W_1 as they are printed."""
    return re.sub(r"(?<=[A-Za-z])_(\d)", lambda match: chr(ord("₀") + int(match[1])), text).replace(" - ", " − ")


def text_width(text: str, size: float) -> float:
    """Pixels of a text in a wide sans-serif font, so that it fits in narrower ones too."""
    text = shown(text)
    ems = sum(0.37 if c in "ijl.,:;'|!()[] " else 0.9 if c in "mwMW" else 0.72 if c.isupper() else 0.62 for c in text)
    return ems * size
