"""Hosts on a shaped network, and that nothing of them stays behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts.bench import processes, testbed
from scripts.bench.testbed import Link, Testbed, TestbedError, Traffic, parse_rate
from tests.distributed import is_running
from tests.programs import ROOT, ran

PAYLOAD_BYTES = 3_000_000
PATIENCE_S = 100.0  # with a busy machine
# Rank 0 takes what rank 1 sends and answers; rank 1 says how long it took.
TRANSFER = f"""
import os, socket, time
if os.environ["RANK"] == "0":
    peer = socket.create_server((os.environ["MASTER_ADDR"], 5000)).accept()[0]
    count = 0
    while count < {PAYLOAD_BYTES}:
        count += len(peer.recv(65536))
    peer.send(b"x")
else:
    while True:
        try:
            peer = socket.create_connection((os.environ["MASTER_ADDR"], 5000), timeout=60)
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    start_s = time.monotonic()
    peer.sendall(bytes({PAYLOAD_BYTES}))
    peer.recv(1)
    print(time.monotonic() - start_s)
"""


@pytest.fixture(scope="module")
def needs_testbed():
    try:
        with Testbed(1, Link(1e8)):
            pass
    except TestbedError as error:
        pytest.skip(str(error))


@pytest.fixture
def bed(needs_testbed):
    with Testbed(2, Link(40e6)) as bed:
        yield bed


def in_namespaces(namespaces):
    """Processes that keep one of the network namespaces alive."""
    found = []
    for path in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            if path.readlink() in namespaces:
                found.append(path.parts[2])
        except (FileNotFoundError, PermissionError):
            pass
    return found


def namespaces_of(bed):
    return {Path(bed.namespace(host)).readlink() for host in range(-1, bed.num_hosts)}


def wait_until(is_so):
    end_s = time.monotonic() + PATIENCE_S
    while not is_so() and time.monotonic() < end_s:
        time.sleep(0.02)
    return is_so()


def start_tool(logs):
    """The command in a process of its own, and the pids of its two ranks once they run."""
    tool = subprocess.Popen(
        [
            *(sys.executable, "-m", "scripts.bench.testbed", "--hosts", "2", "--logs", logs, "--"),
            *(sys.executable, "-c", "import os, time; print(os.getpid()); time.sleep(600)"),
        ],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # A shell starts what is in the background, these tests perhaps, with SIGINT ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    paths = [logs / f"rank{rank}.log" for rank in range(2)]
    started = wait_until(lambda: all(path.exists() and path.stat().st_size for path in paths))
    assert started, tool.poll()
    pids = [int(path.read_text()) for path in paths]
    return tool, pids, {Path(f"/proc/{pid}/ns/net").readlink() for pid in pids}


# What needs no root


@pytest.mark.parametrize(
    ("text", "rate"), [("200mbit", 2e8), ("2.5gbit", 2.5e9), ("800kbit", 8e5), ("unshaped", None)]
)
def test_a_rate_is_read(text, rate):
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["200", "200mb", "fast", "-1mbit"])
def test_a_rate_of_another_form_is_refused(text):
    with pytest.raises(ValueError, match=f"a rate of '{text}'; try 200mbit"):
        parse_rate(text)


def test_delay_comes_before_the_shaping():
    assert list(Link(2e8, 0.5).qdiscs("eth0")) == [
        "qdisc add dev eth0 root handle 1: netem delay 0.5ms limit 10000",
        "qdisc add dev eth0 parent 1: handle 2: tbf rate 200000000bit burst 32768b latency 2ms",
    ]
    assert list(Link().qdiscs("eth0")) == []


def test_short_packets_go_first_and_bursts_can_be_short():
    lines = list(Link(2e7, short_first=True, queue_ms=60.0, burst_bytes=9216).qdiscs("eth0"))
    first, second = (line.partition(" rate ")[0] for line in lines if "2:9 classid" in line)
    assert ("2:1 htb prio 1" in first, "2:2 htb prio 2" in second) == (True, True)
    assert lines[0].endswith("root handle 2: htb default 2")
    assert lines[-1].endswith("u32 match u16 0 0xfe00 at 2 flowid 2:1")
    assert [line for line in lines if line.endswith("bfifo limit 159216b")] == [
        f"qdisc add dev eth0 parent 2:{number} bfifo limit 159216b" for number in (1, 2)
    ]
    assert all("burst 9216b cburst 9216b" in line for line in lines if line.startswith("class"))
    (line,) = Link(2e7, burst_bytes=9216).qdiscs("eth0")
    assert "burst 9216b" in line


@pytest.mark.parametrize("arguments", [(10.0, 0.0), (None, -1.0)])
def test_a_link_that_cannot_be_is_refused(arguments):
    with pytest.raises(ValueError, match=r"a link of 10 bit/s|a delay of -1 ms"):
        Link(*arguments)


@pytest.mark.parametrize(
    ("user", "message"),
    [
        (
            1000,
            "the testbed makes network namespaces and needs root; run it with sudo, or without any "
            "right under: unshare -Ur",
        ),
        (0, "no command 'ip'; run: apt-get install iproute2"),
    ],
)
def test_a_machine_that_cannot_have_one_is_told_in_one_line(
    monkeypatch, tmp_path, capsys, user, message
):
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert testbed.main(["--", "true"]) == 2
    assert capsys.readouterr().err == f"testbed.py: error: {message}\n"


# What needs root


@pytest.mark.processes
@pytest.mark.alone
def test_the_link_has_the_rate_asked_for_and_its_bytes_are_counted(bed, tmp_path):
    before = bed.traffic()
    ranks = bed.start([sys.executable, "-c", TRANSFER], tmp_path)
    assert ranks.wait(PATIENCE_S) == [0, 0]
    receiver, sender = (
        Traffic(*(now - start for now, start in zip(*host, strict=True)))
        for host in zip(bed.traffic(), before, strict=True)
    )
    # Headers are 1 % of a 9000-byte packet; what is lost in the short queue is sent again.
    assert PAYLOAD_BYTES < sender.sent_bytes < 1.1 * PAYLOAD_BYTES
    assert PAYLOAD_BYTES < receiver.received_bytes <= sender.sent_bytes + 1000
    assert max(sender) == sender.sent_bytes
    seconds = float(ranks.logs[1].read_text())
    # The first burst passes at once: 1 %. TCP must fill at least 80 % of the link.
    assert 0.98 * PAYLOAD_BYTES * 8 / 40e6 < seconds < 1.25 * PAYLOAD_BYTES * 8 / 40e6


@pytest.mark.processes
def test_a_cut_cable_delays_a_transfer_and_loses_nothing(bed, tmp_path):
    ranks = bed.start([sys.executable, "-c", TRANSFER], tmp_path)
    assert wait_until(lambda: bed.traffic()[1].sent_bytes > PAYLOAD_BYTES / 10)
    with bed.cut(0):
        time.sleep(0.5)
        assert ranks.poll() == [None, None]
    assert ranks.wait(PATIENCE_S) == [0, 0]
    assert float(ranks.logs[1].read_text()) > 0.5 + 0.8 * PAYLOAD_BYTES * 8 / 40e6


@pytest.mark.processes
def test_a_failed_rank_ends_the_others(bed, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "_GRACE_S", 0.3)
    ranks = bed.start(["sh", "-c", 'test "$RANK" = 1 && exit 3; sleep 600'], tmp_path)
    assert ranks.wait(PATIENCE_S) == [None, 3]
    assert not any(is_running(process.pid) for process in ranks.processes)


@pytest.mark.processes
def test_a_testbed_that_could_not_be_built_leaves_nothing_behind(needs_testbed):
    class Wrong(Link):
        def qdiscs(self, device):
            yield f"qdisc add dev {device} root no_such_discipline"

    bed, namespaces = Testbed(2, Wrong(1e8)), set()
    close = bed.close
    bed.close = lambda: (namespaces.update(namespaces_of(bed)), close())
    with pytest.raises(TestbedError, match=r"tc -batch -: .*no_such_discipline"):
        bed.__enter__()
    assert len(namespaces) == 3
    assert in_namespaces(namespaces) == []


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_tool_that_is_told_to_end_leaves_nothing_behind(needs_testbed, tmp_path, number):
    tool, pids, namespaces = start_tool(tmp_path)
    assert len(namespaces) == 2
    tool.send_signal(number)
    tool.communicate(timeout=PATIENCE_S)
    assert tool.returncode in (-number, 128 + number)
    assert wait_until(lambda: not any(map(is_running, pids)))
    assert wait_until(lambda: not in_namespaces(namespaces))


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_rank_is_on_its_host_and_keeps_its_exit_code(bed, tmp_path):
    def rank():
        os.write(1, f"{os.environ['RANK']} {Path('/proc/self/ns/net').readlink()}".encode())
        return 3

    ranks = bed.fork(rank, tmp_path)
    assert ranks.wait(PATIENCE_S) == [3, 3]
    hosts = [str(Path(bed.namespace(host)).readlink()) for host in range(2)]
    assert [log.read_text().split() for log in ranks.logs] == [["0", hosts[0]], ["1", hosts[1]]]


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*fork")
def test_without_a_link_ranks_stay_here_and_talk_over_the_loopback(tmp_path):
    def rank():
        where = (os.environ["MASTER_ADDR"], os.environ["GLOO_SOCKET_IFNAME"])
        os.write(1, f"{where[0]} {where[1]} {Path('/proc/self/ns/net').readlink()}".encode())
        return 0

    with Testbed(2, None) as bed:
        ranks = bed.fork(rank, tmp_path)
        assert ranks.wait(PATIENCE_S) == [0, 0]
        assert bed.traffic() == [Traffic(0, 0)] * 2
    here = str(Path("/proc/self/ns/net").readlink())
    assert [log.read_text().split() for log in ranks.logs] == [["127.0.0.1", "lo", here]] * 2


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("user/max_user_namespaces", 0, "sysctl -w user.max_user_namespaces=1000"),
        ("kernel/unprivileged_userns_clone", 0, "kernel.unprivileged_userns_clone=1"),
        ("kernel/apparmor_restrict_unprivileged_userns", 1, "restrict_unprivileged_userns=0"),
        ("kernel/apparmor_restrict_unprivileged_userns", 0, "docker run --privileged"),
    ],
)
def test_who_may_not_make_namespaces_is_told_what_would_allow_it(tmp_path, name, value, advice):
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_text(f"{value}\n")
    assert testbed._what_would_allow(tmp_path).endswith(advice)


@pytest.mark.processes
@pytest.mark.parametrize("tool", ["compare", "grid"])
def test_real_time_is_refused_at_once_where_the_kernel_would(tool):
    as_user = ("unshare", "--user", "--map-root-user")
    if ran(*as_user, "true").returncode:
        pytest.skip("users may not make namespaces here")
    done = ran(*as_user, sys.executable, "-m", f"scripts.bench.{tool}", "--real-time")
    assert done.returncode == 2
    assert "error: --real-time: this process may not go before all others" in done.stderr
    assert "Traceback" not in done.stderr
