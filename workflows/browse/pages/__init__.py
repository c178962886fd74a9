"""The pages, one file per kind: functions from a snapshot of the store to a `Page`, for server and files."""
