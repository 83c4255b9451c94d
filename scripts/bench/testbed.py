"""Hosts on a slow network, on one machine: network namespaces behind one switch.

    sudo .venv/bin/python -m scripts.bench.testbed --hosts 4 --rate 200mbit -- COMMAND

Each host has a network namespace and a link to a bridge, shaped in both directions; the bridge has
a namespace of its own, so no packet and no setting touches the machine's network. COMMAND runs once
per host, with what torchrun would put into its environment: each has one rank.

     h0        h1        h2            a namespace each: a rank, eth0
     |         |         |             tbf (and netem) on eth0: what the host sends
    p0 ------ p1 ------ p2             tbf (and netem) on p0: what the host receives
           bridge                      one namespace

Keeps one invariant: nothing outlives the process that made it, however that ends. A namespace has
no name; it exists as long as a holder, a process that sleeps in it, or a rank does, and the kernel
kills holders and ranks when their parent dies.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

from scripts.bench.options import parser_of
from scripts.bench.processes import Forked, Process, Ranks

_TOOLS = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "setpriv": "util-linux"}
_DIES_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")
_MTU_BYTES = 9000
# Larger super-packets of segmentation offload would wait too long behind each other.
OFFLOAD_BYTES = 16384
_SWITCH = -1  # its holder is the last one
_SMALL_BURST_BYTES = 18 << 10  # of a link with two classes: one super-packet
_IS_SHORT = "match u16 0 0xfe00 at 2"  # the length in the IP header is less than 512


class TestbedError(RuntimeError):
    """This machine cannot have a testbed; the message says in one line what is missing."""

    __test__ = False  # not a test, whatever pytest makes of its name


@dataclass(frozen=True, slots=True)
class Link:
    """One host's link, in each direction.

    Attributes:
        rate_bit_s: bits per second; None is unshaped.
        delay_ms: the time a packet is under way.
        short_first: whether packets of less than 512 bytes go before all others. They are TCP's
            acknowledgements, and gloo's notes that a receiver is ready, which wait for no message
            on NCCL's networks.
        queue_ms: how long a packet may wait; it is lost if it would wait longer. Where two long
            messages share a link, a short queue costs both TCP connections up to a third of it. A
            longer one stands for a network whose senders are held back and lose nothing.
        burst_bytes: what passes at once after a pause, at least a packet and what the link sends in
            1.3 ms. That is nothing beside DP.sync, but a good part of a short message.
    """

    rate_bit_s: float | None = None
    delay_ms: float = 0.0
    short_first: bool = False
    queue_ms: float = 2.0
    burst_bytes: int = 32 * 1024

    def __post_init__(self) -> None:
        if self.rate_bit_s is not None and self.rate_bit_s < 1e5:
            raise ValueError(f"a link of {self.rate_bit_s:g} bit/s; try 100kbit or more")
        if self.delay_ms < 0:
            raise ValueError(f"a delay of {self.delay_ms:g} ms; it cannot be negative")

    def qdiscs(self, device: str) -> Iterator[str]:
        """Yield the lines of ``tc -batch`` that shape what ``device`` sends."""
        parent = "root"
        if self.delay_ms:  # at the root: below, it may put what was shaped into another order
            yield f"qdisc add dev {device} root handle 1: netem delay {self.delay_ms}ms limit 10000"
            parent = "parent 1:"
        if self.rate_bit_s is not None:
            yield from self._shaped(f"dev {device}", parent, self.rate_bit_s)

    def _shaped(self, on: str, parent: str, rate_bit_s: float) -> Iterator[str]:
        burst = max(self.burst_bytes, int(rate_bit_s / 8 * 1.3e-3))
        if not self.short_first:
            rate = f"rate {rate_bit_s:.0f}bit burst {burst}b"
            yield f"qdisc add {on} {parent} handle 2: tbf {rate} latency {self.queue_ms:g}ms"
            return
        queue = f"bfifo limit {burst + rate_bit_s / 8 * self.queue_ms / 1e3:.0f}b"
        small = min(burst, _SMALL_BURST_BYTES)
        bursts = f"burst {small}b cburst {small}b"
        yield f"qdisc add {on} {parent} handle 2: htb default 2"
        yield f"class add {on} parent 2: classid 2:9 htb rate {rate_bit_s:.0f}bit {bursts}"
        for number, share in ((1, 0.99), (2, 0.01)):  # and whatever the other one leaves
            yield (
                f"class add {on} parent 2:9 classid 2:{number} htb prio {number} "
                f"rate {share * rate_bit_s:.0f}bit ceil {rate_bit_s:.0f}bit {bursts}"
            )
            yield f"qdisc add {on} parent 2:{number} {queue}"
        yield f"filter add {on} parent 2: protocol ip u32 {_IS_SHORT} flowid 2:1"


class Traffic(NamedTuple):
    """Bytes that a host has put on its link and taken from it, headers included."""

    sent_bytes: int
    received_bytes: int


class Testbed:
    """``num_hosts`` hosts with one link each, from ``with`` until its block ends.

    With no link there are no hosts either: ranks that are forked stay where this process is, and
    talk over the loopback. It needs nothing of the machine.

    Raises:
        TestbedError: on entering, if the machine lacks what a testbed needs.
    """

    __test__ = False

    def __init__(self, num_hosts: int, link: Link | None) -> None:
        if not 1 <= num_hosts <= 250:
            raise ValueError(f"{num_hosts} hosts: 1 to 250")
        self.num_hosts, self.link = num_hosts, link
        self._holders: list[subprocess.Popen[bytes]] = []  # of the hosts, then of the switch
        self._ranks: list[Ranks] = []

    def __enter__(self) -> Self:
        if self.link is None:
            return self
        check_machine()
        try:
            self._build(self.link)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop all ranks; the kernel takes the namespaces down with their last process."""
        for ranks in self._ranks:
            ranks.stop()
        for holder in self._holders:
            holder.kill()
        for holder in self._holders:
            holder.wait()
        self._ranks, self._holders = [], []

    def address(self, host: int) -> str:
        """The host's address; no other machine can reach it."""
        return f"10.77.0.{host + 1}" if self.link else "127.0.0.1"

    def namespace(self, host: int) -> str:
        """Path of the host's network namespace."""
        return f"/proc/{self._holders[host].pid}/ns/net"

    def start(self, command: Sequence[str], logs: Path, cwd: Path | None = None) -> Ranks:
        """Run a command on every rank; its output goes to ``logs/rank<N>.log``."""

        def begin(host: int, environment: Mapping[str, str], log: Path) -> Process:
            with log.open("wb") as output:
                return subprocess.Popen(
                    [*_DIES_WITH_PARENT, *self._inside(host), *command],
                    env=os.environ | environment,
                    cwd=cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )

        return self._begin(begin, logs)

    def fork(self, function: Callable[[], int], logs: Path) -> Ranks:
        """Call a function on every rank, in a copy of this process; it returns the exit code.

        What this process has imported is there at once: seconds per rank, for Megatron.
        """

        def begin(host: int, environment: Mapping[str, str], log: Path) -> Process:
            namespace = self.namespace(host) if self.link else None
            return Forked(namespace, environment, log, function)

        return self._begin(begin, logs)

    def _begin(self, begin: Callable[[int, Mapping[str, str], Path], Process], logs: Path) -> Ranks:
        logs.mkdir(parents=True, exist_ok=True)
        port = 29500 if self.link else _free_port()
        paths = [logs / f"rank{rank}.log" for rank in range(self.num_hosts)]
        processes: list[Process] = []
        ranks = Ranks(processes, paths)
        self._ranks.append(ranks)  # first, so that `close` finds those that did start
        for rank, path in enumerate(paths):
            path.write_bytes(b"")  # whoever watches may read it at once
            processes.append(begin(rank, self._environment(rank, port), path))
        return ranks

    def traffic(self) -> list[Traffic]:
        """Bytes on each host's link since the testbed was made."""
        if self.link is None:
            return [Traffic(0, 0)] * self.num_hosts
        return [traffic_of(holder.pid) for holder in self._holders[: self.num_hosts]]

    @contextlib.contextmanager
    def cut(self, host: int) -> Iterator[None]:
        """Pull the host's cable for the time of the block; packets are lost without a word."""
        self._ip(_SWITCH, f"link set p{host} down")
        try:
            yield
        finally:
            self._ip(_SWITCH, f"link set p{host} up")

    def _build(self, link: Link) -> None:
        for _ in range(self.num_hosts + 1):
            self._holders.append(_hold_namespace())
        offload = f"gso_max_size {OFFLOAD_BYTES} gro_max_size {OFFLOAD_BYTES}"
        self._ip(_SWITCH, "link add br0 type bridge stp_state 0 forward_delay 0", "link set br0 up")
        for host in range(self.num_hosts):
            self._ip(
                _SWITCH,
                f"link add p{host} mtu {_MTU_BYTES} type veth "
                f"peer name eth0 mtu {_MTU_BYTES} netns {self._holders[host].pid}",
                f"link set p{host} {offload}",
                f"link set p{host} master br0 up",
            )
            self._ip(
                host,
                f"link set eth0 {offload}",
                f"address add {self.address(host)}/24 dev eth0",
                "link set lo up",
                "link set eth0 up",
                # Without it a lost packet of a short queue costs 200 ms.
                f"route replace 10.77.0.0/24 dev eth0 src {self.address(host)} rto_min 5ms",
            )
            for name, value in (("congestion_control", "reno"), ("slow_start_after_idle", "0")):
                _run([*self._inside(host), "sysctl", "-qw", f"net.ipv4.tcp_{name}={value}"])
            self._tc(host, link, "eth0")
            self._tc(_SWITCH, link, f"p{host}")

    def _environment(self, rank: int, port: int) -> dict[str, str]:
        """What torchrun would set, and the interface that gloo is to use."""
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.num_hosts),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "eth0" if self.link else "lo",
            "PYTHONUNBUFFERED": "1",
        }

    def _inside(self, host: int) -> tuple[str, ...]:
        """Words to put before a command, so that it runs on the host or on the switch."""
        return ("nsenter", f"--net={self.namespace(host)}", "--")

    def _ip(self, host: int, *lines: str) -> None:
        """Run ``ip`` on a host or on the switch."""
        _run([*self._inside(host), "ip", "-batch", "-"], "\n".join(lines))

    def _tc(self, host: int, link: Link, device: str) -> None:
        if lines := list(link.qdiscs(device)):
            _run([*self._inside(host), "tc", "-batch", "-"], "\n".join(lines))


