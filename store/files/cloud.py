"""Connections to object stores: URLs, timeouts and retries, credentials, and the meaning of server errors.

Credentials come from where the tools of each provider look for them (environment, profiles, roles). They are
never part of an address, so that no key, log or provenance note can repeat them.
"""

from __future__ import annotations

import os
import re
from datetime import timedelta
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ..errors import MissingExtra, StoreError, StoreFormatError, StoreUnreachable

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

__all__ = ["as_store_error", "connected", "is_worth_a_retry", "normalised"]

SCHEMES = ("s3", "gs", "az", "memory")
"""URL schemes that a store can have."""
TIMEOUT = "MIZARR_TIMEOUT"
"""Environment variable: seconds that one request may take; default 120."""
ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
}
"""Environment variables from which obstore takes another server than the provider's, per scheme."""
CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
}
"""Environment variables with credentials, per scheme, as error messages name them."""
_RETRIES = 4
# Server messages may quote parts of a signed request: values of these fields are not shown.
_DETAILS = re.compile(r"(?i)(signature|credential|token|accesskeyid|sig|key)[^\s,;]*\s*[=:]\s*[^\s,;<>]+")


def normalised(address: str) -> str:
    """Validate the URL of a store in a bucket and return it in canonical spelling.

    Raises:
        StoreFormatError: The URL has another scheme, no bucket, an unsafe prefix, credentials or options.
    """
    parts = urlsplit(address)
    if parts.scheme not in SCHEMES:
        some = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise StoreFormatError(
            f"expected a store as a folder, or as a URL that begins with {some}, found one that begins with "
            f"{parts.scheme + '://'!r}"
        )
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise StoreFormatError(
            f"the URL of a store is {parts.scheme}://BUCKET/PREFIX, without credentials or options; leave "
            "them out: credentials are read from the environment, a profile or the role"
        )
    path = parts.path.removeprefix("/").removesuffix("/")
    if not parts.netloc or any(step in ("", ".", "..") for step in path.split("/") if path):
        raise StoreFormatError(
            f"expected the URL of a store as {parts.scheme}://BUCKET/PREFIX, found {address!r}; name a "
            "bucket, and a prefix without empty parts, '.' and '..'"
        )
    return f"{parts.scheme}://{parts.netloc}" + (f"/{path}" if path else "")


_in_memory: dict[str, ObjectStore] = {}
"""Content of memory:// stores in this process: data, not a cache, hence no eviction."""


def connected(address: str) -> ObjectStore:
    """Client for the object store at a URL returned by `normalised`; sends no request yet.

    Raises:
        MissingExtra: obstore is not installed.
        StoreError: The environment's settings are invalid.
    """
    if find_spec("obstore") is None:
        raise MissingExtra(f"the store {address} needs obstore: pip install 'mizarr[remote]'")
    if address.startswith("memory://"):
        from obstore.store import MemoryStore

        # setdefault is atomic: one store for all threads
        return _in_memory.setdefault(address, MemoryStore())
    return _bucket_client(address)


