"""What a dictionary is made of: its files, its layout, the features of one layer."""
