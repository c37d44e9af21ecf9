"""Explain a trained model: choose a text, describe the numbers, and say in words what the weights show."""

from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np
import yaml
from numpy.typing import NDArray

from multilin.analysis.evaluate.run import recipe_of, validation_text
from multilin.analysis.explain.explanation import Agreement, Explanation, Step, by_character, explain, largest
from multilin.analysis.settings import ExplainSettings
from multilin.analysis.templates import asset
from multilin.data.progress import Progress, no_progress
from multilin.data.tokenizers import start_token_id, token_texts, whole_characters
from multilin.errors import InputError, listed, plural
from multilin.inference.generate_run import text_codec
from multilin.model.memory import check_memory
from multilin.runs.files import RECIPE_FILE
from multilin.runs.load import Run

PASSAGE_TOKENS = 128
PAIR_BYTES = 8  # of one weight or one effect
FOLLOWS, LOOSELY = 0.5, 0.2  # smallest rank correlations of weights that agree with the effects mostly, or loosely

NUM_NAMED = 3  # tokens that the answer names
FELT = 0.01  # nats; the answer names no smaller change of the prediction

DEFAULTS = ExplainSettings()

MEANINGS: dict[str, str] = yaml.safe_load(asset("meanings.yaml"))
"""The meaning of every number, shown beside it on the page, in the JSON and in the terminal."""


@dataclass(frozen=True)
class Report:
    """An explanation, with the texts that its page shows.

    run: folder of the run. source: origin of the text, in words. tokens: text of each token, the start token first.
    characters: number of tokens and text of each group of tokens that forms whole characters.
    texts: text of every token id in the explanation.
    """

    run: str
    source: str
    tokens: list[str]
    characters: list[tuple[int, str]]
    texts: dict[int, str]
    explanation: Explanation

    @property
    def name(self) -> str:
        """The name of the run, for titles."""
        return Path(self.run).resolve().name

    def by_character(self, values_S: NDArray[np.float64]) -> NDArray[np.float64]:
        """Turn values of tokens into values of `characters`."""
        return by_character(values_S, [num_tokens for num_tokens, _ in self.characters])

    @property
    def labels(self) -> list[str]:
        """A label for each token: its quoted text, or `'世' (2 of 3)` for a part of a character."""
        return [
            repr(text) + (f" ({place} of {num_tokens})" if num_tokens > 1 else "")
            for num_tokens, text in self.characters
            for place in range(1, num_tokens + 1)
        ]


def explain_run(
    run: Run, text: str | None, settings: ExplainSettings = DEFAULTS, *, progress: Progress = no_progress
) -> Report:
    """Explain a text, or a passage of the run's validation text.

    Args:
        run: the model and its tokenizer.
        text: the text; None takes the beginning of a document of the validation text.
        settings: see ExplainSettings.
        progress: called at intervals.

    Raises:
        InputError: no text, a text together with a document, or a text longer than the model can read or than
            `max_tokens`.
    """
    if text is None:
        ids, source = _passage(run, settings, progress)
    else:
        if settings.document is not None:
            raise InputError(f"--document: {settings.document} given together with a text; leave out one of them")
        ids, source = text_codec(run.tokenizer).encode(text), "the given text"
    if len(ids) > settings.max_tokens:
        raise InputError(
            f"text: {plural(len(ids), 'token')} given, but at most {settings.max_tokens} are explained, as each token "
            "is removed in turn; give a shorter text, or raise --max-tokens"
        )
    token_ids = [start_token_id(run.tokenizer), *ids]
    pairs = len(token_ids) ** 2 * (2 + run.model.config.num_hidden_layers)
    check_memory(f"text: {len(ids)} tokens given, but explaining them", pairs * PAIR_BYTES, "cpu")
    explanation = explain(
        run.model, token_ids, remove=settings.remove, batch_size=settings.batch_size,
        progress=lambda done: progress("removing tokens", done, len(ids)),
    )  # fmt: skip
    guessed = {token_id for guesses in explanation.guesses for token_id, _ in guesses}
    named = sorted({*token_ids, *guessed, *(token_id for token_id, _ in explanation.matches)})
    texts = dict(zip(named, token_texts(run.tokenizer, named), strict=True))
    tokens, characters = [texts[token_id] for token_id in token_ids], whole_characters(run.tokenizer, token_ids)
    return Report(str(run.folder), source, tokens, characters, texts, explanation)


