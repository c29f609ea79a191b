"""A local S3 server with conditional writes (moto), in this process, whose requests can fail."""

import functools
import logging
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any
from wsgiref.types import StartResponse, WSGIEnvironment

import obstore
from werkzeug.serving import make_server

from jaxpar.config.rules.paths import Address
from jaxpar.stores.objects import Objects

#: What happens to a request: None, a status, "lost" (it is done, and the answer is a 500), or
#: seconds to wait.
type Fault = int | float | str | None


class Server:
    """Serves S3 on a free port of this host. `fault(method, path)` may make requests fail."""

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._app = DomainDispatcherApplication(create_backend_app)
        self.fault: Callable[[str, str], Fault] = lambda method, path: None
        self.requests: list[tuple[str, str]] = []
        self._server = make_server("127.0.0.1", 0, self._serve, threaded=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _serve(self, environ: WSGIEnvironment, start: StartResponse) -> Any:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.requests.append((method, path))
        match self.fault(method, path):
            case int(status):
                start(f"{status} Injected", [("Content-Length", "0")])
                return []
            case float(seconds):
                time.sleep(seconds)
            case "lost":
                list(self._app(environ, lambda *_: lambda _: None))
                start("500 Injected", [("Content-Length", "0")])
                return []
        return self._app(environ, start)

    def close(self) -> None:
        self._server.shutdown()

    def address(self) -> Address:
        """An address in a new bucket."""
        address = Address("s3", f"bucket-{uuid.uuid4().hex[:12]}", "runs/one")
        store = obstore.store.HTTPStore(self.url, client_options={"allow_http": True})
        store.put(address.bucket, b"", use_multipart=False)
        return address

    def failing(self, times: int, fault: Fault, method: str = "PUT", part: str = "") -> None:
        """Let the next requests of a kind fail."""
        left = [times]

        def one(asked: str, path: str) -> Fault:
            if asked != method or part not in path or not left[0]:
                return None
            left[0] -= 1
            return fault

        self.fault = one


def objects_at(address: Address) -> Objects:
    return Objects(address, "run.store")


@functools.cache
def server() -> Server:
    return Server()
