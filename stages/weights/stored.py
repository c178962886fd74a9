"""A model's matrices as what stages read: a name, the digest of its weights, and which folding is asked.

Border: files and identities; what is made of matrices is each stage's. Stages get `Matrices`, opened.
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
    """The matrices of a model's files, a pinned resource.

    name, revision: of the model, in no key. model: its identity, of which weights, configuration and dtype
    are. is_folded: whether norms, value biases and means are folded in (folded.py), or matrices are plain.
    """

    name: str
    revision: str | None
    model: ModelIdentity
    is_folded: bool = True

    @classmethod
    def of(cls, files: ModelFiles, *, dtype: str = "float32", folded: bool = True) -> StoredMatrices:
        """Those of a model's files as they are now."""
        matrices = cls(files.name, files.revision, files.identity(dtype=dtype), folded)
        return matrices.opened_as(OpenResource(files, files.pinned))

    def identity(self) -> dict[str, Any]:
        """What decides every number of them."""
        it = self.model
        return {
            "weights": it.weights,
            "config": it.config,
            "dtype": it.dtype,
            "folded": self.is_folded,
        }

    def opened_anew(self) -> OpenResource:
        """The files that the name leads to. Raises SourceChanged unless they are those of the identity."""
        files = resolve(self.name, self.revision)
        files.require_identity(self.model)
        return OpenResource(files, files.pinned)

    @contextmanager
    def open(self) -> Iterator[Matrices]:
        """The matrices; nothing is read before it is asked for. Raises WeightsError unless all tensors are
        those of the model, as for a pass: names, shapes and dtypes, also of those nobody asks for."""
        with super().open() as files:
            plain = PlainMatrices(files.checked_checkpoint(), files.architecture(), self.model.dtype)
            yield FoldedMatrices(plain) if self.is_folded else plain
