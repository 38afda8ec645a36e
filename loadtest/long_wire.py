#!/usr/bin/env python3
"""A link with delay between two network namespaces: two TUN devices, and a process that forwards packets between them,
in each direction with at most MBIT megabits per second and a delay of DELAY_MS milliseconds. For kernels without netem.

    long_wire.py NAMESPACE ADDRESS NAMESPACE ADDRESS DELAY_MS MBIT      # addresses as 10.0.0.1/30; needs root
"""

import collections
import ctypes
import fcntl
import os
import select
import struct
import subprocess
import sys
import time

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
CLONE_NEWNET = 0x40000000
MTU = 9000
# Packets beyond this queue are dropped, as in a router: two bandwidth-delay products at 100 Mbit/s and 100 ms.
QUEUE_BYTES = 2_500_000


def enter(namespace):
    """Enters a network namespace; os.setns requires Python 3.12."""
    if ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def device(namespace, address):
    """Creates a TUN device in `namespace`; its descriptor is usable from this namespace."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    enter(there)
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH", b"long0", IFF_TUN | IFF_NO_PI))
    for command in (f"addr add {address} dev long0", f"link set long0 mtu {MTU} up"):
        subprocess.run(["ip", *command.split()], check=True)
    enter(home)
    return tun


class Way:
    """One direction: packets leave the queue at the rate and arrive after the delay."""

    def __init__(self, source, target, delay, bytes_per_second):
        self.source, self.target, self.delay, self.rate = source, target, delay, bytes_per_second
        self.travelling = collections.deque()
        self.free_at = 0.0
        self.dropped = 0

    def take(self, now):
        while True:
            try:
                packet = os.read(self.source, 65536)
            except BlockingIOError:
                return
            if (self.free_at - now) * self.rate > QUEUE_BYTES:
                self.dropped += 1
                continue
            self.free_at = max(self.free_at, now) + len(packet) / self.rate
            self.travelling.append((self.free_at + self.delay, packet))

    def deliver(self, now):
        while self.travelling and self.travelling[0][0] <= now:
            try:
                os.write(self.target, self.travelling.popleft()[1])
            except OSError:
                self.dropped += 1

    def next(self):
        return self.travelling[0][0] if self.travelling else float("inf")


def main():
    here, there = device(*sys.argv[1:3]), device(*sys.argv[3:5])
    delay, rate = float(sys.argv[5]) / 1000, float(sys.argv[6]) * 125_000
    ways = [Way(here, there, delay, rate), Way(there, here, delay, rate)]
    print("up", flush=True)
    poll = select.epoll()
    for tun in (here, there):
        poll.register(tun, select.EPOLLIN)
    while True:
        wait = min(way.next() for way in ways) - time.monotonic()
        poll.poll(None if wait == float("inf") else max(wait, 0))
        now = time.monotonic()
        for way in ways:
            way.take(now)
            way.deliver(now)


main()
