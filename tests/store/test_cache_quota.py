"""The quota of the read-through cache, from the environment."""

from __future__ import annotations

import pytest

from mizarr.store.errors import StoreError
from mizarr.store.files.cache import quota


@pytest.mark.parametrize(
    ("setting", "size"),
    [("10GiB", 10 << 30), ("10GB", 10**10), ("0", 0), ("", 10 << 30), ("1.5e9", 15 * 10**8)],
)
def test_the_quota_is_a_size_as_in_all_options(monkeypatch, setting, size):
    monkeypatch.setenv("MIZARR_CACHE_QUOTA", setting)
    assert quota() == size


def test_a_quota_that_is_no_size_is_refused(monkeypatch):
    monkeypatch.setenv("MIZARR_CACHE_QUOTA", "much")
    with pytest.raises(StoreError, match=r"expected a size such as 10GB .*, found 'much'"):
        quota()
