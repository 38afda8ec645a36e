//! A relay that only passes bytes on: the floor of two hops with this reactor and these sockets.
//!
//! Two threads with a reactor each stand for gateway and agent, and one connection between them for
//! the tunnel. The bytes of all callers share it as frames of a stream number and a length. There
//! is no HTTP, no authentication, no limit, no record and no window of a stream. With a
//! certificate, both hops are TLS 1.3, as those of the product.

mod hop;
mod wire;

use std::io::{self, Write};
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::rc::Rc;
use std::thread;

use clap::Args;
use gw_shared::net::{Listener, Socket};
use gw_shared::runtime::{self, Driver};

use self::hop::{Hop, Streams};
use self::wire::{Tls, Wire};
use crate::failure::Failure;

/// Options of the relay.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Address of the backend.
    #[arg(long)]
    backend: SocketAddr,
    /// PEM file of the certificate of both hops; without it, the relay speaks plain TCP.
    #[arg(long, requires = "key")]
    certificate: Option<PathBuf>,
    /// PEM file of the private key of the certificate.
    #[arg(long, requires = "certificate")]
    key: Option<PathBuf>,
    /// Name in the certificate.
    #[arg(long, default_value = "localhost")]
    name: String,
}

/// Relays until the process is killed. Prints the port for callers on the first line.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let tls = match (&options.certificate, &options.key) {
        (Some(certificate), Some(key)) => Some(Tls::load(certificate, key, &options.name)?),
        _ => None,
    };
    runtime::raise_open_file_limit();
    let driver = Driver::choose().map_err(|error| Failure::new(error.to_string()))?;
    let callers = TcpListener::bind(("127.0.0.1", 0))?;
    let hops = TcpListener::bind(("127.0.0.1", 0))?;
    let (port, front) = (callers.local_addr()?.port(), hops.local_addr()?);

    let of_back = (driver.clone(), options.backend, tls.clone());
    let back =
        thread::Builder::new()
            .name("null-back".into())
            .spawn(move || -> Result<(), Failure> {
                let (driver, backend, tls) = of_back;
                Ok(driver.block_on(serve_backend(front, backend, tls))??)
            })?;
    writeln!(io::stdout(), "{port}")?;
    driver.block_on(serve_callers(callers, hops, tls))??;
    back.join()
        .unwrap_or_else(|_| Err(Failure::new("a panic of the second hop")))
}

/// The first hop: its streams are the connections of callers.
async fn serve_callers(
    callers: TcpListener,
    hops: TcpListener,
    tls: Option<Tls>,
) -> io::Result<()> {
    let (socket, _) = Listener::new(hops)?.accept().await?;
    let hop = Hop::new(Wire::accept(Socket::from_fd(socket)?, tls.as_ref()).await?);
    // The second hop begins no streams.
    hop.start(Streams::Known);
    let callers = Listener::new(callers)?;
    for number in 0.. {
        let (socket, _) = callers.accept().await?;
        let (hop, tls) = (Rc::clone(&hop), tls.clone());
        runtime::spawn(async move {
            // A caller that ends its connection early is no error.
            if let Ok(socket) = Socket::from_fd(socket)
                && let Ok(wire) = Wire::accept(socket, tls.as_ref()).await
            {
                let stream = hop.stream(number);
                hop.relay(number, &stream, wire).await;
            }
        });
    }
    Ok(())
}

/// The second hop: each stream is a connection to the backend.
async fn serve_backend(front: SocketAddr, backend: SocketAddr, tls: Option<Tls>) -> io::Result<()> {
    let socket = Socket::connect(front, None).await?;
    let hop = Hop::new(Wire::connect(socket, tls.as_ref()).await?);
    hop.start(Streams::Connect(backend));
    hop.ended().await;
    Ok(())
}
