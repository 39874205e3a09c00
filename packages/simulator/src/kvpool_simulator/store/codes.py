"""Mooncake's return codes (0.3.13.post1), as far as the simulator gives them, and the error for what would crash it."""

OK = 0
SETUP_FAIL = -1
NO_AVAILABLE_HANDLE = -200
INVALID_PARAMS = -600
ILLEGAL_CLIENT = -601
INVALID_WRITE = -700
INVALID_REPLICA = -702
REPLICA_IS_NOT_READY = -703
OBJECT_NOT_FOUND = -704
OBJECT_ALREADY_EXISTS = -705
OBJECT_HAS_LEASE = -706
LEASE_EXPIRED = -707
TRANSFER_FAIL = -800
RPC_FAIL = -900
RPC_TIMEOUT = -901
DFS_NOT_ENABLED = -1601


class WouldCrashError(RuntimeError):
    """The real store would have ended the process here (or, in a child of fork, would hang it)."""
