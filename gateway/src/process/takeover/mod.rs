//! One process takes over from another: what the two say to each other, over a pair of sockets that the successor
//! finds in place of its standard input.
//!
//! First its predecessor's listening sockets, then lines of JSON:
//!
//! | predecessor | successor |
//! |---|---|
//! | sockets | |
//! | | `ready`: configuration and sockets are fine, the store can come |
//! | `store`: it is closed; and where tunnels are live | |
//! | | `serving`: the predecessor can drain |
//!
//! Until the last one the predecessor can go on as before: when the successor says `failed`, or nothing for too long,
//! it is ended. [`link`] has the messages after that.

mod link;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, IoSlice, IoSliceMut, Read, Write};
use std::mem::{MaybeUninit, discriminant};
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use crossbeam_channel::Receiver;
use rustix::io::retry_on_intr;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use serde::{Deserialize, Serialize};

use crate::control::Control;
use crate::limit::{Level, SuccessorCharge, levels};
use crate::limits;
use crate::process::listeners::{Inherited, Listeners};
use crate::store::Record;
use crate::worker::Peers;

/// Names the predecessor by its process id, so that it means nothing to whoever else inherits it.
const VARIABLE: &str = "GW_PREDECESSOR";
/// Longest line, in bytes.
const LINE_MAX: u64 = 64 * 1024 * 1024;

/// What comes with each byte of the first part: a listening socket, or the end of them.
const CALLERS: u8 = b'c';
const ADMIN: u8 = b'a';
const END_OF_OURS: u8 = b'.';
const END_OF_SERVICE_MANAGERS: u8 = b's';

#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Message {
    Ready,
    /// By label of their service, how many tunnels are live.
    Store {
        tunnels: BTreeMap<String, usize>,
    },
    Serving,
    Failed {
        reason: String,
    },
    Levels {
        levels: Vec<Level>,
    },
    Records {
        records: Vec<Record>,
    },
    Charge {
        number: u64,
        /// Label of the service.
        service: String,
    },
    Charged {
        number: u64,
        /// `None`: it was taken.
        wait_ms: Option<u64>,
    },
}

impl Message {
    /// Appends the message to `lines`; leaves `lines` as it is if the message is too long.
    fn write_to(&self, lines: &mut Vec<u8>) -> Result<(), TakeoverError> {
        self.write_within(lines, LINE_MAX)
    }

    fn write_within(&self, lines: &mut Vec<u8>, most: u64) -> Result<(), TakeoverError> {
        let begin = lines.len();
        serde_json::to_writer(&mut *lines, self).map_err(io::Error::from)?;
        lines.push(b'\n');
        if (lines.len() - begin) as u64 > most {
            lines.truncate(begin);
            return Err(TakeoverError::TooLong);
        }
        Ok(())
    }
}

/// Why another process did not take over.
#[derive(Debug, thiserror::Error)]
pub enum TakeoverError {
    #[error("the first process of a container takes the container with it; start another container instead")]
    FirstProcess,
    #[error("not of its own program: only `gw-gateway serve` can be replaced")]
    NoProgram,
    #[error("{program} does not start: {error}")]
    Spawn { program: String, error: io::Error },
    #[error("the other process said nothing for {:?}", limits::TAKEOVER_STEP)]
    Silent,
    #[error("the other process ended; see what it wrote")]
    Ended,
    #[error("the other process failed: {0}")]
    Failed(String),
    #[error("a message would be longer than {LINE_MAX} bytes")]
    TooLong,
    #[error("the other process does not speak our language: {0}")]
    NotUnderstood(String),
    #[error(transparent)]
    Io(io::Error),
}

impl From<io::Error> for TakeoverError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Self::Silent,
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset | io::ErrorKind::UnexpectedEof => Self::Ended,
            _ => Self::Io(error),
        }
    }
}

/// How this process was started.
#[derive(Debug, Clone)]
pub struct Program {
    /// By the name it was started with: there may be another file behind it now.
    name: OsString,
    arguments: Vec<OsString>,
}

impl Program {
    pub fn of_this_process() -> Self {
        let mut arguments = std::env::args_os();
        let name = arguments.next().unwrap_or_else(|| env!("CARGO_PKG_NAME").into());
        Self { name, arguments: arguments.collect() }
    }
}

