"""Networks of their own for nodes of a cluster on this machine, as ip-netns(8) makes them."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from ipaddress import IPv4Network


@dataclass(frozen=True)
class Network:
    """A link between this machine's network and one beyond it, with an interface of one name at both ends."""

    interface: str
    near: str  # the address of this side
    far: str
    enter: tuple[str, ...]  # ahead of a command that is to run on the far side


@cache
def why_not() -> str | None:
    """Why networks cannot be had here, or None."""
    if shutil.which("ip") is None:
        return "iproute2 is not installed"
    try:
        with network():
            return None
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"


@contextlib.contextmanager
def network() -> Iterator[Network]:
    """Makes one. Processes that are still in it when the block is left lose their link.

    Raises:
        subprocess.CalledProcessError: Without the right to (CAP_NET_ADMIN and CAP_SYS_ADMIN).
    """
    name = f"ekv{os.getpid()}"
    # 198.18.0.0/15 is for tests of networks (RFC 2544); four addresses for each process that tests.
    near, far = IPv4Network("198.18.0.0/30").hosts()
    offset = 4 * (os.getpid() % (1 << 15))
    one = Network(name, str(near + offset), str(far + offset), ("ip", "netns", "exec", name))
    with contextlib.ExitStack() as stack:
        ip("netns", "add", name)
        stack.callback(ip, "netns", "delete", name)
        ip("link", "add", name, "type", "veth", "peer", "name", name, "netns", name)
        stack.callback(ip, "link", "delete", name)
        ip("address", "add", f"{one.near}/30", "dev", name)
        ip("link", "set", name, "up")
        ip("-netns", name, "address", "add", f"{one.far}/30", "dev", name)
        ip("-netns", name, "link", "set", "lo", "up")
        ip("-netns", name, "link", "set", name, "up")
        ip("-netns", name, "route", "add", "default", "via", one.near)
        yield one


def ip(*arguments: str) -> None:
    """Runs ip(8)."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=60)
