//! The predecessor's handle of the process that replaces it.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use gw_base::process::background::Tasks;
use gw_control_plane::control::Control;
use gw_control_plane::members::CarriedNode;
use gw_data_plane::worker::{WorkerHandles, WorkerMessage};
use gw_interface::rate_limit::{Level, SuccessorCharge, levels};
use gw_region::owners::ownership::WorkerId;
use gw_store::Position;
use rustix::io::{FdFlags, fcntl_setfd};
use tokio::sync::mpsc;

use super::channel::Channel;
use super::message::TakeoverMessage;
use super::program::Program;
use super::{CHANNEL, LINK, LINKS, PREDECESSOR, SOCKETS, TakeoverError, follow};
use crate::process::sockets::listeners::Listeners;

/// Process that replaces this one. It is killed when this is dropped before it serves.
pub(crate) struct Successor {
    child: KilledOnDrop,
    pub(super) channel: Channel,
    /// Ends of the links: the first one of each worker of this process, then the next ones.
    links: Vec<UnixStream>,
    /// Number of workers of this process.
    workers: usize,
    /// Whether it is told which changes are in use here.
    acknowledge: bool,
}

/// A child process that is killed on drop; `None` once it serves.
struct KilledOnDrop(Option<Child>);

/// Descriptors that child processes inherit until this is dropped. This process starts no other
/// child meanwhile.
struct Inheritable<'a>(Vec<BorrowedFd<'a>>);

impl Successor {
    /// Starts `program`, which inherits the listening sockets, and one end of a new channel and of
    /// the links of `workers`.
    pub(crate) fn start(
        program: &Program,
        listeners: &Listeners,
        workers: usize,
    ) -> Result<Self, TakeoverError> {
        let (ours, theirs) = UnixStream::pair()?;
        let links = (0..workers * LINKS).map(|_| UnixStream::pair());
        let links: io::Result<Vec<_>> = links.collect();
        let (our_links, their_links): (Vec<_>, Vec<_>) = links?.into_iter().unzip();
        let named: Vec<_> = listeners
            .named()
            .map(|(name, listener)| (name, listener.as_fd()))
            .chain([(CHANNEL, theirs.as_fd())])
            .chain(their_links.iter().map(|link| (LINK, link.as_fd())))
            .collect();
        let names: Vec<_> = named
            .iter()
            .map(|(name, fd)| format!("{name}={}", fd.as_raw_fd()))
            .collect();
        let inheritable = Inheritable::new(named.into_iter().map(|(_, fd)| fd).collect())?;
        let spawned = Command::new(&program.name)
            .args(&program.arguments)
            .env(PREDECESSOR, std::process::id().to_string())
            .env(SOCKETS, names.join(":"))
            .stdin(Stdio::null())
            .spawn();
        drop(inheritable);
        let child = spawned.map_err(|error| {
            let program = program.name.to_string_lossy().into_owned();
            TakeoverError::Spawn { program, error }
        })?;
        Ok(Self {
            child: KilledOnDrop(Some(child)),
            channel: Channel::new(ours)?,
            links: our_links,
            workers,
            acknowledge: false,
        })
    }

    #[cfg(test)]
    pub(super) fn without_process(channel: Channel) -> Self {
        Self {
            child: KilledOnDrop(None),
            channel,
            links: Vec::new(),
            workers: 0,
            acknowledge: false,
        }
    }

    pub(crate) fn id(&self) -> Option<u32> {
        self.child.0.as_ref().map(Child::id)
    }

    /// Waits until the successor needs only the store.
    pub(crate) fn wait_until_ready(&mut self) -> Result<(), TakeoverError> {
        self.channel.expect(&TakeoverMessage::Ready)
    }

    /// Reports that the store is closed, with `position` as that of the records here, and waits
    /// until the successor serves. After that, a drop does not kill it.
    pub(crate) fn give_store(
        &mut self,
        tunnels: BTreeMap<String, usize>,
        membership: Option<CarriedNode>,
        position: Position,
    ) -> Result<(), TakeoverError> {
        let clock_ahead_us = gw_shared::clock::followed();
        self.channel.send(&TakeoverMessage::Store {
            tunnels,
            membership,
            position,
            clock_ahead_us,
            acknowledges: true,
            linked_workers: Some(self.workers),
        })?;
        match self.channel.receive()? {
            TakeoverMessage::Serving { acknowledge } => self.acknowledge = acknowledge,
            other => return Err(other.unexpected()),
        }
        self.child.0 = None;
        Ok(())
    }