/// The process that is to take over, as its predecessor sees it. Dropped before it serves, it is ended.
pub(crate) struct Successor {
    child: Guarded,
    talk: Talk,
}

/// A process that is ended when this is dropped; `None` once it serves.
struct Guarded(Option<Child>);

impl Successor {
    /// Starts `program` and gives it the listening sockets.
    pub(crate) fn start(program: &Program, listeners: &Listeners) -> Result<Self, TakeoverError> {
        let (ours, theirs) = UnixStream::pair()?;
        let spawned = Command::new(&program.name)
            .args(&program.arguments)
            .env(VARIABLE, std::process::id().to_string())
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .spawn();
        let child = spawned.map_err(|error| {
            let program = program.name.to_string_lossy().into_owned();
            TakeoverError::Spawn { program, error }
        })?;
        let mut successor = Self { child: Guarded(Some(child)), talk: Talk::new(ours)? };
        let sent = send_listeners(successor.talk.0.get_ref(), listeners);
        sent.map_err(|error| successor.talk.reason_of(error.into()))?;
        Ok(successor)
    }

    pub(crate) fn id(&self) -> Option<u32> {
        self.child.0.as_ref().map(Child::id)
    }

    /// Waits until it needs nothing but the store.
    pub(crate) fn wait_until_ready(&mut self) -> Result<(), TakeoverError> {
        self.talk.expect(&Message::Ready)
    }

    /// Says that the store is closed, and waits until it serves. From then on it lives without us.
    pub(crate) fn give_store(&mut self, tunnels: BTreeMap<String, usize>) -> Result<(), TakeoverError> {
        self.talk.say(&Message::Store { tunnels })?;
        self.talk.expect(&Message::Serving)?;
        self.child.0 = None;
        Ok(())
    }

    /// Gives it the buckets and follows its messages from then on. Workers end once it is gone.
    pub(crate) fn follow(
        mut self,
        levels: Vec<Level>,
        charges: Receiver<SuccessorCharge>,
        control: &Arc<Control>,
        peers: &Arc<Peers>,
    ) -> Result<(), TakeoverError> {
        self.talk.say(&Message::Levels { levels: levels::bounded(levels) })?;
        link::follow(self.talk, charges, Arc::clone(control), Arc::clone(peers))
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            // Fails when it has ended already.
            let _ = child.kill();
            // Only then nothing of ours is in its hands.
            let _ = child.wait();
        }
    }
}

/// The process that this one takes over from.
pub struct Predecessor(Option<Talk>);

impl Predecessor {
    /// The process that started this one to take over from it, if that is how it was started.
    pub fn find() -> io::Result<Option<Self>> {
        let named = std::env::var(VARIABLE).ok().and_then(|id| id.parse().ok());
        if named.is_none() || named != rustix::process::getppid().map(|id| id.as_raw_nonzero().get()) {
            return Ok(None);
        }
        let socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
        // Held only here: its end is then seen at the other end.
        rustix::stdio::dup2_stdin(std::fs::File::open("/dev/null")?)?;
        Talk::new(socket).map(|talk| Some(Self(Some(talk))))
    }

    /// Its listening sockets. The first thing to ask for.
    pub(crate) fn listeners(&mut self) -> Result<Inherited, TakeoverError> {
        let socket = self.talk()?.0.get_ref();
        let mut inherited = Inherited::default();
        loop {
            match receive_socket(socket)? {
                (CALLERS, Some(fd)) => inherited.callers.push(TcpListener::from(fd)),
                (ADMIN, Some(fd)) => inherited.admin = Some(TcpListener::from(fd)),
                (END_OF_OURS, None) => return Ok(inherited),
                (END_OF_SERVICE_MANAGERS, None) => return Ok(Inherited { from_service_manager: true, ..inherited }),
                (kind, _) => return Err(TakeoverError::NotUnderstood(format!("{kind:#x} for a socket"))),
            }
        }
    }

