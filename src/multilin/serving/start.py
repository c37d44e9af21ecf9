"""Puts a server together from an engine and settings."""

from pathlib import Path

from multilin.inference.engine import Engine
from multilin.inference.state_contents import StateOwner
from multilin.inference.text import TextCodec
from multilin.serving.folder import AddressFolder, MemoryFolder
from multilin.serving.layout import open_layout
from multilin.serving.service import Limits, Service
from multilin.serving.sessions import SessionStore
from multilin.serving.settings import ServeLimits, num_bytes
from multilin.serving.turns import TurnStore


def start_service(
    engine: Engine, codec: TextCodec, owner: StateOwner, folder: Path, name: str | None, limits: ServeLimits
) -> Service:
    """A service whose scheduler runs.

    Args:
        engine, codec, owner: of the model.
        folder: of the run or the export.
        name: of the model for clients; None takes that of the folder.
        limits: of the server.

    Raises:
        InputError: a model without states, or a store that cannot be opened.
    """
    store = None if limits.sessions is None else AddressFolder(f"{limits.sessions}/{owner.hash[:16]}")
    seconds = None if limits.keep_days is None else limits.keep_days * 86400
    turns = TurnStore(store, num_bytes("memory", limits.memory), num_bytes("disk", limits.disk), seconds)
    return Service(
        engine, codec, owner, name or folder.resolve().name, open_layout(codec, folder), turns,
        SessionStore(store or MemoryFolder()), Limits(limits.max_prompt, limits.max_tokens, limits.slots), limits.slots,
        limits.queue,
    )  # fmt: skip
