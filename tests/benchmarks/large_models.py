"""A random Llama written tensor by tensor: as large as asked, in the memory of its largest tensor."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import numpy as np


def write_llama(
    folder: Path, *, layers: int, hidden: int, inner: int, heads: int, vocab: int, seed: int = 0
) -> int:
    """Writes config.json and model.safetensors in float32; returns the bytes of its weights."""
    from mizarr.stages.forward.architectures.known import from_hf_config
    from mizarr.stages.forward.networks.weights import expected_tensors

    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": vocab,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    shapes = expected_tensors(from_hf_config(config))
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    rng = np.random.default_rng(seed)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for shape in shapes.values():
            scale = 1.0 if len(shape) == 1 else shape[-1] ** -0.5
            file.write((rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)).data)
    return end
