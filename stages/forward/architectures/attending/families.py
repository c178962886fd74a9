"""Table of the families whose layers all attend: importing the modules of this folder registers them.

Border: never imports torch.
"""

from . import (  # noqa: F401 - their decorators `@family` fill ATTENDING
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