@lru_cache(maxsize=16)
def _bucket_client(address: str) -> ObjectStore:
    """obstore's client for a bucket, with time-outs, retries and credentials from the environment."""
    from obstore.exceptions import BaseError
    from obstore.store import from_url

    try:
        seconds = float(os.environ.get(TIMEOUT) or 120)
    except ValueError:
        setting = os.environ[TIMEOUT]
        raise StoreError(
            f"expected a number of seconds in the environment variable {TIMEOUT}, found {setting!r}"
        ) from None
    scheme = address.partition("://")[0]
    client: ClientConfig = {
        # A wrong host should fail in seconds; a slow transfer may take the whole time-out.
        "connect_timeout": timedelta(seconds=min(5.0, seconds)),
        "timeout": timedelta(seconds=seconds),
    }
    # obstore refuses http:// by default, as credentials would travel in the clear; allowed only for a named
    # emulator.
    if _is_plain_http(scheme):
        client["allow_http"] = True
    retry: RetryConfig = {"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=seconds)}
    options: dict[str, Any] = _aws_credentials() if scheme == "s3" else {}
    try:
        return from_url(address, client_options=client, retry_config=retry, **options)
    except (BaseError, ValueError) as error:
        # Quoted parts are cut: a user may have put a key where the path of a key file belongs.
        reason = re.sub(r"""(["'`]).*?\1|(?<=file from ).*(?=: )""", "…", _first_line(error))[:300]
        raise StoreUnreachable(
            f"{address}: the environment variables that configure access to this store are invalid "
            f"({reason}); set {CREDENTIALS[scheme]}"
        ) from None


def _is_plain_http(scheme: str) -> bool:
    """Whether the environment names an endpoint without TLS, as emulators have.

    Raises:
        StoreError: The endpoint is no http:// or https:// URL.
    """
    names = [name for name in ENDPOINTS[scheme] if os.environ.get(name)]
    for name in names:
        parts = urlsplit(os.environ[name])
        if parts.scheme not in ("http", "https") or not parts.netloc or "@" in parts.netloc:
            raise StoreError(
                f"expected the environment variable {name} to be http:// or https:// and a host, without "
                "credentials, found another value; set it so, or unset it"
            )
    return any(os.environ[name].startswith("http:") for name in names)


def _aws_credentials() -> dict[str, Any]:
    """Options for obstore with credentials from boto3 (profiles, SSO, roles); empty if the environment has a
    key or boto3 is not installed."""
    # boto3 is imported only if obstore would find nothing by itself; it also reads profiles in ~/.aws.
    read_by_obstore = ("AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE", "AWS_WEB_IDENTITY_TOKEN_FILE")
    if any(name in os.environ for name in read_by_obstore) or find_spec("boto3") is None:
        return {}
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        return {"credential_provider": Boto3CredentialProvider()}
    except ValueError:
        raise StoreUnreachable(
            "no AWS credentials were found in the environment, a profile or the role of this machine; set "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
        ) from None


def is_worth_a_retry(error: BaseException) -> bool:
    """Whether a failed request may succeed if it is repeated: server overloaded, connection cut, timeout."""
    if (status := _status(error)) is not None:
        return status in (408, 429) or status >= 500
    message = _message(error)
    # First the permanent errors: some of their texts also contain words of the transient ones below.
    if re.search("dns error|builder error|NoSuchBucket|AccessDenied|token request", message):
        return False  # permanent: a retry would get the same answer
    transient = (
        "timed? ?out|connection|reset|incomplete|closed|body|server error|internal ?error|SlowDown|HTTP error"
    )
    return re.search(f"(?i){transient}", message) is not None


def as_store_error(error: Exception, url: str) -> StoreError:
    """Translate an error of the client library obstore to a StoreError whose message names a remedy.

    Arguments:
        error: What obstore raised.
        url: URL of the object.
    """
    message, status = _message(error), _status(error)
    keys = CREDENTIALS.get(url.partition("://")[0], "those of the provider")
    if "NoSuchBucket" in message or "ContainerNotFound" in message:
        return StoreFormatError(f"{url}: there is no bucket of this name; create it, or correct the URL")
    # obstore's messages are the only source: it raises one class for all HTTP failures. The tests against
    # emulators and a fault proxy fail if a new version rephrases them.
    if "token request" in message or (status is None and re.search("(?i)credential", message)):
        return StoreUnreachable(
            f"{url}: no credentials that give access were found in the environment, a profile or the role of "
            f"this machine; set {keys}"
        )
    denied = "InvalidAccessKeyId|SignatureDoesNotMatch|AuthenticationFailed|failed to authenticate"
    if status == 401 or re.search(denied, message):
        return StoreUnreachable(f"{url}: the object store denied the credentials; check {keys}")
    if status == 403 or isinstance(error, PermissionError) or "AccessDenied" in message:
        return StoreUnreachable(
            f"{url}: the object store denied access; check {keys}, and what these credentials may do"
        )
    if re.search("(?i)timed? ?out|deadline", message):
        return StoreUnreachable(
            f"{url}: the object store did not answer in time, nor in {_RETRIES} further attempts; try again, "
            f"or set the environment variable {TIMEOUT} to more seconds"
        )
    if re.search("dns error|ConnectionRefused", message):
        return StoreUnreachable(
            f"{url}: no server was reached; check the network, and the account or endpoint in the environment"
        )
    first = _DETAILS.sub(r"\1=…", _first_line(error))[:300]
    return StoreUnreachable(f"{url}: the object store failed ({first}); try again")


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _message(error: BaseException) -> str:
    """Text of an obstore error without its `retry_timeout` setting, which would match the search for
    timeouts."""
    return str(error).replace("retry_timeout", "")


def _status(error: BaseException) -> int | None:
    """HTTP status of the response to the whole request or to a single object; None without a response."""
    match = re.search(r"\bcode: (\d{3})\b", str(error))
    return None if match is None else int(match[1])
