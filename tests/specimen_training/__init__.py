"""How the specimen was made: the small trained model that ships with the package, from raw text to its card.

data, network, muon -> train -> evaluate -> card; `train` and `card` are commands
(`python -m tests.specimen_training.train --help`).
Nothing here is imported by the rest of the package: the shipped files in `stages/forward/specimen/` are read
like any other model.
"""
