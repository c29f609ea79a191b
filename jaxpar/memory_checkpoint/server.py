"""The piece server of a host: takes the files of other hosts, and lets them read all files.

It is a process of its own, started by the launcher: it serves while no process of the run lives,
and what it sends and receives does not hold up the launcher. It ends with the launcher.
"""

import contextlib
import mmap
import os
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from pathlib import Path

from jaxpar.config import declared
from jaxpar.config.json_reader import UnreadableJson
from jaxpar.memory_checkpoint import client
from jaxpar.memory_checkpoint.client import (
    LIMITS_FILE,
    MAX_PROOF,
    MAX_REQUEST,
    PIECE,
    STALLED_SECONDS,
    Answer,
    Greeting,
    Limits,
    PieceRequest,
    Proof,
)
from jaxpar.memory_checkpoint.places import MIRRORED, PARTIAL, complete_files, read_name
from jaxpar.runtime.processes.children import end_with_parent
from jaxpar.runtime.processes.token import RunToken
from jaxpar.runtime.terminal import warn

#: Seconds for a client to prove that it has the token.
PROOF_SECONDS = 10.0

#: Connections at a time: those that have proven themselves, and the latest of the others. A
#: stranger who opens more ends only older ones that have not proven themselves either.
MAX_PEERS, MAX_STRANGERS = 8192, 128


class PieceServer:
    """Runs the server of a host in a child process. A context manager.

    It serves only clients that have the run's token. What they send and read is not encrypted.
    """

    def __init__(self, folder: Path, address: str, token: RunToken, port: int = 0):
        """
        Args:     folder: of the host's files (`HostMemory.folder`). address: to listen on, a name
                  or an IP address. token: of the run. port: 0 takes a free one.
        Raises:   OSError when the address is not one of this host, or the port is taken.
        """
        self.folder, self._token = folder, token
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
            stdin=subprocess.PIPE,
            pass_fds=[fd],
            process_group=0,  # Ctrl-C in a terminal does not end it
        )
        assert self._child.stdin is not None
        with contextlib.suppress(OSError), self._child.stdin as pipe:  # it may have ended already
            pipe.write(self._token.secret.encode())

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

    def __init__(self, folder: Path, fd: int, token: RunToken):
        super().__init__(("", 0), _Conversation, bind_and_activate=False)
        self.folder, self.token = folder, token
        self.socket.close()
        self.socket = socket.socket(fileno=fd)
        self.writing = threading.Lock()
        self.arriving: dict[str, int] = {}
        """Bytes of the files that are being received, by name."""
        self._lock, self._peers = threading.Lock(), 0
        self._strangers: list[socket.socket] = []

    def process_request(self, request: socket.socket, client_address: object) -> None:  # type: ignore[override]
        """Start a thread for a connection; end the oldest stranger's if there are too many."""
        with self._lock:
            self._strangers.append(request)
            oldest = self._strangers.pop(0) if len(self._strangers) > MAX_STRANGERS else None
        if oldest is not None:
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # its thread then ends
        super().process_request(request, client_address)

    def shutdown_request(self, request: socket.socket) -> None:  # type: ignore[override]
        """Close a connection."""
        with self._lock:
            if request in self._strangers:
                self._strangers.remove(request)
        super().shutdown_request(request)

    def admit(self, request: socket.socket) -> bool:
        """Count a connection among the peers'. Returns:  False if there are too many."""
        with self._lock:
            if request in self._strangers:
                self._strangers.remove(request)
            self._peers += 1
            return self._peers <= MAX_PEERS

    def dismiss(self) -> None:
        """Note that a peer's connection has ended."""
        with self._lock:
            self._peers -= 1

    def handle_error(self, request: object, client_address: object) -> None:
        """Say in one line that a conversation has failed."""
        error = sys.exception()
        warn(f"piece server: {type(error).__name__}: {error}")


