"""The piece server of a host: takes the files of other hosts, and lets them read all files.

It is a process of its own, started by the launcher: it serves while no process of the run lives,
and what it sends and receives does not hold up the launcher. It ends with the launcher.
"""

import contextlib
import json
import mmap
import os
import signal
import socket
import socketserver
import subprocess
import sys
from pathlib import Path
from typing import Any

from jaxpar.memory_checkpoint.client import MAX_LINE, PIECE, STALLED_SECONDS
from jaxpar.memory_checkpoint.places import MIRRORED, PARTIAL, complete_files, read_name
from jaxpar.runtime.processes.children import end_with_parent


class PieceServer:
    """Runs the server of a host in a child process. A context manager.

    It asks for no password: listen only in a network that the hosts of the run share.
    """

    def __init__(self, folder: Path, address: str, port: int = 0):
        """
        Args:     folder: of the host's files (`HostMemory.folder`). address: to listen on, a name
                  or an IP address. port: 0 takes a free one.
        Raises:   OSError when the address is not one of this host, or the port is taken.
        """
        self.folder = folder
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, port), family=family, backlog=1024)
        self._child: subprocess.Popen | None = None

    @property
    def port(self) -> int:
        """The port on which it listens."""
        return int(self._socket.getsockname()[1])

    def ensure(self) -> None:
        """Start the process, again if it has ended. The port stays the same."""
        if self._child is not None and self._child.poll() is None:
            return
        fd = self._socket.fileno()
        command = [sys.executable, "-m", "jaxpar.memory_checkpoint.server"]
        self._child = subprocess.Popen(
            [*command, str(self.folder), str(fd), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            pass_fds=[fd],
            process_group=0,  # Ctrl-C in a terminal does not end it
        )

    def __enter__(self) -> "PieceServer":
        self.ensure()
        return self

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()
        self._socket.close()


class _Listener(socketserver.ThreadingTCPServer):
    daemon_threads, block_on_close = True, False

    def __init__(self, folder: Path, fd: int):
        super().__init__(("", 0), _Conversation, bind_and_activate=False)
        self.folder = folder
        self.socket.close()
        self.socket = socket.socket(fileno=fd)


class _Conversation(socketserver.StreamRequestHandler):
    """The requests of one connection (`client.PieceClient`)."""

    timeout = 10 * STALLED_SECONDS
    server: _Listener

    def handle(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while line := self.rfile.readline(MAX_LINE):
                self._serve(json.loads(line))

    def _serve(self, request: dict[str, Any]) -> None:
        try:
            match request:
                case {"do": "list"}:
                    self._answer(files=_sizes(self.server.folder))
                case {"do": "read", "name": str(name), "begin": int(begin), "size": int(size)}:
                    self._send(name, begin, size)
                case {"do": "write", "name": str(name), "size": int(size)}:
                    self._receive(name, size)
                case _:
                    self._answer(error="the request is not known")
        except OSError as error:
            self._answer(error=error.strerror or str(error))
            raise  # the rest of the conversation would not make sense

    def _answer(self, **said: Any) -> None:
        self.wfile.write(json.dumps(said).encode() + b"\n")

    def _send(self, name: str, begin: int, size: int) -> None:
        file = read_name(name)
        paths = complete_files(self.server.folder).get(file, []) if file else []
        if not paths:
            return self._answer(error=f"there is no {name}")
        with open(paths[0], "rb") as source:
            if not 0 <= begin <= begin + size <= os.fstat(source.fileno()).st_size:
                return self._answer(error=f"{name} has no such bytes")
            self._answer(size=size)
            if size:
                self.connection.sendfile(source, begin, size)

    def _receive(self, name: str, size: int) -> None:
        if read_name(name) is None or size < 1:
            return self._answer(error=f"{name!r} is not the name of a piece file")
        target = self.server.folder / MIRRORED / name
        partial = target.with_name(f"{PARTIAL}{name}")
        try:
            with open(partial, "w+b") as file:
                os.posix_fallocate(file.fileno(), 0, size)  # fails here if there is no room
                self._answer(ready=True)
                with mmap.mmap(file.fileno(), size) as memory, memoryview(memory) as view:
                    self._fill(view)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
        self._answer(done=True)

    def _fill(self, memory: memoryview) -> None:
        done = 0
        while done < memory.nbytes:
            got = self.rfile.readinto(memory[done : done + PIECE])
            if not got:
                raise OSError("the connection was closed")
            done += got


def _sizes(folder: Path) -> dict[str, int]:
    found = {}
    for file, paths in complete_files(folder).items():
        with contextlib.suppress(FileNotFoundError):
            found[str(file)] = paths[0].stat().st_size
    return found


def main() -> None:
    """Serve on a socket of the parent, until it ends."""
    folder, fd, parent = sys.argv[1:]
    end_with_parent(int(parent))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the parent ends it, after the run
    _Listener(Path(folder), int(fd)).serve_forever()


if __name__ == "__main__":
    main()
