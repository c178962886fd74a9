"""From a URL to a connection with an object store: which ones, with what patience, by whose leave.

Border: addresses, connections, and what servers answer when they refuse; which objects are asked for is known
elsewhere. Credentials come from where the tools of each provider look for them (environment, profiles, roles)
and are never in an address, so that no key, log or note can repeat them.
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
"""Of the URLs a store can have."""
TIMEOUT = "MIZARR_TIMEOUT"
"""Environment variable: seconds one request may take, by default 120."""
ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
}
"""Environment variables in which obstore looks for another server than the provider's."""
CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
}
"""What to set where there are none; the page on remote stores has them all."""
_RETRIES = 4
_DETAILS = re.compile(r"(?i)(signature|credential|token|accesskeyid|sig|key)[^\s,;]*\s*[=:]\s*[^\s,;<>]+")


def normalised(address: str) -> str:
    """The one spelling of an address. StoreFormatError for what can be none, or has credentials in it."""
    parts = urlsplit(address)
    if parts.scheme not in SCHEMES:
        some = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise StoreFormatError(
            f"expected a folder, or a URL that begins with {some}, found one that begins with "
            f"{parts.scheme + '://'!r}; name a store so"
        )
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise StoreFormatError(
            f"expected {parts.scheme}://BUCKET/PREFIX and no more, found a URL with credentials or options "
            "in it; leave them out: credentials are read from the environment, a profile or the role"
        )
    path = parts.path.removeprefix("/").removesuffix("/")
    if not parts.netloc or any(step in ("", ".", "..") for step in path.split("/") if path):
        raise StoreFormatError(
            f"expected {parts.scheme}://BUCKET/PREFIX, found {address!r}; name a bucket and a plain prefix"
        )
    return f"{parts.scheme}://{parts.netloc}" + (f"/{path}" if path else "")


_in_memory: dict[str, ObjectStore] = {}
"""What memory:// addresses of this process hold: data, not connections, so that none is ever let go."""


def connected(address: str) -> ObjectStore:
    """The connection behind a normalised address; nothing is asked yet.

    Raises MissingExtra, and StoreError for settings that lead nowhere.
    """
    if find_spec("obstore") is None:
        raise MissingExtra(f"{address} needs obstore, not installed here; pip install 'mizarr[remote]'")
    if address.startswith("memory://"):
        from obstore.store import MemoryStore

        return _in_memory.setdefault(address, MemoryStore())  # at once, for any number of threads
    return _connected(address)


@lru_cache(maxsize=16)
def _connected(address: str) -> ObjectStore:
    from obstore.exceptions import BaseError
    from obstore.store import from_url

    try:
        seconds = float(os.environ.get(TIMEOUT) or 120)
    except ValueError:
        found = os.environ[TIMEOUT]
        raise StoreError(f"expected seconds in {TIMEOUT}, found {found!r}; set it to a number") from None
    scheme = address.partition("://")[0]
    client: ClientConfig = {
        "connect_timeout": timedelta(seconds=min(5.0, seconds)),
        "timeout": timedelta(seconds=seconds),
    }
    if _is_plain_http(scheme):
        client["allow_http"] = True
    retry: RetryConfig = {"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=seconds)}
    options: dict[str, Any] = _aws_credentials() if scheme == "s3" else {}
    try:
        return from_url(address, client_options=client, retry_config=retry, **options)
    except (BaseError, ValueError) as error:
        # Without names and what is quoted: a key may have been put where that of its file should be.
        found = re.sub(r"""(["'`]).*?\1|(?<=file from ).*(?=: )""", "…", _first_line(error))[:300]
        raise StoreUnreachable(
            f"{address}: expected settings in the environment that lead to the store, found some that do not "
            f"({found}); set {CREDENTIALS[scheme]}"
        ) from None


def _is_plain_http(scheme: str) -> bool:
    """Whether the environment names a server that is spoken to without TLS, as emulators are.

    StoreError for one that is no address.
    """
    names = [name for name in ENDPOINTS[scheme] if os.environ.get(name)]
    for name in names:
        parts = urlsplit(os.environ[name])
        if parts.scheme not in ("http", "https") or not parts.netloc or "@" in parts.netloc:
            raise StoreError(
                f"expected http:// or https:// and a host in {name}, found something else; set it so, with "
                "no credentials in it, or leave it out"
            )
    return any(os.environ[name].startswith("http:") for name in names)


def _aws_credentials() -> dict[str, Any]:
    """Profiles and whatever else boto3 knows, where it is installed and the environment holds no key."""
    alone = ("AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE", "AWS_WEB_IDENTITY_TOKEN_FILE")
    if any(name in os.environ for name in alone) or find_spec("boto3") is None:
        return {}
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        return {"credential_provider": Boto3CredentialProvider()}
    except ValueError:
        raise StoreUnreachable(
            "expected AWS credentials in the environment, a profile or the role of this machine, found none; "
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
        ) from None


def is_worth_a_retry(error: BaseException) -> bool:
    """Whether the same request may succeed: an overloaded server, a connection that was cut, a time-out."""
    if (status := _status(error)) is not None:
        return status in (408, 429) or status >= 500
    said = _said(error)
    if re.search("dns error|builder error|NoSuchBucket|AccessDenied|token request", said):
        return False  # asked again, the answer would be the same
    kinds = (
        "timed? ?out|connection|reset|incomplete|closed|body|server error|internal ?error|SlowDown|HTTP error"
    )
    return re.search(f"(?i){kinds}", said) is not None


def as_store_error(error: Exception, what: str) -> StoreError:
    """What a server, or the way to it, said, in one line. what: the URL of the object."""
    said, status = _said(error), _status(error)
    keys = CREDENTIALS.get(what.partition("://")[0], "those of the provider")
    if "NoSuchBucket" in said or "ContainerNotFound" in said:
        return StoreFormatError(f"{what}: expected a bucket that exists, found none of that name; create it")
    if "token request" in said or (status is None and re.search("(?i)credential", said)):
        return StoreUnreachable(
            f"{what}: expected credentials in the environment, a profile or the role of this machine, found "
            f"none that give access; set {keys}"
        )
    wrong = "InvalidAccessKeyId|SignatureDoesNotMatch|AuthenticationFailed|failed to authenticate"
    if status == 401 or re.search(wrong, said):
        return StoreUnreachable(
            f"{what}: expected credentials the store accepts, found some that were denied; check {keys}"
        )
    if status == 403 or isinstance(error, PermissionError) or "AccessDenied" in said:
        return StoreUnreachable(f"{what}: access denied; check the credentials and what they allow")
    if re.search("(?i)timed? ?out|deadline", said):
        return StoreUnreachable(
            f"{what}: no answer in time, {_RETRIES} further attempts included; try again, or set "
            f"{TIMEOUT} to more seconds"
        )
    if re.search("dns error|ConnectionRefused", said):
        return StoreUnreachable(
            f"{what}: expected a server, found none there; check the network, and the account or endpoint in "
            "the environment"
        )
    first = _DETAILS.sub(r"\1=…", _first_line(error))[:300]
    return StoreUnreachable(f"{what}: the object store did not do what was asked ({first}); try again")


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _said(error: BaseException) -> str:
    """All obstore says of a failure, but for how long it would have tried: no time-out is meant by that."""
    return str(error).replace("retry_timeout", "")


def _status(error: BaseException) -> int | None:
    """The status a server answered with, of the whole request or of one object in it; None for no answer."""
    found = re.search(r"\bcode: (\d{3})\b", str(error))
    return None if found is None else int(found[1])
