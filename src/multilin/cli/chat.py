"""The verb that talks with a model in the terminal."""

import contextlib
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multilin.cli.export import open_at_once
from multilin.cli.messages import check_installed
from multilin.errors import InputError, nearest, plural
from multilin.files import check_writable, write_whole
from multilin.inference.settings import DEFAULT_NEW_TOKENS, EngineName, GenerationSettings
from multilin.serving.settings import KEY_VARIABLE, ServeLimits
from multilin.settings import settings
from multilin.settings.bounds import Name, PathText, Prose
from multilin.settings.inputs import read_bytes

if TYPE_CHECKING:
    from multilin.serving.conversation import Conversation

LARGEST_STATE = 2**30
HELP = """\
/fork       continue in a copy of the conversation; the original does not change
/switch N   return to branch N
/rewind N   drop the last N answers; without N, the last one
/save FILE  write the state, to continue later with --state FILE
/help       show this list
/quit       end the conversation, as Ctrl-D does
Ctrl-C ends an answer early; a second Ctrl-C drops the answer."""


@settings
class ChatArguments:
    """The model to talk with, and how the conversation begins."""

    target: PathText  # address of a server (http://...), or folder of a trained or exported model
    system: Prose | None = None  # instructions that the model reads before the first message
    state: PathText | None = None  # continue from the state in this file
    session: Name | None = None  # continue this session of the server
    api_key: str | None = None  # key of the server; the environment variable MULTILIN_API_KEY is safer
    engine: EngineName = "auto"  # engine if TARGET is a folder; see `multilin generate --help`


def chat(arguments: ChatArguments, settings: GenerationSettings) -> None:
    """Chat with a model on a server or in a folder.

    Each line of stdin is a message; stdout gets only the answers. /help lists the commands.
    """
    state = _check(arguments, settings)
    with _opened(arguments, settings, state) as first:
        talk = _Talk([first], arguments.system, begins_with_state=state is not None)
        _talk(talk, is_kept=_is_address(arguments.target))


