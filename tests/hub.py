"""A server with the parts of the Hugging Face Hub's protocol that a download needs, on this host.

It has one model, "org/model", at one commit, or the same files as the dataset "org/data", whose
card is `server.card`; "org/private" needs permission.
"""

import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MODEL, DATA, COMMIT = "org/model", "org/data", hashlib.sha1(b"commit").hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers from `server.files`, and lists each request in `server.requests`."""

    def log_message(self, *_) -> None:
        pass

    def do_GET(self) -> None:
        path, files = self.path.partition("?")[0], self.server.files
        self.server.requests.append(f"{self.command} {path}")
        _, _, of = path.partition("/api/models/")
        revisions = (f"{MODEL}/revision/{name}" for name in ("main", "v1", COMMIT))
        if of == MODEL or of in revisions:
            self.reply(json.dumps({"id": MODEL, "sha": COMMIT, "siblings": []}).encode())
        elif path in (f"/api/datasets/{DATA}", f"/api/datasets/{DATA}/revision/v1"):
            siblings = [{"rfilename": name, "size": len(files[name])} for name in files]
            about = {"id": DATA, "sha": COMMIT, "siblings": siblings, "cardData": self.server.card}
            self.reply(json.dumps(about).encode())
        elif of.startswith(f"{MODEL}/tree/"):
            entry = lambda name, b: {"type": "file", "path": name, "size": len(b), "oid": "0" * 40}  # noqa: E731
            self.reply(json.dumps([entry(*item) for item in files.items()]).encode())
        elif of.startswith(f"{MODEL}/revision/") or f"/datasets/{DATA}/revision/" in path:
            self.refuse(404, "RevisionNotFound")
        elif of.startswith("org/private"):
            self.refuse(403, "GatedRepo")
        elif (name := path.partition(f"{COMMIT}/")[2]) in files:
            tag = hashlib.sha1(files[name]).hexdigest()
            self.reply(files[name], ETag=f'"{tag}"', **{"X-Repo-Commit": COMMIT})
        else:
            self.refuse(404, "RepoNotFound")

    do_HEAD = do_GET

    def reply(self, body: bytes, code: int = 200, **headers: str) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def refuse(self, code: int, why: str) -> None:
        self.reply(b"{}", code, **{"X-Error-Code": why})


@contextmanager
def serving(files: dict[str, bytes]) -> Iterator[http.server.ThreadingHTTPServer]:
    """Serve a model's files. `url` of the server is its address."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.files, server.requests, server.card = files, [], {}
        server.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()


def files_in(folder: Path) -> dict[str, bytes]:
    """Read the files of a published folder."""
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def connect(monkeypatch, url: str, cache: Path) -> None:
    """Make huggingface_hub use a server, with an empty cache, as HF_ENDPOINT and HF_HOME do."""
    from huggingface_hub import constants

    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # another test may have set it
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
