"""An `ActivationLoader` as a torch dataset, for a DataLoader with any number of workers.

    loader = ActivationLoader(states, batch=4096, epochs=4)
    for batch in DataLoader(loader.to_torch(), batch_size=None, num_workers=2):
        batch["resid_post"]                          # float32 tensor [row, layer, hidden]

Batches are made by the dataset: `batch_size=None` tells torch to make none of its own. A DataLoader takes
from its workers in turn, so that batches come in the loader's order, whatever their number. A training that
took `n` of them goes on with `loader.position = n`. Workers hold buffers of their own, each for its share of
the rows.

Border: torch's protocol; rows and order are the loader's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from .conversion import as_tensor

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["ActivationDataset", "SharedBatches"]


class SharedBatches(Protocol):
    """Batches that can be shared out over workers: an `ActivationLoader`."""

    def __len__(self) -> int:
        """Batches that are left."""
        ...

    def shared(
        self, worker: int, workers: int, *, taken: int = 0
    ) -> Iterator[dict[str, npt.NDArray[np.generic]]]:
        """Those of a worker, without the first `taken`."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Where they begin, as `load_state_dict` takes it."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> Any:
        """Go on from where a `state_dict` was taken."""
        ...


class ActivationDataset(IterableDataset[dict[str, Tensor]]):
    """Batches of a loader as tensors, from its position on in each iteration; its share inside a worker.

    `state_dict` and `load_state_dict` are what torchdata's StatefulDataLoader asks of a worker: the batches
    that it handed out.
    """

    def __init__(self, loader: SharedBatches) -> None:
        super().__init__()
        self.loader = loader
        self._begun = 0
        self._taken = 0

    def __len__(self) -> int:
        """Batches that are left, of all workers together."""
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """The batches of this worker, or all of them outside of any."""
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        self._taken, self._begun = self._begun, 0
        for batch in self.loader.shared(worker, workers, taken=self._taken):
            self._taken += 1
            yield {name: as_tensor(values, widen=False) for name, values in batch.items()}

    def state_dict(self) -> dict[str, Any]:
        """How many batches this worker handed out, and of what."""
        return {"taken": self._taken, "loader": self.loader.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the next iteration behind as many. Raises ConfigError for a loader of other rows."""
        self.loader.load_state_dict(state["loader"])
        self._begun = int(state["taken"])
