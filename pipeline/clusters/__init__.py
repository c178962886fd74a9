"""Cells on the workers of a Dask cluster: one that is there already, or processes of this machine."""

from .client import ClusterClient
from .local import local_workers, threads_each

__all__ = ["ClusterClient", "local_workers", "threads_each"]
