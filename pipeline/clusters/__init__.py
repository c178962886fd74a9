"""Computation of cells by the workers of an existing Dask cluster, or by processes of this machine."""

from .client import ClusterClient
from .local import local_workers, threads_per_worker

__all__ = ["ClusterClient", "local_workers", "threads_per_worker"]