    /// Says that nothing but the store is missing, and waits for it. Returns where its live tunnels are.
    pub(crate) fn take_store(&mut self) -> Result<BTreeMap<String, usize>, TakeoverError> {
        self.talk()?.say(&Message::Ready)?;
        match self.talk()?.hear()? {
            Message::Store { tunnels } => Ok(tunnels),
            other => Err(TakeoverError::NotUnderstood(format!("{other:?}"))),
        }
    }

    /// Says that it can drain, and from then on tells it what changes and admits its requests. The channel disconnects
    /// when it has ended.
    pub(crate) fn serving(
        &mut self,
        control: &Arc<Control>,
        peers: &Arc<Peers>,
    ) -> Result<Receiver<Infallible>, TakeoverError> {
        self.talk()?.say(&Message::Serving)?;
        link::lead(self.0.take().ok_or(TakeoverError::Ended)?, control, peers)
    }

    fn talk(&mut self) -> Result<&mut Talk, TakeoverError> {
        self.0.as_mut().ok_or(TakeoverError::Ended)
    }

    /// Says why it has to go on by itself.
    pub fn failed(&mut self, reason: &str) {
        // It also sees our end.
        let _ = self.talk().and_then(|talk| talk.say(&Message::Failed { reason: reason.to_owned() }));
    }
}

/// One end of the conversation.
struct Talk(
    BufReader<UnixStream>,
    /// Partial line received so far.
    Vec<u8>,
);

impl Talk {
    fn new(socket: UnixStream) -> io::Result<Self> {
        socket.set_read_timeout(Some(limits::TAKEOVER_STEP))?;
        socket.set_write_timeout(Some(limits::TAKEOVER_STEP))?;
        Ok(Self(BufReader::new(socket), Vec::new()))
    }

    fn say(&mut self, message: &Message) -> Result<(), TakeoverError> {
        let mut line = Vec::new();
        message.write_to(&mut line)?;
        self.0.get_mut().write_all(&line).map_err(|error| self.reason_of(error.into()))
    }

    /// Why the other process cannot be talked to any more, if it has said so.
    fn reason_of(&mut self, error: TakeoverError) -> TakeoverError {
        match error {
            TakeoverError::Ended => self.hear().err().unwrap_or(TakeoverError::Ended),
            error => error,
        }
    }

    fn hear(&mut self) -> Result<Message, TakeoverError> {
        let Self(reader, line) = self;
        // On an error, such as a time limit, the received bytes stay there.
        reader.by_ref().take(LINE_MAX - line.len() as u64).read_until(b'\n', line)?;
        if !line.ends_with(b"\n") {
            let is_whole = line.len() as u64 >= LINE_MAX;
            return Err(if is_whole { TakeoverError::TooLong } else { TakeoverError::Ended });
        }
        match serde_json::from_slice(&std::mem::take(line)) {
            Ok(Message::Failed { reason }) => Err(TakeoverError::Failed(reason)),
            Ok(message) => Ok(message),
            Err(error) => Err(TakeoverError::NotUnderstood(error.to_string())),
        }
    }

    fn expect(&mut self, expected: &Message) -> Result<(), TakeoverError> {
        match self.hear()? {
            message if discriminant(&message) == discriminant(expected) => Ok(()),
            other => Err(TakeoverError::NotUnderstood(format!("{other:?}"))),
        }
    }
}

fn send_listeners(over: &UnixStream, listeners: &Listeners) -> io::Result<()> {
    for listener in &listeners.callers {
        send_socket(over, CALLERS, Some(listener.as_fd()))?;
    }
    send_socket(over, ADMIN, Some(listeners.admin.as_fd()))?;
    send_socket(over, if listeners.are_ours { END_OF_OURS } else { END_OF_SERVICE_MANAGERS }, None)
}

/// Sends one byte, and a descriptor with it.
fn send_socket(over: &UnixStream, kind: u8, fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fd.as_slice().is_empty() {
        control.push(SendAncillaryMessage::ScmRights(fd.as_slice()));
    }
    retry_on_intr(|| sendmsg(over, &[IoSlice::new(&[kind])], &mut control, SendFlags::NOSIGNAL))?;
    Ok(())
}

