"""The client of stores, obstore: its settings, and the retries of single requests."""

import os
from datetime import timedelta
from typing import Any

from jaxpar.config.rules.paths import Address

#: Seconds of one HTTP request, and of connecting.
REQUEST_SECONDS, CONNECT_SECONDS = 60, 10

#: Retries of a request by the client, with up to 10 s between them.
REQUEST_RETRIES = 10


def obstore() -> Any:
    """Return the client's module."""
    import obstore  # optional, and few programs need it
    import obstore.exceptions

    return obstore


def open_store(address: Address, seconds: float) -> Any:
    """Return a client of an address, by the settings of the environment.

    Args:     seconds: after which a request is not repeated.
    """
    from obstore import store

    client: Any = {
        "timeout": timedelta(seconds=min(REQUEST_SECONDS, seconds)),
        "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
    }
    retry: Any = {
        "max_retries": REQUEST_RETRIES,
        "retry_timeout": timedelta(seconds=seconds),
        "backoff": {
            "init_backoff": timedelta(milliseconds=200),
            "max_backoff": timedelta(seconds=10),
            "base": 2,
        },
    }
    more: Any = {"prefix": address.prefix, "client_options": client, "retry_config": retry}
    if address.scheme == "gs":
        # The variable of Google's clients for a server in place of theirs.
        client["allow_http"] = os.environ.get("STORAGE_EMULATOR_HOST", "").startswith("http://")
        return store.GCSStore(address.bucket, **more)
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint:
        more["endpoint"] = endpoint
        client["allow_http"] = endpoint.startswith("http://")
    return store.S3Store(address.bucket, **more)
