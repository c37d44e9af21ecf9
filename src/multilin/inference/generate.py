"""Writing text: a prompt, or the state of an earlier text, is continued token by token and streamed as it comes."""

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast, TextStreamer

from multilin.data.tokenizers import start_token_id
from multilin.errors import InputError, plural
from multilin.inference.prompts import encode_prompt
from multilin.inference.runs import Run, longest_text
from multilin.inference.settings import GenerationSettings
from multilin.inference.snapshot import Snapshot
from multilin.model import MultilinForCausalLM
from multilin.model.memory import cache_bytes, check_beams, check_reading

DEFAULTS = GenerationSettings()


@dataclass(frozen=True)
class Continuation:
    """What was written.

    token_ids: the new tokens, an end of text included.
    text: what was given to `write`, the prompt not included.
    snapshot: where the text stands now, to go on from; None for models of other kinds and after a beam search.
    """

    token_ids: list[int]
    text: str
    snapshot: Snapshot | None


def generate_text(
    run: Run,
    prompt: str = "",
    settings: GenerationSettings = DEFAULTS,
    *,
    snapshot: Snapshot | None = None,
    write: Callable[[str], object] | None = None,
    echo: bool = False,
) -> Continuation:
    """Continue a prompt, or a text from its snapshot.

    Without a seed, a snapshot goes on with the random numbers it carries: the tokens are those of an uninterrupted
    run. Sampling draws from torch's default generator of the model's device and leaves it moved on.

    Args:
        run: the model and its tokenizer.
        prompt: the text to continue; empty lets the model begin a text, or go on with that of the snapshot.
        settings: see GenerationSettings.
        snapshot: where an earlier text stopped; it stays as it is.
        write: called with every piece of new text as soon as it is certain; never with half a character.
        echo: give `write` the prompt first.

    Raises:
        InputError: prompt and new tokens are longer than the model can read, a snapshot that cannot be continued, or
            settings that would be ignored.
    """
    model, tokenizer = run.model, run.tokenizer
    _check_choices(settings)
    prompt_ids = _prompt_ids(prompt, tokenizer, snapshot)
    num_read = 0 if snapshot is None else _num_read(snapshot)
    _check_length(num_read + len(prompt_ids), settings.max_new_tokens, longest_text(model.config))
    _check_memory(model, prompt_ids, settings)
    _seed(settings, snapshot, model.device)
    if write is not None and echo:
        write(prompt)
    written = io.StringIO()

    def pass_on(text: str) -> None:
        written.write(text)
        if write is not None:
            write(text)

    streamer = _Streamer(tokenizer, pass_on, skip_special_tokens=settings.stop_at_end)
    found = model.generate(
        torch.tensor([prompt_ids], device=model.device),
        **({} if snapshot is None else {"past_key_values": snapshot.state, "new_tokens_only": True}),
        streamer=streamer if settings.num_beams == 1 else None,
        return_dict_in_generate=True,
        **_arguments(settings, tokenizer),
    )
    token_ids = found.sequences[0, len(prompt_ids) :].tolist()
    if settings.num_beams > 1:
        pass_on(tokenizer.decode(token_ids, skip_special_tokens=settings.stop_at_end))
    after = None
    if settings.num_beams == 1 and isinstance(model, MultilinForCausalLM):
        after = Snapshot(found.past_key_values, [token_ids[-1:]], _random_state(model.device))
    return Continuation(token_ids, written.getvalue(), after)


def _check_choices(settings: GenerationSettings) -> None:
    """Refuse settings that have no part in how the tokens are chosen."""
    if settings.greedy and settings.num_beams > 1:
        raise InputError(f"num_beams: {settings.num_beams} given together with greedy; give one of them")
    for name in () if settings.draws else ("temperature", "top_k", "top_p", "seed"):
        value = getattr(settings, name)
        if value != getattr(DEFAULTS, name):
            other = "greedy" if settings.greedy else f"num_beams: {settings.num_beams}"
            raise InputError(
                f"{name}: {value} given together with {other}, where nothing is drawn; leave one of them out"
            )


