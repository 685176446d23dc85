"""Errors of files that pass: by themselves, or once somebody has seen to the server. What meets them is tried again."""

from __future__ import annotations

import errno
import re

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

_BY_RUST = re.compile(r"\(os error (\d+)\)")  # safetensors and tokenizers say the number in the text alone


def passes(error: BaseException | None) -> bool:
    """Whether an error passes, or was raised from one that does, as by a library that names what it cannot read."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        told = _BY_RUST.search(str(error))
        number = error.errno if isinstance(error, OSError) and error.errno is not None else told and int(told[1])
        if number in UNREACHABLE:
            return True
        error = error.__cause__ or error.__context__
    return False
