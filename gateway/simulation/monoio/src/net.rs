//! Readiness of sockets.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::task::{Context, Poll};

use gw_simulated_kernel::{scheduler, sockets};

/// A stream socket.
pub struct TcpStream(OwnedFd);

impl TcpStream {
    pub fn from_std(stream: std::net::TcpStream) -> io::Result<Self> {
        Ok(Self(stream.into()))
    }

    pub async fn connect_addr(address: SocketAddr) -> io::Result<Self> {
        let fd = sockets::socket(true).map_err(io::Error::from_raw_os_error)?;
        let stream = Self(owned(fd));
        match sockets::connect(fd, address) {
            Ok(()) => {}
            Err(error) if error == sockets::IN_PROGRESS => {}
            Err(error) => return Err(io::Error::from_raw_os_error(error)),
        }
        stream.writable(false).await?;
        match sockets::take_error(fd).map_err(io::Error::from_raw_os_error)? {
            0 => Ok(stream),
            error => Err(io::Error::from_raw_os_error(error)),
        }
    }

    pub fn set_nodelay(&self, _: bool) -> io::Result<()> {
        Ok(())
    }

    /// Waits until a read does not block.
    pub async fn readable(&self, _: bool) -> io::Result<()> {
        self.wait(sockets::poll_readable).await
    }

    /// Waits until a write does not block, or the socket is connected.
    pub async fn writable(&self, _: bool) -> io::Result<()> {
        self.wait(sockets::poll_writable).await
    }

    /// A completion of the ring is seen after the tasks that are ready.
    async fn wait(
        &self,
        poll: impl Fn(RawFd, &mut Context<'_>) -> Poll<sockets::Result<()>>,
    ) -> io::Result<()> {
        let fd = self.0.as_raw_fd();
        let mut has_waited = false;
        std::future::poll_fn(|cx| {
            if !sockets::is_simulated(fd) {
                // The reactor's own socket, which is always ready.
                if has_waited {
                    return Poll::Ready(Ok(()));
                }
            } else {
                match poll(fd, cx) {
                    Poll::Pending => {
                        has_waited = true;
                        return Poll::Pending;
                    }
                    Poll::Ready(result) if has_waited => {
                        return Poll::Ready(result.map_err(io::Error::from_raw_os_error));
                    }
                    Poll::Ready(_) => {}
                }
            }
            has_waited = true;
            scheduler::wake_after_turn(cx.waker());
            Poll::Pending
        })
        .await
    }
}

#[expect(unsafe_code, reason = "the simulated kernel gives plain numbers")]
fn owned(fd: RawFd) -> OwnedFd {
    // SAFETY: the kernel has just opened the descriptor for this call.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

impl AsRawFd for TcpStream {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl IntoRawFd for TcpStream {
    fn into_raw_fd(self) -> RawFd {
        self.0.into_raw_fd()
    }
}
