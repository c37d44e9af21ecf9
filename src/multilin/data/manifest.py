"""The manifest of prepared text: its folders, with their sizes and the checksum of every file."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import MaxLen, MinLen
from pydantic import StringConstraints

from multilin.data.packed_text import Description
from multilin.errors import InputError, shown
from multilin.settings import load_settings
from multilin.settings.bounds import Section, Size

FORMAT = 1
_Sum = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
_FileName = Annotated[str, StringConstraints(pattern=r"^\w[\w.-]*$")]


@dataclass(frozen=True)
class Folder:
    """A folder of prepared text, whose name is relative to the manifest."""

    name: Annotated[str, StringConstraints(pattern=r"^(unfinished/)?[a-z]+(/[0-9]+-[0-9]+)?$")]
    files: Annotated[dict[_FileName, _Sum], MaxLen(100)]  # SHA-256 of each
    description: Description | None  # the content of packed.json; none of the tokenizer

    def describe(self) -> Description:
        """The description of a packed text."""
        if self.description is None:
            raise InputError(f"{self.name}: the manifest does not say what it holds; prepare the text again")
        return self.description


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json, which is written last."""

    format: Size
    settings: Section  # that decided the content, and the source's hash
    num_documents: Size  # of training and validation text together
    num_tokens: Size
    num_bytes: Size  # UTF-8 bytes of the text
    tokenizer_hash: _Sum
    tokenizer: Folder
    validation: Folder
    train: Annotated[list[Folder], MinLen(1), MaxLen(10**7)]

    def to_json(self) -> bytes:
        """The content of the file: the fields, and then the SHA-256 of these fields."""
        values = dataclasses.asdict(self)
        return json.dumps(values | {"sha256": _sum(values)}, indent=1).encode()

    @classmethod
    def parse(cls, content: bytes, where: str) -> "Manifest":
        """The manifest in a file.

        Raises:
            InputError: the manifest is damaged, or has another format.
        """
        try:
            values = json.loads(content)
            expected = values.pop("sha256")
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            raise InputError(
                f"{where} is no manifest of prepared text; prepare the text again, or name files of text by a "
                "glob such as 'texts/*.txt'"
            ) from None
        if expected != _sum(values):
            raise InputError(f"{where} is damaged: its checksum is not that of its content; prepare the text again")
        if values.get("format") != FORMAT:
            raise InputError(f"{where} has format {shown(values.get('format'))}, but only {FORMAT} is known")
        return load_settings(cls, values, where)


def _sum(values: Any) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()
