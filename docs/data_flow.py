"""Reads the data flow of a layer: the lines with an arrow in its docstring.

    values -> kind label [parts] {state} -> kind label [parts] -> values -> kind label -> values

For instance `h -> linear V [attention.values] -> v`; `x + u -> x` and `G * k -> P` are bare sums and products. x is
what runs through the residual layers. A kind is one of KINDS; a part is a module, a parameter or an op of the layer,
several are joined by +; a question mark, `linear?`, `decay?` or `x +? f`, marks a step or a part that only an option
adds; the state is what one text needs in one layer, `{(window - 1) (D + H); D + H without window}`. A line that begins
with an arrow or a brace goes on with the one before.
"""

import inspect
import re
from dataclasses import dataclass
from typing import Any

KINDS = {
    "time": "positions meet here; keeps a state",
    "linear": "matrix",
    "product": "products of numbers",
    "map": "function",
    "norm": "norm",
    "sum": "sum",
}
"""What a step does, and how the legend calls it."""

GIVEN = ("x", "position")
"""What a layer is told: its input, and where in its text a token stands."""

_STEP = re.compile(
    rf"(?P<kind>{'|'.join(KINDS)})(?P<option>\??) (?P<label>[^\[\]{{}}]+?)"
    r"( \[(?P<parts>[\w.+? ]+)\])?( \{(?P<state>[^{}]+)\})?"
)
_BARE = re.compile(r"(?P<left>[\w' ]+) (?P<sign>[+*])(?P<option>\??) (?P<right>[\w' ]+)")
_VALUES = re.compile(r"[\w' ]+(, [\w' ]+)*")


@dataclass(frozen=True)
class Step:
    """The values that a step reads and gives, and the parts of the layer that do it."""

    outputs: tuple[str, ...]
    kind: str
    is_option: bool
    parts: tuple[str, ...]
    optional_parts: tuple[str, ...]
    inputs: tuple[str, ...]
    label: str
    state: str

    @property
    def is_circle(self) -> bool:
        """Whether it is a bare sum or product of two values."""
        return not self.label


def read_flow(docstring: str) -> list[Step]:
    """The steps in order; none where no line has an arrow.

    Raises:
        ValueError: a line is not of the form at the top of this file, or reads a value that no line before gives.
    """
    joined = re.sub(r"\s*\n\s*(?=->|\{)", " ", inspect.cleandoc(docstring))
    steps, known = [], set(GIVEN)
    for line in map(str.strip, joined.splitlines()):
        if " -> " in line:
            steps += _read_line(line, known)
    return steps


def state_numbers(steps: list[Step], symbols: dict[str, Any]) -> int:
    """The declared size of the state of these steps for these widths and options; None is an option that is not set."""
    return sum(_evaluate(step.state, symbols) for step in steps if step.state)


def _read_line(line: str, known: set[str]) -> list[Step]:
    """Boxes wait for the name of what the last of them gives; all of them give it that name."""
    first, *rest = line.split(" -> ")
    steps: list[Step] = []
    values, boxes = _names(first, ","), [first] if _BARE.fullmatch(first) else []
    for text in rest:
        if not boxes or _STEP.fullmatch(text) or not _VALUES.fullmatch(text):
            boxes.append(text)
            continue
        outputs = _names(text, ",")
        steps += [_read_step(box, outputs if number else values, outputs) for number, box in enumerate(boxes)]
        values, boxes = outputs, []
    if boxes:
        raise ValueError(f"{line!r} does not end with the name of a value")
    for step in steps:
        if missing := set(step.inputs) - known:
            raise ValueError(f"{line!r} reads {', '.join(sorted(missing))}, which no line before gives")
        known.update(step.outputs)
    return steps


def _read_step(box: str, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Step:
    if bare := _BARE.fullmatch(box):
        kind = "sum" if bare["sign"] == "+" else "product"
        return Step(outputs, kind, bool(bare["option"]), (), (), (bare["left"], bare["right"]), label="", state="")
    match = _STEP.fullmatch(box)
    if match is None:
        raise ValueError(f"{box!r} is not 'kind label [parts] {{state}}', kind one of {list(KINDS)}")
    parts = _names(match["parts"] or "", "+")
    return Step(
        outputs=outputs,
        kind=match["kind"],
        is_option=bool(match["option"]),
        parts=tuple(part for part in parts if not part.endswith("?")),
        optional_parts=tuple(part[:-1] for part in parts if part.endswith("?")),
        inputs=inputs,
        label=match["label"],
        state=match["state"] or "",
    )


def _names(text: str, separator: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(separator) if name.strip())


def _evaluate(state: str, symbols: dict[str, Any]) -> int:
    for case in state.split(";"):
        formula, _, absent = case.strip().partition(" without ")
        names = re.findall(r"[A-Za-z_]\w*", formula)
        if (symbols[absent] is None) if absent else all(symbols[name] is not None for name in names):
            product = re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", formula)
            return int(eval(product, {"__builtins__": {}}, symbols))
    raise ValueError(f"no case of {state!r} fits {symbols}")
