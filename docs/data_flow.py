"""Reads the data flow that an architecture declares where it is registered: one step of a layer per line.

    outputs = kind part(inputs) | what it does | numbers of state

For instance `q, k, v = linear attention.projections(h) | W_q, W_k, W_v`. x is what runs through the residual layers;
a part is a module, a parameter or an op of the layer, several are joined by +; a question mark, `linear?` or `decay?`,
marks a step or a part that only an option adds; the state is what one text needs in one layer, `(window - 1) (D + H);
D + H without window`. A line that begins with | goes on with the one before.
"""

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

_LINE = re.compile(
    r"(?P<outputs>[^=]+?)\s*=\s*(?P<kind>\w+)(?P<option>\??)\s+(?P<parts>[\w.+? ]*)\((?P<inputs>[^()]*)\)"
)


@dataclass(frozen=True)
class Step:
    """One line: the values it reads and gives, and the parts of the layer that do it."""

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
        return not self.parts and self.kind in ("sum", "product")


def read_flow(text: str) -> list[Step]:
    """The steps in order.

    Raises:
        ValueError: a line is not of the form at the top of this file, or reads a value that no line before gives.
    """
    joined = re.sub(r"\s*\n\s*\|", " |", text)
    steps, known = [], set(GIVEN)
    for line in filter(None, map(str.strip, joined.splitlines())):
        step = _read_step(line)
        if missing := set(step.inputs) - known:
            raise ValueError(f"{line!r} reads {', '.join(sorted(missing))}, which no line before gives")
        known.update(step.outputs)
        steps.append(step)
    return steps


def state_numbers(steps: list[Step], symbols: dict[str, Any]) -> int:
    """The declared size of the state of these steps for these widths and options; None is an option that is not set."""
    return sum(_evaluate(step.state, symbols) for step in steps if step.state)


def _read_step(line: str) -> Step:
    head, label, state, *rest = [part.strip() for part in line.split("|")] + ["", ""]
    match = _LINE.fullmatch(head)
    if match is None or any(rest) or match["kind"] not in KINDS:
        raise ValueError(f"{line!r} is not 'outputs = kind part(inputs) | label | state', kind one of {list(KINDS)}")
    parts = _names(match["parts"], "+")
    return Step(
        outputs=_names(match["outputs"], ","),
        kind=match["kind"],
        is_option=bool(match["option"]),
        parts=tuple(part for part in parts if not part.endswith("?")),
        optional_parts=tuple(part[:-1] for part in parts if part.endswith("?")),
        inputs=_names(match["inputs"], ","),
        label=label,
        state=state,
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
