//! Parts of unit tests of several modules.

use std::net::{TcpListener, TcpStream};

use http::header::{HeaderName, HeaderValue};

use crate::http::Fields;
use crate::net::Socket;
use crate::runtime::Driver;

/// The driver that programs use here, and the one of older kernels.
pub(crate) fn drivers() -> [Driver; 2] {
    let reason = "test".into();
    [Driver::choose().unwrap(), Driver::Epoll { reason }]
}

/// Runs a future to its end.
pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
    Driver::choose().unwrap().block_on(future).unwrap()
}

/// The two ends of a connection: one of this crate, and its peer.
pub(crate) async fn connect() -> (Socket, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let socket = Socket::connect(address, None).await.unwrap();
    (socket, listener.accept().unwrap().0)
}

/// Fields with these names and values.
pub(crate) fn fields(list: &[(&'static str, &'static str)]) -> Fields {
    let field = |(name, value): &(&'static str, &'static str)| {
        (
            HeaderName::from_static(name),
            HeaderValue::from_static(value),
        )
    };
    list.iter().map(field).collect()
}
