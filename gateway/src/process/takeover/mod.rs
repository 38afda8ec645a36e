//! Takeover: a successor process replaces a running one without closing its listening sockets.
//!
//! The successor is a child process. It inherits the listening sockets and one end of a socket
//! pair, by names: [`SOCKETS`] lists them as `NAME=DESCRIPTOR`, separated by colons, and
//! [`Inherited`](super::sockets::listeners::Inherited) sorts them as it sorts those of the service
//! manager. Over the socket pair, both send lines of JSON ([`message`]):
//!
//! - successor: `ready`: the configuration and the sockets are usable
//! - predecessor: `store`: the store is closed; the number of live tunnels by service; the position
//!   of the predecessor's records
//! - successor: `serving`: the predecessor can drain
//!
//! Until `serving`, the predecessor can continue as before. It kills a successor that sends `end`,
//! or that sends nothing for [`limits::TAKEOVER_STEP`]. While the predecessor drains ([`follow`]),
//! the successor admits its requests ([`lead`]). Each of them has one thread for it:
//!
//! - predecessor: `levels`, once: levels of the buckets of services, which the successor owns from
//!   here on
//! - successor: `step`s and a `change`: each change after that position, in order: the predecessor
//!   authorises by the changed records
//! - predecessor: `charge`: a request of a service
//! - successor: `answer`: the request is admitted, or the time until it could be
//! - successor: `end`: the reason why nothing follows
//!
//! Each worker of the predecessor also has a link to the successor, a pair of Unix sockets with the
//! protocol of links between nodes. It sends requests there that have no tunnel at the predecessor
//! any more: those that wait for their agent, and those of kept connections. A worker of the
//! successor that panics ends its links, and serves the next ones once it has started again.
//!
//! The processes may be of different versions. A version may add fields. An unknown message ends
//! the exchange.
//!
//! When the exchange ends, such as with the successor or for want of a change between the positions
//! of both, the predecessor serves its connections on for the time of its drain, by the records and
//! the buckets that it has. The successor counts changes as pending at this node until the
//! predecessor has ended.

mod channel;
mod follow;
mod lead;
mod message;
mod predecessor;
mod program;
mod successor;

use std::io;

use crate::limits;
use gw_base::process::background::Tasks;
use gw_control_plane::control::MissingChanges;
use gw_store::StoreError;

use self::channel::{Channel, MessageReader, MessageWriter};
pub use self::predecessor::Predecessor;
pub use self::program::Program;
pub(crate) use self::successor::Successor;

/// Environment variable with the process id of the predecessor. Other processes that inherit it
/// ignore it.
const PREDECESSOR: &str = "GW_PREDECESSOR";
/// Environment variable with the names and numbers of the sockets that the successor inherits.
const SOCKETS: &str = "GW_SOCKETS";
/// Name of the successor's end of the socket pair.
const CHANNEL: &str = "gw-takeover";
/// Name of the successor's ends of the links.
const LINK: &str = "gw-link";
/// Links of each worker, one after the other. Workers that panic once more end the process.
const LINKS: usize = limits::WORKER_PANICS;
/// Longest line, in bytes.
const LINE_MAX: u64 = 64 * 1024 * 1024;

/// Log line of a process that has a successor, and learns of no more revocations.
pub(super) const FOLLOWS_NO_MORE: &str = "no more changes from the successor: this process serves \
                                          its connections on until its drain is over, by the \
                                          records that it has";

/// Reason why a takeover failed.
#[derive(Debug, thiserror::Error)]
pub enum TakeoverError {
    #[error(
        "this is the first process of a container, and the container ends with it; start another \
         container instead"
    )]
    FirstProcess,
    #[error("this process cannot be replaced: only `gw-gateway serve` can")]
    NoProgram,
    #[error("cannot start {program}: {error}")]
    Spawn { program: String, error: io::Error },
    #[error("the other process sent nothing for {:?}", limits::TAKEOVER_STEP)]
    Silent,
    #[error("the other process ended; see its log")]
    Ended,
    #[error("the other process failed: {0}")]
    Failed(String),
    #[error("a message is longer than {LINE_MAX} bytes")]
    TooLong,
    #[error("unexpected message from the other process: {0}")]
    Unexpected(String),
    #[error(transparent)]
    MissingChanges(#[from] MissingChanges),
    #[error("this process gets no more changes itself")]
    FollowsNone,
    #[error(
        "the running process is of a build that hands its sockets over in another way: stop and \
         start the gateway instead"
    )]
    OtherBuild,
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Io(io::Error),
}

