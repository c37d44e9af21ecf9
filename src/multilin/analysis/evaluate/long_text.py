"""Texts of any length, each read as one: the state carries what was read, so that memory does not grow."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F

from multilin.data.packing import PackedText
from multilin.errors import InputError
from multilin.inference.runs import Run
from multilin.model import MultilinForCausalLM
from multilin.scoring.losses import Scored

CHUNK_TOKENS = 512


def read_whole(
    run: Run,
    packed: PackedText,
    *,
    chunk_tokens: int = CHUNK_TOKENS,
    max_tokens: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Iterator[Scored]:
    """Score every document from its start to its end, however long, each token given all of the document before it.

    Args:
        run: a model of ours without a longest text.
        packed: the text, packed with the model's tokenizer.
        chunk_tokens: tokens read by one call; the losses do not depend on it.
        max_tokens: stop after about so many.
        progress: called with the number of tokens read.

    Raises:
        InputError: a model with a longest text, or one of another kind, whose memory grows with the text.
    """
    model = check_reads_any_length(run)
    ends = [*packed.document_starts[1:].tolist(), packed.num_tokens]
    read = 0
    for start, end in zip(packed.document_starts.tolist(), ends, strict=True):
        state = model.new_state()
        for first in range(start, end - 1, chunk_tokens):
            last = min(first + chunk_tokens, end - 1)
            row = torch.from_numpy(packed.tokens[first : last + 1].astype(np.int64)).to(model.device)
            with torch.inference_mode():
                logits = model(row[None, :-1], past_key_values=state).logits[0]
                losses = F.cross_entropy(logits.float(), row[1:], reduction="none")
            places = np.arange(first + 1, last + 1)
            yield Scored(places, places - start, losses.double().cpu().numpy())
            read += last - first
            if progress is not None:
                progress(read)
            if max_tokens is not None and read >= max_tokens:
                return


def check_reads_any_length(run: Run) -> MultilinForCausalLM:
    """The model of a run that reads texts of any length in memory of one size.

    Raises:
        InputError: it has a longest text, or is of another kind.
    """
    if run.longest_text is not None:
        raise InputError(
            f"long: this model reads at most {run.longest_text} tokens; leave --long out, and it reads in blocks"
        )
    if not isinstance(run.model, MultilinForCausalLM):
        raise InputError(f"long: a {run.model.config.model_type} model given, whose memory grows with what it has read")
    return run.model
