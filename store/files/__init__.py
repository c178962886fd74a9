"""Where a store's files lie: one seam (`folder.py`), and who keeps it: a local folder, or an object store."""

from .cache import cache_folder as cache_folder
from .folder import (
    DESCRIPTION as DESCRIPTION,
    THREADS as THREADS,
    Folder as Folder,
    ManifestFiles as ManifestFiles,
    Watched as Watched,
    free_bytes_at as free_bytes_at,
    is_below as is_below,
)
from .local import LocalFolder as LocalFolder
from .mapped import Mapped as Mapped
from .opening import folder_at as folder_at, is_remote as is_remote, open_folder as open_folder
from .stamps import Stamp as Stamp, Stat as Stat, is_settled as is_settled, stamp as stamp
