"""An `ActivationLoader` as a torch dataset, for a DataLoader with any number of workers.

    loader = ActivationLoader(states, batch=4096, epochs=4)
    for batch in DataLoader(loader.to_torch(), batch_size=None, num_workers=2):
        batch["resid_post"]                          # float32 tensor [row, layer, hidden]

The dataset makes the batches, and `batch_size=None` tells torch to make none of its own. A DataLoader takes
from its workers in turn, so batches come in the loader's order whatever the number of workers. A training
that took `n` batches continues with `loader.position = n`. Each worker has its own buffers, for its share of
the rows.

Border: torch's dataset protocol; the loader decides rows and order.
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
    """Protocol of sources whose batches several DataLoader workers share, such as `ActivationLoader`."""

    def __len__(self) -> int:
        """Number of remaining batches."""
        ...

    def shared(
        self, worker: int, workers: int, *, taken: int = 0
    ) -> Iterator[dict[str, npt.NDArray[np.generic]]]:
        """Batches that one worker makes.

        Arguments:
            worker: Number of the worker, from 0.
            workers: Number of workers.
            taken: Number of batches of this worker to skip at the beginning.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """The position, as values that `load_state_dict` restores."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> Any:
        """Continue at the position in a `state_dict`."""
        ...


class ActivationDataset(IterableDataset[dict[str, Tensor]]):
    """Batches of a loader as tensors, from its position on; in a DataLoader worker, that worker's share.

    `state_dict` and `load_state_dict` follow the protocol of torchdata's StatefulDataLoader: they count the
    batches that this worker has returned.
    """

    def __init__(self, loader: SharedBatches) -> None:
        super().__init__()
        self.loader = loader
        # Batches of this worker to skip in the next iteration, and those returned in the current one.
        self._restored = 0
        self._taken = 0

    def __len__(self) -> int:
        """Number of remaining batches, over all workers."""
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Batches of this worker; all batches in the main process."""
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        # A restored position applies to the next iteration only.
        self._taken, self._restored = self._restored, 0
        for batch in self.loader.shared(worker, workers, taken=self._taken):
            # Before the yield: a state saved while the batch is used must count it.
            self._taken += 1
            # Not widened here: the loader's dtype= has decided, and a stored dtype is to stay.
            yield {name: as_tensor(values, widen=False) for name, values in batch.items()}

    def state_dict(self) -> dict[str, Any]:
        """Number of batches this worker has returned, and the state of the loader."""
        return {"taken": self._taken, "loader": self.loader.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Skip the batches of a `state_dict` in the next iteration.

        Raises:
            ConfigError: The loader has other rows, or another order.
        """
        self.loader.load_state_dict(state["loader"])
        self._restored = int(state["taken"])
