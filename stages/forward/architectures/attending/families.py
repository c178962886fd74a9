"""Every family whose layers all attend: the modules of this folder, each of which enters its families.

Border: never imports torch.
"""

from . import (  # noqa: F401 - to be imported is to enter their families
    bert,
    cohere_glm,
    deepseek,
    exaone_hunyuan_ernie,
    gemma,
    gpt,
    llama,
    mistral,
    mixtures,
    modernbert,
    olmo_granite,
    opt_bloom_falcon,
    qwen,
)
from .builders import ATTENDING

__all__ = ["ATTENDING"]
