"""Standard tasks for circuit discovery, generated for any tokenizer: pairs of equal length, one-token
answers.
"""
