"""A specimen while it is trained, computed by the package's own forward pass.

The loop over layers runs under autograd, so that what is trained is what is served: this file holds the
parameters under the names a checkpoint has them by, and hands them to the network of the package. How they
begin is the business of each family (goose.py, mixtral.py).

Border: token ids and tensors; knows no text.

Axes: row, position, head, hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn

from mizarr.stages.forward.architectures.architecture import Architecture
from mizarr.stages.forward.architectures.points import BY_NAME
from mizarr.stages.forward.hooks.spec import BoundSpec, Capture, HookSpec
from mizarr.stages.forward.hooks.taps import RunTaps
from mizarr.stages.forward.hooks.wants import ALL_LOGITS
from mizarr.stages.forward.models.trainable import network_over
from mizarr.stages.forward.networks.loop import Network, through_layers
from mizarr.stages.forward.passes.plain import WholePrompts

from .network import Shape

__all__ = ["Served"]


class Served(nn.Module):
    """A model whose unembedding is its embedding, of an architecture of the package."""

    def __init__(self, shape: Shape, config: Architecture, begin: Callable[[str, tuple[int, ...]], Tensor]):
        """begin: a tensor's name in a checkpoint and its shape -> what it is before training."""
        super().__init__()
        self.shape, self.config = shape, config
        self.tensors = nn.ParameterDict()
        for name, size in config.tensors.shapes.items():
            # ParameterDict, like every module, has no names with dots.
            self.tensors[name.replace(".", "/")] = nn.Parameter(begin(name, size))

    def network(self) -> Network:
        """The network of the package over these parameters."""
        return network_over(self.config, lambda name: self.tensors[name.replace(".", "/")])

    def named_weights(self) -> dict[str, Tensor]:
        """Every parameter by its name in a checkpoint."""
        return {name.replace("/", "."): tensor for name, tensor in self.tensors.items()}

    def states(self, ids: Tensor) -> list[Tensor]:
        """The residual stream after the embedding and after each layer, [row, position, hidden] each."""
        captured = self._captured(ids, HookSpec().capture("hook_embed", "blocks.*.hook_resid_post"))
        return list(captured.values())

    def patterns(self, ids: Tensor) -> list[Tensor]:
        """The attention each layer amounts to, [row, head, query position, key position] each."""
        path = BY_NAME[self.config.attention_kind or "pattern"].path
        captured = self._captured(ids, HookSpec().capture(path.format("*")))
        return list(captured.values())

    def logits(self, state: Tensor) -> Tensor:
        """[..., vocabulary] of the last state, [..., hidden]."""
        network = self.network()
        return network.unembed(network.final_norm(state), ALL_LOGITS)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits [row, position, vocabulary] of ids [row, position]."""
        return self.logits(self.states(ids)[-1])

    def hub_config(self, dtype: str, bos: int, eos: int) -> dict[str, Any]:
        """See `Trained`."""
        raise NotImplementedError

    def untrained(self) -> Served:
        """One of its shape, as training begins."""
        raise NotImplementedError

    def holding(self, folder: Path) -> Self:
        """This network with the weights stored by `write_model`, in float32."""
        from safetensors.torch import load_file

        held = load_file(folder / "model.safetensors")
        self.load_state_dict({f"tensors.{k.replace('.', '/')}": v.float() for k, v in held.items()})
        return self.eval()

    def _captured(self, ids: Tensor, hooks: HookSpec) -> dict[Capture, Tensor]:
        network, found = self.network(), dict[Capture, Tensor]()
        spec: BoundSpec = hooks.bind(self.config.hook_points)
        taps = RunTaps(spec, found.__setitem__)
        through_layers(network, ids, WholePrompts(ids.shape[1], taps, ids.device), taps)
        return found
