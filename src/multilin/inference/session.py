"""One text over several runs of a program: each goes on from the file that the one before has left."""

from collections.abc import Callable

from multilin.errors import InputError
from multilin.files import check_writable
from multilin.inference.engine import Engine
from multilin.inference.generate import Continuation, Sequence, generate
from multilin.inference.settings import GenerationSettings
from multilin.inference.state_contents import StateOwner
from multilin.inference.state_file import read_state, write_state
from multilin.inference.text import TextCodec


def continue_file(
    engine: Engine,
    codec: TextCodec,
    owner: Callable[[], StateOwner],
    prompt: str,
    settings: GenerationSettings,
    *,
    state: str | None,
    save_state: str | None,
    echo: bool,
    write: Callable[[str], object],
) -> Continuation:
    """Continue a prompt, or the text whose state lies in a file, and leave the state for the next time.

    Args:
        engine, codec, prompt, settings, echo, write: as for `generate`.
        owner: what state files of the engine's model hold; called where a file is read or written.
        state: file to go on from.
        save_state: file to write; it may be the same one.

    Raises:
        InputError: a model without a state, a state that cannot be read, used or written, or too long a text.
    """
    if not engine.keeps_states and (state or save_state):
        given = "--state" if state is not None else "--save-state"
        raise InputError(f"{given}: a {engine.kind} model keeps no state that a file could hold; leave it out")
    if save_state is not None:
        check_writable("--save-state", save_state)
    sequence = Sequence(engine.new_state())
    if state is not None:
        sequence = Sequence.restored(read_state(state, owner()), engine)
    result = generate(engine, codec, prompt, settings, sequence=sequence, write=write, echo=echo)
    if save_state is not None:
        write_state(sequence.saved(engine), save_state, owner())
    return result
