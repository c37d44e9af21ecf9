"""Programs that start at once: a server that has imported what multilin needs forks for each of them.

`python -m tests.docs.forks SOCKET` is the server; `stand_in(folder)` writes multilin, python and torchrun for a PATH,
which send it their words, folder, environment and files. Each call of multilin is made small by `SMALLER`.
"""

import atexit
import importlib
import json
import os
import re
import runpy
import shlex
import signal
import socket
import sys
from pathlib import Path

IMPORTED = ["multilin.analysis.compare.run", "multilin.analysis.explain.run", "multilin.export.folder",
            "multilin.inference.generate_run", "multilin.training.loop"]  # fmt: skip
_MODEL = {"--model.hidden_size": "64", "--model.num_layers": "2"}
_VOCABULARY = {"--tokenizer.vocab_size": "300"}
_EVERY_STEP = {"--training.batch_size": "2", "--training.eval_max_tokens": "1000", "--schedule.warmup_steps": "1"}
_STEPS = _EVERY_STEP | {"--training.max_steps": "4", "--training.save_every_steps": "2"}  # a run that can be resumed
SMALLER: list[tuple[str, dict[str, str]]] = [
    # What the words after multilin match gets these flags; a flag that is given already gets this value.
    (r"^(train|demo)(?!.*(hybrid|--resume|--model.start|--minutes))", _MODEL),
    (r"^(train|demo)(?!.*(--resume|minutes))", _STEPS),
    (r"^train(?!.*(--resume|--model.start|--minutes|prepared/))", _VOCABULARY),
    (r"^(train|plan|compare|demo)(?!.*(--data|\.yaml| runs/|--resume|--task))", {"--data.source": "my-books/"}),
    (r"^train(?!.*--resume)", {"--overwrite": ""}),
    (r"^(train|plan).*--minutes", {"--minutes": "0.6"}),
    (r"^(train|plan) \w.*--minutes", _VOCABULARY),
    (r"^train.*--training.minutes", _EVERY_STEP | {"--training.minutes": "0.3"}),
    (r"--training.compile", {"--training.compile": "false"}),
    (r"^compare(?!.*--(seconds|flops))", {"--tokens": "4000"}),
    (r"^compare.*--seconds", {"--seconds": "1"}),
    (r"^compare", _MODEL | _EVERY_STEP | {"--seeds": "1"}),
    (r"^compare(?!.*--task)", _VOCABULARY),
    (r"^compare( --|$)", {"--only": "elita,gpt2"}),
    (r"^(generate|chat)", {"--max-new-tokens": "8"}),
    (r"^evaluate(?!.*--tasks)", {"--max-tokens": "500"}),
    (r"^evaluate.*--tasks", {"--task-limit": "2"}),
    (r"^quantize", {"--max-tokens": "500"}),
    (r"^(generate|chat|serve) runs/(?!.*(-onnx|--engine))", {"--engine": "torch"}),
    (r"^export.*--format web", {"--runtime": "$RUNTIME"}),
    (r"^prepare(?!.*--tokenizer)", {"--vocab-size": "300"}),
    (r"^prepare.*--workers", {"--workers": "2"}),
]
CLIENT = f"""#!{sys.executable} -IS
import array, json, os, signal, socket, sys
name = os.path.basename(sys.argv[0])
with socket.socket(socket.AF_UNIX) as server:
    server.connect(os.environ["FORKS"])
    words = json.dumps([name, sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
    files = array.array("i", [0, 1, 2])
    server.sendmsg([len(words).to_bytes(4, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
    server.sendall(words)
    child = int(server.recv(8))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os.kill(child, number))
    sys.exit(int(server.recv(8) or 1))
"""


def stand_in(folder: Path) -> None:
    """Write the programs into a folder."""
    folder.mkdir(parents=True)
    for name in ("multilin", "python", "torchrun", "accelerate"):
        (folder / name).write_text(CLIENT)
        (folder / name).chmod(0o755)


def smaller(words: list[str]) -> list[str]:
    """The words after multilin with the flags that make the call take seconds."""
    text = shlex.join(words)
    for pattern, flags in SMALLER:
        for flag, value in flags.items() if re.search(pattern, text) else ():
            text = re.sub(rf" {flag}[ =]\S+", "", text) + f" {flag} {value}"
    return shlex.split(os.path.expandvars(text))


def _run(name: str, words: list[str]) -> None:
    """Be the program."""
    launched = "multilin" in words and words[words.index("multilin") - 1] == "-m"
    if name == "multilin" or launched:
        first = words.index("multilin") + 1 if launched else 0
        launcher = re.sub(r"(--nproc.per.node|--num.processes)[ =]\d+", r"\1 2", shlex.join(words[:first]))
        words = [*shlex.split(launcher), *smaller(words[first:])]
        first = words.index("multilin") + 1 if launched else 0
        print("+ multilin", *words[first:], file=sys.stderr, flush=True)
    if name in ("torchrun", "accelerate"):
        module = {"torchrun": "torch.distributed.run", "accelerate": "accelerate.commands.accelerate_cli"}[name]
        os.execv(sys.executable, [sys.executable, "-W", "ignore", "-m", module, *words])
    if name == "multilin" or words[:2] == ["-m", "multilin"]:
        from multilin.cli.main import main

        sys.argv = ["multilin", *(words if name == "multilin" else words[2:])]
        sys.exit(main())
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0].startswith("-"):
        os.execv(sys.executable, [sys.executable, *words])
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def _serve_one(connection: socket.socket) -> None:
    """Run a program in a process of its own, and send its id and its status."""
    size, files, *_ = socket.recv_fds(connection, 4, 3)
    content = b""
    while len(content) < int.from_bytes(size, "big"):
        content += connection.recv(1 << 16)
    name, words, folder, environment = json.loads(content)
    if child := os.fork():
        for file in files:
            os.close(file)
        connection.send(str(child).encode().ljust(8))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        connection.send(str(status % 256).encode())
        return
    connection.close()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[0] = ""
    _run(name, words)


def _serve(path: str) -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen(16)
        while True:
            connection, _ = server.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                server.close()
                _end(connection)
            connection.close()


def _end(connection: socket.socket) -> None:
    """Run a program and end this process, as Python does."""
    status = 0
    try:
        _serve_one(connection)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        print(end.code, file=sys.stderr) if isinstance(end.code, str) else None
    except BaseException:
        status = 1
        sys.excepthook(*sys.exc_info())
    finally:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status or 0)


if __name__ == "__main__":
    _serve(sys.argv[1])
