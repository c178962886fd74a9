"""How mizarr shows text to people: HTML in notebooks, text in terminals."""
