"""A python for many short commands: a server imports what they need, and each command is a fork of it.

    python fork_python.py SOCKET                   # the server; prints "ready", runs until it is killed
    python -IS fork_python.py SOCKET SCRIPT ...    # a script in a fork, in this folder, with this output
"""
import os
import socket
import sys


def ask(path: str, argv: list[str]) -> int:
    """The exit code of a command."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        command = "\0".join([os.getcwd(), *argv])
        socket.send_fds(server, [command.encode()], [0, 1, 2])
        # A fork that was killed says nothing.
        return int(server.recv(100) or 1)


def serve(path: str) -> None:
    import gc
    import importlib
    import signal

    # All that the scripts import, some of it only when they need it, and what opening an LM compiles.
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    late = ("transformers.models.distilbert.modeling_distilbert", "spacy.lang.en",
            "spacy.pipeline.entityruler")
    for name in ("train_nmg", "finetune_cls", "finetune_qa", "report", *late):
        importlib.import_module(name)
    models = importlib.import_module("nmg.models")
    models.load_lm("tiny")
    models.load_tokenizer("tiny")
    # The forks share this memory as long as nobody writes to it.
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        print("ready", flush=True)
        # Nobody waits for the forks.
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while True:
            connection, _ = server.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                answer(connection)
            connection.close()


def answer(connection: socket.socket) -> None:
    """Runs one command, sends its exit code, and ends this process."""
    import runpy
    import traceback
    command, files, _, _ = socket.recv_fds(connection, 2**20, 3)
    for target, file in enumerate(files):
        os.dup2(file, target)
    folder, *sys.argv = command.decode().split("\0")
    os.chdir(folder)
    code = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as e:
        code = e.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    connection.send(str(code).encode())
    os._exit(0)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.exit(ask(sys.argv[1], sys.argv[2:]))
    serve(sys.argv[1])
