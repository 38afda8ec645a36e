//! An echo on a ring without a reactor, in three styles: what the kernel's part of each style
//! costs.
#![allow(
    unsafe_code,
    reason = "entries of a ring refer to memory by its address"
)]

use std::collections::{HashSet, VecDeque};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU16, Ordering};

use io_uring::squeue::Entry;
use io_uring::types::{BufRingEntry, Fd};
use io_uring::{IoUring, cqueue, opcode};
use rustix::io::Errno;
use rustix::net::RecvFlags;

use crate::echo::{Meter, drive, per_message};
use crate::load::Load;
use crate::measure::Spent;

/// How the server waits and carries bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Style {
    /// One entry for each wait, then `recv(2)` and `send(2)`: as the product's reactor does.
    Poll,
    /// One entry for all waits of a connection (kernel 5.13), then `recv(2)` and `send(2)`.
    MultishotPoll,
    /// One entry for all receives of a connection, into buffers that belong to the ring (kernel
    /// 6.0); sends are entries that enter the kernel together.
    MultishotReceive,
}

pub(crate) const STYLES: [Style; 3] = [Style::Poll, Style::MultishotPoll, Style::MultishotReceive];

const ENTRIES: u32 = 1024;
/// Readable (`POLLIN`).
const READABLE: u32 = 1;
const GROUP: u16 = 0;
/// Bit of an entry's number that tells a send from a receive.
const SEND: u64 = 1 << 32;

/// Serves `load` on one core, driven by a thread on the other. Returns the CPU of the server's
/// thread per message, and its calls of `io_uring_enter` per message.
pub(crate) fn cost_per_message(style: Style, load: Load) -> (Spent, f64) {
    let (spent, enters) = drive(load, move |listener| {
        let accept = |_| {
            let (connection, _) = listener.accept().unwrap();
            connection.set_nodelay(true).unwrap();
            connection.set_nonblocking(true).unwrap();
            connection
        };
        let mut server = Server::new(style, (0..load.connections).map(accept).collect(), load);
        server.run();
        (server.meter.spent(), server.enters)
    });
    (
        per_message(spent, load),
        enters as f64 / load.messages as f64,
    )
}

struct Server {
    style: Style,
    ring: IoUring,
    connections: Vec<TcpStream>,
    /// Connections that have not ended.
    open: HashSet<usize>,
    buffers: Buffers,
    scratch: Vec<u8>,
    meter: Meter,
    enters: u64,
    /// Entries of this turn.
    entries: VecDeque<Entry>,
}

impl Server {
    fn new(style: Style, connections: Vec<TcpStream>, load: Load) -> Self {
        let ring = IoUring::builder()
            .setup_coop_taskrun()
            .setup_single_issuer()
            .build(ENTRIES)
            .unwrap();
        let buffers = Buffers::new(&ring, load.message.max(4096));
        Self {
            style,
            ring,
            open: (0..connections.len()).collect(),
            connections,
            buffers,
            scratch: vec![0; 64 * 1024],
            meter: Meter::of(load),
            enters: 0,
            entries: VecDeque::new(),
        }
    }

    fn run(&mut self) {
        for number in 0..self.connections.len() {
            self.wait(number);
        }
        let mut completions = Vec::new();
        while !self.open.is_empty() {
            self.submit();
            completions.extend(self.ring.completion());
            for completion in completions.drain(..) {
                let number = (completion.user_data() & 0xffff) as usize;
                match self.style {
                    Style::Poll => {
                        if self.echo(number) {
                            self.wait(number);
                        }
                    }
                    Style::MultishotPoll => {
                        if self.echo(number) && !cqueue::more(completion.flags()) {
                            self.wait(number);
                        }
                    }
                    Style::MultishotReceive => self.completed(number, &completion),
                }
            }
        }
    }

    /// Waits until the connection is readable, or receives from it from now on.
    fn wait(&mut self, number: usize) {
        let fd = Fd(self.connections[number].as_raw_fd());
        let entry = match self.style {
            Style::Poll => opcode::PollAdd::new(fd, READABLE).build(),
            Style::MultishotPoll => opcode::PollAdd::new(fd, READABLE).multi(true).build(),
            Style::MultishotReceive => opcode::RecvMulti::new(fd, GROUP).build(),
        };
        self.entries.push_back(entry.user_data(number as u64));
    }