class _Conversation(socketserver.StreamRequestHandler):
    """The requests of one connection (`client.PieceClient`)."""

    timeout = 10 * STALLED_SECONDS
    server: _Listener

    def handle(self) -> None:
        with contextlib.suppress(OSError, UnreadableJson):
            if not self._proven():
                return
            try:
                if not self.server.admit(self.connection):
                    return self._answer(Answer(error="too many connections"))
                while line := self.rfile.readline(MAX_REQUEST):
                    self._serve(declared.read(PieceRequest, line))
            finally:
                self.server.dismiss()

    def _proven(self) -> bool:
        """Return whether the client has the token. Reads no more than a proof, and not for long."""
        nonce = client.new_nonce()
        self.connection.sendall(client.line(Greeting(nonce=nonce)))
        until, line = time.monotonic() + PROOF_SECONDS, b""
        while b"\n" not in line:  # what follows the line makes it no proof
            left = until - time.monotonic()
            if left <= 0 or len(line) >= MAX_PROOF:
                return False
            self.connection.settimeout(left)
            got = self.connection.recv(MAX_PROOF - len(line))
            if not got:
                return False
            line += got
        self.connection.settimeout(self.timeout)
        shown = declared.read(Proof, line)
        if not client.is_proven(self.server.token, nonce, shown):
            self._answer(Answer(error=f"the client {client.OTHER_TOKEN}"))
            return False
        self._answer(Answer(signature=client.server_signature(self.server.token, nonce, shown)))
        return True

    def _serve(self, request: PieceRequest) -> None:
        try:
            match request.do:
                case "list":
                    self._answer(Answer(files=_sizes(self.server.folder)))
                case "read":
                    self._send(request.name, request.begin, request.size)
                case "write":
                    self._receive(request.name, request.size)
        except OSError as error:
            self._answer(Answer(error=error.strerror or str(error)))
            raise  # the rest of the conversation would not make sense

    def _answer(self, answer: Answer) -> None:
        self.wfile.write(client.line(answer))

    def _send(self, name: str, begin: int, size: int) -> None:
        file = read_name(name)
        paths = complete_files(self.server.folder).get(file, []) if file else []
        if not paths:
            return self._answer(Answer(error=f"there is no {name}"))
        with open(paths[0], "rb") as source:
            if not 0 <= begin <= begin + size <= os.fstat(source.fileno()).st_size:
                return self._answer(Answer(error=f"{name} has no such bytes"))
            self._answer(Answer())
            if size:
                self.connection.sendfile(source, begin, size)

    def _receive(self, name: str, size: int) -> None:
        target = self.server.folder / MIRRORED / name
        partial = target.with_name(f"{PARTIAL}{name}")
        with self.server.writing:
            why = self._unplanned(name, size)
            if not why:
                self.server.arriving[name] = size
        if why:
            return self._answer(Answer(error=why))
        try:
            with open(partial, "w+b") as file:
                os.posix_fallocate(file.fileno(), 0, size)  # fails here if there is no room
                self._answer(Answer())
                with mmap.mmap(file.fileno(), size) as memory, memoryview(memory) as view:
                    self._fill(view)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
            del self.server.arriving[name]
        self._answer(Answer())

    def _unplanned(self, name: str, size: int) -> str:
        """Return why the run has not planned such a file; empty if it has."""
        file = read_name(name)
        if file is None or size < 1:
            return f"{name!r} is not the name of a piece file"
        try:
            limits = declared.read(Limits, self.server.folder / LIMITS_FILE, max_bytes=MAX_REQUEST)
        except (OSError, UnreadableJson):
            return "no process of this host expects pieces"
        if file.group.session != limits.session or file.group.step > limits.last_step:
            return f"{name} is not of this run's copies"
        if name in self.server.arriving:
            return f"{name} is being received already"
        held = sum(self.server.arriving.values())
        held += _bytes_of(self.server.folder / MIRRORED, limits.session)
        if size > limits.file_bytes or held + size > limits.all_bytes:
            return f"{size:,} bytes are more than the run has planned"
        return ""

    def _fill(self, memory: memoryview) -> None:
        done = 0
        while done < memory.nbytes:
            got = self.rfile.readinto(memory[done : done + PIECE])
            if not got:
                raise OSError("the connection was closed")
            done += got


def _sizes(folder: Path) -> dict[str, int]:
    """Return the bytes of each complete file of a host."""
    found = {}
    for file, paths in complete_files(folder).items():
        with contextlib.suppress(FileNotFoundError):
            found[str(file)] = paths[0].stat().st_size
    return found


def _bytes_of(folder: Path, session: str) -> int:
    """Return the bytes of the complete files of a session in a folder."""
    found = 0
    for path in sorted(folder.iterdir()):
        file = read_name(path.name)
        with contextlib.suppress(FileNotFoundError):
            found += path.stat().st_size if file and file.group.session == session else 0
    return found


def main() -> None:
    """Serve on a socket of the parent, until it ends."""
    folder, fd, parent = sys.argv[1:]
    token = RunToken(sys.stdin.buffer.read().decode())
    end_with_parent(int(parent))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the parent ends it, after the run
    _Listener(Path(folder), int(fd), token).serve_forever()


if __name__ == "__main__":
    main()
