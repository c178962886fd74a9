"""A dictionary of features: cross-layer or per-layer transcoders, or a sparse autoencoder, from any format.

    clt = Dictionary.from_pretrained("mntss/clt-llama-3.2-1b-524k")
    cache = model.forward(prompt, HookSpec().capture(*clt.read_hooks))
    active = clt.encode({layer: cache[clt.read_hook(layer)][0] for layer in clt.layers})

Kinds: "clt" (Lindsey et al. 2025, "Circuit Tracing": a feature reads one layer and writes to it and all later
ones), "plt" (a transcoder per layer, Dunefsky et al. 2024), "sae" (reads and writes one place), "crosscoder"
(Lindsey et al. 2024: reads and writes several layers, or models, at once; crosscoder.py). Where features read
and write comes from the files' own configuration, never from their layout.

Border: activations by layer in, features out; runs no model. Making one reads headers only, without torch;
weights are mapped when a layer is first used.

Axes: layer, position, feature; d_in, d_out = widths read and written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...pipeline.ambient import plain_torch
from ...pipeline.pinned import FileResource, OpenResource
from ...store.arrays import as_count, as_index, require_kind, shown
from ...store.display import html
from ...store.errors import DictionaryError, ModelNotFound, SourceChanged, WeightsError
from ..forward.architectures.points import BY_NAME, HookPoint
from .formats.table import open_files
from .layers.active import Active
from .layers.files import DictionaryFiles, DictionaryReference, resolve
from .layers.layout import CrosscoderPlace, DictionaryLayout, FeatureId, models_of, told
from .layers.names import require_module_output

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..forward.architectures.architecture import Architecture
    from .layers.layer import LayerFeatures

__all__ = ["Dictionary", "DictionaryInMemory", "StoredDictionary"]

BLOCK_BYTES = 1 << 26
"""Of decoder rows gathered at a time."""


class Dictionary:
    """Features of a model's layers; see the module's docstring. Made by `from_pretrained`, or by a format."""

    def __init__(
        self,
        files: DictionaryFiles,
        layout: DictionaryLayout,
        open_layer: Callable[[int], LayerFeatures],
        content: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        """open_layer: the features that read a layer, mapped; called once per layer. content: what the
        weights of a dictionary without files are now, as plain values."""
        self.files, self.layout = files, layout
        self._open_layer, self._content = open_layer, content
        self._opened: dict[int, LayerFeatures] = {}
        self._elsewhere: dict[str, Dictionary] = {}
        self.device: torch.device | str = "cpu"
        self.reference = files.name

    @classmethod
    @plain_torch()
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        read: str | None = None,
        write: str | None = None,
        device: torch.device | str = "cpu",
    ) -> Dictionary:
        """A dictionary from a local directory or a cached hub repository, in any supported format.

        name: "specimen/clt", directory, or "org/repo[/subfolder][@revision]", also with the next two behind
        it, "NAME?read=HOOK&write=HOOK". read, write: names of hook points ("hook_resid_mid"; with their
        layer, "blocks.3.hook_resid_mid", where files do not say that either) in place of those in the files.
        device: where arithmetic is done; weights stay mapped from disk.
        Raises ModelNotFound, or DictionaryError for a layout nobody knows or files that contradict each
        other.
        """
        reference = DictionaryReference.parse(name, read, write)
        files = resolve(reference.name)
        found = cls(*open_files(files, read=reference.read, write=reference.write))
        found.reference, found.device = str(reference), device
        return found

    def __repr__(self) -> str:
        it = self.layout
        return f"Dictionary({self.name!r}: {it.kind}, {len(it.layers)} x {it.n_features} features)"

    def _repr_html_(self) -> str:
        """For a notebook: kind, sizes, and where features read and write, layer by layer."""
        it = self.layout
        facts = [
            ("kind", it.kind),
            ("format", it.format),
            ("made for", it.model_name or "not said"),
            ("features of a layer", f"{it.n_features:,}"),
            ("width read, written", f"{it.d_in:,}, {it.d_out:,}"),
            ("linear skip", "yes" if it.has_skip else "no"),
            ("files", len(it.files)),
        ]
        rows: list[tuple[object, ...]] = [
            (layer, self.read_hook(layer), ", ".join(str(self.write_hook(m)) for m in self.targets(layer)))
            for layer in (() if self.places else self.layers)
        ]
        rows += [(self.layers[0], place, place) for place in self.places]
        held = html.table(["layer", "reads", "writes"], rows, right=[0])
        body = html.table(["", ""], facts) + html.details(f"{len(self.layers)} layers", held)
        return html.shown(f"Dictionary {self.name}", body)

    # -- what it is

    @property
    def name(self) -> str:
        """As it was asked for, with the hook points the caller said: opens it again."""
        return self.reference

    @property
    def kind(self) -> str:
        """ "clt", "plt", "sae" or "crosscoder"."""
        return self.layout.kind

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers that are read, ascending."""
        return self.layout.layers

    @property
    def n_features(self) -> int:
        """Features of each layer: all have as many."""
        return self.layout.n_features

    @property
    def d_in(self) -> int:
        """Width of what is read."""
        return self.layout.d_in

    @property
    def d_out(self) -> int:
        """Width of what is written."""
        return self.layout.d_out

    @property
    def model_name(self) -> str | None:
        """The model it says it was made for."""
        return self.layout.model_name

    @property
    def identity(self) -> str:
        """Digest of the content of its files, of where it reads and writes, and of the settings that change
        numbers: part of every result's key. Of a dictionary in memory: of its weights as they are now.
        """
        return self._of_files if self._content is None else self._digest(self._content())

    @cached_property
    def _of_files(self) -> str:
        return self._digest({})

    def _digest(self, content: Mapping[str, Any]) -> str:
        from ...store.digest import digest

        it = self.layout
        files = self.files.digest(it.files)
        return digest("features", files, it.read, it.write, {**it.settings, **content})

    def _require_unedited(self, anew: Dictionary) -> None:
        """Raise SourceChanged where an opened layer is not as in the files."""
        from ..forward.models.fingerprint import fingerprint

        for layer, features in list(self._opened.items()):
            edited = fingerprint(features).first_difference(fingerprint(anew.layer(layer)))
            if edited is not None:
                raise SourceChanged(
                    f"expected the weights of {self.name} as they are in its files, found {edited} of layer "
                    f"{layer} edited in memory; write an edited dictionary to a folder of its own, and open "
                    "that"
                )

    def as_resource(self, device: str | None = None) -> StoredDictionary | DictionaryInMemory:
        """What nodes take: its name and identity, and where to compute, by default a GPU if there is one.
        Reads the weights of opened layers twice, 8 ms per 100 MB each time. Raises SourceChanged for weights
        that were edited in memory, as nodes read those of the files."""
        if self._content is not None:
            return DictionaryInMemory(self, self.identity)
        untouched = self._copy()
        if self._opened:
            self.files.pinned.check()
            self._require_unedited(untouched)
            untouched = self._copy()
        opened = OpenResource(untouched, self.files.pinned)
        return StoredDictionary(self.name, self.identity, device).opened_as(opened)

    def _copy(self) -> Dictionary:
        """Copy of this dictionary with tensors of its own, which no user can edit."""
        copy = Dictionary(self.files, self.layout, self._open_layer)
        copy.reference, copy.device = self.reference, self.device
        return copy

    def on(self, device: torch.device | str | None) -> Dictionary:
        """This dictionary with computation on a device (None: a GPU if there is one, else the CPU)."""
        if device is None:
            import torch

            device = "cuda" if torch.cuda.is_available() else "cpu"
        if str(device) == str(self.device):
            return self
        if str(device) not in self._elsewhere:
            copy = self._elsewhere[str(device)] = self._copy()
            copy.device = device
        return self._elsewhere[str(device)]

    @property
    def places(self) -> tuple[CrosscoderPlace, ...]:
        """Where the features of a crosscoder read and write, in the order of their rows; else none."""
        return self.layout.places

    def reads(self, layers: Sequence[int] | None = None) -> tuple[tuple[HookPoint, ...], ...]:
        """What is captured to encode some layers (default: all), of each model that is read: one, but for
        crosscoders of several.
        """
        if not self.places:
            return (tuple(map(self.read_hook, self.layers if layers is None else layers)),)
        for layer in layers or ():
            self._own(layer)
        found: dict[int, list[HookPoint]] = {}
        for model, place in zip(models_of(self.places), self.places, strict=True):
            found.setdefault(model, []).append(HookPoint.parse(place.hook))
        return tuple(map(tuple, found.values()))

    def require_models(self, names: Sequence[str]) -> None:
        """Raise DictionaryError unless so many models are read, and none is named in the place of another."""
        models = dict(zip(models_of(self.places), (place.model for place in self.places), strict=True))
        known = list(models.values()) or [self.model_name or "one model"]
        if len(names) != len(known):
            raise DictionaryError(
                f"expected {len(known)} model{'s' if len(known) > 1 else ''} for {self.name} "
                f"({', '.join(known)}), found {len(names)} ({', '.join(names)}); "
                f"{'name the second with against=' if len(known) == 2 else 'give states of each'}"
            )
        swapped = [n for n, name in enumerate(names) if name in known and name != known[n]]
        if swapped:
            raise DictionaryError(
                f"expected the models of {self.name} in its order, {', '.join(known)}, found "
                f"{', '.join(names)}; swap them"
            )

    def read_hook(self, layer: int) -> HookPoint:
        """Where the features of a layer read. DictionaryError for a crosscoder's, which read several places
        at once: whoever asks has one in mind.
        """
        if self.places:
            raise DictionaryError(
                f"expected features that read one layer, found the crosscoder {self.name}, whose features "
                f"read {len(self.places)} places at once; encode a corpus with it (encode_corpus, "
                "feature_pages), or take another dictionary"
            )
        return _point(self.layout.read, self._own(layer))

    def write_hook(self, layer: int) -> HookPoint:
        """Where features write at a layer. DictionaryError for those that write to several models."""
        if max(models_of(self.places), default=0):
            raise DictionaryError(
                f"expected features that write to one model, found the crosscoder {self.name}, whose "
                "features write to several; take a dictionary of one model"
            )
        return _point(self.layout.write, layer)

    @property
    def read_hooks(self) -> tuple[HookPoint, ...]:
        """Where all layers' features read."""
        return tuple(self.read_hook(layer) for layer in self.layers)

    @property
    def write_layers(self) -> tuple[int, ...]:
        """Layers that are written to, ascending."""
        return tuple(sorted({m for targets in self.layout.targets.values() for m in targets}))

    @property
    def write_hooks(self) -> tuple[HookPoint, ...]:
        """Where features write, at every layer they write to."""
        return tuple(self.write_hook(layer) for layer in self.write_layers)

    def targets(self, layer: int) -> tuple[int, ...]:
        """Layers that the features of `layer` write to."""
        return self.layout.targets[self._own(layer)]

    def require_fit(self, config: Architecture, model: str) -> None:
        """Raise DictionaryError unless layers and widths are those of a model."""
        last = max(self.write_layers)
        for hook in self.layout.modules:
            require_module_output(hook, config, model)
        if last >= config.num_layers:
            raise DictionaryError(
                f"{self.name} has features of layer {last}, {model} has layers 0 to {config.num_layers - 1}; "
                f"it was made for {self.model_name or 'another model'}"
            )
        for what, point, width in (
            ("read", self.layout.read, self.d_in),
            ("write", self.layout.write, self.d_out),
        ):
            expected = config.width(point)
            if expected != width:
                raise DictionaryError(
                    f"{self.name} has features that {what} {width} numbers at {_point(point, last)}, "
                    f"{model} has {expected} there; it was made for {self.model_name or 'another model'}"
                )

    # -- weights

    @plain_torch()
    def layer(self, layer: int) -> LayerFeatures:
        """The features that read a layer, with mapped weights."""
        if self._own(layer) not in self._opened:
            features = self._open_layer(layer)
            is_there = str(self.device) == "cpu"
            self._opened[layer] = features if is_there else replace(features, device=self.device)
        return self._opened[layer]

    def feature(self, feature: FeatureId | tuple[int, int] | str) -> FeatureId:
        """A feature this dictionary has, from (layer, index) or "L14:13043"; DictionaryError for another."""
        if isinstance(feature, FeatureId):
            found = feature
        else:
            found = FeatureId.parse(feature) if isinstance(feature, str) else _pair(feature)
        self._own(found.layer)
        if not 0 <= found.index < self.n_features:
            raise DictionaryError(
                f"expected a feature of layer {found.layer} from 0 to {self.n_features - 1}, found "
                f"{found.index}"
            )
        return found

    def decoder_vector(self, feature: FeatureId | tuple[int, int] | str, target: int | None = None) -> Tensor:
        """What one unit of a feature writes to layer `target` (default: its own): float32 [d_out].

        Raises DictionaryError for a feature there is not, or a layer it does not write to.
        """
        found = self.feature(feature)
        rows: Tensor = self.layer(found.layer).decoder_rows([found.index], target)
        return rows[0]

    # -- arithmetic

    @plain_torch()
    def encode(self, states: Mapping[int, Tensor], *, zero_positions: int = 0) -> Active:
        """Everything active in the states of one prompt.

        states: layer -> what features read there, [position, d_in]; of a crosscoder's layer the states of all
        its places in one row. zero_positions: this many first positions have no features; circuit-tracer
        leaves out 1, the token whose activations are out of all proportion.
        """
        import torch

        require_kind(
            states,
            Mapping,
            "states by layer",
            "write {3: states}, states of [position, d_in]",
            DictionaryError,
        )
        as_count(zero_positions, "zero_positions", least=0)
        if not states:
            raise DictionaryError(f"expected states of a layer, found none; {self.name} reads {self.layers}")
        for layer, each in states.items():
            if not isinstance(each, torch.Tensor):
                raise DictionaryError(
                    f"expected the states of layer {layer} as a tensor, found {shown(each)}; write "
                    "torch.as_tensor(states)"
                )
        parts = []
        for layer in sorted(states):
            position, feature, value = self.layer(layer).active(states[layer])
            kept = position >= zero_positions
            where = torch.full_like(position[kept], layer)
            parts.append((where, position[kept], feature[kept], value[kept]))
        return Active(*(torch.cat(column) for column in zip(*parts, strict=True)))

    @plain_torch()
    def reconstruct(self, active: Active, states: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """What features, biases and skips give at every written layer that was read: layer -> [position,
        d_out].

        active, states: as `encode` takes and gives them. A CLT's output at a layer is the sum of what all
        earlier layers' features write there.
        """
        import torch

        found: dict[int, Tensor] = {}
        for layer in sorted(states):
            y = torch.zeros(states[layer].shape[-2], self.d_out).to(active.value)
            for source in sorted(states):
                if layer in self.targets(source):
                    self._write(active, source, layer, y)
            found[layer] = self.layer(layer).finish(y, states[layer])
        return found

    def _write(self, active: Active, source: int, target: int, out: Tensor) -> None:
        """Add what the active features of one layer write to another; rows are gathered block by block."""
        here = (active.layer == source).nonzero().squeeze(1)
        for some in here.split(max(1, BLOCK_BYTES // (4 * self.d_out))):
            rows = self.layer(source).decoder_rows(active.feature[some], target).to(out)
            out.index_add_(0, active.position[some], active.value[some, None] * rows)

    def _own(self, layer: int) -> int:
        layer = as_index(layer, "layers", DictionaryError)
        if layer not in self.layout.targets:
            raise DictionaryError(f"{self.name} has features of {told(self.layers)}, found layer {layer!r}")
        return layer


def _pair(feature: Any) -> FeatureId:
    """A feature from (layer, index)."""
    if not isinstance(feature, Sequence) or isinstance(feature, bytes) or len(feature) != 2:
        raise DictionaryError(
            f"expected a feature as (layer, index), or as text such as L14:13043, found {shown(feature)}"
        )
    return FeatureId(*feature)


@dataclass(frozen=True)
class StoredDictionary(FileResource):
    """A dictionary in files as a pinned resource of nodes: the one of an identity.

    features: its identity. device: where it computes, None for a GPU if there is one; part of no key, as the
    name.
    """

    name: str
    features: str
    device: str | None = field(default=None, compare=False)

    def identity(self) -> dict[str, Any]:
        """What features read and write, and all that decides them."""
        layout = self._opened.value.layout
        return {"features": self.features, "read": layout.read, "write": layout.write}

    def require_fit(self, config: Architecture, model: str) -> None:
        """As `Dictionary.require_fit`."""
        self._opened.value.require_fit(config, model)

    def opened_anew(self) -> OpenResource:
        """The dictionary under the name. Raises SourceChanged unless it is the one of the identity."""
        try:
            found = Dictionary.from_pretrained(self.name)
            identity = found.identity
        except (DictionaryError, ModelNotFound, WeightsError, OSError) as error:
            raise SourceChanged(f"the files of {self.name} changed since it was opened: {error}") from error
        if identity != self.features:
            raise SourceChanged(
                f"expected the dictionary {self.name} as it was ({self.features[:12]}), found another "
                f"({identity[:12]}): it was replaced or edited meanwhile; open it anew"
            )
        return OpenResource(found, found.files.pinned)

    @property
    def opened(self) -> Dictionary:
        """The dictionary, for whoever checks the resource before anything computed with it is published."""
        dictionary: Dictionary = self._opened.value.on(self.device)
        return dictionary

    @contextmanager
    def open(self) -> Iterator[Dictionary]:
        """The dictionary. Raises SourceChanged as `check`, also behind the block."""
        with super().open():
            yield self.opened


@dataclass(frozen=True, eq=False)
class DictionaryInMemory:
    """A dictionary without files, such as one in training, as a pinned resource.

    features: its identity when a command was planned.
    """

    opened: Dictionary
    features: str

    def identity(self) -> dict[str, Any]:
        """See `StoredDictionary`."""
        layout = self.opened.layout
        return {"features": self.features, "read": layout.read, "write": layout.write}

    def require_fit(self, config: Architecture, model: str) -> None:
        """As `Dictionary.require_fit`."""
        self.opened.require_fit(config, model)

    def check(self) -> None:
        """Raise SourceChanged unless its weights are as they were."""
        if self.opened.identity != self.features:
            raise SourceChanged(
                f"expected the weights of {self.opened.name} as they were ({self.features[:12]}), found them "
                "edited meanwhile; start again with the dictionary as it is now"
            )

    @contextmanager
    def open(self) -> Iterator[Dictionary]:
        """The dictionary. Raises SourceChanged as `check`, also behind the block."""
        yield self.opened
        self.check()


def _point(kind: str, layer: int) -> HookPoint:
    """A kind at a layer; kinds outside the blocks, such as the embedding, have none."""
    return HookPoint(kind, layer if BY_NAME[kind].per_layer else None)
