//! Carries the bytes of a tunnel between its agent and the node that owns its service. TLS ends at
//! that node.

use std::cell::RefCell;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::pin::pin;
use std::task::{Context, Poll, ready};

use crate::limits;
use bytes::{Buf, BytesMut};
use futures_util::future::{Either, select};
use gw_region::{AnnouncementKeys, Member, NodeSlot, TunnelAnnouncement};
use gw_shared::net::Socket;
use gw_shared::runtime;
use gw_shared::tunnel::connection::UNSENT;
use gw_shared::tunnel::heartbeat::TCP_DEAD_AFTER;

use crate::upstream::cross_node;

thread_local! {
    /// Receive buffer of all spliced connections of a worker: one that is idle has none of its own.
    static SCRATCH: RefCell<Vec<u8>> = RefCell::new(vec![0; limits::SPLICE_BUFFER]);
}

/// Where a tunnel goes.
pub(super) struct SpliceTo {
    pub(super) owner: Member,
    pub(super) here: NodeSlot,
    /// Epoch of the placement that says so.
    pub(super) epoch: u64,
}

/// Connects to the owner, announces the agent and sends what the agent has sent so far.
pub(crate) async fn connect(
    to: &SpliceTo,
    agent: SocketAddr,
    received: &[u8],
    key: &AnnouncementKeys,
) -> io::Result<Socket> {
    let mut nonce = [0; 16];
    aws_lc_rs::rand::fill(&mut nonce).map_err(|_| io::Error::other("no random numbers"))?;
    let announcement = TunnelAnnouncement {
        agent,
        sender: to.here,
        owner_session: to.owner.session,
    };
    let header = key.write(&announcement, nonce)?;
    let connected = async {
        let socket = Socket::connect(to.owner.peer_address, None).await?;
        socket
            .send_all(&mut [IoSlice::new(&header), IoSlice::new(received)])
            .await?;
        Ok(socket)
    };
    let late = || io::Error::new(io::ErrorKind::TimedOut, "no connection in time");
    runtime::timeout(limits::NODE_CONNECT, connected)
        .await
        .map_err(|_| late())?
}

/// As [`carry`], until the owner is `silent`.
pub(super) async fn carry_until(
    silent: impl Future<Output = ()>,
    agent: &Socket,
    owner: &Socket,
) -> io::Result<()> {
    match select(pin!(carry(agent, owner)), pin!(silent)).await {
        Either::Left((ended, _)) => ended,
        Either::Right(((), _)) => {
            // A FIN would be sent only after the bytes that are not acknowledged.
            owner.reset_when_dropped();
            Err(io::Error::other("the owner does not answer"))
        }
    }
}

/// Carries both directions. When one has ended, the other has [`limits::SPLICE_END`] to end, too.
async fn carry(agent: &Socket, owner: &Socket) -> io::Result<()> {
    // A dead peer is noticed here, since the heartbeats of the tunnel end at the owner.
    agent.detect_dead_peer(TCP_DEAD_AFTER)?;
    agent.limit_unsent(UNSENT)?;
    cross_node::prepare(owner)?;
    let mut up = Direction::new(agent, owner);
    let mut down = Direction::new(owner, agent);
    let up = pin!(std::future::poll_fn(|cx| up.poll_carry(cx)));
    let down = pin!(std::future::poll_fn(|cx| down.poll_carry(cx)));
    match select(up, down).await {
        Either::Left((ended, rest)) => finish(ended, rest).await,
        Either::Right((ended, rest)) => finish(ended, rest).await,
    }
}

async fn finish(
    ended: io::Result<()>,
    rest: impl Future<Output = io::Result<()>>,
) -> io::Result<()> {
    ended?;
    // A peer that does not end its direction loses it.
    runtime::timeout(limits::SPLICE_END, rest)
        .await
        .unwrap_or(Ok(()))
}

/// One direction of a spliced connection.
struct Direction<'a> {
    from: &'a Socket,
    to: &'a Socket,
    /// Received bytes that `to` has not taken yet: at most one receive.
    waiting: BytesMut,
}

impl<'a> Direction<'a> {
    fn new(from: &'a Socket, to: &'a Socket) -> Self {
        Self {
            from,
            to,
            waiting: BytesMut::new(),
        }
    }

