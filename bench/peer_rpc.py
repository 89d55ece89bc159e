"""llama.cpp's RPC: a server that computes on one device, and its device as seen by a client.

The server listens on this machine only.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from bench.llama_api import CPU, SIZE, P
from bench.peer import Peer, PeerError, find_device, open_peer

_HOST = "127.0.0.1"
_POLL_S = 0.02
_START_SERVER = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, SIZE, SIZE, P)
"""(endpoint, folder of a cache, threads, number of devices, devices); returns only on failure."""
_ADD_SERVER = ctypes.CFUNCTYPE(P, ctypes.c_char_p)


class RpcServer:
    """Serves one device until the process, which must do nothing else, ends. As a `Side` it ends
    with its parent, killed or not.

    A build without CUDA serves the CPU, to try out callers.
    """

    def __init__(self, folder: Path, device: str) -> None:
        """`device` is llama.cpp's name. Returns when the server listens.

        Raises: BuildError, PeerError.
        """
        peer = open_peer(folder)
        served = find_device(peer, device if peer.has_cuda else CPU)
        start = _START_SERVER(_procedure(peer, "ggml_backend_rpc_start_server"))
        os.dup2(2, 1)  # it prints to stdout, where results go
        # The server's thread never returns from C, and would be torn down while CUDA works.
        atexit.register(os._exit, 0)
        port = _free_port()
        self._endpoint = f"{_HOST}:{port}"
        devices = (P * 1)(served)
        arguments = (self._endpoint.encode(), None, os.cpu_count() or 1, 1, devices)
        thread = threading.Thread(target=start, args=arguments, name="rpc-server", daemon=True)
        thread.start()
        while not _listens(port):
            if not thread.is_alive():
                raise PeerError(f"llama.cpp does not serve {device} at {self._endpoint}")
            time.sleep(_POLL_S)

    def endpoint(self) -> str:
        """The address for clients."""
        return self._endpoint


def add_server(peer: Peer, endpoint: str) -> str:
    """Add the server's device to the peer; returns its name.

    Raises: PeerError if the server has none. If no server listens there, llama.cpp ends the
    process.
    """
    add = _ADD_SERVER(_procedure(peer, "ggml_backend_rpc_add_server"))
    registry = add(endpoint.encode())
    if not registry:
        raise PeerError(f"the RPC server at {endpoint} has no device")
    peer.ggml_backend_register(registry)
    name: bytes = peer.ggml_backend_dev_name(peer.ggml_backend_reg_dev_get(registry, 0))
    return name.decode()


def _procedure(peer: Peer, name: str) -> int:
    """Address of a function of the RPC backend. Raises: PeerError if this build has none."""
    registry = peer.ggml_backend_reg_by_name(b"RPC")
    found: Any = registry and peer.ggml_backend_reg_get_proc_address(registry, name.encode())
    if not found:
        raise PeerError("llama.cpp was built without RPC")
    return int(found)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _listens(port: int) -> bool:
    """Whether this process listens there, and not another that was faster."""
    sockets = psutil.Process().net_connections("tcp4")
    return any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in sockets)
