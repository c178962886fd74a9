"""Facts as inputs of workflows: records, pairs, and which facts a model knows."""