    /// Carries bytes until `from` ends, then ends the direction of `to`.
    fn poll_carry(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            while !self.waiting.is_empty() {
                match self.to.try_send(&[IoSlice::new(&self.waiting)]) {
                    Ok(sent) => self.waiting.advance(sent),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        ready!(self.to.poll_writable(cx))?;
                    }
                    Err(error) => return Poll::Ready(Err(error)),
                }
            }
            self.waiting = BytesMut::new();
            if ready!(SCRATCH.with_borrow_mut(|scratch| self.poll_receive(cx, scratch)))? == 0 {
                self.to.shutdown_write();
                return Poll::Ready(Ok(()));
            }
        }
    }

    /// Receives once and sends at once what `to` takes.
    fn poll_receive(
        &mut self,
        cx: &mut Context<'_>,
        scratch: &mut [u8],
    ) -> Poll<io::Result<usize>> {
        let received = ready!(self.from.poll_recv(cx, scratch))?;
        let sent = match self.to.try_send(&[IoSlice::new(&scratch[..received])]) {
            _ if received == 0 => 0,
            Ok(sent) => sent,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
            Err(error) => return Poll::Ready(Err(error)),
        };
        self.waiting.extend_from_slice(&scratch[sent..received]);
        Poll::Ready(Ok(received))
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{Shutdown, TcpListener, TcpStream};

    use gw_shared::runtime::Driver;

    use super::*;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (client, listener.accept().unwrap().0)
    }

    /// Splices two connections and runs `test` with their outer ends.
    fn spliced(driver: &Driver, test: impl FnOnce(TcpStream, TcpStream) + Send + 'static) {
        let (agent, agent_here) = pair();
        let (owner, owner_here) = pair();
        let outside = std::thread::spawn(move || test(agent, owner));
        driver
            .block_on(async move {
                let socket = |stream: TcpStream| Socket::from_fd(stream.into()).unwrap();
                carry(&socket(agent_here), &socket(owner_here))
                    .await
                    .unwrap();
            })
            .unwrap();
        outside.join().unwrap();
    }

    #[test]
    fn bytes_and_half_closes_are_carried_both_ways() {
        for driver in [
            Driver::choose().unwrap(),
            Driver::Epoll {
                reason: "test".into(),
            },
        ] {
            spliced(&driver, |mut agent, mut owner| {
                // More than all buffers hold, against a reader that begins late.
                let sent: Vec<u8> = (0..20_000_000u32).map(|at| (at % 251) as u8).collect();
                let expected = sent.clone();
                let mut writer = agent.try_clone().unwrap();
                let writing = std::thread::spawn(move || {
                    writer.write_all(&sent).unwrap();
                    writer.shutdown(Shutdown::Write).unwrap();
                });
                let mut received = Vec::new();
                owner.read_to_end(&mut received).unwrap();
                assert!(received == expected);
                writing.join().unwrap();
                // The other direction is still open.
                owner.write_all(b"still open").unwrap();
                drop(owner);
                let mut answer = String::new();
                agent.read_to_string(&mut answer).unwrap();
                assert_eq!(answer, "still open");
            });
        }
    }

    #[test]
    fn both_ends_of_a_tunnel_to_a_lost_node_are_closed_at_once() {
        let (mut agent, agent_here) = pair();
        let (_silent, owner_here) = pair();
        let ended = Driver::choose().unwrap().block_on(async move {
            let socket = |stream: TcpStream| Socket::from_fd(stream.into()).unwrap();
            let agent = socket(agent_here);
            let owner = socket(owner_here);
            let ends = [agent.closer(), owner.closer()];
            let carried = pin!(carry(&agent, &owner));
            let closed = pin!(async {
                ends.iter().for_each(gw_shared::net::Closer::abort);
                std::future::pending::<()>().await;
            });
            // Not after a time limit.
            let Either::Left((ended, _)) = select(carried, closed).await else {
                panic!("never ready")
            };
            ended
        });
        assert!(ended.is_ok());
        assert_eq!(agent.read(&mut [0; 8]).unwrap(), 0);
    }

    #[test]
    fn the_end_of_one_peer_ends_the_other() {
        spliced(&Driver::choose().unwrap(), |agent, mut owner| {
            drop(agent);
            assert_eq!(owner.read(&mut [0; 8]).unwrap(), 0);
            drop(owner);
        });
    }
}
