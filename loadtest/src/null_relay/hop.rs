//! One end of the connection between the hops: frames of many streams.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;

use bytes::{Buf, BufMut, BytesMut};
use futures_util::future::select;
use gw_shared::net::Socket;
use gw_shared::runtime;
use tokio::sync::Notify;

use super::wire::Wire;

/// Bytes of the number and the length before each payload.
const HEAD: usize = 8;
/// Bytes that wait for the other hop, or for the peer of a stream, from which on their source is
/// not read.
const WAITING_MAX: usize = 512 * 1024;

/// What a frame of an unknown stream does.
#[derive(Clone, Copy)]
pub(super) enum Streams {
    /// Nothing: this end begins all streams.
    Known,
    /// It begins a stream, to the server at this address.
    Connect(SocketAddr),
}

/// Bytes that one task adds and another one takes.
#[derive(Default)]
pub(super) struct Queue {
    bytes: RefCell<BytesMut>,
    ended: Cell<bool>,
    added: Notify,
    taken: Notify,
}

impl Queue {
    fn add(&self, add: impl FnOnce(&mut BytesMut)) {
        add(&mut self.bytes.borrow_mut());
        self.added.notify_one();
    }

    fn end(&self) {
        self.ended.set(true);
        self.added.notify_one();
        self.taken.notify_waiters();
    }

    /// All bytes that wait; `None` at the end.
    async fn take(&self) -> Option<BytesMut> {
        loop {
            let bytes = self.bytes.take();
            if !bytes.is_empty() {
                self.taken.notify_waiters();
                return Some(bytes);
            }
            if self.ended.get() {
                return None;
            }
            self.added.notified().await;
        }
    }

    /// Waits until fewer than [`WAITING_MAX`] bytes wait.
    async fn room(&self) {
        while self.bytes.borrow().len() >= WAITING_MAX && !self.ended.get() {
            self.taken.notified().await;
        }
    }
}

/// The connection to the other hop.
pub(super) struct Hop {
    wire: Wire,
    outgoing: Queue,
    streams: RefCell<HashMap<u32, Rc<Queue>>>,
    ended: Notify,
}

impl Hop {
    pub(super) fn new(wire: Wire) -> Rc<Self> {
        Rc::new(Self {
            wire,
            outgoing: Queue::default(),
            streams: RefCell::default(),
            ended: Notify::new(),
        })
    }

    /// Starts the tasks that send and receive frames.
    pub(super) fn start(self: &Rc<Self>, streams: Streams) {
        let (sender, receiver) = (Rc::clone(self), Rc::clone(self));
        runtime::spawn(async move {
            while let Some(frames) = sender.outgoing.take().await {
                if sender.wire.send(&frames).await.is_err() {
                    return;
                }
            }
        });
        runtime::spawn(async move {
            // The end of the other hop is the end of the relay.
            let _ = receiver.receive(streams).await;
            receiver.outgoing.end();
            receiver.ended.notify_one();
        });
    }

    /// Waits until the other hop has ended.
    pub(super) async fn ended(&self) {
        self.ended.notified().await;
    }

    /// The bytes of a new stream that arrive from the other hop.
    pub(super) fn stream(&self, number: u32) -> Rc<Queue> {
        let stream = Rc::<Queue>::default();
        self.streams.borrow_mut().insert(number, Rc::clone(&stream));
        stream
    }

    /// Relays between `wire` and a stream until one of them ends.
    pub(super) async fn relay(&self, number: u32, stream: &Queue, wire: Wire) {
        let up = async {
            let mut buffer = BytesMut::new();
            while matches!(wire.receive(&mut buffer).await, Ok(1..)) {
                self.send(number, &buffer);
                buffer.clear();
                self.outgoing.room().await;
            }
        };
        let down = async {
            while let Some(bytes) = stream.take().await {
                if wire.send(&bytes).await.is_err() {
                    return;
                }
            }
        };
        select(std::pin::pin!(up), std::pin::pin!(down)).await;
        stream.end();
        // Without a payload: the end of the stream. The other hop may have ended it.
        if self.streams.borrow_mut().remove(&number).is_some() {
            self.send(number, &[]);
        }
    }

    fn send(&self, number: u32, payload: &[u8]) {
        self.outgoing.add(|frames| {
            frames.put_u32(number);
            frames.put_u32(payload.len() as u32);
            frames.put_slice(payload);
        });
    }

    async fn receive(self: &Rc<Self>, streams: Streams) -> io::Result<()> {
        let mut buffer = BytesMut::new();
        while self.wire.receive(&mut buffer).await? > 0 {
            while let Some((number, length)) = head(&buffer) {
                if buffer.len() < HEAD + length {
                    break;
                }
                buffer.advance(HEAD);
                let payload = buffer.split_to(length);
                let known = self.streams.borrow().get(&number).cloned();
                match (known, streams) {
                    (Some(stream), _) if length == 0 => {
                        self.streams.borrow_mut().remove(&number);
                        stream.end();
                    }
                    (Some(stream), _) => {
                        stream.add(|bytes| bytes.put_slice(&payload));
                        stream.room().await;
                    }
                    (None, Streams::Connect(backend)) if length > 0 => {
                        let stream = self.stream(number);
                        stream.add(|bytes| bytes.put_slice(&payload));
                        self.connect(number, stream, backend);
                    }
                    (None, _) => {}
                }
            }
        }
        Ok(())
    }

    fn connect(self: &Rc<Self>, number: u32, stream: Rc<Queue>, backend: SocketAddr) {
        let hop = Rc::clone(self);
        runtime::spawn(async move {
            match Socket::connect(backend, None).await {
                Ok(socket) => hop.relay(number, &stream, Wire::Plain(socket)).await,
                Err(_) => {
                    hop.streams.borrow_mut().remove(&number);
                    hop.send(number, &[]);
                }
            }
        });
    }
}

/// Stream number and payload length of the first frame, once its head is there.
fn head(buffer: &BytesMut) -> Option<(u32, usize)> {
    let mut head = buffer.get(..HEAD)?;
    Some((head.get_u32(), head.get_u32() as usize))
}
