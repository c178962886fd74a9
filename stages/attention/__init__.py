"""Analysis of attention patterns: summaries per prompt, statistics and detection scores per head."""
