"""Addresses by which ranks reach each other: names are resolved within a time limit, and an interface is chosen if no name is usable.

gloo binds to the address that the machine's own host name has, for every group of ranks. Where the name does not resolve, each look-up
waits for the name servers, and the ranks of several machines would then offer each other 127.0.0.1.
"""

import fcntl
import os
import socket
import struct
import threading
import time
from concurrent.futures import Future
from contextlib import suppress

from megarun.errors import refusal

INTERFACE = "GLOO_SOCKET_IFNAME"
LOOPBACK, LOOPBACK_NAME = "127.0.0.1", "lo"
LOOK_UP_SECONDS = 5.0
RETRY_SECONDS = 0.5
GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux


def reachable_host(host: str, port: int, seconds: float, *, alone: bool) -> tuple[str, str]:
    """The host of the job's store, and a sentence for the user.

    It is 127.0.0.1 if the name does not resolve and all processes are on this machine.

    Args:
        host: MASTER_ADDR.
        port: MASTER_PORT.
        seconds: Time for which the look-up is tried again.
        alone: True if every process of the job is on this machine.

    Raises:
        MegaplanError: MP673.
    """
    end = time.monotonic() + seconds
    while True:
        reason = look_up(host, min(LOOK_UP_SECONDS, seconds))
        if not reason:
            return host, ""
        if alone:
            return LOOPBACK, f"MASTER_ADDR = {host} does not resolve ({reason}); all processes are on this machine, so {LOOPBACK} is used"
        if time.monotonic() >= end:
            break
        time.sleep(RETRY_SECONDS)
    detail = f"MASTER_ADDR = {host} does not resolve on {socket.gethostname()} within {seconds:g} s: {reason}\nport {port}"
    hints = (f"torchrun --rdzv-endpoint ADDRESS:{port} …    # an address, {LOOPBACK} on one machine", f"getent hosts {host}")
    raise refusal("MP673", detail, "MASTER_ADDR", hints)


def look_up(host: str, seconds: float) -> str:
    """Reason why a name has no address; empty if it has one. A name server that does not answer is not waited for."""
    found: Future[str] = Future()

    def ask() -> None:
        try:
            socket.getaddrinfo(host, None)
            found.set_result("")
        except OSError as error:
            found.set_result(error.strerror or str(error))

    threading.Thread(target=ask, name="look-up", daemon=True).start()
    try:
        return found.result(seconds)
    except TimeoutError:
        return f"the name servers gave no answer within {seconds:g} s"


def choose_interface(host: str) -> str:
    """Set gloo's interface if the host name does not resolve to this machine; returns a sentence for the user, else an empty text.

    Args:
        host: Host of the job's store; the interface is that by which it is reached. Empty: one process.
    """
    if os.environ.get(INTERFACE):
        return ""
    own = socket.gethostname()
    reason = look_up(own, LOOK_UP_SECONDS) or _not_of_this_machine(own)
    if not reason:
        return ""
    name = _interface_of(_own_address(host)) if host else LOOPBACK_NAME
    if not name:
        return ""
    os.environ[INTERFACE] = name
    return f"host name {own}: {reason}; connections between ranks use the interface {name} ({INTERFACE})"


def here() -> str:
    """Host name, address and interface of this machine, for a message."""
    host = os.environ.get("MASTER_ADDR", "")
    address = _own_address(host) if host else LOOPBACK
    interface = os.environ.get(INTERFACE) or _interface_of(address) or "unknown"
    return f"{socket.gethostname()}, address {address or 'unknown'}, interface {interface}"


def _own_address(host: str) -> str:
    """The address of this machine from which a host is reached; no packet is sent. Empty if there is no way to it."""
    with suppress(OSError):
        for family, kind, _, _, place in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(place)
                return str(probe.getsockname()[0])
    return ""


def _not_of_this_machine(own: str) -> str:
    """Reason why none of a name's addresses can be bound here; empty if one can."""
    addresses = []
    with suppress(OSError):
        for family, kind, _, _, place in socket.getaddrinfo(own, 0, type=socket.SOCK_STREAM):
            addresses.append(str(place[0]))
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(place)
                return ""
    return f"its address {', '.join(dict.fromkeys(addresses)) or 'is missing'} is not of this machine"


def _interface_of(address: str) -> str:
    """The interface with an IPv4 or IPv6 address; empty if none has it."""
    with suppress(OSError, ValueError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address or (name == LOOPBACK_NAME and address.startswith("127.")):
                    return name
    with suppress(OSError, ValueError):
        packed = socket.inet_pton(socket.AF_INET6, address).hex()
        with open("/proc/net/if_inet6", encoding="utf-8") as file:
            return next((line.split()[-1] for line in file if line.startswith(packed)), "")
    return ""
