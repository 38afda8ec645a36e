//! The client of an echo: one thread that keeps one message in flight on every connection.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use rustix::buffer::spare_capacity;
use rustix::event::{Timespec, epoll};

/// Load of the client.
#[derive(Clone, Copy)]
pub(crate) struct Load {
    pub(crate) connections: usize,
    pub(crate) message: usize,
    /// Number of messages over all connections.
    pub(crate) messages: usize,
    /// Steps of computation per message on the server, in place of a gateway's TLS and HTTP.
    pub(crate) work: u32,
}

/// Timeout of the server.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

impl Load {
    pub(crate) fn bytes(self) -> usize {
        self.message * self.messages
    }

    /// Connects, sends every message and reads it back, disconnects.
    pub(crate) fn drive(self, address: SocketAddr) {
        let mut connections = connect(address, self.connections);
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        for (number, connection) in connections.iter().enumerate() {
            let data = epoll::EventData::new_u64(number as u64);
            epoll::add(&epoll, connection, data, epoll::EventFlags::IN).unwrap();
        }
        let message = vec![7u8; self.message];
        let mut buffer = vec![0u8; self.message];
        let mut missing = vec![self.message; self.connections];
        let mut to_send = self.messages - self.connections;
        let mut to_receive = self.messages;
        connections
            .iter_mut()
            .for_each(|connection| connection.write_all(&message).unwrap());

        let mut events = Vec::with_capacity(self.connections);
        let patience = Timespec::try_from(PATIENCE).unwrap();
        while to_receive > 0 {
            epoll::wait(&epoll, spare_capacity(&mut events), Some(&patience)).unwrap();
            assert!(!events.is_empty(), "the server is stuck");
            for event in events.drain(..) {
                let number = usize::try_from(event.data.u64()).unwrap();
                let connection = &mut connections[number];
                let received = connection.read(&mut buffer[..missing[number]]).unwrap();
                assert!(received > 0, "the server closed a connection");
                missing[number] -= received;
                if missing[number] > 0 {
                    continue;
                }
                missing[number] = self.message;
                to_receive -= 1;
                if to_send > 0 {
                    to_send -= 1;
                    connection.write_all(&message).unwrap();
                }
            }
        }
    }
}

pub(crate) fn connect(address: SocketAddr, connections: usize) -> Vec<TcpStream> {
    let open = |_| {
        let connection = TcpStream::connect(address).unwrap();
        connection.set_nodelay(true).unwrap();
        connection.set_read_timeout(Some(PATIENCE)).unwrap();
        connection
    };
    (0..connections).map(open).collect()
}