def _prompt_ids(prompt: str, tokenizer: PreTrainedTokenizerFast, snapshot: Snapshot | None) -> list[int]:
    """What the model reads first: the start of a text, or what the snapshot left unread; then the prompt."""
    ids = encode_prompt(prompt, tokenizer)
    if snapshot is None:
        return [start_token_id(tokenizer), *ids]
    before = snapshot.unread_ids[0] if snapshot.unread_ids else []
    if not before and not ids:
        raise InputError("prompt: none given, and the state has no token left to read; give some text to go on with")
    return [*before, *ids]


def _num_read(snapshot: Snapshot) -> int:
    if snapshot.state.num_tokens is None:
        return 0
    if snapshot.state.batch_size != 1:
        raise InputError(
            f"state: holds {snapshot.state.batch_size} texts, but one is continued at a time; select a row"
        )
    return int(snapshot.state.num_tokens[0])


def _check_length(num_before: int, max_new_tokens: int, limit: int | None) -> None:
    # Every model is checked here: transformers' own fail at their last position, or quietly read on past it.
    if limit is None or num_before + max_new_tokens - 1 <= limit:
        return
    if num_before > limit:
        raise InputError(
            f"prompt: the text has {num_before} tokens, but this model reads at most {limit} (n_positions)"
        )
    raise InputError(
        f"max_new_tokens: {max_new_tokens} after a text of {plural(num_before, 'token')} given, but this model reads "
        f"at most {limit} (n_positions), so at most {limit - num_before + 1} can follow"
    )


def _check_memory(model: PreTrainedModel, prompt_ids: list[int], settings: GenerationSettings) -> None:
    num_beams, num_tokens = settings.num_beams, len(prompt_ids) + settings.max_new_tokens
    if num_beams == 1:
        check_reading(f"prompt: {len(prompt_ids)} tokens", model, 1, len(prompt_ids), all_logits=False)
        return
    state_bytes = cache_bytes(model.config, num_tokens)
    if isinstance(model, MultilinForCausalLM):
        state, first = model.new_state(), torch.tensor([prompt_ids[:1]], device=model.device)
        with torch.no_grad():
            model(first, past_key_values=state)
        state_bytes = state.num_bytes  # it does not grow
    check_beams(model, num_beams, num_prompt_tokens=len(prompt_ids), num_tokens=num_tokens, state_bytes=state_bytes)


def _arguments(settings: GenerationSettings, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """The settings in the words of transformers' generate()."""
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    arguments: dict[str, Any] = {
        "max_new_tokens": settings.max_new_tokens,
        "do_sample": settings.draws,
        "num_beams": settings.num_beams,
        "eos_token_id": end if settings.stop_at_end else None,
        "pad_token_id": pad,
        # Never seen in training, so whatever probability it has is an accident.
        "suppress_tokens": [pad] if pad != end else None,
    }
    if settings.draws:
        # transformers' own default is 50; 0 leaves all tokens in.
        arguments |= {"temperature": settings.temperature, "top_k": settings.top_k or 0, "top_p": settings.top_p or 1.0}
    return arguments


def _seed(settings: GenerationSettings, snapshot: Snapshot | None, device: torch.device) -> None:
    if settings.seed is not None:
        torch.manual_seed(settings.seed)
    elif snapshot is None or snapshot.rng_state is None:
        torch.seed()
    elif settings.draws:
        try:
            _generator(device).set_state(snapshot.rng_state.cpu())
        except RuntimeError:
            raise InputError(
                f"seed: none given, and the random numbers of the state are not those of this device ({device.type}); "
                "give a seed, and sampling goes on from there"
            ) from None


def _random_state(device: torch.device) -> Tensor:
    return _generator(device).get_state()


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator


class _Streamer(TextStreamer):  # type: ignore[misc]
    """transformers' streamer, which holds back a word until it is complete, with its text going to a function."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, write: Callable[[str], object], **decoding: Any) -> None:
        super().__init__(tokenizer, skip_prompt=True, **decoding)
        self._write = write

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self._write(text)
