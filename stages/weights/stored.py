"""Matrices of a model's files as a resource of stages, identified by weights, dtype and folding.

Border: files and identities. Stages receive opened `Matrices`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...pipeline.pinned import FileResource, OpenResource
from ..forward.models.files import ModelFiles, resolve
from .folded import FoldedMatrices
from .matrices import Matrices, PlainMatrices

if TYPE_CHECKING:
    from ...store.keys import ModelIdentity

__all__ = ["StoredMatrices"]


@dataclass(frozen=True)
class StoredMatrices(FileResource):
    """Matrices of a model's files, a pinned resource."""

    name: str
    """Model name, outside of the key: digests identify the weights."""
    revision: str | None
    """Model revision, outside of the key."""
    model: ModelIdentity
    """Identity of the model; weights, configuration and dtype enter the key."""
    is_folded: bool = True
    """Whether norms, value biases and means are folded in (folded.py)."""

    @classmethod
    def of(cls, files: ModelFiles, *, dtype: str = "float32", folded: bool = True) -> StoredMatrices:
        """Matrices of a model's files in their present state.

        Arguments:
            files: the model's files.
            dtype: dtype in which the model computes; weights are rounded to it.
            folded: whether norms, value biases and means are folded in.
        """
        matrices = cls(files.name, files.revision, files.identity(dtype=dtype), folded)
        return matrices.opened_as(OpenResource(files, files.pinned))

    def identity(self) -> dict[str, Any]:
        """Plain values that determine every number of the matrices."""
        identity = self.model
        return {
            "weights": identity.weights,
            "config": identity.config,
            "dtype": identity.dtype,
            "folded": self.is_folded,
        }

    def opened_anew(self) -> OpenResource:
        """Open the files to which the name refers.

        Raises:
            SourceChanged: if their identity is another.
        """
        files = resolve(self.name, self.revision)
        files.require_identity(self.model)
        return OpenResource(files, files.pinned)

    @contextmanager
    def open(self) -> Iterator[Matrices]:
        """The matrices, read on demand.

        Raises:
            WeightsError: unless all tensors have the names, shapes and dtypes that a forward pass needs.
        """
        with super().open() as files:
            plain = PlainMatrices(files.checked_checkpoint(), files.architecture(), self.model.dtype)
            yield FoldedMatrices(plain) if self.is_folded else plain