impl From<io::Error> for TakeoverError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Self::Silent,
            io::ErrorKind::BrokenPipe
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::UnexpectedEof => Self::Ended,
            _ => Self::Io(error),
        }
    }
}

/// Starts a thread that runs `exchange` with the two halves of `channel`. A thread, because an
/// exchange blocks: it applies changes, reads the store, and leaves requests in the mailboxes of
/// workers.
fn start_exchange(
    tasks: &Tasks,
    channel: Channel,
    exchange: impl FnOnce(&Tasks, MessageReader, MessageWriter) + Send + 'static,
) -> Result<(), TakeoverError> {
    let (reader, writer) = tasks.block_on(async { channel.split() })?;
    let runtime = tasks.clone();
    tasks.thread("gw-takeover", move || exchange(&runtime, reader, writer))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::io::Write;
    use std::os::unix::net::UnixStream;
    use std::thread;

    use gw_store::Position;

    use super::message::TakeoverMessage;
    use super::*;

    fn pair() -> (Successor, Predecessor) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (
            Successor::without_process(Channel::new(ours).unwrap()),
            Predecessor::new(Channel::new(theirs).unwrap(), Vec::new()),
        )
    }

    #[test]
    fn successor_gets_the_store_after_it_is_ready() {
        let (mut successor, mut predecessor) = pair();
        let tunnels = BTreeMap::from([("acme--api".to_owned(), 2)]);
        let expected = tunnels.clone();
        let taking = thread::spawn(move || {
            assert_eq!(predecessor.take_store().unwrap(), (expected, None));
            predecessor
                .channel()
                .unwrap()
                .send(&TakeoverMessage::Serving { acknowledge: true })
                .unwrap();
        });
        successor.wait_until_ready().unwrap();
        successor
            .give_store(tunnels, None, Position::default())
            .unwrap();
        taking.join().unwrap();
    }

    #[test]
    fn predecessor_sees_a_failure_and_the_end_of_the_successor() {
        let (mut successor, mut predecessor) = pair();
        predecessor.failed("no region");
        let failed = successor.wait_until_ready().unwrap_err();
        assert!(
            matches!(&failed, TakeoverError::Failed(reason) if reason == "no region"),
            "{failed}"
        );
        // At any later step too.
        predecessor.failed("no room");
        drop(predecessor);
        let failed = successor
            .give_store(BTreeMap::new(), None, Position::default())
            .unwrap_err();
        assert!(
            matches!(&failed, TakeoverError::Failed(reason) if reason == "no room"),
            "{failed}"
        );
        assert!(matches!(
            successor.wait_until_ready(),
            Err(TakeoverError::Ended)
        ));
        assert!(matches!(
            successor.give_store(BTreeMap::new(), None, Position::default()),
            Err(TakeoverError::Ended)
        ));
    }

    #[test]
    fn a_partial_line_survives_a_time_limit() {
        let (mut successor, mut predecessor) = pair();
        let socket = predecessor.channel().unwrap().socket();
        successor
            .channel
            .socket()
            .set_read_timeout(Some(std::time::Duration::from_millis(1)))
            .unwrap();
        socket.write_all(b"{\"type\":").unwrap();
        assert!(matches!(
            successor.channel.receive(),
            Err(TakeoverError::Silent)
        ));
        socket.write_all(b"\"serving\"}\n").unwrap();
        assert!(matches!(
            successor.channel.receive(),
            Ok(TakeoverMessage::Serving { .. })
        ));
    }

    #[test]
    fn unexpected_messages_are_errors() {
        for line in ["{\"type\":\"serving\"}\n", "hello\n"] {
            let (mut successor, mut predecessor) = pair();
            predecessor
                .channel()
                .unwrap()
                .socket()
                .write_all(line.as_bytes())
                .unwrap();
            assert!(
                matches!(
                    successor.wait_until_ready(),
                    Err(TakeoverError::Unexpected(_))
                ),
                "{line}"
            );
        }
    }
}