def traffic_of(pid: int) -> Traffic:
    """Bytes on the link of the host that a process is on, since the testbed was made.

    Raises:
        TestbedError: the process is on no host.
    """
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
        device, _, counters = line.partition(":")
        if device.strip() == "eth0":
            fields = counters.split()
            return Traffic(sent_bytes=int(fields[8]), received_bytes=int(fields[0]))
    raise TestbedError(f"process {pid} has no eth0: its namespace is not a host's")


def check_machine() -> None:
    """Raise a `TestbedError` if this process is not root or lacks a command."""
    if os.geteuid() != 0:
        raise TestbedError(
            "the testbed makes network namespaces and needs root; run it with sudo, or without any "
            "right under: unshare -Ur"
        )
    for tool, package in _TOOLS.items():
        if shutil.which(tool) is None:
            raise TestbedError(f"no command {tool!r}; run: apt-get install {package}")


def become_root(module: str, argv: Sequence[str]) -> None:
    """Unless this process is root, run a module in its place as root of a user namespace.

    That root has no right outside of what it makes itself, which is all that a testbed needs.

    Raises:
        TestbedError: the system does not let users make namespaces.
    """
    if os.geteuid() == 0:
        return
    if shutil.which("unshare") is None:
        raise TestbedError("no command 'unshare'; run: apt-get install util-linux")
    again = ("unshare", "--user", "--map-root-user")
    tried = subprocess.run(
        [*again, "unshare", "--net", "true"], capture_output=True, text=True, check=False
    )
    if tried.returncode:
        reason = " ".join(tried.stderr.split())
        raise TestbedError(f"cannot make a network namespace: {reason}; {_what_would_allow()}")
    sys.stdout.flush()
    os.execvp(again[0], [*again, sys.executable, "-m", module, *argv])


