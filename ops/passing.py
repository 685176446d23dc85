"""Errors of files that pass: by themselves, or once somebody has seen to the server. What meets them is tried again."""

from __future__ import annotations

import errno

# A file server does not answer, has forgotten this client, or cannot be reached: NFS (soft mounts), Lustre, FUSE, and
# block devices over the network. EAGAIN: its client is out of slots or memory. EKEYEXPIRED: the Kerberos ticket.
UNREACHABLE = frozenset(
    (
        errno.EIO,
        errno.EREMOTEIO,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.EAGAIN,
        errno.EKEYEXPIRED,
        errno.ENOTCONN,
        errno.ESHUTDOWN,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETUNREACH,
    )
)
