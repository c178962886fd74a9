"""Pages of all features of a dictionary: the question, the files a browser opens, and the export."""