def _what_would_allow(settings: Path = Path("/proc/sys")) -> str:
    """Name the setting of this system that forbids namespaces, and how to change it."""
    for name, allowed in (
        ("user/max_user_namespaces", 1000),
        ("kernel/unprivileged_userns_clone", 1),
        ("kernel/apparmor_restrict_unprivileged_userns", 0),
    ):
        file = settings / name
        if file.exists() and (int(file.read_text()) == 0) != (allowed == 0):
            return f"allow it with: sudo sysctl -w {name.replace('/', '.')}={allowed}"
    return "in a container, start it with: docker run --privileged"


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def parse_rate(text: str) -> float | None:
    """Bits per second of ``200mbit``, ``2.5gbit`` or ``800kbit``; None for ``unshaped``.

    Raises:
        ValueError: the text is none of these.
    """
    if text == "unshaped":
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", text)
    if not found:
        raise ValueError(f"a rate of {text!r}; try 200mbit, 2.5gbit, 800kbit or unshaped")
    return float(found[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[found[2]]


def _hold_namespace() -> subprocess.Popen[bytes]:
    """Start a process that sleeps in a network namespace of its own."""
    holder = subprocess.Popen(
        [*_DIES_WITH_PARENT, "unshare", "--net", "sleep", "infinity"],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    end_s = time.monotonic() + 10
    while time.monotonic() < end_s and holder.poll() is None:
        with contextlib.suppress(FileNotFoundError):  # it has ended since
            if not Path(f"/proc/{holder.pid}/ns/net").samefile("/proc/self/ns/net"):
                return holder
        time.sleep(0.002)
    holder.kill()
    reason = holder.communicate()[1].decode().strip() or "unshare did not answer"
    raise TestbedError(f"cannot make a network namespace: {reason}; {_what_would_allow()}")


def _run(command: Sequence[str], lines: str = "") -> None:
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        words = " ".join(command[command.index("--") + 1 :])
        given = f" (given: {'; '.join(lines.splitlines())})" if lines else ""
        if "unknown" in reason.lower():
            reason += "; this kernel lacks one of veth, bridge, sch_tbf, and sch_netem for a delay"
        raise TestbedError(f"{words}: {reason}{given}")


def end_on_signals() -> None:
    """Let SIGTERM and SIGHUP end this program as an exception does: through every ``with``."""

    def leave(number: int, _frame: object) -> None:
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)


def main(argv: Sequence[str]) -> int:
    """Run a command on every rank of a testbed; print exit codes and traffic as JSON."""
    split = argv.index("--") if "--" in argv else len(argv)
    parser = parser_of(__doc__)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="unshaped", help="of each link, say 200mbit")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="one way, on each link")
    parser.add_argument("--logs", type=Path, default=Path("out/testbed"), help="(out/testbed)")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="(600)")
    args = parser.parse_args(argv[:split])
    if not (command := argv[split + 1 :]):
        parser.error("no command; give it after --")
    end_on_signals()
    try:
        link = Link(parse_rate(args.rate), args.delay_ms)
        with Testbed(args.hosts, link) as testbed:
            codes = testbed.start(command, args.logs).wait(args.timeout_s)
            traffic = testbed.traffic()
    except (TestbedError, ValueError) as error:
        return refuse("testbed.py", error)
    print(
        json.dumps(
            {
                "exit_codes": codes,
                "sent_bytes": [host.sent_bytes for host in traffic],
                "received_bytes": [host.received_bytes for host in traffic],
                "logs": str(args.logs),
            }
        )
    )
    return 0 if not any(codes) and None not in codes else 1


def refuse(program: str, error: Exception) -> int:
    """Say in one line what is wrong; returns the exit code."""
    print(f"{program}: error: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
