"""Families whose layers have other mixers than attention alone: one function `config.json` ->
`ComposedArchitecture` per family, in a `FamilyReader`."""
