"""Text generation with a run in PyTorch, for any model of a folder, also by beam search."""

from collections.abc import Callable

import torch
from transformers import PreTrainedTokenizerFast

from multilin.data.added_text import plain_tokenizer
from multilin.data.tokenizers import start_token_id
from multilin.inference.generate import DEFAULTS, Continuation, check_settings, count_new_tokens, generate
from multilin.inference.settings import GenerationSettings
from multilin.inference.text import TextCodec, TextStream
from multilin.inference.torch_engine import TorchEngine
from multilin.model.memory import check_reading
from multilin.runs.load import Run


def generate_text(
    run: Run,
    prompt: str = "",
    settings: GenerationSettings = DEFAULTS,
    *,
    write: Callable[[str], object] | None = None,
    echo: bool = False,
) -> Continuation:
    """Generate text after a prompt with the model of a run; `multilin.inference.generate.generate` takes any engine.

    Beam search writes the text when the search has ended.

    Raises:
        InputError: as `generate`, or there is not enough memory.
    """
    engine, codec = TorchEngine(run.model), text_codec(run.tokenizer)
    prompt_ids = codec.encode(prompt, is_start=True)
    num_beams = settings.num_beams
    check_reading(f"prompt: {len(prompt_ids)} tokens", run.model, num_beams, len(prompt_ids), all_logits=False)
    if num_beams == 1:
        return generate(engine, codec, prompt, settings, write=write, echo=echo)
    num_new = count_new_tokens(len(prompt_ids), settings.max_new_tokens, engine.longest_text)
    check_settings(settings, engine.vocab_size)
    pad = codec.pad_id
    unknown = [token for token in (pad, *range(codec.num_tokens, engine.vocab_size)) if not codec.is_end(token)]
    found_ids = run.model.generate(
        torch.tensor([prompt_ids], device=run.model.device),
        max_new_tokens=num_new, do_sample=False, num_beams=num_beams,
        eos_token_id=[codec.end_id, codec.eos_id] if settings.stop_at_end else None, pad_token_id=pad,
        suppress_tokens=unknown or None,
    )  # fmt: skip
    token_ids = found_ids[0, len(prompt_ids) :].tolist()
    stream = TextStream(codec, prompt_ids, settings.stop_at_end)
    text = "".join(map(stream.put, token_ids)) + stream.end()
    if write is not None:
        write(prompt + text if echo else text)
    return Continuation(token_ids, text)


def text_codec(tokenizer: PreTrainedTokenizerFast) -> TextCodec:
    """Return the codec of a run's tokenizer, which turns text into tokens and back."""
    end = start_token_id(tokenizer)
    pad = end if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return TextCodec(plain_tokenizer(tokenizer.backend_tokenizer.to_str()), end, pad, tokenizer.eos_token_id)
