//! Connections of `std::net` on the simulated kernel, for tasks that wait.

use std::future::poll_fn;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

use gw_simulated_kernel::scheduler::sleep;
use gw_simulated_kernel::{Ended, Host, clock, simulate, sockets};

/// Address of a machine.
pub(crate) fn machine(number: u8) -> IpAddr {
    Ipv4Addr::new(10, 0, 0, number).into()
}

/// Where the server of most tests listens.
pub(crate) fn server_address() -> SocketAddr {
    SocketAddr::new(machine(1), 80)
}

/// Runs a test in a simulation on a thread of its own, as thread-local state demands.
pub(crate) fn run<T: Send + 'static>(
    seed: u64,
    main: impl AsyncFnOnce() -> T + Send + 'static,
) -> T {
    let thread = std::thread::spawn(move || match simulate(seed, false, main) {
        Ended::Completed(value) => value,
        other => panic!("{:?}", other_name(&other)),
    });
    thread.join().unwrap()
}

fn other_name<T>(ended: &Ended<T>) -> String {
    match ended {
        Ended::Completed(_) => "completed".to_owned(),
        Ended::Panicked(message) => message.clone(),
        Ended::Stuck => "nothing can happen any more".to_owned(),
        Ended::Endless => "too many polls".to_owned(),
    }
}

/// Time of the simulation.
pub(crate) fn now() -> Duration {
    Duration::from_nanos(clock::now().unwrap())
}

/// A listening socket.
pub(crate) struct Listener(TcpListener);

impl Listener {
    pub(crate) fn bind(address: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        Ok(Self(listener))
    }

    pub(crate) async fn accept(&self) -> io::Result<Stream> {
        loop {
            match self.0.accept() {
                Ok((stream, _)) => return Ok(Stream(stream)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
            poll_fn(|cx| sockets::poll_readable(self.0.as_raw_fd(), cx))
                .await
                .map_err(io::Error::from_raw_os_error)?;
        }
    }
}

/// A connection.
pub(crate) struct Stream(pub(crate) TcpStream);

impl Stream {
    /// Takes a descriptor that the kernel has just opened.
    pub(crate) fn of(fd: RawFd) -> Self {
        #[expect(unsafe_code, reason = "the simulated kernel gives plain numbers")]
        // SAFETY: as of this function.
        Self(unsafe { OwnedFd::from_raw_fd(fd) }.into())
    }

    /// Connects as a task of the current host.
    pub(crate) async fn connect(address: SocketAddr) -> io::Result<Self> {
        let fd = sockets::socket(true).map_err(io::Error::from_raw_os_error)?;
        let stream = Self::of(fd);
        assert_eq!(sockets::connect(fd, address), Err(sockets::IN_PROGRESS));
        poll_fn(|cx| sockets::poll_writable(fd, cx))
            .await
            .map_err(io::Error::from_raw_os_error)?;
        match stream.0.take_error()? {
            None => Ok(stream),
            Some(error) => Err(error),
        }
    }

    /// Reads what is there, once there is something.
    pub(crate) async fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match (&self.0).read(buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                result => return result,
            }
            poll_fn(|cx| sockets::poll_readable(self.0.as_raw_fd(), cx))
                .await
                .map_err(io::Error::from_raw_os_error)?;
        }
    }

    /// Reads until the end of the stream.
    pub(crate) async fn read_to_end(&self) -> io::Result<Vec<u8>> {
        let mut all = Vec::new();
        let mut buffer = [0; 4096];
        loop {
            match self.read(&mut buffer).await? {
                0 => return Ok(all),
                length => all.extend_from_slice(&buffer[..length]),
            }
        }
    }

    pub(crate) async fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match (&self.0).write(bytes) {
                Ok(length) => bytes = &bytes[length..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    poll_fn(|cx| sockets::poll_writable(self.0.as_raw_fd(), cx))
                        .await
                        .map_err(io::Error::from_raw_os_error)?;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Writes until the kernel takes no more. Returns the number of bytes.
    pub(crate) fn fill(&self) -> usize {
        let mut sent = 0;
        loop {
            match (&self.0).write(&[7; 4096]) {
                Ok(length) => sent += length,
                Err(error) => {
                    assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
                    return sent;
                }
            }
        }
    }

    pub(crate) fn descriptor(&self) -> i32 {
        self.0.as_raw_fd()
    }
}

/// A connection from a client on a machine of its own, and its end at the server.
pub(crate) struct Pair {
    pub(crate) client_host: Host,
    pub(crate) server_host: Host,
    pub(crate) client: Stream,
    pub(crate) server: Stream,
}

pub(crate) async fn pair() -> Pair {
    let server_host = Host::new("server", machine(1));
    let client_host = Host::new("client", machine(2));
    let listener = server_host
        .enter(|| Listener::bind(server_address()))
        .unwrap();
    let client = on(client_host, async || {
        Stream::connect(server_address()).await.unwrap()
    })
    .await;
    let server = on(server_host, async move || listener.accept().await.unwrap()).await;
    Pair {
        client_host,
        server_host,
        client,
        server,
    }
}

/// Runs a task of a host, and waits for its end.
pub(crate) async fn on<T: 'static>(host: Host, task: impl AsyncFnOnce() -> T + 'static) -> T {
    let result = std::rc::Rc::new(std::cell::RefCell::new(None));
    let kept = std::rc::Rc::clone(&result);
    host.spawn(async move {
        let value = task().await;
        *kept.borrow_mut() = Some(value);
    });
    loop {
        if let Some(value) = result.borrow_mut().take() {
            return value;
        }
        sleep(Duration::from_millis(1)).await;
    }
}