def _passage(run: Run, settings: ExplainSettings, progress: Progress) -> tuple[list[int], str]:
    recipe = recipe_of(run)
    if recipe is None:
        raise InputError(
            f"text: none given, and {run.folder} has no {RECIPE_FILE} that names a text; give --text or --file"
        )
    packed, document = validation_text(run, recipe, progress), settings.document or 0
    if document >= packed.num_documents:
        raise InputError(
            f"--document: {document} given, but the validation text has "
            f"{plural(packed.num_documents, 'document')}, counted from 0"
        )
    longest = min(PASSAGE_TOKENS, settings.max_tokens, (run.longest_text or PASSAGE_TOKENS + 1) - 1)
    ids = packed.opening(document, longest)
    return ids, f"the first {plural(len(ids), 'token')} of document {document} of the run's validation text"


def answer(report: Report) -> str:
    """The tokens with the largest weights for the prediction after the text, and what their removal changes."""
    explanation = report.explanation
    weights_S, effects_S = explanation.last_weights_S, explanation.last_effects_S
    guess, share = explanation.guesses[-1][0]
    sentences = [f"After this text the model expects {report.texts[guess]!r} ({share:.0%})."]
    if explanation.matches:
        predicted, length = explanation.matches[-1]
        before = f"{plural(length, 'token')} occurred before, followed by {report.texts[predicted]!r}"
        sentences.append(f"Longest match: the last {before}." if length else "The last token did not occur before.")
    weighed = [] if weights_S is None else largest(weights_S, NUM_NAMED)
    names = [f"{label} at {place}" if place else "the start of the text" for place, label in enumerate(report.labels)]
    if weights_S is None:
        sentences.append("The model has no readable weights.")
    elif weighed:
        first = explanation.steps[0]
        where = f" of {first.label}" if first.layer and len(explanation.steps) > 1 else ""
        sentences.append(f"Largest weights{where}: {listed([f'{names[i]} ({weights_S[i]:.2g})' for i in weighed])}.")
    else:
        sentences.append("At the last position the model's layers read no token.")
    if effects_S is None:
        return " ".join([*sentences, "Removal was not measured, so it is unknown which tokens change the prediction."])
    if not np.isfinite(effects_S).any():
        return " ".join([*sentences, "There is no token before the last one that can be removed."])
    felt = [i for i in largest(effects_S, NUM_NAMED) if effects_S[i] >= FELT]
    if not felt:
        hardly = f"Removing any token before the last one changes the prediction by less than {FELT:g} nats."
        return " ".join([*sentences, hardly])
    strongest = felt[0]
    verdict = "Removal confirms this" if strongest in weighed else "Removal does not confirm this"
    others = [i for i in weighed if i != strongest and effects_S[i] == effects_S[i]] if weighed else felt[1:]
    sentence = f"{f'{verdict}: without' if weighed else 'Without'} {names[strongest]} the prediction changes most, by "
    sentence += f"{effects_S[strongest]:.2g} nats"
    if others:
        sentence += "; " + listed([f"without {names[i]} by {effects_S[i]:.2g}" for i in others])
    return " ".join([*sentences, f"{sentence}."])


def finding(explanation: Explanation) -> str:
    """One or two sentences that say whether the weights explain the prediction, or why this is not known."""
    if not explanation.steps:
        shown = "only the effects of removal are shown" if explanation.removal else "removal was not measured"
        return f"This model has no readable attention weights; {shown}."
    if explanation.removal is None:
        return "Removal was not measured, so it is not known whether the weights explain the prediction."
    overall = _overall(explanation.steps)
    if overall.correlation is None or overall.nearness is None:
        return "The text is too short to compare the weights with the effects of removing tokens."
    if overall.correlation >= FOLLOWS:
        sentence = "Tokens with larger weights are mostly the tokens whose removal changes the prediction more."
    elif overall.correlation >= LOOSELY:
        sentence = (
            "Low: larger weights only loosely mark the tokens whose removal changes the prediction more. The weights "
            "say what the layers averaged, not why the model predicts this token."
        )
    else:
        sentence = (
            "Very low: the weights say almost nothing about which tokens the prediction depends on. Do not use them "
            "as an explanation."
        )
    if overall.nearness >= overall.correlation:
        sentence += " The distance of a token predicts its effect as well as its weight, or better."
    return (
        f"Rank correlation with the effects of removal: {overall.correlation:.2f} for the weights, "
        f"{overall.nearness:.2f} for nearness alone ({plural(overall.positions, 'position')}). {sentence}"
    )


def _overall(steps: list[Step]) -> Agreement:
    """The agreement of the mean over all layers; if there is no such mean, the mean agreement of all steps."""
    agreements = [step.agreements[-1] for step in (steps[:1] if steps[0].layer == 0 else steps)]
    known = [agreement for agreement in agreements if agreement.correlation is not None]
    if not known:
        return Agreement(None, None, 0)
    return Agreement(
        mean(agreement.correlation or 0.0 for agreement in known),
        mean(agreement.nearness or 0.0 for agreement in known),
        max(agreement.positions for agreement in known),
    )
