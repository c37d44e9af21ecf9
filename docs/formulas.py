"""Typesets the plain formulas of docstrings: `y_t = sum_{j<=t} e^(l_j) x_j` becomes LaTeX between dollar signs.

The notation: names with `_` and `^`, groups in {} or (); `sum_{...}`; `(a) / (b)` for a fraction; `.`
and `*` for products; the words `outer`, `xor` and `in`; `<-`, `->`, `<=`. Three spaces or more separate formulas, and
remarks on the formula before them. The site shows LaTeX as MathML, which browsers set without any script.
"""

import re
from collections.abc import Iterator

from latex2mathml.converter import convert

_TOKEN = re.compile(r"\s*(<-|->|<=|\+=|[A-Za-z]+'?|\d+(?:\.\d+)?|\S)")
_SYMBOLS = {
    "<-": r"\leftarrow", "->": r"\to", "<=": r"\le", ".": r"\cdot", "*": r"\odot", "outer": r"\otimes",
    "xor": r"\oplus", "in": r"\in", "sum": r"\sum\limits", "{": r"\{", "}": r"\}",
}  # fmt: skip
_CLOSING = {"(": ")", "[": "])", "{": "}"}
_DOLLARS = re.compile(r"^\$\$\n(.*?)\n\$\$$", re.MULTILINE | re.DOTALL)


def typeset(block: str) -> str:
    """The formulas of a block, each as LaTeX between lines of two dollar signs."""
    formulas: list[str] = []
    for line in block.splitlines():
        line = re.sub(r" +(<-|\+?=) +", r" \1 ", line.strip())
        for part in re.split(r" {3,}", line):
            if re.search(r"<-|[^<]=", part):
                formulas.append(to_latex(part))
            elif not formulas:
                raise ValueError(f"{line!r} is indented as a formula, but has no =, += or <-")
            else:
                is_formula = re.search(r"<|->|\bin\b", part)
                formulas[-1] += r" \qquad " + (to_latex(part) if is_formula else rf"\text{{{part}}}")
    return "\n\n".join(f"$$\n{formula}\n$$" for formula in formulas)


def to_latex(formula: str) -> str:
    """The LaTeX of one formula."""
    return _sequence(re.sub(r" {2,}", " ", formula))


def to_mathml(page: str) -> str:
    """A Markdown page whose formulas are MathML."""
    return _DOLLARS.sub(lambda match: f'<div class="formula">{_mathml(match[1])}</div>', page)


def on_page_markdown(markdown: str, **_: object) -> str:
    """Called by mkdocs for every page."""
    return to_mathml(markdown)


def _mathml(latex: str) -> str:
    plus, equals = "<mo>&#x0002B;</mo>", "<mo>&#x0003D;</mo>"
    return convert(latex, display="block").replace(plus + equals, "<mo>+=</mo>")


def _sequence(text: str) -> str:
    """Atoms side by side; a slash between two atoms is a fraction."""
    parts: list[str] = []
    is_fraction = False
    for atom in _atoms(text):
        if atom == "/":
            is_fraction = True
        elif is_fraction:
            parts[-1] = rf"\frac{{{_bare(parts[-1])}}}{{{_bare(atom)}}}"
            is_fraction = False
        else:
            parts.append(atom)
    return " ".join(parts)


def _atoms(text: str) -> Iterator[str]:
    """Names and numbers with what stands below and above them, functions with their arguments, groups, symbols."""
    place = 0
    while match := _TOKEN.match(text, place):
        token, place = match[1], match.end()
        if token in _CLOSING:
            end = _end(text, place)
            atom = rf"\left{token} {_sequence(text[place : end - 1])} \right{text[end - 1]}".replace(
                r"\left{", r"\left\{"
            )
            place = end
        elif token == "sqrt":
            end = _end(text, place + 1)
            atom, place = rf"\sqrt{{{_sequence(text[place + 1 : end - 1])}}}", end
        elif token[0].isalpha() and token not in _SYMBOLS:
            atom, place = _name(token, text, place)
        else:
            atom = _SYMBOLS.get(token, token)
        while text[place : place + 1] in ("_", "^"):
            mark, (group, place) = text[place], _group(text, place + 1)
            atom = f"{atom}{mark}{{{group}}}"
        yield atom


def _name(token: str, text: str, place: int) -> tuple[str, int]:
    """A letter as it is, a word upright; with an argument in parentheses directly after it, a function."""
    atom = token if len(token.rstrip("'")) == 1 else rf"\mathrm{{{token}}}"
    digits = re.compile(r"\d+").match(text, place)
    if digits:  # p1_i
        place = digits.end()
        below, place = (_group(text, place + 1)) if text[place : place + 1] == "_" else ("", place)
        atom = f"{atom}_{{{digits[0]}{',' if below else ''}{below}}}"
    return atom, place


def _group(text: str, place: int) -> tuple[str, int]:
    """What stands below or above: {group}, (group), or one name or number, with names after commas."""
    if text[place] in "{(":
        end = _end(text, place + 1)
        return _sequence(text[place + 1 : end - 1]), end
    match = re.compile(r"[A-Za-z0-9]+(,[a-z](?![a-z])|,\([^)]*\))*").match(text, place)
    assert match is not None, text
    names = [name if len(name) <= 2 or "(" in name else rf"\mathrm{{{name}}}" for name in match[0].split(",")]
    return ",".join(_sequence(name) if "(" in name else name for name in names), match.end()


def _end(text: str, place: int) -> int:
    """The place after the parenthesis that closes the one before `place`."""
    depth = 1
    while depth:
        if place == len(text):
            raise ValueError(f"{text!r}: a parenthesis is not closed")
        depth += (text[place] in "([{") - (text[place] in ")]}")
        place += 1
    return place


def _bare(atom: str) -> str:
    """A group without its parentheses."""
    whole = re.fullmatch(r"\\left\( (.*) \\right\)", atom)
    return whole[1] if whole else atom
