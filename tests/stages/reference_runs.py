"""Full forwards of the reference implementation with one activation edited, for experiments to agree with.

Written on forward hooks of transformers' Llama and on nothing of ours. Activations are [head, position,
d_head] or [position, hidden], as ours without the batch axis; patterns are [head, query, key].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Edit = Callable[[torch.Tensor], torch.Tensor]


class Reference:
    """A Llama of transformers (eager attention) whose activations are read and edited by kind and layer."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def run(
        self, ids: Sequence[int], edits: Mapping[tuple[str, int], Edit] | None = None
    ) -> tuple[torch.Tensor, dict[tuple[str, int], torch.Tensor]]:
        """Logits of the last position [vocab], and the activations seen (after their edit)."""
        edits, seen, handles = edits or {}, {}, []

        def meet(kind: str, layer: int, x: torch.Tensor) -> torch.Tensor:
            if (kind, layer) in edits:
                x = edits[kind, layer](x.clone())
            seen[kind, layer] = x
            return x

        embed = self.model.model.embed_tokens
        handles.append(embed.register_forward_hook(lambda _m, _i, out: meet("embed", -1, out[0])[None]))
        for layer, block in enumerate(self.model.model.layers):
            handles += self._hooks(layer, block, meet, seen)
        with torch.no_grad():
            logits = self.model(torch.tensor([list(ids)]), output_attentions=True).logits[0, -1]
        for handle in handles:
            handle.remove()
        return logits, seen

    def _hooks(self, layer: int, block: Any, meet: Any, seen: dict[Any, torch.Tensor]) -> list[Any]:
        attention = block.self_attn
        size = attention.head_dim

        def split(x: torch.Tensor) -> torch.Tensor:
            return x[0].unflatten(-1, (-1, size)).transpose(0, 1)

        def merge(x: torch.Tensor) -> torch.Tensor:
            return x.transpose(0, 1).flatten(1)[None]

        def at_projection(kind: str) -> Any:
            return lambda _m, _i, out: merge(meet(kind, layer, split(out)))

        def at_attention(_module: Any, _inputs: Any, out: Any) -> Any:
            # The pattern is known only here; with it edited, values and projection are done once more.
            pattern = meet("pattern", layer, out[1][0])
            values = seen["v", layer].repeat_interleave(pattern.shape[0] // seen["v", layer].shape[0], 0)
            z = meet("z", layer, pattern @ values)
            added = meet("attn_out", layer, attention.o_proj(merge(z))[0])
            middle = meet("resid_mid", layer, seen["resid_pre", layer] + added)
            return ((middle - seen["resid_pre", layer])[None], out[1])

        return [
            block.register_forward_pre_hook(
                lambda _m, args: (meet("resid_pre", layer, args[0][0])[None], *args[1:])
            ),
            *[
                getattr(attention, f"{kind}_proj").register_forward_hook(at_projection(kind))
                for kind in ("q", "k", "v")
            ],
            attention.register_forward_hook(at_attention),
            block.mlp.register_forward_hook(lambda _m, _i, out: meet("mlp_out", layer, out[0])[None]),
            block.register_forward_hook(
                lambda _m, _i, out: (
                    meet("resid_post", layer, out[0])[None]
                    if isinstance(out, torch.Tensor)
                    else (meet("resid_post", layer, out[0][0])[None], *out[1:])
                )
            ),
        ]


def put(
    source: torch.Tensor, head: int | None, position: int | list[int] | None, key: int | None = None
) -> Edit:
    """An edit that overwrites one head (or all), positions (or all) and one key (or all) from `source`."""

    def edit(x: torch.Tensor) -> torch.Tensor:
        whole = slice(None)
        at = (whole if position is None else position,)
        if x.ndim == 3:
            at = (whole if head is None else head, *at, *([] if key is None else [key]))
        x[at] = source[at]
        return x

    return edit