    /// Submits the entries of this turn, and waits for a completion.
    fn submit(&mut self) {
        loop {
            {
                let mut queue = self.ring.submission();
                while let Some(entry) = self.entries.pop_front() {
                    // SAFETY: what an entry refers to outlives the ring: the descriptors, and the
                    // buffers, which are given back to the kernel after the completion of their
                    // send only.
                    if unsafe { queue.push(&entry) }.is_err() {
                        self.entries.push_front(entry);
                        break;
                    }
                }
            }
            self.enters += 1;
            if self.entries.is_empty() {
                self.ring.submit_and_wait(1).unwrap();
                return;
            }
            self.ring.submit().unwrap();
        }
    }

    /// Receives and sends with system calls. Returns whether the connection goes on.
    fn echo(&mut self, number: usize) -> bool {
        let mut connection = &self.connections[number];
        loop {
            let received = match connection.read(&mut self.scratch) {
                Ok(received) if received > 0 => received,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return true,
                _ => {
                    self.open.remove(&number);
                    return false;
                }
            };
            connection.write_all(&self.scratch[..received]).unwrap();
            self.meter.count(received);
            // As the product: a read that did not fill the room has emptied the socket.
            if received < self.scratch.len() {
                return true;
            }
        }
    }

    fn completed(&mut self, number: usize, completion: &cqueue::Entry) {
        let result = completion.result();
        if completion.user_data() & SEND != 0 {
            let buffer = (completion.user_data() >> 48) as u16;
            let sent = usize::try_from(result).unwrap();
            assert_eq!(sent, self.buffers.lengths[usize::from(buffer)]);
            self.buffers.give_back(buffer);
            self.meter.count(sent);
            return;
        }
        if result > 0 {
            let buffer = cqueue::buffer_select(completion.flags()).unwrap();
            self.buffers.lengths[usize::from(buffer)] = result as usize;
            let send = opcode::Send::new(
                Fd(self.connections[number].as_raw_fd()),
                self.buffers.address(buffer),
                result as u32,
            );
            let name = number as u64 | SEND | u64::from(buffer) << 48;
            // The kernel sends all of it before the entry completes.
            let wait_all = RecvFlags::WAITALL.bits().cast_signed();
            self.entries
                .push_back(send.flags(wait_all).build().user_data(name));
        }
        if !cqueue::more(completion.flags()) {
            if result > 0 || result == -Errno::NOBUFS.raw_os_error() {
                self.wait(number);
            } else {
                self.open.remove(&number);
            }
        }
    }
}

/// Buffers that belong to the ring, and its queue of free ones.
struct Buffers {
    queue: *mut BufRingEntry,
    bytes: Vec<u8>,
    size: usize,
    /// Bytes that wait in each buffer.
    lengths: Vec<usize>,
    tail: u16,
}

impl Buffers {
    const COUNT: u16 = 512;

    fn new(ring: &IoUring, size: usize) -> Self {
        let layout =
            std::alloc::Layout::from_size_align(usize::from(Self::COUNT) * 16, 4096).unwrap();
        // SAFETY: the layout has a size. The memory is never freed, as the kernel may use it.
        let queue = unsafe { std::alloc::alloc_zeroed(layout) }.cast::<BufRingEntry>();
        // SAFETY: the queue has this number of entries, and lives for as long as the process.
        unsafe {
            ring.submitter()
                .register_buf_ring(queue as u64, Self::COUNT, GROUP)
        }
        .unwrap();
        let mut buffers = Self {
            queue,
            bytes: vec![0; size * usize::from(Self::COUNT)],
            size,
            lengths: vec![0; usize::from(Self::COUNT)],
            tail: 0,
        };
        for buffer in 0..Self::COUNT {
            buffers.give_back(buffer);
        }
        buffers
    }

    fn address(&mut self, buffer: u16) -> *mut u8 {
        self.bytes[usize::from(buffer) * self.size..].as_mut_ptr()
    }

    fn give_back(&mut self, buffer: u16) {
        let address = self.address(buffer) as u64;
        let slot = usize::from(self.tail % Self::COUNT);
        // SAFETY: the slot is one of the queue, and the kernel does not read it before the tail has
        // passed it.
        let entry = unsafe { &mut *self.queue.add(slot) };
        entry.set_addr(address);
        entry.set_len(self.size as u32);
        entry.set_bid(buffer);
        self.tail = self.tail.wrapping_add(1);
        // SAFETY: the tail is an aligned number of the queue, which the kernel reads at any time.
        let tail = unsafe { &*BufRingEntry::tail(self.queue).cast::<AtomicU16>() };
        tail.store(self.tail, Ordering::Release);
    }
}
