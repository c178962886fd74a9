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


@lru_cache(maxsize=16)
def connected(address: str) -> ObjectStore:
    """The connection behind a normalised address; nothing is asked yet. What memory:// holds stays with it.

    Raises MissingExtra.
    """
    if find_spec("obstore") is None:
        raise MissingExtra(f"{address} needs obstore, not installed here; pip install 'mizarr[remote]'")
    from obstore.store import MemoryStore, from_url

    if address.startswith("memory://"):
        return MemoryStore()
    try:
        seconds = float(os.environ.get(TIMEOUT) or 120)
    except ValueError:
        found = os.environ[TIMEOUT]
        raise StoreError(f"expected seconds in {TIMEOUT}, found {found!r}; set it to a number") from None
    client: ClientConfig = {
        "connect_timeout": timedelta(seconds=min(5.0, seconds)),
        "timeout": timedelta(seconds=seconds),
    }
    retry: RetryConfig = {"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=seconds)}
    options: dict[str, Any] = {}
    if address.startswith("s3://"):
        if os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://"):
            client["allow_http"] = True
        options = _aws_credentials()
    return from_url(address, client_options=client, retry_config=retry, **options)


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
    said = str(error)
    if "dns error" in said or "NoSuchBucket" in said or re.search("AccessDenied|403 Forbidden", said):
        return False  # asked again, the answer would be the same
    kinds = (
        r"(?i)timed? ?out|connection|reset|incomplete|closed|body|server error|\b5\d\d\b|SlowDown|HTTP error"
    )
    return re.search(kinds, said) is not None


def as_store_error(error: Exception, what: str) -> StoreError:
    """What a server, or the way to it, said, in one line. what: the object, as people name it."""
    said = str(error)
    if "NoSuchBucket" in said or "ContainerNotFound" in said:
        return StoreFormatError(f"{what}: expected a bucket that exists, found none of that name; create it")
    if re.search(r"(?i)denied|forbidden|\b403\b|permission", said):
        return StoreUnreachable(f"{what}: access denied; check the credentials and what they allow")
    if re.search(r"(?i)unauthenticated|credential|\b401\b|InvalidAccessKey|metadata", said):
        return StoreUnreachable(
            f"{what}: expected credentials the store accepts, found none; set those of the provider in the "
            "environment or a profile"
        )
    if re.search(r"(?i)timed? ?out|deadline", said):
        return StoreUnreachable(
            f"{what}: no answer in time, {_RETRIES} further attempts included; try again, or set "
            f"{TIMEOUT} to more seconds"
        )
    first = _DETAILS.sub(r"\1=…", said.splitlines()[0] if said else type(error).__name__)[:300]
    return StoreUnreachable(f"{what}: the object store did not do what was asked ({first}); try again")
