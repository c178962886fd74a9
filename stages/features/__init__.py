"""Features: sparse dictionaries that read a model's activations and write to them.

dictionary, layer, activations, scaling   what a dictionary is, and its arithmetic
formats and the modules it lists          files of transcoders and autoencoders as others write them
names                                     which hook point a file's name for one means here

Border: this room knows activations by hook point and never runs a model; importing it does not import torch.
"""
