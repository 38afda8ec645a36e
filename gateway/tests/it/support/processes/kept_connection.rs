//! Connections on which a request runs until the next one is sent: a drain does not close them,
//! however long it takes.

use gw_shared::http::head::Framing;
use http::Method;

use crate::support::peers::caller::Caller;
use crate::support::peers::http1_peer::Response;

pub(crate) struct KeptConnection {
    pub(crate) caller: Caller,
    /// Framing of the response that has begun.
    framing: Framing,
}

impl KeptConnection {
    /// Begins a request that is the GET of `get` with a body. The backend begins its response
    /// before it has the body, and so the response does not announce the end of the connection in a
    /// drain that begins later.
    pub(crate) fn begin(mut caller: Caller, get: &str) -> Self {
        let (_, fields) = get.split_once("\r\n").unwrap();
        let fields = fields.trim_end();
        caller.send(format!(
            "POST /early HTTP/1.1\r\n{fields}\r\nContent-Length: 1\r\n\r\n"
        ));
        let head = caller.response_head(&Method::POST).unwrap();
        assert_eq!(
            (head.status.as_u16(), head.headers.contains("connection")),
            (200, false)
        );
        Self {
            caller,
            framing: head.framing,
        }
    }

    /// Ends the request that runs, and sends another one behind it. Returns the response to that
    /// one.
    pub(crate) fn ask(&mut self, request: &str) -> Response {
        self.caller.send(format!("a{request}"));
        self.caller.body(self.framing).unwrap();
        self.caller.response()
    }
}
