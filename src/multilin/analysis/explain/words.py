"""What every number of an explanation means, in the words that stand beside it wherever it is shown."""

from statistics import mean

import numpy as np
from numpy.typing import NDArray

from multilin.analysis.explain.explanation import Explanation, Step
from multilin.analysis.explain.removal import Agreement
from multilin.errors import plural

MEANINGS = {
    "received": (
        "The mean of the weights with which the token is read, over all positions that can read it: how much the text "
        "as a whole reads it."
    ),
    "null": "The share of the position's reading that goes to no token: a term of value zero in the denominator.",
    "own": "The share with which the position's own token counts once more, past the running sum.",
    "divergence": (
        "How much the prediction of the next token changes, as a whole, when the token is taken out of the text and "
        "the text is read again: the Kullback-Leibler divergence sum p ln(p / q) in nats, p with the token, q without. "
        "0 is no change. The other tokens keep their positions, so that it is the token that matters, not the shift."
    ),
    "loss_change": (
        "How much less likely the token that really follows becomes when the token is taken out: the rise of its -ln "
        "p, in nats. Above 0 the token helped; below 0 the model did better without it."
    ),
    "loss": (
        "-ln p of the token that really follows, in nats: 0 is certainty, the logarithm of the vocabulary size a blind "
        "guess."
    ),
    "agreement": (
        "Spearman's rank correlation, from -1 to 1, of the size of the weights and the divergence on removal: at each "
        "position the tokens it reads are ranked by both, the start token and the position's own token left out; the "
        "mean over positions. Nearness is the same with the tokens ranked by how near they are instead of by weight."
    ),
}

FOLLOWS, LOOSELY = 0.5, 0.2


def others(effects_S: NDArray[np.float64]) -> NDArray[np.float64]:
    """Effects on the last prediction without that of its own token, beside which no other would be seen."""
    return np.append(effects_S[:-1], np.nan)


def overall(steps: list[Step]) -> Agreement:
    """The agreement of the mean over all layers, or the mean of the steps' where there is no such mean."""
    found = [step.agreements[-1] for step in steps if step.agreements]
    found = found[:1] if steps and steps[0].layer == 0 else found
    known = [(a.correlation, a.nearness or 0.0, a.positions) for a in found if a.correlation is not None]
    if not known:
        return Agreement(None, None, 0)
    correlations, by_nearness, positions = zip(*known, strict=True)
    return Agreement(mean(correlations), mean(by_nearness), max(positions))


def verdict(found: Agreement) -> str:
    """Whether the weights can be taken for reasons, in a sentence or two."""
    if found.correlation is None or found.nearness is None:
        return "The text is too short to compare the weights with what the removal of tokens changes."
    if found.correlation >= FOLLOWS:
        sentence = "Tokens that weigh more are mostly those whose removal changes the prediction more."
    elif found.correlation >= LOOSELY:
        sentence = (
            "Low: tokens that weigh more are only loosely those whose removal changes the prediction more. Take the "
            "weights for what was averaged, not for reasons."
        )
    else:
        sentence = (
            "Very low: the weights say next to nothing about which tokens the prediction depends on. Do not take them "
            "for reasons."
        )
    if found.nearness >= found.correlation:
        sentence += " How near a token is tells as much or more."
    return (
        f"Weights and effects of removal: rank correlation {found.correlation:.2f}, nearness alone "
        f"{found.nearness:.2f} ({plural(found.positions, 'position')}). {sentence}"
    )


def what_is_shown(explanation: Explanation) -> str:
    """A sentence about what a model without weights shows instead; else that on the agreement."""
    if not explanation.steps:
        shown = (
            "what the removal of each token changes is shown instead"
            if explanation.removal
            else "nothing else is shown"
        )
        return f"This model gives no weights away; {shown}."
    if explanation.removal is None:
        return "Removal was not measured, so whether the weights are reasons is not known."
    return verdict(overall(explanation.steps))
