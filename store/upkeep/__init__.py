"""Maintenance of a store: verify, quarantine, garbage collection, copying, lineage, annotations.

Garbage collection marks and sweeps. Reference counts would be wrong after a crash, and marking reads only a
few small files.
"""
