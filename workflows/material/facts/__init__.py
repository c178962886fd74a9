"""Facts that questions are asked about: records, pairs, and which of them a model knows."""
