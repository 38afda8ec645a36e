//! The one place where raw file descriptors become borrowed or owned ones.
#![allow(unsafe_code, reason = "monoio's sockets implement AsRawFd/IntoRawFd but neither AsFd nor Into<OwnedFd>")]

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};

use monoio::net::{TcpListener, TcpStream};

/// The descriptor of `stream`, borrowed for as long as the stream is.
pub(crate) fn borrow(stream: &TcpStream) -> BorrowedFd<'_> {
    // SAFETY: the stream owns the descriptor and stays borrowed for the lifetime of the result.
    unsafe { BorrowedFd::borrow_raw(stream.as_raw_fd()) }
}

/// The descriptor of `listener`, borrowed for as long as the listener is.
pub(crate) fn borrow_listener(listener: &TcpListener) -> BorrowedFd<'_> {
    // SAFETY: the listener owns the descriptor and stays borrowed for the lifetime of the result.
    unsafe { BorrowedFd::borrow_raw(listener.as_raw_fd()) }
}

/// Takes the descriptor out of `stream`, to hand it to another thread.
///
/// monoio panics if an operation is in flight on the stream: call this only once every wait on it has ended.
pub fn own(stream: TcpStream) -> OwnedFd {
    // SAFETY: into_raw_fd gives up ownership, which passes to the OwnedFd.
    unsafe { OwnedFd::from_raw_fd(stream.into_raw_fd()) }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;
    use crate::runtime::Driver;

    #[test]
    fn an_owned_descriptor_still_reaches_its_peer() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let fd = Driver::choose()
            .unwrap()
            .block_on(async move {
                let stream = TcpStream::connect_addr(address).await.unwrap();
                assert_eq!(borrow(&stream).as_raw_fd(), stream.as_raw_fd());
                own(stream)
            })
            .unwrap();
        std::net::TcpStream::from(fd).write_all(b"x").unwrap();
        let mut byte = [0];
        listener.accept().unwrap().0.read_exact(&mut byte).unwrap();
        assert_eq!(&byte, b"x");
    }
}
