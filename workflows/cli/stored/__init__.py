"""Commands on a store: list, show, browse, export, import, copy, merge, verify, pin, remove."""
