"""What a model is without its weights: sizes, layers, hook points and the tensors it is made of. No torch."""
