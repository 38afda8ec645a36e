//! Listening sockets that pass from the predecessor to the successor (SCM_RIGHTS, unix(7)).

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::io::retry_on_intr;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use super::TakeoverError;
use crate::process::listeners::{Inherited, Listeners};

/// Byte that comes with a listening socket for callers and agents.
const CALLERS: u8 = b'c';
/// Byte that comes with the admin listener.
const ADMIN: u8 = b'a';
/// Byte that comes with the admin listener, if either it or those for callers are of the service manager, and not both.
const ADMIN_OF_OTHER: u8 = b'o';
/// Byte that comes with a listening socket for other nodes of the region.
const PEERS: u8 = b'p';
/// Byte after the last socket, if this process opened those for callers.
const END_OF_OWN: u8 = b'.';
/// Byte after the last socket, if the service manager opened those for callers.
const END_OF_SERVICE_MANAGERS: u8 = b's';

pub(super) fn send(over: &UnixStream, listeners: &Listeners) -> io::Result<()> {
    for listener in &listeners.callers {
        send_socket(over, CALLERS, Some(listener.as_fd()))?;
    }
    let admin = if listeners.admin_is_ours == listeners.are_ours {
        ADMIN
    } else {
        ADMIN_OF_OTHER
    };
    send_socket(over, admin, Some(listeners.admin.as_fd()))?;
    for listener in &listeners.peers {
        send_socket(over, PEERS, Some(listener.as_fd()))?;
    }
    send_socket(
        over,
        if listeners.are_ours {
            END_OF_OWN
        } else {
            END_OF_SERVICE_MANAGERS
        },
        None,
    )
}

pub(super) fn receive(over: &UnixStream) -> Result<Inherited, TakeoverError> {
    let mut inherited = Inherited::default();
    let mut is_admin_of_other = false;
    loop {
        let (kind, fd) = receive_socket(over)?;
        is_admin_of_other |= kind == ADMIN_OF_OTHER;
        match (kind, fd) {
            (CALLERS, Some(fd)) => inherited.callers.push(TcpListener::from(fd)),
            (ADMIN | ADMIN_OF_OTHER, Some(fd)) => inherited.admin = Some(TcpListener::from(fd)),
            (PEERS, Some(fd)) => inherited.peers.push(TcpListener::from(fd)),
            (END_OF_OWN | END_OF_SERVICE_MANAGERS, None) => {
                inherited.from_service_manager = kind == END_OF_SERVICE_MANAGERS;
                inherited.admin_from_service_manager =
                    inherited.from_service_manager != is_admin_of_other;
                return Ok(inherited);
            }
            (kind, _) => {
                return Err(TakeoverError::Unexpected(format!(
                    "{kind:#x} in place of a socket"
                )));
            }
        }
    }
}

/// Sends one byte with the descriptor, if any.
fn send_socket(over: &UnixStream, kind: u8, fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fd.as_slice().is_empty() {
        control.push(SendAncillaryMessage::ScmRights(fd.as_slice()));
    }
    retry_on_intr(|| {
        sendmsg(
            over,
            &[IoSlice::new(&[kind])],
            &mut control,
            SendFlags::NOSIGNAL,
        )
    })?;
    Ok(())
}

/// Receives one byte with its descriptor, if any.
fn receive_socket(over: &UnixStream) -> io::Result<(u8, Option<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let flags = RecvFlags::CMSG_CLOEXEC;
    let received =
        retry_on_intr(|| recvmsg(over, &mut [IoSliceMut::new(&mut byte)], &mut control, flags))?;
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

    #[test]
    fn hundreds_of_sockets_pass() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let callers: Vec<TcpListener> = (0..400)
            .map(|_| TcpListener::bind("127.0.0.1:0").unwrap())
            .collect();
        let admin = callers[0].try_clone().unwrap();
        let addresses = |listeners: &[TcpListener]| -> Vec<_> {
            listeners
                .iter()
                .map(|listener| listener.local_addr().unwrap())
                .collect()
        };
        let expected = addresses(&callers);
        let peers = vec![callers[1].try_clone().unwrap()];
        let sending = thread::spawn(move || {
            send(
                &ours,
                &Listeners {
                    callers,
                    admin,
                    peers,
                    are_ours: false,
                    admin_is_ours: false,
                },
            )
            .unwrap();
            ours
        });
        let inherited = receive(&theirs).unwrap();
        assert_eq!(addresses(&inherited.callers), expected);
        assert_eq!(inherited.admin.unwrap().local_addr().unwrap(), expected[0]);
        assert_eq!(addresses(&inherited.peers), expected[1..2]);
        assert!(inherited.from_service_manager && inherited.admin_from_service_manager);
        let flags = rustix::io::fcntl_getfd(&inherited.callers[0]).unwrap();
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
        drop(sending.join());
    }

    #[test]
    fn each_kind_of_socket_keeps_its_opener() {
        for (are_ours, admin_is_ours) in
            [(true, true), (true, false), (false, true), (false, false)]
        {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let socket = || TcpListener::bind("127.0.0.1:0").unwrap();
            let callers = vec![socket()];
            let admin = socket();
            send(
                &ours,
                &Listeners {
                    callers,
                    admin,
                    peers: Vec::new(),
                    are_ours,
                    admin_is_ours,
                },
            )
            .unwrap();
            let inherited = receive(&theirs).unwrap();
            let found = (
                !inherited.from_service_manager,
                !inherited.admin_from_service_manager,
            );
            assert_eq!(found, (are_ours, admin_is_ours));
        }
    }
}
