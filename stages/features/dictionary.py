"""A dictionary of features: cross-layer or per-layer transcoders, or a sparse autoencoder, from any format.

    clt = Dictionary.from_pretrained("mntss/clt-llama-3.2-1b-524k")
    cache = model.forward(prompt, HookSpec().capture(*clt.read_hooks))
    active = clt.encode({layer: cache[clt.read_hook(layer)][0] for layer in clt.layers})

Kinds: "clt" (Lindsey et al. 2025, "Circuit Tracing": a feature reads one layer and writes to that and all
later layers), "plt" (a transcoder per layer, Dunefsky et al. 2024), "sae" (reads and writes one hook point),
"crosscoder" (Lindsey et al. 2024: reads and writes several layers, or models, at once; crosscoder.py). The
hook points that features read and write are taken from the configuration in the files, never guessed from
their layout.

Border: activations by layer in, features out; runs no model. Opening a dictionary reads only headers, without
torch; the weights of a layer are memory-mapped when it is first used.

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
from .layers.layer import layers_text
from .layers.layout import CrosscoderPlace, DictionaryLayout, FeatureId, models_of
from .layers.names import require_module_output

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..forward.architectures.architecture import Architecture
    from .layers.layer import LayerFeatures

__all__ = ["Dictionary", "DictionaryInMemory", "StoredDictionary"]

BLOCK_BYTES = 1 << 26
"""Bytes of decoder rows gathered at a time."""


class Dictionary:
    """Features of a model's layers; see the module's docstring. Opened by `from_pretrained`, or by a format.

    Arguments:
        files: Files of the dictionary.
        layout: Kind, hook points, layers and sizes.
        open_layer: Returns the features that read a layer, memory-mapped; called once per layer.
        content: For a dictionary without files: returns the digest of its current weights as plain values.
    """

    def __init__(
        self,
        files: DictionaryFiles,
        layout: DictionaryLayout,
        open_layer: Callable[[int], LayerFeatures],
        content: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        self.files, self.layout = files, layout
        self._open_layer, self._content = open_layer, content
        self._opened: dict[int, LayerFeatures] = {}
        self._by_device: dict[str, Dictionary] = {}
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
        """Open a dictionary from a local directory or a cached hub repository, in any supported format.

        Arguments:
            name: "specimen/clt", a directory, or "org/repo[/subfolder][@revision]"; hook points may be
                appended as "NAME?read=HOOK&write=HOOK".
            read: Hook point that features read, in place of that in the files: "hook_resid_mid", or with the
                layer "blocks.3.hook_resid_mid" if the files do not state the layer either.
            write: Hook point that features write to, likewise.
            device: Device of the arithmetic; weights stay mapped from disk.

        Raises:
            ModelNotFound: There is no such directory or cached repository.
            DictionaryError: The format is unknown, or the files contradict each other.
        """
        reference = DictionaryReference.parse(name, read, write)
        files = resolve(reference.name)
        dictionary = cls(*open_files(files, read=reference.read, write=reference.write))
        dictionary.reference, dictionary.device = str(reference), device
        return dictionary

    def __repr__(self) -> str:
        layout = self.layout
        return (
            f"Dictionary({self.name!r}: {layout.kind}, {len(layout.layers)} x {layout.n_features} features)"
        )

    def _repr_html_(self) -> str:
        """Summary for a notebook: kind, sizes, and the hook points read and written by each layer."""
        layout = self.layout
        facts = [
            ("kind", layout.kind),
            ("format", layout.format),
            ("made for", layout.model_name or "not stated"),
            ("features of a layer", f"{layout.n_features:,}"),
            ("width read, written", f"{layout.d_in:,}, {layout.d_out:,}"),
            ("linear skip", "yes" if layout.has_skip else "no"),
            ("files", len(layout.files)),
        ]
        rows: list[tuple[object, ...]] = [
            (layer, self.read_hook(layer), ", ".join(str(self.write_hook(m)) for m in self.targets(layer)))
            for layer in (() if self.places else self.layers)
        ]
        rows += [(self.layers[0], place, place) for place in self.places]
        layer_table = html.table(["layer", "reads", "writes"], rows, right=[0])
        body = html.table(["", ""], facts) + html.details(f"{len(self.layers)} layers", layer_table)
        return html.shown(f"Dictionary {self.name}", body)

    # -- properties of the layout

    @property
    def name(self) -> str:
        """Name under which it was opened, hook points chosen by the caller included; opens it again."""
        return self.reference

    @property
    def kind(self) -> str:
        """ "clt", "plt", "sae" or "crosscoder"."""
        return self.layout.kind

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers whose states are read, ascending."""
        return self.layout.layers

    @property
    def n_features(self) -> int:
        """Number of features per layer; the same for every layer."""
        return self.layout.n_features

    @property
    def d_in(self) -> int:
        """Width of the states that features read."""
        return self.layout.d_in

    @property
    def d_out(self) -> int:
        """Width of the states that features write."""
        return self.layout.d_out

    @property
    def model_name(self) -> str | None:
        """Model name in the configuration; None if absent."""
        return self.layout.model_name

    @property
    def identity(self) -> str:
        """Digest of the files, the hook points, and the settings that change numbers; part of every result's
        key.

        For a dictionary in memory, the digest of its current weights.
        """
        return self._files_identity if self._content is None else self._digest(self._content())

    # Cached, unlike the identity of weights in memory: files are pinned, and a change of them is an error.
    @cached_property
    def _files_identity(self) -> str:
        return self._digest({})

    def _digest(self, content: Mapping[str, Any]) -> str:
        from ...store.digest import digest

        layout = self.layout
        files = self.files.digest(layout.files)
        return digest("features", files, layout.read, layout.write, {**layout.settings, **content})

    def _require_unedited(self, reopened: Dictionary) -> None:
        """Raise SourceChanged if the weights of an opened layer differ from those in the files."""
        from ..forward.models.fingerprint import fingerprint

        for layer, features in list(self._opened.items()):
            edited = fingerprint(features).first_difference(fingerprint(reopened.layer(layer)))
            if edited is not None:
                raise SourceChanged(
                    f"expected the weights of {self.name} as they are in its files, found {edited} of layer "
                    f"{layer} edited in memory; write an edited dictionary to a folder of its own, and open "
                    "that"
                )

    def as_resource(self, device: str | None = None) -> StoredDictionary | DictionaryInMemory:
        """This dictionary as a pinned resource for nodes: name, identity, and device (None: a GPU if there is
        one).

        Reads the weights of opened layers twice, 8 ms per 100 MB each time.

        Raises:
            SourceChanged: Weights were edited in memory; nodes would read those of the files.
        """
        if self._content is not None:
            return DictionaryInMemory(self, self.identity)
        untouched = self._copy()
        if self._opened:
            # Checked first: files that changed would look like edited weights.
            self.files.pinned.check()
            self._require_unedited(untouched)
            # The comparison opened layers of the first copy, which the resource would hold in memory.
            untouched = self._copy()
        # A copy of its own for nodes, because the user may edit the tensors of this object.
        opened = OpenResource(untouched, self.files.pinned)
        return StoredDictionary(self.name, self.identity, device).opened_as(opened)

    def _copy(self) -> Dictionary:
        """A copy with separate tensors, so that user edits cannot reach it."""
        copy = Dictionary(self.files, self.layout, self._open_layer)
        copy.reference, copy.device = self.reference, self.device
        return copy

    def on(self, device: torch.device | str | None) -> Dictionary:
        """This dictionary computing on another device; None selects a GPU, or the CPU without one."""
        if device is None:
            import torch

            device = "cuda" if torch.cuda.is_available() else "cpu"
        # Compared as text: "cuda" and torch.device("cuda") are the same device.
        if str(device) == str(self.device):
            return self
        # One copy per device, so that its layers are opened once.
        if str(device) not in self._by_device:
            copy = self._by_device[str(device)] = self._copy()
            copy.device = device
        return self._by_device[str(device)]

    @property
    def places(self) -> tuple[CrosscoderPlace, ...]:
        """Hook points of a crosscoder's models, in row order; empty for other kinds."""
        return self.layout.places

    def reads(self, layers: Sequence[int] | None = None) -> tuple[tuple[HookPoint, ...], ...]:
        """Hook points to capture for encoding some layers (None: all), as one tuple per model.

        Only a crosscoder of several models reads more than one model.
        """
        if not self.places:
            return (tuple(map(self.read_hook, self.layers if layers is None else layers)),)
        for layer in layers or ():
            self._checked_layer(layer)
        points_by_model: dict[int, list[HookPoint]] = {}
        for model, place in zip(models_of(self.places), self.places, strict=True):
            points_by_model.setdefault(model, []).append(HookPoint.parse(place.hook))
        return tuple(map(tuple, points_by_model.values()))

    def require_models(self, names: Sequence[str]) -> None:
        """Check the names of the models whose states are to be encoded.

        Raises:
            DictionaryError: The number of models is wrong, or known models are in another order.
        """
        models = dict(zip(models_of(self.places), (place.model for place in self.places), strict=True))
        expected = list(models.values()) or [self.model_name or "one model"]
        if len(names) != len(expected):
            raise DictionaryError(
                f"expected {len(expected)} model{'s' if len(expected) > 1 else ''} for {self.name} "
                f"({', '.join(expected)}), found {len(names)} ({', '.join(names)}); "
                f"{'name the second with against=' if len(expected) == 2 else 'give states of each'}"
            )
        # Unknown names are accepted, since a model may have been moved or renamed.
        swapped = [n for n, name in enumerate(names) if name in expected and name != expected[n]]
        if swapped:
            raise DictionaryError(
                f"expected the models of {self.name} in its order, {', '.join(expected)}, found "
                f"{', '.join(names)}; swap them"
            )

    def read_hook(self, layer: int) -> HookPoint:
        """Hook point that the features of a layer read.

        Raises:
            DictionaryError: It is a crosscoder, whose features read several hook points at once.
        """
        if self.places:
            raise DictionaryError(
                f"expected features that read one layer, found the crosscoder {self.name}, whose features "
                f"read {len(self.places)} places at once; encode a corpus with it (encode_corpus, "
                "feature_pages), or take another dictionary"
            )
        return _point(self.layout.read, self._checked_layer(layer))

    def write_hook(self, layer: int) -> HookPoint:
        """Hook point that features write to at a layer.

        Raises:
            DictionaryError: It is a crosscoder that writes to several models.
        """
        if max(models_of(self.places), default=0):
            raise DictionaryError(
                f"expected features that write to one model, found the crosscoder {self.name}, whose "
                "features write to several; take a dictionary of one model"
            )
        # Not `_checked_layer`: features may write to layers that no feature reads.
        return _point(self.layout.write, layer)

    @property
    def read_hooks(self) -> tuple[HookPoint, ...]:
        """Hook points that are read, one per layer."""
        return tuple(self.read_hook(layer) for layer in self.layers)

    @property
    def write_layers(self) -> tuple[int, ...]:
        """Layers that features write to, ascending."""
        return tuple(sorted({m for targets in self.layout.targets.values() for m in targets}))

    @property
    def write_hooks(self) -> tuple[HookPoint, ...]:
        """Hook points that features write to, one per written layer."""
        return tuple(self.write_hook(layer) for layer in self.write_layers)

    def targets(self, layer: int) -> tuple[int, ...]:
        """Layers that the features of `layer` write to."""
        return self.layout.targets[self._checked_layer(layer)]

    def require_fit(self, config: Architecture, model: str) -> None:
        """Check that a model has the layers and widths that this dictionary reads and writes.

        Arguments:
            config: Architecture of the model.
            model: Name of the model, for messages.

        Raises:
            DictionaryError: The model lacks a layer, a width differs, or a module's output is another value.
        """
        last = max(self.write_layers)  # features write to the layer they read, or to later ones
        for hook in self.layout.modules:
            require_module_output(hook, config, model)
        if last >= config.num_layers:
            raise DictionaryError(
                f"{self.name} has features of layer {last}, {model} has layers 0 to {config.num_layers - 1}; "
                f"it was made for {self.model_name or 'another model'}"
            )
        for verb, point, width in (
            ("read", self.layout.read, self.d_in),
            ("write", self.layout.write, self.d_out),
        ):
            expected = config.width(point)
            if expected != width:
                raise DictionaryError(
                    f"{self.name} has features that {verb} {width} numbers at {_point(point, last)}, "
                    f"{model} has {expected} there; it was made for {self.model_name or 'another model'}"
                )

    # -- weights

    @plain_torch()
    def layer(self, layer: int) -> LayerFeatures:
        """The features that read a layer, with memory-mapped weights."""
        if self._checked_layer(layer) not in self._opened:
            features = self._open_layer(layer)
            is_on_cpu = str(self.device) == "cpu"
            # Weights stay memory-mapped; only the rows in use are copied to the device of the arithmetic.
            self._opened[layer] = features if is_on_cpu else replace(features, device=self.device)
        return self._opened[layer]

    def feature(self, feature: FeatureId | tuple[int, int] | str) -> FeatureId:
        """Check that a feature exists, and return its id.

        Arguments:
            feature: A FeatureId, (layer, index), or text such as "L14:13043".

        Raises:
            DictionaryError: The layer or the index does not exist.
        """
        if isinstance(feature, FeatureId):
            feature_id = feature
        else:
            feature_id = FeatureId.parse(feature) if isinstance(feature, str) else _pair(feature)
        self._checked_layer(feature_id.layer)
        if not 0 <= feature_id.index < self.n_features:
            raise DictionaryError(
                f"expected a feature of layer {feature_id.layer} from 0 to {self.n_features - 1}, found "
                f"{feature_id.index}"
            )
        return feature_id

    def decoder_vector(self, feature: FeatureId | tuple[int, int] | str, target: int | None = None) -> Tensor:
        """Vector that one unit of a feature writes to a layer, float32 [d_out].

        Arguments:
            feature: A FeatureId, (layer, index), or text such as "L14:13043".
            target: Layer that is written; None for the feature's own layer.

        Raises:
            DictionaryError: There is no such feature, or it does not write to that layer.
        """
        feature_id = self.feature(feature)
        rows: Tensor = self.layer(feature_id.layer).decoder_rows([feature_id.index], target)
        return rows[0]

    # -- arithmetic

    @plain_torch()
    def encode(self, states: Mapping[int, Tensor], *, zero_positions: int = 0) -> Active:
        """All active features for the states of one prompt.

        Arguments:
            states: By layer, the states [position, d_in] that features read; for a crosscoder, the states of
                all its places side by side in one row.
            zero_positions: Number of first positions without features. circuit-tracer uses 1 and so leaves
                out the first token, whose activations are far larger than others.
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
        for layer, tensor in states.items():
            if not isinstance(tensor, torch.Tensor):
                raise DictionaryError(
                    f"expected the states of layer {layer} as a tensor, found {shown(tensor)}; write "
                    "torch.as_tensor(states)"
                )
        parts = []
        for layer in sorted(states):
            position, feature, value = self.layer(layer).active(states[layer])
            is_counted = position >= zero_positions
            layer_column = torch.full_like(position[is_counted], layer)
            parts.append((layer_column, position[is_counted], feature[is_counted], value[is_counted]))
        # Layers ascend, and `active` sorts by row and feature: the order that `Active` promises.
        return Active(*(torch.cat(column) for column in zip(*parts, strict=True)))

    @plain_torch()
    def reconstruct(self, active: Active, states: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Reconstructed states at every layer of `states` that is written: {layer: [position, d_out]}.

        The sum of active features' decoder vectors, biases and skips. The output of a CLT at a layer sums the
        features of all earlier layers.

        Arguments:
            active: Active features, as `encode` returns them.
            states: The states that were encoded.
        """
        import torch

        outputs: dict[int, Tensor] = {}
        for layer in sorted(states):
            # In the dtype and on the device of the activations (float64 states give float64).
            y = torch.zeros(states[layer].shape[-2], self.d_out).to(active.value)
            for source in sorted(states):
                if layer in self.targets(source):
                    self._write(active, source, layer, y)
            outputs[layer] = self.layer(layer).finish(y, states[layer])
        return outputs

    def _write(self, active: Active, source: int, target: int, out: Tensor) -> None:
        """Add the contribution of one layer's active features to `out` [position, d_out], block by block."""
        # Gathering all rows at once would need memory of active features x d_out.
        rows_of_layer = (active.layer == source).nonzero().squeeze(1)
        for block in rows_of_layer.split(max(1, BLOCK_BYTES // (4 * self.d_out))):
            rows = self.layer(source).decoder_rows(active.feature[block], target).to(out)
            out.index_add_(0, active.position[block], active.value[block, None] * rows)

    def _checked_layer(self, layer: int) -> int:
        """Validate a layer number; DictionaryError if no features read that layer."""
        layer = as_index(layer, "layers", DictionaryError)
        if layer not in self.layout.targets:
            raise DictionaryError(
                f"{self.name} has features of {layers_text(self.layers)}, found layer {layer!r}"
            )
        return layer


def _pair(feature: Any) -> FeatureId:
    """A feature id from (layer, index)."""
    if not isinstance(feature, Sequence) or isinstance(feature, bytes) or len(feature) != 2:
        raise DictionaryError(
            f"expected a feature as (layer, index), or as text such as L14:13043, found {shown(feature)}"
        )
    return FeatureId(*feature)


@dataclass(frozen=True)
class StoredDictionary(FileResource):
    """A dictionary in files as a pinned resource of nodes."""

    name: str
    """Reference that opens the dictionary; no key contains it."""
    features: str
    """Identity that the files must have (`Dictionary.identity`)."""
    device: str | None = field(default=None, compare=False)
    """Device for the arithmetic, contained in no key; None selects a GPU, or the CPU without one."""

    def identity(self) -> dict[str, Any]:
        """Identity and hook points, as they enter a key."""
        layout = self._opened.value.layout
        return {"features": self.features, "read": layout.read, "write": layout.write}

    def require_fit(self, config: Architecture, model: str) -> None:
        """As `Dictionary.require_fit`."""
        self._opened.value.require_fit(config, model)

    def opened_anew(self) -> OpenResource:
        """Open the dictionary by name.

        Raises:
            SourceChanged: Its files are unreadable or have another identity.
        """
        try:
            dictionary = Dictionary.from_pretrained(self.name)
            identity = dictionary.identity
        except (DictionaryError, ModelNotFound, WeightsError, OSError) as error:
            raise SourceChanged(f"the files of {self.name} changed since it was opened: {error}") from error
        if identity != self.features:
            raise SourceChanged(
                f"expected the dictionary {self.name} as it was ({self.features[:12]}), found another "
                f"({identity[:12]}): it was replaced or edited meanwhile; open it again"
            )
        return OpenResource(dictionary, dictionary.files.pinned)

    @property
    def opened(self) -> Dictionary:
        """The dictionary, for callers that check the resource themselves before they publish results."""
        dictionary: Dictionary = self._opened.value.on(self.device)
        return dictionary

    @contextmanager
    def open(self) -> Iterator[Dictionary]:
        """Context that gives the dictionary. Raises SourceChanged like `check`, before and after."""
        with super().open():
            yield self.opened


@dataclass(frozen=True, eq=False)
class DictionaryInMemory:
    """A pinned resource for a dictionary without files, such as a dictionary in training."""

    opened: Dictionary
    """The dictionary; its weights are checked, because there are no files that could be."""
    features: str
    """Its identity when the command was planned."""

    def identity(self) -> dict[str, Any]:
        """Identity and hook points, as they enter a key."""
        layout = self.opened.layout
        return {"features": self.features, "read": layout.read, "write": layout.write}

    def require_fit(self, config: Architecture, model: str) -> None:
        """As `Dictionary.require_fit`."""
        self.opened.require_fit(config, model)

    def check(self) -> None:
        """Raise SourceChanged if its weights changed since the command was planned."""
        if self.opened.identity != self.features:
            raise SourceChanged(
                f"expected the weights of {self.opened.name} as they were ({self.features[:12]}), found them "
                "edited meanwhile; start again with the dictionary as it is now"
            )

    @contextmanager
    def open(self) -> Iterator[Dictionary]:
        """Context that gives the dictionary. Raises SourceChanged like `check` after the block."""
        yield self.opened
        self.check()


def _point(kind: str, layer: int) -> HookPoint:
    """Hook point of this kind; kinds outside the blocks, such as the embedding, get no layer."""
    return HookPoint(kind, layer if BY_NAME[kind].per_layer else None)
