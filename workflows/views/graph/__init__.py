"""View of attribution graphs: data for the page, drawing for figures, and notes on features."""