/// Receives one byte, and the descriptor that came with it.
fn receive_socket(over: &UnixStream) -> io::Result<(u8, Option<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let flags = RecvFlags::CMSG_CLOEXEC;
    let received = retry_on_intr(|| recvmsg(over, &mut [IoSliceMut::new(&mut byte)], &mut control, flags))?;
    if received.bytes == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let fd = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    Ok((byte[0], fd))
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    fn pair() -> (Successor, Predecessor) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (
            Successor { child: Guarded(None), talk: Talk::new(ours).unwrap() },
            Predecessor(Some(Talk::new(theirs).unwrap())),
        )
    }

    #[test]
    fn sockets_come_across_however_many_there_are() {
        let (successor, mut predecessor) = pair();
        let listeners: Vec<TcpListener> = (0..400).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        let addresses = |listeners: &[TcpListener]| -> Vec<_> {
            listeners.iter().map(|listener| listener.local_addr().unwrap()).collect()
        };
        let expected = addresses(&listeners);
        let sending = thread::spawn(move || {
            let socket = successor.talk.0.get_ref();
            listeners.iter().for_each(|listener| send_socket(socket, CALLERS, Some(listener.as_fd())).unwrap());
            send_socket(socket, ADMIN, Some(listeners[0].as_fd())).unwrap();
            send_socket(socket, END_OF_SERVICE_MANAGERS, None).unwrap();
            successor
        });
        let inherited = predecessor.listeners().unwrap();
        assert_eq!(addresses(&inherited.callers), expected);
        assert_eq!(inherited.admin.unwrap().local_addr().unwrap(), expected[0]);
        assert!(inherited.from_service_manager);
        let flags = rustix::io::fcntl_getfd(&inherited.callers[0]).unwrap();
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
        drop(sending.join());
    }

    #[test]
    fn the_store_is_given_once_it_can_be_taken() {
        let (mut successor, mut predecessor) = pair();
        let tunnels = BTreeMap::from([("acme--api".to_owned(), 2)]);
        let expected = tunnels.clone();
        let taking = thread::spawn(move || {
            assert_eq!(predecessor.take_store().unwrap(), expected);
            predecessor.talk().unwrap().say(&Message::Serving).unwrap();
        });
        successor.wait_until_ready().unwrap();
        successor.give_store(tunnels).unwrap();
        taking.join().unwrap();
    }

    #[test]
    fn a_failure_is_told_and_an_end_is_seen() {
        let (mut successor, mut predecessor) = pair();
        predecessor.failed("no region");
        let failed = successor.wait_until_ready().unwrap_err();
        assert!(matches!(&failed, TakeoverError::Failed(reason) if reason == "no region"), "{failed}");
        // However far we were.
        predecessor.failed("no room");
        drop(predecessor);
        let failed = successor.give_store(BTreeMap::new()).unwrap_err();
        assert!(matches!(&failed, TakeoverError::Failed(reason) if reason == "no room"), "{failed}");
        assert!(matches!(successor.wait_until_ready(), Err(TakeoverError::Ended)));
        assert!(matches!(successor.give_store(BTreeMap::new()), Err(TakeoverError::Ended)));
    }

    #[test]
    fn a_line_may_come_in_pieces_with_time_limits_between() {
        let (mut successor, mut predecessor) = pair();
        let socket = predecessor.talk().unwrap().0.get_mut();
        successor.talk.0.get_ref().set_read_timeout(Some(std::time::Duration::from_millis(1))).unwrap();
        socket.write_all(b"{\"type\":").unwrap();
        assert!(matches!(successor.talk.hear(), Err(TakeoverError::Silent)));
        socket.write_all(b"\"serving\"}\n").unwrap();
        assert!(matches!(successor.talk.hear(), Ok(Message::Serving)));
    }

    #[test]
    fn what_speaks_otherwise_is_not_understood() {
        for line in ["{\"type\":\"serving\"}\n", "hello\n"] {
            let (mut successor, mut predecessor) = pair();
            predecessor.talk().unwrap().0.get_mut().write_all(line.as_bytes()).unwrap();
            assert!(matches!(successor.wait_until_ready(), Err(TakeoverError::NotUnderstood(_))), "{line}");
        }
    }
}
