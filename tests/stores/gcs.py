"""Google's XML API in this process, as its documentation describes it, with generations.

The emulators that can be installed ignore conditions, on which the lease depends; this one heeds
`x-goog-if-generation-match`. It knows the requests that obstore makes, and no permissions.
"""

import functools
import json
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from jaxpar.config.rules.paths import Address


class GoogleStorage:
    """Buckets in memory: objects with their generations.

    `requests` has the method, the path and the condition of each.
    """

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, int]] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.requests: list[tuple[str, str, str | None]] = []
        self.lock, self.generation = threading.Lock(), 0
        handler = functools.partial(_Handler, self)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def address(self) -> Address:
        """An address in a new bucket."""
        return Address("gs", f"bucket-{uuid.uuid4().hex[:12]}", "runs/one")

    def put(self, name: str, content: bytes, condition: str | None) -> int | None:
        """Write an object. Returns:  its generation; None if the condition does not hold."""
        with self.lock:
            now = self.objects.get(name, (b"", 0))[1]
            if condition is not None and int(condition) != now:
                return None
            self.generation += 1
            self.objects[name] = content, self.generation
            return self.generation

    def close(self) -> None:
        self._server.shutdown()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, storage: GoogleStorage, *args):
        self.storage = storage
        super().__init__(*args)

    def log_message(self, *args) -> None:
        """Says nothing."""

    def _asked(self) -> tuple[str, dict[str, str]]:
        url = urlsplit(self.path)
        query = {k: v[0] for k, v in parse_qs(url.query, keep_blank_values=True).items()}
        name = unquote(url.path).lstrip("/")
        condition = self.headers.get("x-goog-if-generation-match")
        self.storage.requests.append((self.command, name, condition))
        self.content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return name, query

    def _answer(self, status: int, content: bytes = b"", generation: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Last-Modified", "Fri, 27 Nov 2026 12:00:00 GMT")
        if generation is not None:
            self.send_header("ETag", f'"{generation}"')
            self.send_header("x-goog-generation", str(generation))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def do_PUT(self) -> None:
        name, query = self._asked()
        if "uploadId" in query:
            parts = self.storage.uploads[query["uploadId"]]
            parts[int(query["partNumber"])] = self.content
            return self._answer(200, generation=1)
        condition = self.headers.get("x-goog-if-generation-match")
        made = self.storage.put(name, self.content, condition)
        return self._answer(412 if made is None else 200, generation=made)

    def do_POST(self) -> None:
        name, query = self._asked()
        if "uploads" in query:
            self.storage.uploads[number := uuid.uuid4().hex] = {}
            text = f"<InitiateMultipartUploadResult><UploadId>{number}</UploadId>"
            return self._answer(200, f"{text}</InitiateMultipartUploadResult>".encode())
        parts = self.storage.uploads.pop(query["uploadId"])
        made = self.storage.put(name, b"".join(parts[i] for i in sorted(parts)), None)
        text = f"<CompleteMultipartUploadResult><ETag>{made}</ETag></CompleteMultipartUploadResult>"
        return self._answer(200, text.encode(), made)

    def do_GET(self) -> None:
        name, query = self._asked()
        if "list-type" in query:
            return self._answer(200, self._listed(name.rstrip("/"), query))
        if name not in self.storage.objects:
            return self._answer(404)
        content, generation = self.storage.objects[name]
        wanted = self.headers.get("If-Match")
        if wanted is not None and wanted != f'"{generation}"':
            return self._answer(412)
        if (span := self.headers.get("Range")) is None:
            return self._answer(200, content, generation)
        first, last = map(int, span.removeprefix("bytes=").split("-"))
        part = content[first : last + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        self.send_header("Last-Modified", "Fri, 27 Nov 2026 12:00:00 GMT")
        self.send_header("ETag", f'"{generation}"')
        self.end_headers()
        self.wfile.write(part)
        return None

    do_HEAD = do_GET

    def do_DELETE(self) -> None:
        name, _ = self._asked()
        with self.storage.lock:
            known = self.storage.objects.pop(name, None)
        self._answer(204 if known else 404)

    def _listed(self, bucket: str, query: dict[str, str]) -> bytes:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        found, folders = "", set()
        for key, (content, generation) in sorted(self.storage.objects.items()):
            if not key.startswith(f"{bucket}/{prefix}"):
                continue
            name = key.removeprefix(f"{bucket}/")
            rest = name.removeprefix(prefix)
            if delimiter and delimiter in rest:
                folders.add(prefix + rest.split(delimiter)[0] + delimiter)
                continue
            found += f"<Contents><Key>{escape(name)}</Key><Size>{len(content)}</Size>"
            found += f'<ETag>"{generation}"</ETag>'
            found += "<LastModified>2026-11-27T12:00:00.000Z</LastModified></Contents>"
        found += "".join(
            f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>"
            for one in sorted(folders)
        )
        return f"<ListBucketResult>{found}</ListBucketResult>".encode()


def key_of(storage: GoogleStorage) -> str:
    """The file of a service account that sends obstore to the server, without a token."""
    return json.dumps(
        {
            "gcs_base_url": storage.url,
            "disable_oauth": True,
            "client_email": "",
            "private_key": "",
            "private_key_id": "",
        }
    )
