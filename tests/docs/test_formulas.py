"""Formulas of docstrings are typeset: as LaTeX in the pages, as MathML on the site."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from tests.docs.generator import formulas, generate


@pytest.mark.parametrize(
    ("plain", "latex"),
    [
        ("y_t = (a + b) / (c_1 d)", r"y_{t} = \frac{a + b}{c_{1} d}"),
        ("l_j = w . x_j / sqrt(D)", r"l_{j} = w \cdot \frac{x_{j}}{\sqrt{D}}"),
        ("x += sum_{j<=t} e^(l_j) v_j", r"x += \sum\limits_{j \le t} e^{l_{j}} v_{j}"),
        ("p1_i = A_t,i * X_t,(i xor b)", r"p_{1,i} = A_{t,i} \odot X_{t,\left( i \oplus b \right)}"),
        ("h <- W [ a outer b ]", r"h \leftarrow W \left[ a \otimes b \right]"),
    ],
)
def test_plain_formulas_become_latex(plain: str, latex: str) -> None:
    assert formulas.to_latex(plain) == latex


def test_formulas_stand_one_below_the_other_with_their_remarks() -> None:
    block = formulas.typeset("a   = b        j < t        both of width D\nc <- d        e = f")
    assert block.split("\n\n") == [
        f"$$\n{formula}\n$$"
        for formula in (r"a = b \qquad j < t \qquad \text{both of width D}", r"c \leftarrow d", "e = f")
    ]


@pytest.mark.parametrize(
    ("plain", "words"), [("softmax(l) v", "has no =, \\+= or <-"), ("y = f(x", "a parenthesis is not closed")]
)
def test_what_is_no_formula_is_refused(plain: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        formulas.typeset(plain)


def test_every_formula_of_the_pages_is_mathml_on_the_site() -> None:
    pages = [*generate.pages().values(), (generate.DOCS / "optimizers.md").read_text(encoding="utf-8")]
    shown = [html for page in pages for html in re.findall(r'<div class="formula">.*?</div>', formulas.to_mathml(page))]
    assert len(shown) == sum(page.count("\n$$\n") for page in pages) / 2 > 20
    for html in shown:
        text = "".join(ElementTree.fromstring(html).itertext())
        assert not set(text) & set("\\${}^"), text
