"""How a configuration is understood: what the model is, without its weights.

Prints:

    llama 6 192 6
    166 hook points
"""

from mizarr.stages.forward.models.source import ModelSource

config = ModelSource("specimen").config
print(config.model_type, config.num_layers, config.hidden_size, config.attention_heads)
print(len(config.hook_points), "hook points")
