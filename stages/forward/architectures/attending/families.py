"""Every family whose layers all attend: the modules of this folder, each of which enters its families.

Border: never imports torch.
"""

from __future__ import annotations

from . import (
    bert,
    cohere,
    deberta,
    deepseek,
    exaone_hunyuan_ernie,
    gemma,
    glm,
    gpt,
    granite,
    llama,
    mistral,
    mixtures,
    modernbert,
    olmo,
    opt_bloom_falcon,
    qwen,
)
from .builders import ATTENDING

__all__ = ["ATTENDING", "LINEAGES"]

LINEAGES = (
    *(llama, qwen, mistral, gemma, olmo, granite, cohere, glm, deepseek, exaone_hunyuan_ernie, mixtures),
    *(gpt, opt_bloom_falcon, bert, deberta, modernbert),
)
"""Modules of families, which enter them in `ATTENDING` when they are imported."""