    /// Gives the workers of this process their links.
    pub(crate) fn link(&mut self, handles: &WorkerHandles) {
        for (number, link) in std::mem::take(&mut self.links).into_iter().enumerate() {
            handles.tell(
                WorkerId(number % self.workers),
                WorkerMessage::LinkToSuccessor(link.into()),
            );
        }
    }

    /// Sends the levels of the buckets, and starts a thread that follows the successor.
    pub(crate) fn follow(
        mut self,
        levels: Vec<Level>,
        charges: mpsc::Receiver<SuccessorCharge>,
        control: &Arc<Control>,
        tasks: &Tasks,
    ) -> Result<(), TakeoverError> {
        // Not by the thread: a process without connections may end before it runs.
        let levels = levels::bounded(levels);
        self.channel.send(&TakeoverMessage::Levels { levels })?;
        follow::start(
            tasks,
            self.channel,
            charges,
            self.acknowledge,
            Arc::clone(control),
        )
    }
}

impl Drop for KilledOnDrop {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            // Fails if the process has already ended.
            let _ = child.kill();
            // The process releases the store and the sockets only when it has ended.
            let _ = child.wait();
        }
    }
}

impl<'a> Inheritable<'a> {
    fn new(fds: Vec<BorrowedFd<'a>>) -> io::Result<Self> {
        let inheritable = Self(fds);
        for fd in &inheritable.0 {
            fcntl_setfd(fd, FdFlags::empty())?;
        }
        Ok(inheritable)
    }
}

impl Drop for Inheritable<'_> {
    fn drop(&mut self) {
        for fd in &self.0 {
            // Fails for no open descriptor.
            let _ = fcntl_setfd(fd, FdFlags::CLOEXEC);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::net::TcpListener;

    use rustix::fs::fstat;
    use rustix::io::fcntl_getfd;

    use super::*;

    fn inode(socket: impl AsFd) -> u64 {
        fstat(socket).unwrap().st_ino
    }

    #[test]
    fn a_successor_inherits_hundreds_of_sockets_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let found = folder.path().join("found");
        let socket = || TcpListener::bind("127.0.0.1:0").unwrap();
        let listeners = Listeners {
            callers: (0..400).map(|_| socket()).collect(),
            admin: socket(),
            peers: vec![socket()],
            plain: vec![socket()],
            are_ours: true,
            admin_is_ours: false,
        };
        let script = r#"for entry in $(echo "$GW_SOCKETS" | tr : " "); do
            echo "${entry%=*} $(readlink /proc/$$/fd/${entry#*=})"
        done >"$0"; test "$GW_PREDECESSOR" = $PPID"#;
        let program = Program {
            name: "sh".into(),
            arguments: vec!["-c".into(), script.into(), found.clone().into()],
        };
        let mut successor = Successor::start(&program, &listeners, 2).unwrap();
        assert!(
            successor
                .child
                .0
                .as_mut()
                .unwrap()
                .wait()
                .unwrap()
                .success()
        );
        assert!(matches!(
            successor.wait_until_ready(),
            Err(TakeoverError::Ended)
        ));
        let found = fs::read_to_string(found).unwrap();
        let inherited = found;
        let links = 2 * LINKS;
        let mut last = inherited.trim_end().rsplitn(links + 2, '\n');
        for link in last.by_ref().take(links) {
            assert!(link.starts_with("gw-link socket:["), "{link}");
        }
        let [channel, found] = [(); 2].map(|()| last.next().unwrap());
        let line =
            |(name, listener): (&str, &TcpListener)| format!("{name} socket:[{}]", inode(listener));
        let expected: Vec<_> = listeners.named().map(line).collect();
        assert_eq!(found, expected.join("\n"));
        assert!(channel.starts_with("gw-takeover socket:["), "{channel}");
        for (_, listener) in listeners.named() {
            assert!(fcntl_getfd(listener).unwrap().contains(FdFlags::CLOEXEC));
        }
    }
}
