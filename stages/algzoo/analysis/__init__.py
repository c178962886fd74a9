"""Analyses of AlgZoo networks: ablation, linear regions, roles of neurons, exact accuracy, surprise."""
