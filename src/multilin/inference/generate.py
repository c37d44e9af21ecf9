"""Text generation: continues a prompt, or the state of an earlier text, token by token, and streams the text."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from multilin.errors import InputError, plural
from multilin.inference.engine import Engine
from multilin.inference.sampling import RandomNumbers, choose_tokens
from multilin.inference.settings import DEFAULT_NEW_TOKENS, GenerationSettings
from multilin.inference.state_file import StateContents, read_state, write_state
from multilin.inference.text import TextCodec, TextStream

DEFAULTS = GenerationSettings()


@dataclass
class Sequence:
    """A generated sequence with its state, which `generate` can continue.

    state: engine state of one row.
    unread_ids: tokens of the sequence that the model has not read yet: normally the last generated token, or several
        tokens that form one character or may begin a stop string.
    numbers: the generator of random numbers for sampling; None makes a new generator.
    """

    state: Any
    unread_ids: list[int] = field(default_factory=list)
    numbers: RandomNumbers | None = None

    @classmethod
    def restored(cls, contents: StateContents, engine: Engine) -> "Sequence":
        """A sequence from a state file.

        Raises:
            InputError: the file holds several sequences.
        """
        if len(contents.unread_ids) > 1:
            raise InputError(
                f"state: holds {len(contents.unread_ids)} texts, but only one text can be continued; select a row"
            )
        numbers = None if contents.rng_state is None else RandomNumbers.from_state(contents.rng_state)
        return cls(engine.restore(contents), [token for row in contents.unread_ids for token in row], numbers)

    def saved(self, engine: Engine) -> StateContents:
        """The sequence as the content of a state file."""
        contents = engine.save(self.state)
        contents.unread_ids = [list(self.unread_ids)]
        contents.rng_state = None if self.numbers is None else self.numbers.state
        return contents


@dataclass(frozen=True)
class Continuation:
    """The result of `generate`: the new tokens and their text.

    token_ids: the new tokens, an end of text included.
    text: the text of the new tokens, as given to `write`.
    has_room: whether the model can read the last token and generate more.
    """

    token_ids: list[int]
    text: str
    has_room: bool = True


def generate(
    engine: Engine,
    codec: TextCodec,
    prompt: str = "",
    settings: GenerationSettings = DEFAULTS,
    *,
    sequence: Sequence | None = None,
    write: Callable[[str], object] | None = None,
    echo: bool = False,
) -> Continuation:
    """Generate text after a prompt, or continue a sequence, with any engine.

    Without a seed, a sequence continues its random numbers: several calls give the same tokens as one long call.

    Args:
        engine: runs the model.
        codec: the model's tokenizer.
        prompt: the text to continue; if empty, the model begins a text or continues the sequence.
        settings: see GenerationSettings.
        sequence: the sequence to continue; changed in place to include the new tokens.
        write: called with every piece of new text as soon as later tokens cannot change it.
        echo: give `write` the prompt first.

    Raises:
        InputError: prompt and new tokens are longer than the model can read, there is nothing to read, or a setting
            would be ignored.
    """
    check_settings(settings, engine.vocab_size)
    goes_on = sequence is not None and engine.keeps_states
    sequence = sequence or Sequence(engine.new_state())
    num_read = sum(engine.num_read(sequence.state))
    prompt_ids = first_ids(codec, prompt, sequence.unread_ids, is_start=num_read == 0)
    num_new = count_new_tokens(num_read + len(prompt_ids), settings.max_new_tokens, engine.longest_text)
    if settings.seed is not None or sequence.numbers is None:
        sequence.numbers = RandomNumbers(settings.seed)

    def pass_on(piece: str) -> None:
        if write is not None and piece:
            write(piece)

    pass_on(prompt if echo else "")
    # A later call decodes the unread tokens, so they begin with a whole character: the state stays before it.
    is_cut = not prompt and codec.is_cut(prompt_ids)
    context = prompt_ids if is_cut or not codec.is_cut(prompt_ids) else ()
    stream = TextStream(codec, context, settings.stop_at_end, settings.stop, is_whole=not is_cut)
    token_ids, last_ids, before = [], prompt_ids if is_cut else [], sequence.state
    if is_cut and goes_on:
        before = sequence.state.select([0])
    for token in _tokens(engine, codec, sequence, prompt_ids, settings, num_new):
        was_whole = stream.is_whole
        token_ids.append(token)
        pass_on(stream.put(token))
        if stream.is_stopped:
            break
        if was_whole and not stream.is_whole and goes_on:
            before = sequence.state.select([0])
        last_ids = [token] if was_whole else [*last_ids, token]
    pass_on(stream.end())
    if len(last_ids) > 1 and goes_on and not stream.is_stopped:
        sequence.state, sequence.unread_ids = before, last_ids
    num_tokens, limit = num_read + len(prompt_ids) + len(token_ids), engine.longest_text
    return Continuation(token_ids, stream.text, limit is None or num_tokens <= limit)


def continue_file(
    engine: Engine,
    codec: TextCodec,
    prompt: str,
    settings: GenerationSettings,
    *,
    state: str | None,
    save_state: str | None,
    echo: bool,
    write: Callable[[str], object],
) -> Continuation:
    """Continue a prompt, or the text whose state is in a file, and save the state after it.

    Args:
        engine, codec, prompt, settings, echo, write: as for `generate`.
        state: file with the state to continue from.
        save_state: file to write; may be the same file.

    Raises:
        InputError: a model without a state, a state that cannot be read, used or written, or too long a text.
    """
    if not engine.keeps_states and (state or save_state):
        given = "--state" if state is not None else "--save-state"
        raise InputError(f"{given}: a {engine.kind} model keeps no state that a file could hold; leave it out")
    owner = engine.owner if state or save_state else None
    sequence = Sequence(engine.new_state())
    if state is not None and owner is not None:
        sequence = Sequence.restored(read_state(state, owner), engine)
    result = generate(engine, codec, prompt, settings, sequence=sequence, write=write, echo=echo)
    if save_state is not None and owner is not None:
        write_state(sequence.saved(engine), save_state, owner)
    return result


def _tokens(
    engine: Engine, codec: TextCodec, sequence: Sequence, prompt_ids: list[int], settings: GenerationSettings, most: int
) -> Iterator[int]:
    """Yield at most `most` new tokens, one by one; `sequence` is updated before each token is yielded."""
    assert sequence.numbers is not None
    ids, seen = prompt_ids, dict.fromkeys(prompt_ids, 0)
    for _ in range(most):
        logits_BV = engine.read(sequence.state, [ids])
        codec.exclude_padding(logits_BV)
        (token,) = choose_tokens(logits_BV, [settings], [seen], [sequence.numbers])
        seen[token] = seen.get(token, 0) + 1
        ids = sequence.unread_ids = [token]
        yield token
        if settings.stop_at_end and codec.is_end(token):
            return


def check_settings(settings: GenerationSettings, vocab_size: int) -> None:
    """Refuse settings that would be ignored, and tokens that are not in the vocabulary."""
    check_unused(settings)
    for token in settings.logit_bias:
        if not (token.isdecimal() and int(token) < vocab_size):
            raise InputError(f"logit_bias: {token!r:.40} given, but a token is a number from 0 to {vocab_size - 1}")
    if "" in settings.stop:
        raise InputError("stop: an empty string given, but it must have at least one character")


def check_unused(settings: GenerationSettings) -> None:
    """Refuse settings that would be ignored."""
    unused: tuple[str, ...] = () if settings.draws else ("top_k", "top_p", "min_p", "seed")
    if settings.num_beams > 1:
        unused += ("temperature", "stop", "logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty")
    for name in unused:
        value = getattr(settings, name)
        if value != getattr(DEFAULTS, name):
            other = f"num_beams: {settings.num_beams}" if settings.num_beams > 1 else "temperature: 0"
            raise InputError(f"{name}: {value} given together with {other}, which ignores {name}; leave one out")


def first_ids(codec: TextCodec, prompt: str, unread_ids: list[int], *, is_start: bool) -> list[int]:
    """The tokens to read first: the start token of a text or the unread tokens of a sequence, then the prompt."""
    ids = codec.encode(prompt, is_start=True) if is_start and not unread_ids else codec.encode_more(prompt)
    if not unread_ids and not ids:
        raise InputError(
            "prompt: none given, but the model has already read all tokens of the state; give a text to continue"
        )
    return [*unread_ids, *ids]


def count_new_tokens(
    num_before: int, given: int | None, limit: int | None, *, default: int = DEFAULT_NEW_TOKENS,
    field: str = "max_new_tokens",
) -> int:  # fmt: skip
    """The most tokens to generate: `given`, or else `default`, or fewer than `default` if the model has less room.

    Args:
        num_before, limit, field: as for `check_length`, which raises the errors.
        given: the number that the user gave, if any.
        default: at least 1.
    """
    if given is None:
        given = default if limit is None else max(1, min(default, limit - num_before + 1))
    check_length(num_before, given, limit, field)
    return given


def check_length(num_before: int, num_new: int, limit: int | None, field: str = "max_new_tokens") -> None:
    """Refuse more tokens than the model can read; transformers' models fail late or read beyond their limit.

    Args:
        num_before: tokens of the text before the new ones.
        num_new: new tokens; the last one is not read.
        limit: most tokens that the model can read, None for any number.
        field: the setting that gave `num_new`, for the message.
    """
    if limit is None or num_before + num_new - 1 <= limit:
        return
    if num_before > limit:
        raise InputError(
            f"prompt: the text has {num_before} tokens, but this model reads at most {limit} (n_positions)"
        )
    raise InputError(
        f"{field}: {num_new} given after a text of {plural(num_before, 'token')}, but this model reads "
        f"at most {limit} (n_positions), so at most {limit - num_before + 1} can follow"
    )