def _talk(talk: "_Talk", *, is_kept: bool) -> None:
    """Answer the lines of stdin; at the end, tell how to continue a conversation that a server keeps."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print("multilin: /help lists commands; Ctrl-C ends an answer; Ctrl-D ends the chat", file=sys.stderr)
    try:
        for line in _lines(is_terminal):
            try:
                if line.startswith("/"):
                    if not talk.command(*line.split(maxsplit=1)):
                        break
                elif line.strip():
                    talk.say(line)
            except InputError as error:
                if not is_terminal:
                    raise
                print(f"multilin: {error}", file=sys.stderr)
    finally:
        if is_kept and (any(talk.answers) or talk.begins_with_state):
            print(f"multilin: continue with --session {talk.current.session}", file=sys.stderr)


@dataclass
class _Talk:
    """The branches of a conversation.

    system: instructions, which are sent before the first message.
    answers: number of answers in each branch since it began.
    place: index of the current branch.
    begins_with_state: whether the conversation began from a state file, whose text /rewind cannot drop.
    """

    branches: "list[Conversation]"
    system: str | None
    answers: list[int] = field(default_factory=lambda: [0])
    place: int = 0
    begins_with_state: bool = False

    @property
    def current(self) -> "Conversation":
        """The branch that is continued."""
        return self.branches[self.place]

    def say(self, content: str) -> None:
        """Send a message and print the answer."""
        messages = [{"role": "user", "content": content}]
        if self.system is not None and not self.answers[self.place]:
            messages.insert(0, {"role": "system", "content": self.system})
        has_text = False

        def write(text: str) -> None:
            nonlocal has_text
            has_text = has_text or bool(text)
            print(text, end="", flush=True)

        try:
            with _stopping(self.current.stop):
                self.current.answer(messages, write)
            self.answers[self.place] += 1
        except KeyboardInterrupt:
            print("\nmultilin: this answer was dropped", file=sys.stderr)
        except InputError as error:
            if has_text:  # the answer broke off
                print(flush=True)
            if "(n_positions)" in str(error):  # the only sign of this error, which a server may have sent
                raise InputError(f"{error}; /rewind N drops earlier answers") from None
            raise
        print(flush=True)

    def command(self, name: str, value: str = "") -> bool:
        """Run a command such as /fork; return False if the conversation ends."""
        commands: dict[str, Callable[[str], None]] = {
            "/fork": self._fork, "/switch": self._switch, "/rewind": self._rewind, "/save": self._save,
            "/help": lambda _: print(HELP, file=sys.stderr),
        }  # fmt: skip
        if name == "/quit":
            return False
        if name not in commands:
            hint = nearest(name, commands) or "; /help lists the commands"
            raise InputError(f"{name}: unknown command{hint}")
        commands[name](value.strip())
        return True

    def _fork(self, _: str) -> None:
        self.branches.append(self.current.fork())
        self.answers.append(self.answers[self.place])
        before, self.place = self.place, len(self.branches) - 1
        print(f"multilin: branch {self.place + 1}; /switch {before + 1} returns to the original", file=sys.stderr)

    def _switch(self, value: str) -> None:
        self.place = _number("/switch", value, len(self.branches), "the number of a branch,") - 1
        print(f"multilin: branch {self.place + 1} of {len(self.branches)}", file=sys.stderr)

    def _rewind(self, value: str) -> None:
        number = _number("/rewind", value or "1", 10**6, "a number of answers")
        if self.begins_with_state and number > (answers := self.answers[self.place]):
            raise InputError(
                f"/rewind: {number} given, but {plural(answers, 'answer')} came after the state of --state"
            )
        self.current.rewind(number)
        self.answers[self.place] = max(0, self.answers[self.place] - number)

    def _save(self, value: str) -> None:
        if not value:
            raise InputError("/save: no file given; type /save FILE")
        path = check_writable("/save", os.path.expanduser(value))  # noqa: PTH111 - leaves ~nobody
        write_whole(path, self.current.state())
        print(f"multilin: saved the state in {path}", file=sys.stderr)


def _number(command: str, value: str, largest: int, what: str) -> int:
    if not (value.isascii() and value.isdecimal() and len(value) < 10 and 1 <= int(value) <= largest):
        raise InputError(f"{command}: {value!r:.40} given, but it should be {what} from 1 to {largest}")
    return int(value)


def _is_address(target: str) -> bool:
    return target.startswith(("http://", "https://"))


def _check(arguments: ChatArguments, settings: GenerationSettings) -> bytes | None:
    """Refuse flags that exclude each other; return the content of the state file."""
    if settings.num_beams > 1:
        raise InputError(f"num_beams: {settings.num_beams} given, but chat has no beam search; leave it out")
    state = None if arguments.state is None else read_bytes(arguments.state, "--state", LARGEST_STATE)
    for name in ("session", "api_key") if not _is_address(arguments.target) else ():
        if getattr(arguments, name) is not None:
            raise InputError(f"--{name.replace('_', '-')}: given, but {arguments.target} is not a server's address")
    if state is not None and arguments.session is not None:
        raise InputError("--state: given together with --session; give one of them")
    if not _is_address(arguments.target):
        check_installed("TARGET: a folder", "serve", "fastapi", "uvicorn", "prometheus_client")
    return state


@contextlib.contextmanager
def _opened(arguments: ChatArguments, settings: GenerationSettings, state: bytes | None) -> "Iterator[Conversation]":
    """Open the first branch of a conversation; when the block ends, close the client, and the server of a folder."""
    from multilin.serving.conversation import Conversation, connect

    with contextlib.ExitStack() as stack:
        if _is_address(arguments.target):
            address = arguments.target
            key = arguments.api_key if arguments.api_key is not None else os.environ.get(KEY_VARIABLE) or None
        else:
            address, key = stack.enter_context(_serving(Path(arguments.target), arguments.engine, settings))
        client = stack.enter_context(connect(address, key, is_local=not _is_address(arguments.target)))
        yield Conversation.begin(client, settings, state, arguments.session)


@contextlib.contextmanager
def _serving(folder: Path, engine_name: EngineName, settings: GenerationSettings) -> Iterator[tuple[str, str]]:
    """Serve a folder until the block ends; yield the server's address and a key that only this process knows."""
    with open_at_once(folder, engine_name) as (engine, codec):
        from multilin.serving.app import Server, create_app
        from multilin.serving.service import Service

        most = settings.max_new_tokens or DEFAULT_NEW_TOKENS
        service = Service(engine, codec, folder, None, ServeLimits(slots=1, queue=1, max_tokens=most, max_prompt=2**20))
        key = secrets.token_urlsafe(16)
        with socket.create_server(("127.0.0.1", 0)) as listener, Server(listener) as server:
            server.open(create_app(service, keys=[key], body_bytes=LARGEST_STATE), service)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", key


def _lines(is_terminal: bool) -> Iterator[str]:
    """The messages of the user: lines typed in a terminal, which can be edited, or the lines of stdin."""
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401
    while True:
        try:
            line = _typed() if is_terminal else sys.stdin.readline()
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            print("\nmultilin: Ctrl-D ends the conversation", file=sys.stderr)
            continue
        except UnicodeDecodeError as error:
            message = f"stdin is not UTF-8: byte 0x{error.object[error.start]:02x}"
            if not is_terminal:
                raise InputError(message) from None
            print(f"multilin: {message}", file=sys.stderr)
            continue
        if not line and not is_terminal:
            return
        yield line.removesuffix("\n")


def _typed() -> str:
    """A line typed in the terminal; if stdout is redirected, the prompt goes to stderr and stdout gets only answers."""
    if sys.stdout.isatty():
        return input("> ")
    print("> ", end="", file=sys.stderr, flush=True)
    return input()


@contextlib.contextmanager
def _stopping(stop: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C calls `stop`, the next one interrupts the block."""
    is_stopping = False

    def handle(*_: Any) -> None:
        nonlocal is_stopping
        if is_stopping:
            raise KeyboardInterrupt
        is_stopping = True
        stop()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
