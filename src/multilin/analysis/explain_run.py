"""`multilin explain`: which text is read, and the files that show what was read of it."""

from dataclasses import dataclass
from pathlib import Path

from multilin.analysis.evaluate_run import validation_text
from multilin.analysis.explain import Explanation, explain
from multilin.data.tokenizers import start_token_id, token_texts
from multilin.errors import InputError
from multilin.files import check_writable
from multilin.inference.prompts import encode_prompt, read_prompt
from multilin.inference.runs import Run, load_run
from multilin.model.memory import check_memory
from multilin.progress import counted
from multilin.settings import settings
from multilin.settings.bounds import Batch, Index, PathText, Prose, ShortLength
from multilin.training.recipe import RECIPE_FILE

PASSAGE_TOKENS = 128
PAIR_BYTES = 8  # of a weight or an effect


@settings
class ExplainSettings:
    """What is explained, and how."""

    run: PathText  # folder of a trained model
    text: Prose | None = None  # text to explain; without one it is read from a pipe, or taken from the validation text
    file: PathText | None = None  # file with the text to explain; one newline at its end is left out
    document: Index = 0  # where no text is given: the document of the validation text, from 0
    max_tokens: ShortLength = 400  # longest text; each of its tokens is removed once, so twice as long takes four times
    remove: bool = True  # also measure how each prediction changes when a token is removed
    batch_size: Batch = 16  # texts without a token read at a time
    output: PathText | None = None  # folder for the page, the picture and the JSON; without one RUN/explain
    json: bool = False  # print the JSON


@dataclass(frozen=True)
class Report:
    """An explanation, with what is needed to show it.

    run: the run's folder. source: where the text is from, for people. tokens: the text of each token; the first is the
    start of the text. texts: that of every token id that is named.
    """

    run: str
    source: str
    tokens: list[str]
    texts: dict[int, str]
    explanation: Explanation

    @property
    def name(self) -> str:
        """Of the run, for titles."""
        return Path(self.run).resolve().name


def explain_run(settings: ExplainSettings) -> Report:
    """Load a run, choose the text, and explain it, with progress on stderr.

    Raises:
        InputError: no text, or one longer than the model can read or than `max_tokens`.
    """
    text = read_prompt(settings.text, settings.file, names=("--text", "--file"))
    run = load_run(settings.run)
    given = bool(text) or settings.text is not None or settings.file is not None
    ids, source = (encode_prompt(text, run.tokenizer), "the given text") if given else _passage(run, settings)
    _check_length(len(ids), settings, run.longest_text)
    token_ids = [start_token_id(run.tokenizer), *ids]
    pairs = len(token_ids) ** 2 * (2 + run.model.config.num_hidden_layers)
    check_memory(f"text: {len(ids)} tokens given, but explaining them", pairs * PAIR_BYTES, "cpu")
    with counted("removing tokens", len(ids)) as progress:
        found = explain(run.model, token_ids, remove=settings.remove, batch_size=settings.batch_size, progress=progress)
    named = sorted({*token_ids, *(token_id for guesses in found.guesses for token_id, _ in guesses)})
    texts = dict(zip(named, token_texts(run.tokenizer, named), strict=True))
    return Report(str(run.folder), source, [texts[token_id] for token_id in token_ids], texts, found)


def output_folder(settings: ExplainSettings) -> Path:
    """Where the files go.

    Raises:
        InputError: it cannot be written.
    """
    folder = Path(settings.run, "explain") if settings.output is None else Path(settings.output)
    if settings.output is not None or Path(settings.run).is_dir():
        check_writable("--output", folder / "explain.json" if folder.exists() else folder)
    return folder


def _passage(run: Run, settings: ExplainSettings) -> tuple[list[int], str]:
    if not (run.folder / RECIPE_FILE).is_file():
        raise InputError(
            f"text: none given, and {run.folder} has no {RECIPE_FILE} that names one; give --text or --file"
        )
    packed = validation_text(run)
    if settings.document >= packed.num_documents:
        raise InputError(
            f"--document: {settings.document} given, but the validation text has {packed.num_documents} documents, "
            "counted from 0"
        )
    start = int(packed.document_starts[settings.document]) + 1
    ends = [*packed.document_starts.tolist(), packed.num_tokens]
    longest = min(PASSAGE_TOKENS, settings.max_tokens, (run.longest_text or PASSAGE_TOKENS + 1) - 1)
    ids = packed.tokens[start : min(ends[settings.document + 1], start + longest)].tolist()
    return ids, f"the first {len(ids)} tokens of document {settings.document} of the run's validation text"


def _check_length(num_tokens: int, settings: ExplainSettings, longest: int | None) -> None:
    if longest is not None and num_tokens + 1 > longest:
        raise InputError(
            f"text: {num_tokens + 1} tokens given, the start token included, but this model reads at most {longest}; "
            "give a shorter text"
        )
    if num_tokens > settings.max_tokens:
        raise InputError(
            f"text: {num_tokens} tokens given, but at most {settings.max_tokens} are explained, as each is removed in "
            "turn; give a shorter text, or raise --max-tokens"
        )
