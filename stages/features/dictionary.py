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
"""Largest size in bytes of the decoder rows that `reconstruct` copies into memory at once."""


class Dictionary:
    """Transcoders, autoencoders or a crosscoder of one model: encodes activations to features and back.

    Usually opened with `Dictionary.from_pretrained`.

    Arguments:
        files: The files from which the dictionary was opened; they are checked for changes.
        layout: Kind of the dictionary, hook points read and written, layers and widths.
        open_layer: Function from a layer number to the features that read this layer, with memory-mapped
            weights; called once per layer.
        content: For a dictionary without files: function that returns values identifying its current
            weights, which enter `identity`. None for a dictionary in files.
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
        """Open a dictionary from a local directory or a cached Hugging Face repository, in any known format.

        Arguments:
            name: A directory, "org/repo[/subfolder][@revision]", or the example that is shipped,
                "specimen/clt"; hook points may be appended as "NAME?read=HOOK&write=HOOK".
            read: Hook point that features read, which replaces the one named in the files: "hook_resid_mid",
                or "blocks.3.hook_resid_mid" if the files name no layer. None: as the files say.
            write: Hook point that features write to, in the same form.
            device: Device that encodes and decodes; the weights stay memory-mapped and rows are copied.

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
            ("file format", layout.format),
            ("trained on the model", layout.model_name or "not stated"),
            ("features per layer", f"{layout.n_features:,}"),
            ("width of the states read, written", f"{layout.d_in:,}, {layout.d_out:,}"),
            ("linear skip connection", "yes" if layout.has_skip else "no"),
            ("number of files", len(layout.files)),
        ]
        rows: list[tuple[object, ...]] = [
            (layer, self.read_hook(layer), ", ".join(str(self.write_hook(m)) for m in self.targets(layer)))
            for layer in (() if self.places else self.layers)
        ]
        rows += [(self.layers[0], place, place) for place in self.places]
        layer_table = html.table(["layer", "hook point read", "hook points written"], rows, right=[0])
        body = html.table(["", ""], facts) + html.details(f"{len(self.layers)} layers", layer_table)
        return html.shown(f"Dictionary {self.name}", body)

    # -- properties of the layout

    @property
    def name(self) -> str:
        """Argument of `from_pretrained` that opens this dictionary again, with the same hook points."""
        return self.reference

    @property
    def kind(self) -> str:
        """Kind of the dictionary: "clt", "plt", "sae" or "crosscoder"; see the module's docstring."""
        return self.layout.kind

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers whose states the features read, ascending."""
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
        """Model of the training activations, by its name in the configuration file; None if unstated."""
        return self.layout.model_name

    @property
    def identity(self) -> str:
        """Digest of the files, the hook points and the settings that change numbers.

        It is part of the key of every result. A dictionary in memory has the digest of its current weights.
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
                    f"expected the dictionary {self.name} to have the weights that its files hold, found "
                    f"{edited} of layer {layer} edited in memory; write the edited dictionary to a new "
                    "folder with `export`, and open that folder"
                )

    def as_resource(self, device: str | None = None) -> StoredDictionary | DictionaryInMemory:
        """This dictionary in the form that plan nodes keep: opened again by name, checked for changes.

        The weights of layers in use are compared with the files, which takes 16 ms per 100 MB.

        Arguments:
            device: Device that encodes and decodes; None selects a GPU if there is one.

        Raises:
            SourceChanged: Weights were edited in memory, whereas a node would read the files.
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
        """This dictionary with its arithmetic on a device; None selects a GPU, or the CPU without one."""
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
        """Models and hook points that a crosscoder reads, in the order of its tensors; else empty."""
        return self.layout.places

    def reads(self, layers: Sequence[int] | None = None) -> tuple[tuple[HookPoint, ...], ...]:
        """Hook points that must be captured to encode some layers: one tuple per model that is read.

        Only a crosscoder of several models reads more than one model. A crosscoder reads all of its hook
        points whichever layers are named.

        Arguments:
            layers: Layers to encode; None for all.
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
        """Check the number and the order of the models whose states are to be encoded.

        Arguments:
            names: Names of the models, in the order in which their states will be given.

        Raises:
            DictionaryError: The number of models is wrong, or models it was trained on are in another order.
        """
        models = dict(zip(models_of(self.places), (place.model for place in self.places), strict=True))
        expected = list(models.values()) or [self.model_name or "one model"]
        if len(names) != len(expected):
            raise DictionaryError(
                f"expected {len(expected)} model{'s' if len(expected) > 1 else ''} for the dictionary "
                f"{self.name} ({', '.join(expected)}), found {len(names)} ({', '.join(names)}); "
                + (
                    "name the second model with against="
                    if len(expected) == 2
                    else "give the states of each of its models"
                )
            )
        # Unknown names are accepted, since a model may have been moved or renamed.
        swapped = [n for n, name in enumerate(names) if name in expected and name != expected[n]]
        if swapped:
            raise DictionaryError(
                f"expected the models of the dictionary {self.name} in the order of its training, "
                f"{', '.join(expected)}, found {', '.join(names)}; swap the two models"
            )

    def read_hook(self, layer: int) -> HookPoint:
        """Hook point that the features of a layer read.

        Raises:
            DictionaryError: No feature reads this layer, or the dictionary is a crosscoder, whose features
                read several hook points at once.
        """
        if self.places:
            raise DictionaryError(
                f"expected a dictionary whose features read one layer, found the crosscoder {self.name}, "
                f"whose features read {len(self.places)} hook points at once; use it with encode_corpus or "
                "feature_pages, or choose a transcoder or an autoencoder"
            )
        return _hook_point(self.layout.read, self._checked_layer(layer))

    def write_hook(self, layer: int) -> HookPoint:
        """Hook point that features write to at a layer.

        Raises:
            DictionaryError: It is a crosscoder that writes to several models.
        """
        if max(models_of(self.places), default=0):
            raise DictionaryError(
                f"expected a dictionary whose features write to one model, found the crosscoder {self.name}, "
                "whose features write to several models; choose a dictionary of one model"
            )
        # Not `_checked_layer`: features may write to layers that no feature reads.
        return _hook_point(self.layout.write, layer)

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
        trained_on = self.model_name or "which its files do not name"
        for hook in self.layout.modules:
            require_module_output(hook, config, model)
        if last >= config.num_layers:
            raise DictionaryError(
                f"the dictionary {self.name} has features of layer {last}, but {model} has only layers 0 to "
                f"{config.num_layers - 1}; use the model it was trained on, {trained_on}"
            )
        for verb, point, width in (
            ("read", self.layout.read, self.d_in),
            ("write", self.layout.write, self.d_out),
        ):
            expected = config.width(point)
            if expected != width:
                raise DictionaryError(
                    f"features of the dictionary {self.name} {verb} states of width {width} at "
                    f"{_hook_point(point, last)}, but {model} has width {expected} there; use the model it "
                    f"was trained on, {trained_on}"
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
            feature_id = FeatureId.parse(feature) if isinstance(feature, str) else _from_pair(feature)
        self._checked_layer(feature_id.layer)
        if not 0 <= feature_id.index < self.n_features:
            raise DictionaryError(
                f"expected a feature number from 0 to {self.n_features - 1} in layer {feature_id.layer} of "
                f"the dictionary {self.name}, found {feature_id.index}"
            )
        return feature_id

    def decoder_vector(self, feature: FeatureId | tuple[int, int] | str, target: int | None = None) -> Tensor:
        """Decoder vector of a feature: what an activation of 1 adds to the written layer, float32 [d_out].

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
        """Features that are active in the states of one prompt, sorted by layer, position and feature.

        Arguments:
            states: By layer, the states [position, d_in] that features read; for a crosscoder, the states at
                all its hook points concatenated into one row.
            zero_positions: Number of positions at the start whose features are left out. circuit-tracer uses
                1, because activations at the first token are far larger than elsewhere.
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
            raise DictionaryError(
                f"expected the states of at least one layer, found none; the dictionary {self.name} reads "
                f"{layers_text(self.layers)}"
            )
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
        """Reconstruction of the written states from active features, {layer: [position, d_out]}.

        Each layer of `states` gets the sum of its decoder bias, its skip connection, and activation times
        decoder vector over all features that write to it (in a CLT, also features of earlier layers).

        Arguments:
            active: Active features, as `encode` returns them.
            states: The states that were encoded, {layer: [position, d_in]}.
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
        """Add to `out` [position, d_out] what the active features of layer `source` write to `target`."""
        # In blocks: the decoder rows of all active features would need (their number x d_out) floats at once.
        indices = (active.layer == source).nonzero().squeeze(1)
        for block in indices.split(max(1, BLOCK_BYTES // (4 * self.d_out))):
            decoders = self.layer(source).decoder_rows(active.feature[block], target).to(out)
            out.index_add_(0, active.position[block], active.value[block, None] * decoders)

    def _checked_layer(self, layer: int) -> int:
        """The layer number as an int; DictionaryError if no feature reads that layer."""
        layer = as_index(layer, "layers", DictionaryError)
        if layer not in self.layout.targets:
            raise DictionaryError(
                f"expected a layer that the dictionary {self.name} reads ({layers_text(self.layers)}), found "
                f"layer {layer!r}"
            )
        return layer


def _from_pair(feature: Any) -> FeatureId:
    """Feature id from a sequence (layer, index); DictionaryError for anything else."""
    if not isinstance(feature, Sequence) or isinstance(feature, bytes) or len(feature) != 2:
        raise DictionaryError(
            f"expected a feature as (layer, index), or as text such as L14:13043, found {shown(feature)}"
        )
    return FeatureId(*feature)


@dataclass(frozen=True)
class StoredDictionary(FileResource):
    """A dictionary in files, in the form that plan nodes keep: opened by name, checked against a digest."""

    name: str
    """Argument of `Dictionary.from_pretrained`; excluded from keys."""
    features: str
    """Digest that the opened dictionary must have (`Dictionary.identity`)."""
    device: str | None = field(default=None, compare=False)
    """Device that encodes and decodes, excluded from keys; None selects a GPU, or the CPU without one."""

    def identity(self) -> dict[str, Any]:
        """Digest and hook points of the dictionary, which enter the keys of results computed with it."""
        layout = self._opened.value.layout
        return {"features": self.features, "read": layout.read, "write": layout.write}

    def require_fit(self, config: Architecture, model: str) -> None:
        """Raise DictionaryError if the model lacks a layer or width; see `Dictionary.require_fit`."""
        self._opened.value.require_fit(config, model)

    def opened_anew(self) -> OpenResource:
        """Open the dictionary by name, without using a copy that is open already.

        Raises:
            SourceChanged: Its files are unreadable, or their digest differs from `features`.
        """
        try:
            dictionary = Dictionary.from_pretrained(self.name)
            identity = dictionary.identity
        except (DictionaryError, ModelNotFound, WeightsError, OSError) as error:
            raise SourceChanged(
                f"the files of the dictionary {self.name} changed since it was opened: {error}"
            ) from error
        if identity != self.features:
            raise SourceChanged(
                f"expected the dictionary {self.name} to have the digest {self.features[:12]}, found "
                f"{identity[:12]}: its files were changed after it was opened; open it again"
            )
        return OpenResource(dictionary, dictionary.files.pinned)

    @property
    def opened(self) -> Dictionary:
        """The dictionary on its device, without the check for changed files that `open` does."""
        dictionary: Dictionary = self._opened.value.on(self.device)
        return dictionary

    @contextmanager
    def open(self) -> Iterator[Dictionary]:
        """Context that gives the dictionary; SourceChanged if its files change before or in the block."""
        with super().open():
            yield self.opened


@dataclass(frozen=True, eq=False)
class DictionaryInMemory:
    """Dictionary without files, such as a dictionary in training, for plan nodes."""

    opened: Dictionary
    """The dictionary itself."""
    features: str
    """Digest of its weights (`Dictionary.identity`) when the plan was made; they must not change later."""

    def identity(self) -> dict[str, Any]:
        """Digest and hook points of the dictionary, which enter the keys of results computed with it."""
        layout = self.opened.layout
        return {"features": self.features, "read": layout.read, "write": layout.write}

    def require_fit(self, config: Architecture, model: str) -> None:
        """Raise DictionaryError if the model lacks a layer or width; see `Dictionary.require_fit`."""
        self.opened.require_fit(config, model)

    def check(self) -> None:
        """Raise SourceChanged if the weights changed since the plan was made."""
        if self.opened.identity != self.features:
            raise SourceChanged(
                f"the weights of the dictionary {self.opened.name} were edited after the computation was "
                f"planned (their digest was {self.features[:12]}); start the computation again"
            )

    @contextmanager
    def open(self) -> Iterator[Dictionary]:
        """Context that gives the dictionary; SourceChanged if its weights changed during the block."""
        yield self.opened
        self.check()


def _hook_point(kind: str, layer: int) -> HookPoint:
    """Hook point of a kind ("resid_mid") in a layer; kinds outside the blocks ("embed") get no layer."""
    return HookPoint(kind, layer if BY_NAME[kind].per_layer else None)
