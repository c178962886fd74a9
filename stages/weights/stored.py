"""A model's matrices as a resource that stages read, identified by weights, dtype and folding.

Border: files and identities. Stages receive the opened `Matrices`.
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
    """The matrices of a model, read from its files, which must not change while a stage uses them."""

    name: str
    """Name of the model; not part of a key, as digests identify the weights."""
    revision: str | None
    """Revision of the model; not part of a key."""
    model: ModelIdentity
    """Identity of the model: its weights, configuration and dtype are part of a key."""
    is_folded: bool = True
    """Whether norms, value biases and means are folded in (folded.py)."""

    @classmethod
    def of(cls, files: ModelFiles, *, dtype: str = "float32", folded: bool = True) -> StoredMatrices:
        """The matrices of a model's files as they are now.

        Arguments:
            files: the model's files.
            dtype: dtype in which the model computes; weights are rounded to it.
            folded: whether norms, value biases and means are folded in.
        """
        matrices = cls(files.name, files.revision, files.identity(dtype=dtype), folded)
        return matrices.opened_as(OpenResource(files, files.pinned))

    def identity(self) -> dict[str, Any]:
        """The values that determine every number of the matrices, for keys."""
        identity = self.model
        return {
            "weights": identity.weights,
            "config": identity.config,
            "dtype": identity.dtype,
            "folded": self.is_folded,
        }

    def opened_anew(self) -> OpenResource:
        """Open the files that the name refers to now, such as on another machine.

        Raises:
            SourceChanged: their weights or configuration are others.
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
