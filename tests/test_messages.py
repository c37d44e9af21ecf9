"""All that multilin says to its users is in tests/messages.txt, to be read in one sitting.

`python -m tests.test_messages` writes the file anew.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "multilin"
FILE = Path(__file__).with_name("messages.txt")
SPEAKING = re.compile(r"print|input|warn(_once|_plainly)?|warning|say(_next)?|message|status|_fail|report|\w*Error")
SENTENCE = re.compile(r"[A-Za-z]{2,}[,;:]? [\w{}'\"()-]+[,;:]? [\w{}'\"(-]+")  # three words, at least


def test_the_file_of_messages_follows_the_code() -> None:
    assert FILE.read_text(encoding="utf-8") == messages(), (
        f"{FILE.name} is stale: run python -m tests.test_messages, and read what changed as a user would"
    )


def messages() -> str:
    """The messages of every file, a line for each."""
    parts = ["Written by python -m tests.test_messages: what multilin says, by file. {...} stands for a value."]
    for path in sorted(SOURCE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        lines = [f"  {text}" for text in dict.fromkeys(texts(tree, is_said=False)) if re.search("[A-Za-z]{2}", text)]
        parts += ["\n".join(["", path.relative_to(SOURCE).as_posix(), *lines])] if lines else []
    return "\n".join([*parts, ""])


def texts(node: ast.AST, *, is_said: bool) -> Iterator[str]:
    """The texts in a syntax tree that are arguments of what speaks, and all others of three words.

    Args:
        node: to look through, without its documentation.
        is_said: whether the node is such an argument.
    """
    if text := written(node):
        yield from [text] if is_said or SENTENCE.search(text) else []
        return
    if isinstance(node, ast.List) and node.elts and getattr(node.elts[0], "value", None) == "multilin":
        yield f"Next: {' '.join(written(word) or f'{{{ast.unparse(word)}}}' for word in node.elts)}"
        return
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        speaks = SPEAKING.fullmatch(name) is not None
        for index, child in enumerate(node.args):
            yield from texts(child, is_said=speaks and (index == 0 or name in ("print", "say_next")))
        for keyword in node.keywords:
            yield from texts(keyword.value, is_said=False)
        yield from texts(node.func, is_said=False)
        return
    inside = is_said and isinstance(node, ast.IfExp | ast.BinOp | ast.List | ast.Tuple | ast.Starred)
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.Expr) or not isinstance(child.value, ast.Constant):  # documentation
            yield from texts(child, is_said=inside)


def written(node: ast.AST) -> str:
    """A text on one line, with {expression} for what is put in; empty for what is no text."""
    values = node.values if isinstance(node, ast.JoinedStr) else [node]
    pieces = []
    for value in values:
        if isinstance(value, ast.FormattedValue):
            pieces.append(f"{{{ast.unparse(value.value)}}}".replace('"', "'"))  # as versions of Python differ in this
        elif isinstance(value, ast.Constant) and isinstance(value.value, str):
            pieces.append(value.value.replace("\n", "\\n"))
    return "".join(pieces).strip()


if __name__ == "__main__":
    FILE.write_text(messages(), encoding="utf-8")
