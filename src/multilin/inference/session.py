"""Writing a text in several sittings: each goes on from the file that the one before has left."""

from collections.abc import Callable

from multilin.errors import InputError
from multilin.files import check_writable
from multilin.inference.generate import Continuation, generate_text
from multilin.inference.runs import Run
from multilin.inference.settings import GenerationSettings
from multilin.inference.snapshot import load_snapshot, save_snapshot
from multilin.model import MultilinForCausalLM


def write_text(
    run: Run,
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
        run, prompt, settings, write: as for `generate_text`.
        state: file to go on from.
        save_state: file to write; it may be the same one.
        echo: also write the prompt, once it is certain that it can be continued.

    Raises:
        InputError: a model without a state, a state that cannot be read, used or written, or too long a text.
    """
    model = run.model
    if state is None and save_state is None:
        return generate_text(run, prompt, settings, write=write, echo=echo)
    if not isinstance(model, MultilinForCausalLM):
        given = "--state" if state is not None else "--save-state"
        raise InputError(
            f"{given}: a {model.config.model_type} model keeps no state that a file could hold; leave it out"
        )
    if save_state is not None:
        check_writable("--save-state", save_state)
        if settings.num_beams > 1:
            raise InputError(f"--save-state: given with a search among {settings.num_beams} texts; use --num-beams 1")
    snapshot = None if state is None else load_snapshot(state, model)
    result = generate_text(run, prompt, settings, snapshot=snapshot, write=write, echo=echo)
    if save_state is not None and result.snapshot is not None:
        save_snapshot(result.snapshot, save_state, model)
    return result
